#!/bin/sh
# Trains models of this repository, each on a GPU of its own: SMOLLM2=FILE.gguf benchmarks/gpu/training.sh MODEL...
#
# MODEL is one of these; the first takes the first GPU (or FIRST_GPU), and so on, with its share of the cores. Each takes
# about eight minutes on an H200.
#   smolvideo, smoleagle              continue from the weights in this repository
#   smoldraw                          begins anew
#   smoldraw-more, smoldraw-clips     continue from smoldraw
#
# Weights (saved every minute), results and logs go to $OUT (or ./out), a folder for each model. They are kept in $KEPT
# (or /tmp/trellis-training) for the next call; on another machine, give KEPT=FOLDER with the files that came back.
# Packages that the machine lacks can be given as a folder of wheels (`wheels.sh`, and for smoldraw those of diffusers,
# importlib_metadata and zipp): WHEELS=FOLDER.
set -u
mkdir -p "${OUT:-out}" "${KEPT:=/tmp/trellis-training}"
out=$(cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.." || exit 1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
gpus=$(nvidia-smi -L | wc -l)
[ $((${FIRST_GPU:=0} + $#)) -le "$gpus" ] || { echo "$# models need as many GPUs: there are $gpus" >&2 && exit 2; }
cores=$(($(nproc) / gpus))
workers=$((cores > 3 ? cores - 2 : 1))

train() { # MODEL GPU
    case $1 in
    smolvideo) options="--base $SMOLLM2 --start smolvideo/smolvideo.safetensors --compile --workers $workers" ;;
    smoleagle) options="--base $SMOLLM2 --start smoleagle/smollm2-135m-instruct/model.safetensors --passes 4 --rate 2e-3 --minutes 7.5" ;;
    smoldraw) options="--compile --workers $workers" ;;
    smoldraw-more) options="--part more --compile --workers $workers" ;;
    smoldraw-clips) options="--part clips --compile --workers $workers --minutes 6.5" ;;
    *) echo "$1: unknown model" >&2 && exit 2 ;;
    esac
    module=${1%%-*}
    mkdir -p "$out/$module"
    case $1 in *-*) cp "$KEPT/$module"/*.safetensors "$KEPT/$module/results.json" "$out/$module" || exit 1 ;; esac
    # shellcheck disable=SC2086 # a list of words
    CUDA_VISIBLE_DEVICES=$2 taskset -c "$(($2 * cores))-$(($2 * cores + cores - 1))" \
        timeout 520 python3 -m "$module" --out "$out/$module" $options >"$out/$1.log" 2>&1
    echo "== $1: exit code $?"
    tail -n 4 "$out/$1.log"
    cp -r "$out/$module" "$KEPT"
}

gpu=$FIRST_GPU
for model; do
    train "$model" "$gpu" &
    gpu=$((gpu + 1))
done
wait
