#!/bin/sh
# Trains models of this repository, each on a GPU of its own: SMOLLM2=FILE.gguf benchmarks/gpu/training.sh MODEL...
#
# MODEL is smolvideo, smoleagle (both continue from the shipped weights), smoldraw, or smoldraw-clips, which continues from
# the pictures in $OUT/smoldraw. Weights, results and logs go to $OUT (or ./out), a folder for each model. The first MODEL
# takes the first GPU, and so on; cores are divided evenly. Each takes about eight minutes on an H200.
set -u
mkdir -p "${OUT:-out}"
out=$(cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.." || exit 1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
cores=$(($(nproc) / $#))
workers=$((cores > 3 ? cores - 2 : 1))

train() { # MODEL GPU
    case $1 in
    smolvideo) options="--base $SMOLLM2 --start smolvideo/smolvideo.safetensors --compile --workers $workers" ;;
    smoleagle) options="--base $SMOLLM2 --start smoleagle/model.safetensors --passes 4 --rate 2e-3 --minutes 7.5" ;;
    smoldraw) options="--compile --workers $workers" ;;
    smoldraw-clips) options="--part clips --compile --workers $workers --minutes 6.5" ;;
    *) echo "$1: unknown model" >&2 && exit 2 ;;
    esac
    module=${1%-clips}
    mkdir -p "$out/$module"
    # shellcheck disable=SC2086 # a list of words
    CUDA_VISIBLE_DEVICES=$2 taskset -c "$(($2 * cores))-$(($2 * cores + cores - 1))" \
        timeout 520 python3 -m "$module" --out "$out/$module" $options >"$out/$1.log" 2>&1
    echo "== $1: exit code $?"
    tail -n 4 "$out/$1.log"
}

gpu=0
for model; do
    train "$model" "$gpu" &
    gpu=$((gpu + 1))
done
wait
