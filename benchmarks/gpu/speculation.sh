#!/bin/sh
# Speculation on one GPU: the tests of heads and of other models than Llamas, SmolLM2-135M with and without drafts, and
# edits by a model of Llama 3.1 8B's shape: benchmarks/gpu/speculation.sh [OPTIONS...]
#
# Results go to $OUT (or ./out), a log for each part; options go to `python -m benchmarks.speculation`, in the place of
# those below. A part that fails does not keep the others from running. About six minutes; the weights of
# smollm2-135m-instruct must be there, or its package (docs/models.md).
set -u
mkdir -p "${OUT:-out}"
out=$(cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.." || exit 1
[ $# -gt 0 ] || set -- --modes eagle3 ngram --workloads held-out edit --streams 1 16 64 --repeats 10
failed=0
part() { # name, seconds that it may take, command
    name=$1
    limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || failed=1
    tail -n 40 "$out/$name.log" | cut -c 1-300
}
part tests 240 python3 -m pytest -p no:cacheprovider -q -m "gpu or not gpu" tests/engine/embedded/models/cuda/test_gpu_head.py \
    tests/engine/embedded/models/cuda/test_cuda_engine.py -k "head or draft or kinds"
part drafts 300 python3 -m benchmarks.speculation --device cuda "$@"
part edits 180 python3 -m benchmarks.gpu.editing
exit $failed
