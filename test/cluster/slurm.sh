#!/usr/bin/env bash
# dev/cluster/slurm.sbatch in a Slurm of this machine, with two ranks: over MPI, without MPI, and out of time.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh
# shellcheck source=test/cluster/slurm_on_one_node.sh
. test/cluster/slurm_on_one_node.sh

submit() { sbatch --ntasks-per-node=2 --cpus-per-task=1 --output="$work/$1.log" "${@:2}"; }

train_alone
submit slurm --wait dev/cluster/slurm.sbatch "${job[@]}" --out "$work/slurm" > /dev/null ||
  fail "two ranks do not train"
same_losses_as_alone slurm

# Without MPI the ranks meet over TCP; then the CPU device, whose collectives are MPI's, sends them away.
export GPT_SRUN_MPI=none
if submit no_mpi --wait dev/cluster/slurm.sbatch "${job[@]}" --out "$work/no_mpi" > /dev/null; then
  same_losses_as_alone no_mpi
else
  grep -m 1 'train_gpt: .*MPI' "$work/no_mpi.log" | sed 's/^/  srun --mpi=none: /' ||
    fail "srun --mpi=none gives no reason"
fi
unset GPT_SRUN_MPI

# The signal before the end of the time queues the job again, and it goes on from its checkpoint.
resumed='^steps +([2-9]|[1-9][0-9]+) to'
number=$(submit again --parsable --time=1 --signal=USR1@60 dev/cluster/slurm.sbatch "${job[@]}" --steps 1000000 \
  --checkpoint-every 100 --resume --out "$work/again") || fail "sbatch refuses the job"
await 60 "a second start of the job" sh -c "scontrol show job $number | tr ' ' '\n' | grep -qx Restarts=1"
await 60 "a resumed run" grep -qE "$resumed" "$work/again.log"
grep -hE "queueing again|$resumed" "$work/again.log" | head -2 | sed 's/^/  /'
scancel "$number"

# The line of dev/cluster/hooks.md by which a job script learns when its time is up.
submit end --wait --time=10 --wrap "$(grep -m 1 '^export JOB_ENDS=' dev/cluster/hooks.md)
  echo \"the job ends in \$((JOB_ENDS - \$(date +%s))) s\"" > /dev/null || fail "the job that asks for its end fails"
grep -E 'ends in (60|5[0-9])[0-9] s' "$work/end.log" | sed 's/^/  hooks.md: /' || fail "a job of 10 minutes does not find its end"
