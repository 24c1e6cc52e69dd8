#!/usr/bin/env bash
# dev/cluster/torchrun.sh, on one host and on two (both of them this one): GPUs train; ranks of the CPU device meet over
# TCP and are then sent to MPI. And the launcher itself: one failed rank ends all, signals reach all.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh

# A run has one rank's losses, or was refused by the CPU device in one line: trained_or_refused NAME EXIT_CODE
trained_or_refused() {
  if [ "$2" -eq 0 ]; then
    same_losses_as_alone "$1"
  else
    [ "$(grep -c '^train_gpt: ' "$work/$1.log")" -eq 1 ] || fail "$1: not one line says why"
    grep '^train_gpt: .*MPI' "$work/$1.log" | sed "s/^/  $1: /" || fail "$1: the reason is not MPI"
  fi
}

train_alone
status=0
dev/cluster/torchrun.sh 2 "${job[@]}" --out "$work/one_host" > "$work/one_host.log" 2>&1 || status=$?
trained_or_refused one_host $status

export NNODES=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 GPT_JOB_TOKEN=test
NODE_RANK=1 dev/cluster/torchrun.sh 2 "${job[@]}" --out "$work/two_hosts" > "$work/host_1.log" 2>&1 &
status=0
NODE_RANK=0 dev/cluster/torchrun.sh 2 "${job[@]}" --out "$work/two_hosts" > "$work/two_hosts.log" 2>&1 || status=$?
wait
trained_or_refused two_hosts $status
unset NNODES MASTER_ADDR MASTER_PORT GPT_JOB_TOKEN

# In place of train_gpt: says who it is and sleeps; rank $STUBBORN ignores signals, and rank $FAILS fails.
cat > "$work/train_gpt" <<'END'
#!/usr/bin/env bash
for name in INT TERM; do trap "echo rank $RANK: $name; exit 7" $name; done
[ "$RANK" != "${STUBBORN:-}" ] || trap '' INT TERM
echo "rank $RANK/$WORLD_SIZE, $LOCAL_RANK/$LOCAL_WORLD_SIZE, $MASTER_ADDR:$MASTER_PORT, token ${#GPT_JOB_TOKEN}: $*"
[ "$RANK" != "${FAILS:-}" ] || exit 3
sleep "$SLEEP" &
wait
END
chmod +x "$work/train_gpt"
export GPT_PROGRAM=$work/train_gpt

# The stand-in must have ended with a code, left no process, and said a line: expect LOG CODE EXPECTED LINE
expect() {
  [ "$2" = "$3" ] || fail "$1: exit code $2 instead of $3"
  grep -qx "$4" "$work/$1.log" || fail "$1: no line '$4'"
  if pgrep -f "$work/train_gpt"; then fail "$1: processes are left"; fi
}

status=0
SLEEP=0 dev/cluster/torchrun.sh 3 'two words' > "$work/plain.log" 2>&1 || status=$?
expect plain $status 0 'rank 2/3, 2/3, 127.0.0.1:29500, token 32: two words'
status=0
SLEEP=60 FAILS=1 STUBBORN=2 dev/cluster/torchrun.sh 3 > "$work/fails.log" 2>&1 || status=$?
expect fails $status 3 'rank 0: TERM'
expect fails $status 3 'torchrun.sh: rank 1 ended with exit code 3'
for name in INT TERM; do
  set -m  # a process started in the background ignores SIGINT otherwise
  SLEEP=60 dev/cluster/torchrun.sh 2 > "$work/$name.log" 2>&1 &
  set +m
  until [ "$(grep -c '^rank ' "$work/$name.log")" = 2 ]; do sleep 0.1; done
  kill -s $name $!
  status=0
  wait $! || status=$?
  expect $name $status 7 "rank 1: $name"
done
echo "  one failed rank ends all; SIGINT and SIGTERM reach all"
