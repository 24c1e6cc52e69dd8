#!/usr/bin/env bash
# Two hosts, node-a and node-b, made of network namespaces that a virtual cable joins; two ranks on each, over TCP.
# The losses equal one rank's; then the cable is slow, then it is cut.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh

two_hosts_on_a_cable
export HOSTS=node-a:2,node-b:2

train_alone
dev/cluster/mpirun.sh 4 "${job[@]}" --out "$work/two_hosts" > "$work/two_hosts.log" 2>&1 ||
  fail "two hosts do not train"
same_losses_as_alone two_hosts

# The mean of a key over the last STEPS steps that have it: recent KEY STEPS
recent() { values cable "$1" | tail -n "$2" | awk '{ sum += $1 } END { printf "%.1f", sum / NR }'; }

dev/cluster/mpirun.sh 4 "${job[@]}" --steps 1000000 --out "$work/cable" > "$work/cable.log" 2>&1 &
job_process=$!
# A busy machine's steps take long on any cable: such a machine gets two more attempts. Collectives are timed in every tenth step.
for attempt in 1 2 3; do
  wait_for_step cable $(($(values cable loss | wc -l) + 20))
  step_before=$(recent step_ms 10) exposed_before=$(recent comm_exposed_ms 2)
  slow_cable 8mbit
  wait_for_step cable $(($(values cable loss | wc -l) + 12))
  step_after=$(recent step_ms 5) exposed_after=$(recent comm_exposed_ms 1)
  echo "  cable at 8 Mbit/s: step $step_before -> $step_after ms," \
    "exposed communication $exposed_before -> $exposed_after ms"
  awk "BEGIN { exit !($step_after > 2 * $step_before &&
    $exposed_after - $exposed_before > ($step_after - $step_before) / 2) }" && break
  [ $attempt -lt 3 ] || fail "a slow cable does not show as exposed communication"
  fast_cable
done

echo "  cable cut"
ip link set cable down
ends_with $job_process "$work/cable.log" 'rank [0-9]|node-b'
