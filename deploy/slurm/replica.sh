#!/usr/bin/env bash
# One replica, on each of its tasks: replica.sh ROLE PORT ARGUMENTS.yaml TASKS NODES DEVICES. The first task serves.
set -euo pipefail
role=$1 port=$2 arguments=$3 tasks=$4 nodes=$5 devices=$6
if [[ $devices != all ]]; then export CUDA_VISIBLE_DEVICES=$devices; fi
mode=$role
if [[ $role == agg ]]; then mode=aggregated; fi
command=("$TRELLIS" serve --disaggregation-mode "$mode" --host 0.0.0.0 --port "$port" --engine "$ENGINE" --model "$MODEL")
if [[ $ENGINE == trtllm ]]; then command+=(--extra-engine-args "$arguments" --engine-on-death exit); fi
if ((nodes > 1)); then command+=(--gpus-per-node "$((tasks / nodes))"); fi
if [[ $ENGINE == trtllm ]] && ((tasks > 1)); then
    exec trtllm-llmapi-launch "${command[@]}"
fi
if ((${SLURM_PROCID:-0} > 0)); then exit 0; fi
exec "${command[@]}"
