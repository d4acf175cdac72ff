#!/usr/bin/env bash
# One job of submit_agg.sh or submit_disagg.sh: write the configurations, start the replicas with srun, wait until they are
# ready, and sweep: job.sh FOLDER_OF_THESE_FILES NAME GPUS CONCURRENCY gen_yaml's arguments...
# RESULTS/NAME gets the results, DONE at the end, or FAILED with the reason.
set -euo pipefail
here=$1 name=$2 gpus=$3 concurrency=$4
shift 4
results=${RESULTS:?}/$name
export TRELLIS=${TRELLIS:-trellis} PYTHON=${PYTHON:-python3} ENGINE=${ENGINE:-trtllm}
export INTERNAL_SECRET=${INTERNAL_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
mkdir -p "$results/logs"
rm -f "$results/FAILED"
pids=()
router=""

fail() {
    echo "$1" | tee "$results/FAILED" >&2
    exit 1
}

stop() {
    for pid in $router "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    wait || true
}
trap stop EXIT
trap 'exit 143' TERM INT

# ready URL WHAT PID: wait until a server is ready, as long as its process lives.
ready() {
    local deadline=$((SECONDS + ${START_SECONDS:-3600}))
    until curl -sf -o /dev/null --max-time 10 "$1/health/ready"; do
        kill -0 "$3" 2>/dev/null || fail "$2 ended before it was ready: $(tail -n 1 "$results/logs/$2.log")"
        ((SECONDS < deadline)) || fail "$2 was not ready in time: $(tail -n 1 "$results/logs/$2.log")"
        sleep 1
    done
}

"$PYTHON" "$here/gen_yaml.py" "$@" --output "$results/config" 2>"$results/logs/gen_yaml.log" ||
    fail "$(tail -n 1 "$results/logs/gen_yaml.log")"

names=() urls=() prefill=() public=()
while IFS=$'\t' read -r role host port _; do
    if [[ $role == prefill ]]; then prefill+=("http://$host:$port"); else public+=("http://$host:$port"); fi
done <"$results/config/instances.tsv"
PREFILL_URLS=$(IFS=, && echo "${prefill[*]}")
export PREFILL_URLS

while IFS=$'\t' read -r role host port nodes tasks each list devices; do
    instance=$role-$((${#names[@]} + 1))
    names+=("$instance")
    urls+=("http://$host:$port")
    options=(--nodes "$nodes" --ntasks "$tasks" --ntasks-per-node "$each" --nodelist "$list" --mpi "${MPI:-pmix}" --overlap)
    if [[ ${IMAGE:-} ]]; then
        options+=(--container-image "$IMAGE" --container-mounts "${MOUNTS:+$MOUNTS,}$RESULTS:$RESULTS,$here:$here")
    fi
    srun "${options[@]}" bash "$here/replica.sh" "$role" "$port" "$results/config/$role.yaml" "$tasks" "$nodes" "$devices" \
        </dev/null >"$results/logs/$instance.log" 2>&1 &
    pids+=($!)
done <"$results/config/instances.tsv"
for index in "${!urls[@]}"; do ready "${urls[$index]}" "${names[$index]}" "${pids[$index]}"; done

url=${public[0]}
if ((${#public[@]} > 1)); then
    url=http://127.0.0.1:${ROUTER_PORT:-8099}
    ROUTE_URLS=$(IFS=, && echo "${public[*]}")
    ROUTE_URLS=$ROUTE_URLS ROUTE_POLICY=least_loaded ROUTE_EVENTS_PORT=0 ROUTE_REPLAY_PORT=0 \
        "$TRELLIS" serve --disaggregation-mode router --host 127.0.0.1 --port "${url##*:}" --engine "$ENGINE" \
        --model "$MODEL" >"$results/logs/router.log" 2>&1 &
    router=$!
    ready "$url" router "$router"
fi

"$TRELLIS" sweep --url "$url" --name "$name" --gpus "$gpus" --concurrency "$concurrency" --lengths "$ISL:$OSL" \
    --client "${CLIENT:-builtin}" --requests-per-stream "${REQUESTS_PER_STREAM:-4}" --output "$results" ||
    fail "some points failed: $results/index.html"
touch "$results/DONE"
