#!/usr/bin/env bash
# Starts the ranks of one host with the variables that torchrun sets, without Python or MPI (bash 5.1). For GPUs: on the
# CPU device ranks communicate over MPI (mpirun.sh).
#
#   dev/cluster/torchrun.sh 8 --train 'data/*.bin' --model gpt2        8 ranks on this host
#
# Several hosts: run it on each, with NODE_RANK counted from 0, MASTER_ADDR the name of host 0, and the same secret on
# all:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node1 GPT_JOB_TOKEN=SECRET dev/cluster/torchrun.sh 8 --train ...
#
# The secret keeps other programs out of the job: make it once with `openssl rand -hex 16`. MASTER_PORT (29500) must be
# free on host 0. GPT_PROGRAM: a program other than ./train_gpt of this repository. PyTorch's torchrun works as well:
#
#   torchrun --no-python --nproc-per-node 8 ./train_gpt --train ...
set -euo pipefail
fail() { echo "torchrun.sh: $*" >&2; exit 2; }
integer() { [[ $2 =~ ^(0|[1-9][0-9]*)$ && $2 -ge $3 ]] || fail "$1 is '$2': it must be an integer from $3"; }

integer "the number of ranks on this host (first argument)" "${1:-}" 1
ranks=$1 nodes=${NNODES:-1} node=${NODE_RANK:-0}
shift
integer NNODES "$nodes" 1
integer NODE_RANK "$node" 0
[ "$node" -lt "$nodes" ] || fail "NODE_RANK is $node, but NNODES=$nodes hosts are counted from 0 to $((nodes - 1))"
[ "$nodes" = 1 ] || [ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set: give all $nodes hosts the name of host 0"
[ "$nodes" = 1 ] || [ -n "${GPT_JOB_TOKEN:-}" ] || fail "GPT_JOB_TOKEN is not set: give all $nodes hosts one secret"
program=$(realpath -m "${GPT_PROGRAM:-$(dirname "$0")/../../train_gpt}")
[ -x "$program" ] || fail "$program is not there: build it with make, or name another in GPT_PROGRAM"

export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
export GPT_JOB_TOKEN=${GPT_JOB_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export WORLD_SIZE=$((nodes * ranks)) LOCAL_WORLD_SIZE=$ranks
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > ranks ? $(nproc) / ranks : 1))}

set -m  # each rank has a process group of its own, so that it gets Ctrl-C only once, from this script
pids=() early=''
signal() { kill -s "$1" -- "${pids[@]/#/-}" 2> /dev/null || true; }
trap 'early=INT' INT; trap 'early=TERM' TERM; trap 'early=USR1' USR1  # until all ranks are there
for ((local = 0; local < ranks; local++)); do
  RANK=$((node * ranks + local)) LOCAL_RANK=$local "$program" "$@" < /dev/null &
  pids+=($!)
done
trap 'signal INT' INT; trap 'signal TERM' TERM; trap 'signal USR1' USR1
[ -z "$early" ] || signal "$early"
# If this script is killed, no rank stays behind.
(while kill -0 $$ 2> /dev/null; do sleep 1; done; signal KILL) & watcher=$!
trap 'kill -- -$watcher 2> /dev/null || true' EXIT

# If one rank fails, all end: the others have three seconds to report, then three seconds to end after SIGTERM.
end_others() { sleep 3; signal TERM; sleep 3; signal KILL; }
status=0
while [ ${#pids[@]} -gt 0 ]; do
  # (wait -n may miss ranks that end at the same time by a signal; a signal to this script ends the wait for sleep)
  sleep 0.2 & wait $! || true
  for local in "${!pids[@]}"; do
    if kill -0 "${pids[local]}" 2> /dev/null; then continue; fi
    code=0
    wait "${pids[local]}" || code=$?
    unset "pids[local]"
    if [ $code -ne 0 ] && [ $status -eq 0 ]; then
      echo "torchrun.sh: rank $((node * ranks + local)) ended with exit code $code" >&2
      status=$code
      end_others & others=$!
    fi
  done
done
if [ -n "${others:-}" ]; then kill -- -"$others" 2> /dev/null || true; fi  # no rank is left
exit $status
