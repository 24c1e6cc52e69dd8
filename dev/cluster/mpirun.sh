#!/usr/bin/env bash
# Starts train_gpt on this host, or on several, with Open MPI (4.0 or later).
#
#   dev/cluster/mpirun.sh 8 --train 'data/*.bin' --model gpt2                            8 ranks on this host
#   HOSTS=node1:8,node2:8 dev/cluster/mpirun.sh 16 --train 'data/*.bin' --model gpt2     8 ranks on each of two
#
# HOSTS are names that ssh reaches without a password. Program and data are at the same path on each of them. Exported
# variables OMP_*, NCCL_*, GPT_*, MASTER_PORT and CUDA_VISIBLE_DEVICES reach every rank, and so do the variables by
# which NCCL and MPI find fast networks: FI_* (libfabric, as on AWS), UCX_*, LD_LIBRARY_PATH. OMPI_MCA_* configure Open
# MPI itself. MASTER_PORT is for firewalls: the port at which rank 0 listens for the others (without it, any free port).
# To stop a run, send mpirun SIGUSR1: all ranks finish the step, save and end with exit code 75. After SIGTERM or Ctrl-C
# they have five seconds for that. GPT_PROGRAM: a program other than ./train_gpt of this repository.
set -euo pipefail
fail() { echo "mpirun.sh: $*" >&2; exit 2; }

ranks=${1:-} hosts=${HOSTS:-}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "number of ranks '$ranks' is not a positive integer: mpirun.sh RANKS OPTIONS..."
shift
program=$(realpath -m "${GPT_PROGRAM:-$(dirname "$0")/../../train_gpt}")
[ -x "$program" ] || fail "$program is not there: build it with make, or name another in GPT_PROGRAM"
command -v mpirun > /dev/null || fail "mpirun is not found: install openmpi-bin"

# nproc alone would answer with OMP_NUM_THREADS, if that is set.
ranks_a_host=$ranks cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
if [ -n "$hosts" ]; then
  [[ $hosts =~ ^[^:,\ ]+:[1-9][0-9]*(,[^:,\ ]+:[1-9][0-9]*)*$ ]] || fail "HOSTS='$hosts' is not like node1:8,node2:8"
  slots=0 ranks_a_host=0
  for host in ${hosts//,/ }; do
    slots=$((slots + ${host##*:}))
    [ "${host##*:}" -le "$ranks_a_host" ] || ranks_a_host=${host##*:}
  done
  [ "$ranks" -le $slots ] || fail "$ranks ranks do not fit HOSTS=$hosts, which has $slots places"
  # The cores of the first host count, which may be another one than this. (If it does not say, mpirun will name the reason.)
  there=$(${OMPI_MCA_plm_rsh_agent:-ssh} "${hosts%%:*}" nproc < /dev/null 2> /dev/null | grep -xE '[1-9][0-9]*') && cores=$there
fi

# The cores of a host are divided among its ranks, and each rank gets neighbouring cores. Open MPI by itself would give
# each rank one core, whatever the number of OpenMP threads.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  export OMP_NUM_THREADS=$((cores > ranks_a_host ? cores / ranks_a_host : 1))
fi
options=(-np "$ranks")
if [ $((ranks_a_host * OMP_NUM_THREADS)) -le "$cores" ]; then
  options+=(--use-hwthread-cpus --map-by "slot:PE=$OMP_NUM_THREADS" --bind-to hwthread)
else
  options+=(--bind-to none)
fi
if [ -n "$hosts" ]; then options+=(--host "$hosts"); else options+=(--oversubscribe); fi
if [ "$(id -u)" = 0 ]; then options+=(--allow-run-as-root); fi
for name in $(compgen -e | grep -E '^(OMP_|NCCL_|GPT_|FI_|UCX_|(MASTER_PORT|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH)$)'); do options+=(-x "$name"); done

# Open MPI's defaults for these would be too slow or too short. A variable that is already set is kept.
: "${OMPI_MCA_mpi_yield_when_idle:=1}"        # a rank that waits leaves its core to the threads of others
: "${OMPI_MCA_odls_base_sigkill_timeout:=5}"  # seconds from SIGTERM to SIGKILL, which mpirun always waits for
: "${OMPI_MCA_oob_tcp_keepalive_time:=5}"     # a host that vanishes is noticed after 5 + 3·2 s, not after minutes
: "${OMPI_MCA_oob_tcp_keepalive_intvl:=2}"
: "${OMPI_MCA_oob_tcp_keepalive_probes:=3}"
export "${!OMPI_MCA_@}"
exec mpirun "${options[@]}" "$program" "$@"
