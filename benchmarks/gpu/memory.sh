#!/bin/sh
# Memory on a GPU: benchmarks/gpu/memory.sh [PART...], all parts if none is named
#
# tests       sleep, shared memory and standby engines
# sleep tiers crowd restart    Llama 3.1 8B's shape with random weights
# embeddings  an image's embeddings from encoder to engine, through the front and by CUDA IPC
# handoff     a prefill and a decode replica; needs two GPUs
#
# Results go to $OUT (or ./out), a log for each part. A part that fails does not keep the others from running. All take
# about fifteen minutes on a bare machine, whose kernels are compiled first, 30 GB of disk and 40 GB of memory.
set -u
mkdir -p "${OUT:-out}"
out=$(cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.." || exit 1
wanted=" ${*:-tests sleep tiers crowd restart embeddings handoff} "
model=$(mktemp -d)
trap 'rm -rf "$model"' EXIT
python3 -m benchmarks.gpu.model llama-8b "$model" --weights >"$out/model.log" 2>&1 || exit 1
failed=0
part() { # name, seconds, command
    name=$1
    limit=$2
    shift 2
    case $wanted in *" $name "*) ;; *) return ;; esac
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || failed=1
    tail -n 25 "$out/$name.log"
}
part tests 240 python3 -m pytest -p no:cacheprovider -v -m "gpu or not gpu" tests/engine/memory/test_memory_gpu.py \
    tests/engine/embedded/vision/test_kept_gpu.py \
    tests/engine/embedded/models/cuda/test_cuda_engine.py -k "sleep or memory or standby or kept"
part sleep 120 python3 -m benchmarks.sleep --device cuda --model "$model" --tokens 16000 --context 32768 --host-mb 16384
part tiers 120 python3 -m benchmarks.tiers --device cuda --model "$model" --tokens 16000 --rounds 2 --only returning
part crowd 200 python3 -m benchmarks.tiers --device cuda --model "$model" --rounds 2 --only crowd nothing
part embeddings 60 python3 -m benchmarks.embeddings
part handoff 240 python3 -m benchmarks.disaggregated --device cuda --repeats 3 --output "$out"
part restart 240 python3 -m benchmarks.restart --device cuda --model "$model" --setups standby "memory service" --second
exit $failed
