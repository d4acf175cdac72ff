#!/usr/bin/env bash
# Join the results of all jobs in one page, with JSON and CSV, and name the jobs without: post_process.sh RESULTS [flags].
# Flags are those of `trellis sweep --join`, such as --ttft 2000 --itl 30 for goodput.
set -euo pipefail
results=${1:?usage: post_process.sh RESULTS [--ttft MS] [--itl MS]}
shift
folders=()
for folder in "$results"/*/; do
    if [[ -s ${folder}measurements.jsonl ]]; then folders+=("$folder"); fi
    if [[ -f ${folder}FAILED ]]; then
        echo "failed: $(basename "$folder"): $(cat "${folder}FAILED")" >&2
    elif [[ -d ${folder}config && ! -f ${folder}DONE ]]; then
        echo "not finished: $(basename "$folder")" >&2
    fi
done
if ((${#folders[@]} == 0)); then
    echo "no job in $results has measurements" >&2
    exit 1
fi
"${TRELLIS:-trellis}" sweep --join "${folders[@]}" --output "$results" "$@"
