#!/bin/sh
# Measure two checkouts on one GPU, in turns: benchmarks/gpu/compare.sh OTHER_CHECKOUT [CELLS] [ROUNDS] [OPTIONS...]
#
# GPUs of one kind differ by several percent, so two revisions are compared on one machine, a round of each in turn. Reports go to
# $OUT (or ./out) as other-N and this-N; options go to `python -m benchmarks.gpu`.
set -eu
other=$1
cells=${2:-1,64,256}
rounds=${3:-2}
[ $# -gt 3 ] && shift 3 || shift $#
out=${OUT:-out}
this=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
for round in $(seq "$rounds"); do
    for side in other this; do
        folder=$this
        [ "$side" = other ] && folder=$other
        echo "== round $round, $side"
        (cd "$folder" && python3 -m benchmarks.gpu --cells "$cells" --repeats 2 --starts 1 --seed "$round" \
            --label "$side-$round" --output "$out" "$@") | grep -E "tok/s|broke|FAILED|Error" || true
    done
done
