#!/bin/sh
# Sampling on one GPU: the tests of its kernels and of the engine, then every kind of request beside greedy ones in the
# same run: benchmarks/gpu/sampling.sh [CELLS] [ROWS] [OPTIONS...]
#
# Results go to $OUT (or ./out): tests.log, DATE-sampling.md and .json, and the server's log; options go to
# `python -m benchmarks.gpu`. A part that fails does not keep the others from running. TESTS=no leaves the tests out;
# SECONDS_IN_ALL ends the benchmark in time, with what it has measured. With all cells and rows: about eight minutes.
set -u
began=$(date +%s)
limit=${SECONDS_IN_ALL:-480}
cells=${1:-64,256,1}
rows=${2:-all}
[ $# -gt 2 ] && shift 2 || shift $#
out=${OUT:-out}
cd "$(dirname "$0")/../.."
mkdir -p "$out"
failed=0
if [ "${TESTS:-yes}" = yes ]; then
    echo "== tests"
    timeout 100 python3 -m pytest -p no:cacheprovider -q -m "gpu or not gpu" --durations=8 \
        tests/engine/embedded/models/cuda/test_cuda_sampling.py \
        tests/engine/embedded/models/cuda/test_cuda_engine.py -k "sampling or ahead or seed or waits" \
        >"$out/tests.log" 2>&1 || failed=1
    grep -E "^(FAILED|ERROR|E  )|passed|failed|s call|s setup" "$out/tests.log" | head -60
fi
echo "== rows"
timeout $((limit - $(date +%s) + began)) python3 -m benchmarks.gpu --cells "$cells" --rows "$rows" --repeats 2 \
    --row-repeats 1 --starts 1 --no-in-process --label sampling --output "$out" --logs "$out" "$@" || failed=1
echo "== what the server says it did"
grep -E "WARN|ERROR|kernels|graphs|weights|ready" "$out"/server-*.log | cut -c 1-600 | tail -40
exit $failed
