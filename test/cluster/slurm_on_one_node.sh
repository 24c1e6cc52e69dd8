# shellcheck shell=bash
# Debian's own Slurm (munge, controller, one node) on this machine, as root and without systemd, all of it in a temporary
# folder. Sourced by scenarios after common.sh. The node has more cores and GPUs than this machine, for jobs that ask for them.
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
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=node-a CPUs=64 Gres=gpu:4 State=UNKNOWN
PartitionName=test Nodes=node-a Default=YES MaxTime=INFINITE State=UP
END
for gpu in 0 1 2 3; do mknod "$work/gpu$gpu" c 1 3; done  # nothing is behind these devices
echo "Name=gpu File=$work/gpu[0-3]" > "$work/gres.conf"
export SLURM_CONF=$work/slurm.conf
slurmctld || fail "slurmctld does not start"
slurmd -N node-a || fail "slurmd does not start"

# Waits until a command succeeds: await SECONDS WHAT COMMAND...
await() {
  local end=$((SECONDS + $1))
  until "${@:3}" > /dev/null 2>&1; do
    [ $SECONDS -lt $end ] || fail "$2 has not come after $1 s"
    sleep 0.5
  done
}
await 20 "an idle node" sh -c 'sinfo --noheader --format=%t | grep -qx idle'
