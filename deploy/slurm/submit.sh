# shellcheck shell=bash
# Sourced by submit_agg.sh and submit_disagg.sh with their arguments, which set `mtp` and `kinds`; `submit` queues one
# job, unless its results are there.
#
# MODEL            folder or id of the model (required)
# RESULTS          folder of the results, on a file system that all nodes share (default: ./results)
# ISL, OSL         tokens of prompts and answers (default: 8150, 1024)
# GPUS_PER_NODE    default: 4
# ONLY             names of jobs to submit, as a regular expression (default: all)
# CONCURRENCY      1,8,64: instead of those in the tables
# FIRST_PORT       of the replicas on their nodes, for jobs that share nodes (default: 8100); ROUTER_PORT likewise (8099)
# PARTITION, ACCOUNT, TIME, SBATCH_OPTIONS     passed to sbatch
# IMAGE, MOUNTS    container of the replicas (pyxis); empty runs them on the nodes themselves
# TRELLIS, PYTHON  commands there (default: trellis, python3)
# CLIENT, REQUESTS_PER_STREAM     of trellis sweep

mtp=0 kinds=all
# shellcheck disable=SC2034  # what includes this reads them
for argument in "$@"; do
    case $argument in
    mtp=off) mtp=0 ;;
    mtp=on) mtp=3 ;;
    tep | dep | all) kinds=$argument ;;
    *)
        echo "usage: ${0##*/} [mtp=off|on] [tep|dep|all]" >&2
        exit 2
        ;;
    esac
done

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MODEL:?set MODEL to the folder or id of the model}"
export MODEL RESULTS="${RESULTS:-$PWD/results}" ISL="${ISL:-8150}" OSL="${OSL:-1024}" GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
mkdir -p "$RESULTS"
submitted=0

# submit NAME GPUS CONCURRENCY gen_yaml's arguments...
submit() {
    local name=$1 gpus=$2 concurrency=${CONCURRENCY:-$3}
    shift 3
    if [[ ! $name =~ ${ONLY:-.} ]]; then return; fi
    if [[ -f $RESULTS/$name/DONE ]]; then
        echo "$name: results are there"
        return
    fi
    local per_node=$((gpus < GPUS_PER_NODE ? gpus : GPUS_PER_NODE))
    local nodes=$(((gpus + GPUS_PER_NODE - 1) / GPUS_PER_NODE))
    local options=(--job-name "$name" --nodes "$nodes" --ntasks "$((nodes * per_node))" --ntasks-per-node "$per_node")
    options+=(--output "$RESULTS/$name.log" --time "${TIME:-04:00:00}")
    if [[ ${PARTITION:-} ]]; then options+=(--partition "$PARTITION"); fi
    if [[ ${ACCOUNT:-} ]]; then options+=(--account "$ACCOUNT"); fi
    if [[ ${SBATCH_OPTIONS:-} ]]; then
        read -ra more <<<"$SBATCH_OPTIONS"
        options+=("${more[@]}")
    fi
    sbatch "${options[@]}" "$here/job.sh" "$here" "$name" "$gpus" "$concurrency" "$@" --isl "$ISL" --osl "$OSL"
    submitted=$((submitted + 1))
}
