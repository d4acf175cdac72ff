#!/usr/bin/env bash
# Submit sweeps of aggregated replicas: `MODEL=... deploy/slurm/submit_agg.sh [mtp=off|on] [tep|dep|all]`.
# tep splits attention and experts over the GPUs (tensor parallelism), dep splits sequences (attention data parallelism).
set -euo pipefail
# shellcheck source=deploy/slurm/submit.sh
source "$(dirname "${BASH_SOURCE[0]}")/submit.sh" "$@"

#     kind  GPUs  batch  tokens  concurrency
while read -r kind gpus batch tokens concurrency; do
    if [[ $kinds != all && $kinds != "$kind" ]]; then continue; fi
    more=()
    if [[ $kind == dep ]]; then more=(--attention-dp); fi
    submit "agg-$kind$gpus-mtp$mtp" "$gpus" "$concurrency" agg --tp "$gpus" --batch "$batch" --tokens "$tokens" \
        --memory 0.75 --mtp "$mtp" "${more[@]}"
done <<'TABLE'
      tep   4     128    8448    1,2,4,8,16,32,64
      tep   8     128    8448    1,2,4,8,16,32,64
      dep   4     256    8448    16,32,64,128,256,512
      dep   8     256    8448    32,64,128,256,512,1024
TABLE
echo "$submitted jobs submitted; then: deploy/slurm/post_process.sh $RESULTS"
