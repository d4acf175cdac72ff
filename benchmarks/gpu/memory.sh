#!/bin/sh
# Memory on one GPU: the tests of sleep and shared memory, then tiers, sleep and restarts with Llama 3.1 8B's shape and
# random weights: benchmarks/gpu/memory.sh
#
# Results go to $OUT (or ./out), a log for each part. A part that fails does not keep the others from running. About eight
# minutes on a bare machine, whose kernels are compiled first; it takes 30 GB of disk and 40 GB of memory.
set -u
out=${OUT:-out}
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out"
model=$(mktemp -d)
trap 'rm -rf "$model"' EXIT
python3 -m benchmarks.gpu.model llama-8b "$model" --weights >"$out/model.log" 2>&1 || exit 1
failed=0
part() { # name, seconds, command
    name=$1
    limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || failed=1
    tail -n 25 "$out/$name.log"
}
part tests 240 python3 -m pytest -p no:cacheprovider -v -m "gpu or not gpu" tests/engine/memory/test_memory_gpu.py \
    tests/engine/embedded/models/cuda/test_cuda_engine.py -k "sleep or memory or standby"
part sleep 120 python3 -m benchmarks.sleep --device cuda --model "$model" --tokens 16000 --context 32768 --host-mb 16384
part tiers 120 python3 -m benchmarks.tiers --device cuda --model "$model" --tokens 16000 --rounds 2 --only returning
part restart 240 python3 -m benchmarks.restart --device cuda --model "$model" --setups standby "memory service" --second
exit $failed
