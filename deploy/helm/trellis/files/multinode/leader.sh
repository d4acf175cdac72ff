# The first node of a group: it starts a rank for each GPU of all nodes, and the server on rank 0 (docs/tensorrt-llm.md).
# LeaderWorkerSet sets LWS_LEADER_ADDRESS (name-0.name.namespace; workers are name-0-1 ...) and LWS_GROUP_SIZE.
set -euo pipefail
. /scripts/ssh.sh
"$(command -v sshd || echo /usr/sbin/sshd)" -f "$folder/sshd_config"

hosts="$LWS_LEADER_ADDRESS:$GPUS_PER_NODE"
for index in $(seq 1 $((LWS_GROUP_SIZE - 1))); do
    host="${LWS_LEADER_ADDRESS%%.*}-$index.${LWS_LEADER_ADDRESS#*.}"
    until ssh -o ConnectTimeout=5 "$host" true; do  # the startup probe ends what takes too long
        echo "waiting for $host" >&2
        sleep 2
    done
    hosts="$hosts,$host:$GPUS_PER_NODE"
done

# ssh begins with an empty environment: what ranks read goes with them.
exports=()
for name in $(compgen -e); do
    case "$name" in
        PATH | HOME | LD_LIBRARY_PATH | PYTHON* | HF_* | CUDA_* | NCCL_* | NVIDIA_* | TLLM_* | TRTLLM_* | UCX_*)
            exports+=(-x "$name") ;;
    esac
done
exec mpirun -n $((LWS_GROUP_SIZE * GPUS_PER_NODE)) -H "$hosts" --mca orte_keep_fqdn_hostnames 1 --mca pml ob1 \
    "${exports[@]}" trtllm-llmapi-launch bash /scripts/serve.sh
