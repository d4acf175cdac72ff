#!/usr/bin/env bash
# Submit sweeps of prefill and decode replicas: `MODEL=... deploy/slurm/submit_disagg.sh [mtp=off|on] [tep|dep|all]`.
# tep and dep say how decode is split (submit_agg.sh); dep from 16 GPUs on spreads experts widely, with a load balancer.
set -euo pipefail
# shellcheck source=deploy/slurm/submit.sh
source "$(dirname "${BASH_SOURCE[0]}")/submit.sh" "$@"

# PREFILL_GPUS is the size of one prefill replica: attention data parallelism, as its batches are small.
prefill_gpus=${PREFILL_GPUS:-4}
#     kind  prefill  decode  GPUs of each decode  batch  tokens  memory  slots of experts  concurrency
while read -r kind prefill decode gpus batch tokens memory slots concurrency; do
    if [[ $kinds != all && $kinds != "$kind" ]]; then continue; fi
    more=()
    if [[ $kind == dep ]]; then more=(--decode-attention-dp); fi
    submit "disagg-${prefill}p$decode$kind$gpus-mtp$mtp" "$((prefill * prefill_gpus + decode * gpus))" "$concurrency" \
        disagg --prefill-replicas "$prefill" --prefill-tp "$prefill_gpus" --prefill-batch 4 --prefill-tokens 8448 \
        --prefill-memory 0.75 --prefill-attention-dp --decode-replicas "$decode" --decode-tp "$gpus" \
        --decode-batch "$batch" --decode-tokens "$tokens" --decode-memory "$memory" --eplb-slots "$slots" \
        --mtp "$mtp" "${more[@]}"
done <<'TABLE'
      tep   1        1       4                    32     128     0.9     0                 1,2,4,8,16
      tep   1        2       8                    32     128     0.9     0                 4,8,16,32
      tep   1        4       8                    64     256     0.9     0                 8,16,32,64,128
      dep   4        1       8                    64     256     0.8     0                 64,128,256,512
      dep   6        1       16                   64     256     0.75    288               256,512,1024
      dep   8        1       16                   128    512     0.75    288               512,1024,2048
      dep   10       1       32                   64     256     0.7     288               1024,2048
TABLE
echo "$submitted jobs submitted; then: deploy/slurm/post_process.sh $RESULTS"
