#!/bin/sh
# Memory on a GPU: benchmarks/gpu/memory.sh [PART...], all parts if none is named
#
# sleep       memory that is given back, waking from both levels, a prefix from the host after level 2
# tiers       copies beside one large copy, a conversation of 16,000 tokens that returns from the host and the disk
# crowd       200 conversations that do not fit the device
# nothing     what tiers cost when nothing is reused
# restart     first tokens after kills, with imports in advance and with a standby engine; memory of a second replica
# kills       twenty kills: memory of the device before and after
# tests       sleep, shared memory and standby engines
# embeddings  an image's embeddings from encoder to engine, through the front and by CUDA IPC
# handoff     a prefill and a decode replica; needs two GPUs
#
# The parts up to nothing, and all but handoff of the others, take six to nine minutes each on a machine whose kernels
# are compiled; on a bare one, two minutes more. A part that could not end within $SECONDS_LEFT (580) is not begun; its
# name is printed. Llama 3.1 8B's shape with random weights: 30 GB of disk, in $MODEL_FOLDER, which stays for the next
# call, and 90 GB of memory. Results go to $OUT (or ./out), a log for each part. A part that fails does not keep the
# others from running.
set -u
ends=$(($(date +%s) + ${SECONDS_LEFT:-580}))
mkdir -p "${OUT:-out}"
out=$(cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.." || exit 1
wanted=" ${*:-sleep tiers crowd nothing restart kills tests embeddings handoff} "
model=${MODEL_FOLDER:-${TMPDIR:-/tmp}/trellis-llama-8b}
failed=0
part() { # name, seconds that it takes, seconds that it may take, command
    name=$1
    takes=$2
    limit=$3
    shift 3
    case $wanted in *" $name "*) ;; *) return ;; esac
    left=$((ends - $(date +%s)))
    if [ "$left" -lt "$takes" ]; then
        echo "== $name: not begun, $left s are left"
        failed=1
        return
    fi
    echo "== $name"
    timeout "$((left < limit ? left : limit))" "$@" >"$out/$name.log" 2>&1 || failed=1
    tail -n 25 "$out/$name.log"
}
if [ ! -f "$model/complete" ]; then
    python3 -m benchmarks.gpu.model llama-8b "$model" --weights >"$out/model.log" 2>&1 || exit 1
    touch "$model/complete"
fi
part sleep 60 150 python3 -m benchmarks.sleep --device cuda --model "$model" --tokens 16000 --context 32768 --host-mb 16384
part tiers 60 150 python3 -m benchmarks.tiers --device cuda --model "$model" --tokens 16000 --rounds 4 \
    --only copies returning
part crowd 150 240 python3 -m benchmarks.tiers --device cuda --model "$model" --conversations 200 --length 2000 \
    --rounds 2 --disk-mb 40000 --only crowd
part nothing 40 90 python3 -m benchmarks.tiers --device cuda --model "$model" --length 2000 --rounds 10 --only nothing
part restart 120 240 python3 -m benchmarks.restart --device cuda --model "$model" --setups imports standby --second \
    --kills 4
part kills 180 300 python3 -m benchmarks.restart --device cuda --model "$model" --setups imports --kills 20 \
    --between 0 1 --settle 5
part tests 60 240 python3 -m pytest -p no:cacheprovider -v -m "gpu or not gpu" tests/engine/memory/test_memory_gpu.py \
    tests/engine/embedded/vision/test_kept_gpu.py \
    tests/engine/embedded/models/cuda/test_cuda_engine.py -k "sleep or memory or standby or kept"
part embeddings 20 60 python3 -m benchmarks.embeddings
part handoff 100 240 python3 -m benchmarks.disaggregated --device cuda --repeats 3 --output "$out"
exit $failed
