#!/usr/bin/env bash
# Tests of real launchers, hosts and networks on one machine. Needs root:
#
#   test/cluster/run.sh                 all scenarios
#   test/cluster/run.sh kill slurm      these
#
# Each scenario runs in namespaces of its own: processes, network (nothing but its own loopback and links; those that install
# packages have this machine's), mounts and host name. Whatever happens, the kernel ends all of its processes with it, and nothing outside has changed.
# GPT_BUILD: a folder that holds another train_gpt than the one of this repository.
cd "$(dirname "$0")/../.." || exit 1
scenarios=("${@:-}")
[ -n "${scenarios[0]}" ] || scenarios=(two_hosts slow_links kill slurm torchrun recipe recipe_schemas elastic container container_gpu)
fail() { echo "test/cluster/run.sh: $*" >&2; exit 2; }

[ "$(id -u)" = 0 ] || fail "needs root, for network namespaces and Slurm's daemons: sudo make test-cluster"
missing=()
programs=(mpirun:openmpi-bin ip:iproute2 pgrep:procps prlimit:util-linux)
case " ${scenarios[*]} " in *" slurm "* | *" recipe "*) programs+=(slurmctld:slurm-wlm munged:munge) ;; esac
case " ${scenarios[*]} " in *" container"*) programs+=(debootstrap:debootstrap) ;; esac
for pair in "${programs[@]}"; do
  command -v "${pair%:*}" > /dev/null || missing+=("${pair#*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; } > /dev/null ||
    fail "apt-get could not install ${missing[*]}: install them, then run again"
fi
export GPT_PROGRAM=$PWD/train_gpt
if [ -n "${GPT_BUILD:-}" ]; then GPT_PROGRAM=$(realpath "$GPT_BUILD")/train_gpt; fi
[ -x "$GPT_PROGRAM" ] || fail "$GPT_PROGRAM is not there: build it with make"

folder=$(mktemp -d)
export folder
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0
for scenario in "${scenarios[@]}"; do
  [ -f "test/cluster/$scenario.sh" ] || fail "there is no scenario '$scenario' in test/cluster"
  start=$SECONDS
  mkdir "$folder/$scenario"
  network=(--net)
  case $scenario in recipe_schemas | container*) network=() ;; esac  # they install packages
  # an hour: what hangs is ended, and what takes two minutes may take twenty on a machine that others use, too
  if timeout --foreground --signal=KILL 3600 \
       unshare --fork --pid --kill-child --mount-proc "${network[@]}" --uts \
       bash "test/cluster/$scenario.sh" "$folder/$scenario"; then
    result=passed passed=$((passed + 1))
  else
    result=FAILED failed=$((failed + 1))
    tail -n 10 "$folder/$scenario"/*.log | cut -c 1-300
  fi
  printf '%-12s %s  %3d s\n' "$scenario" $result $((SECONDS - start))
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
