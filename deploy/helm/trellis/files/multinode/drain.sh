# preStop, with the pod's part and seconds to wait. The signal that follows would end all ranks at once, so the server
# is told first, and its requests finish before it comes. A worker stays as long as it has ranks.
if [ "$1" = leader ]; then
    sleep "$2"
    server="$(cat /tmp/trellis.pid)"
    kill -TERM "$server"
    while kill -0 "$server" 2>/dev/null; do sleep 1; done
else
    while pgrep -f tensorrt_llm.llmapi.mgmn_worker_node >/dev/null; do sleep 1; done
fi
