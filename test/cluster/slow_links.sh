#!/usr/bin/env bash
# Two hosts made of network namespaces, a rank on each, and a cable of 100 Mbit/s between them. With each way to send less
# (extensions/compression/README.md), the time that communication adds to a step falls as the bytes do: to 25 % more than that
# at most. (It may fall further, as there is less to wait for.) Of islands that send codes the time is only shown: making
# codes takes as long there as sending them.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh
two_hosts_on_a_cable
slow_cable 100mbit
export HOSTS=node-a:1,node-b:1

# Trains with some options, and prints rank 0's bytes, and the milliseconds beside forward and backward, per step, the mean
# of steps 11 to 30: measure NAME OPTIONS...
measure() {
  dev/cluster/mpirun.sh 2 "${job[@]}" --layers 2 --channels 256 --heads 4 --micro-batch 1 --global-batch 2 --steps 30 "${@:2}" \
    --out "$work/$1" > "$work/$1.log" 2>&1 || fail "${*:2}: does not train"
  python3 - "$work/$1/metrics.jsonl" <<'END'
import json, statistics, sys
rows = [row for row in map(json.loads, open(sys.argv[1])) if "loss" in row and row["step"] > 10]
steps = [(sum(row["comm_bytes"].values()), row["step_ms"] - row["time_ms"]["compute"]) for row in rows]
print(*map(statistics.mean, zip(*steps)))
END
}
read -r whole_bytes whole_ms < <(measure plain)
[ -n "${whole_ms:-}" ] || fail "the job does not train"
printf '  %-48s %9.0f bytes, %6.1f ms\n' 'in full' "$whole_bytes" "$whole_ms"
# The host's own work is in these times, and a busy machine stretches it: such a machine gets two more attempts.
compare() {  # NAME OPTIONS...
  local attempt bytes ms
  for attempt in 1 2 3; do
    read -r bytes ms < <(measure "$@" --overwrite)
    [ -n "${ms:-}" ] || fail "${*:2}: does not train"
    awk -v name="${*:2}" -v bytes="$bytes" -v ms="$ms" -v all_bytes="$whole_bytes" -v all_ms="$whole_ms" -v shown="${shown:-}" 'BEGIN {
      of_bytes = bytes / all_bytes
      of_ms = ms / all_ms
      printf "  %-48s %9.0f bytes, %6.1f ms: %.3f of the bytes, %.3f of the time\n", name, bytes, ms, of_bytes, of_ms
      exit !(shown || of_ms < 1.25 * of_bytes) }' && return
  done
  fail "${*:2}: time does not fall as bytes do"
}
compare bf16 --dtype bf16 --reduce-dtype bf16
compare zero --zero 1
compare int8 --compress int8
compare int4 --compress int4
compare islands --islands 2 --local-steps 10
shown=1 compare coded_islands --islands 2 --local-steps 10 --outer-dtype int8
