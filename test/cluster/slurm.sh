#!/usr/bin/env bash
# Debian's own Slurm (munge, controller, one node) on this machine, as root and without systemd, all of it in a
# temporary folder; dev/cluster/slurm.sbatch runs in it with two ranks: over MPI, without MPI, and out of time.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh

hostname node-a
ip addr add 10.77.0.1/32 dev lo  # Slurm does not listen where there is nothing but 127.0.0.1
printf '127.0.0.1 localhost\n10.77.0.1 node-a\n' > "$work/hosts"
mount --bind "$work/hosts" /etc/hosts

# munge: programs that sign messages with the same key belong to the same cluster.
(umask 077; head -c 1024 /dev/urandom > "$work/munge.key")
munged --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munge.pid" \
  --log-file="$work/munge.log" --seed-file="$work/munge.seed" || fail "munged does not start"

# No cgroups: containers have none to give. cred_expire: or a requeued job waits two minutes.
mkdir "$work/state" "$work/spool"
cat > "$work/slurm.conf" <<END
ClusterName=test
SlurmctldHost=node-a
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
TmpFS=$work
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
NodeName=node-a CPUs=4 State=UNKNOWN
PartitionName=test Nodes=node-a Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$work/slurm.conf
slurmctld || fail "slurmctld does not start"
slurmd -N node-a || fail "slurmd does not start"

submit() { sbatch --ntasks-per-node=2 --cpus-per-task=1 --output="$work/$1.log" "${@:2}"; }

# Waits until a command succeeds: await SECONDS WHAT COMMAND...
await() {
  local end=$((SECONDS + $1))
  until "${@:3}" > /dev/null 2>&1; do
    [ $SECONDS -lt $end ] || fail "$2 has not come after $1 s"
    sleep 0.5
  done
}
await 20 "an idle node" sh -c 'sinfo --noheader --format=%t | grep -qx idle'

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
