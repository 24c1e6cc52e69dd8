# shellcheck shell=bash
# What the scenarios share; sourced by them in their own namespaces, with a folder of their own as first argument.
set -uo pipefail
work=$1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TMPDIR=$work
unset "${!SLURM@}" "${!OMPI@}" "${!PMIX@}" RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
ip link set lo up

fail() { echo "  FAILED: $*"; exit 1; }

# A small model on the repository's own sources, 8 samples a step. More options may follow.
job=(--train 'kernels/*.cuh' 'kernels/*/*.cuh' gpt/gpt.cuh --layers 2 --heads 2 --channels 64 --seq-len 64 --micro-batch 2 --global-batch 8
     --lr 1e-3 --steps 10)

# Two hosts, node-a (this namespace) and node-b (one more), which a virtual cable joins.
two_hosts_on_a_cable() {
  hostname node-a
  mkdir -p /run/netns
  mount -t tmpfs none /run/netns
  ip netns add node-b
  ip link add cable type veth peer name cable netns node-b
  ip addr add 10.77.0.1/24 dev cable && ip link set cable up
  ip -n node-b addr add 10.77.0.2/24 dev cable && ip -n node-b link set cable up && ip -n node-b link set lo up
  printf '127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n' > "$work/hosts"
  mount --bind "$work/hosts" /etc/hosts

  # What takes the place of ssh: remote.sh HOST COMMAND...
  cat > "$work/remote.sh" <<'END'
#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
END
  chmod +x "$work/remote.sh"
  export OMPI_MCA_plm_rsh_agent=$work/remote.sh
}
# What it carries from now on, each way: slow_cable 8mbit
slow_cable() {
  local slow=(dev cable root tbf rate "$1" burst 64kb latency 50ms)
  { tc qdisc replace "${slow[@]}" && tc -n node-b qdisc replace "${slow[@]}"; } || fail "tc cannot slow the cable"
}
fast_cable() { { tc qdisc del dev cable root && tc -n node-b qdisc del dev cable root; } || fail "tc cannot undo it"; }

# Rank 0's numbers of one key of metrics.jsonl: values FOLDER KEY
values() { sed -n 's/"ranks".*//; s/.*"'"$2"'": *\([^,}]*\).*/\1/p' "$work/$1/metrics.jsonl" 2> /dev/null; }

# Trains on one rank: the run that other runs are compared with.
train_alone() { "$GPT_PROGRAM" "${job[@]}" --out "$work/alone" > "$work/alone.log" 2>&1 || fail "one rank fails"; }

# Every loss of a run must equal one rank's within 1e-5: same_losses_as_alone FOLDER
same_losses_as_alone() {
  paste <(values alone loss) <(values "$1" loss) | awk -v what="$1" '
    { difference = ($1 - $2) / $1
      if (difference < 0) difference = -difference
      if (difference > worst) worst = difference
      if (NF == 2) steps++ }
    END { printf "  %s: losses of %d steps differ by at most %.1e from one rank'\''s (limit 1e-5)\n", what, steps, worst
          exit !(NR == 10 && steps == 10 && worst < 1e-5) }' || fail "the losses of $1 are not one rank's"
}

# Is the job that was started last under way?
job_lives() { kill -0 "$job_process" 2> /dev/null; }
# Waits until a run has done STEP steps, as long as the job lives: a busy machine may be slow. What hangs is ended by run.sh.
# wait_for_step FOLDER STEP
wait_for_step() {
  until [ "$(values "$1" loss | wc -l)" -ge "$2" ]; do
    job_lives || fail "$1: the job has ended before step $2"
    sleep 0.2
  done
}

# The id of the process that is rank K of the job that runs: process_of_rank K
process_of_rank() {
  local process
  for process in $(pgrep -x train_gpt); do
    if grep -zqx "OMPI_COMM_WORLD_RANK=$1" /proc/"$process"/environ; then echo "$process"; fi
  done
}

# The job that was started in the background must end by itself within 30 s, with a failure, leaving no process behind,
# and with a line in its log that matches a pattern: ends_with PROCESS LOG PATTERN
ends_with() {
  local start=$SECONDS status=0 name
  while kill -0 "$1" 2> /dev/null; do
    [ $((SECONDS - start)) -lt 30 ] || fail "the job goes on 30 s after the fault"
    sleep 0.2
  done
  wait "$1" || status=$?
  [ $status -ne 0 ] || fail "the job's exit code is 0"
  for name in train_gpt orted mpirun; do  # ranks behind a cut cable go by clocks of their own
    while pgrep -x $name > /dev/null; do
      [ $((SECONDS - start)) -lt 30 ] || fail "$name is left 30 s after the fault"
      sleep 0.5
    done
  done
  grep -Eq "train_gpt: .*($3)" "$2" || fail "no line of $2 matches '$3'"
  echo "  ended after $((SECONDS - start)) s with exit code $status:" \
    "$(grep -E "train_gpt: .*($3)" "$2" | head -1 | sed 's/.*train_gpt: /train_gpt: /')"
}
