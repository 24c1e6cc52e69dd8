#!/usr/bin/env bash
# One of four ranks dies, stops, is asked to end, or fails: the whole job ends, and a message names that rank.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh

# Starts four ranks and waits until they train: start NAME
start() {
  dev/cluster/mpirun.sh 4 "${job[@]}" --steps 1000000 --checkpoint-every 100 --out "$work/$1" > "$work/$1.log" 2>&1 &
  job_process=$!
  wait_for_step "$1" 3
}

for fault in KILL:2 KILL:0 STOP:1 STOP:0; do
  signal=${fault%:*} rank=${fault#*:}
  echo "  SIG$signal to rank $rank"
  start "$fault"
  kill -s "$signal" "$(process_of_rank "$rank")"
  ends_with $job_process "$work/$fault.log" "rank $rank"
done

echo "  SIGTERM to rank 3: all save, after the same step"
start TERM
kill "$(process_of_rank 3)"
status=0
wait $job_process || status=$?
[ $status -eq 75 ] || fail "the exit code is $status, not 75"
grep -o 'stopped after step [0-9]*, and saved' "$work/TERM.log" | sed 's/^/  /' || fail "nothing was saved"

echo "  the disk is full: training goes on, until it must save"
mkdir "$work/full"
mount -t tmpfs -o size=1m none "$work/full"
start full
until grep -q 'training goes on: .*No space left' "$work/full.log"; do
  kill -0 $job_process || fail "the job ended"
  sleep 0.2
done
kill "$(process_of_rank 1)"
ends_with $job_process "$work/full.log" 'No space left'
