#!/usr/bin/env bash
# Keeps a training going on those of its hosts that answer (Open MPI and bash 5.1; started by mpirun.sh):
#
#   dev/cluster/elastic.sh node1:8,node2:8,node3:8 -- --train 'data/*.bin' --global-batch 96 --checkpoint-every 100 --out /shared/run
#
# A lost host ends the job. The job goes on from the newest checkpoint on the remaining hosts, with as many ranks as the
# options allow: the global batch stays, so its samples must divide among the ranks (`train_gpt --plan` is asked). A host
# that answers again is taken back after the next checkpoint. With `--mesh auto` each start chooses its mesh anew. With
# `--islands G` the hosts that are left form as many islands as they have ranks for, each as large as at first.
#
# Start it on a machine that stays: a login node, or your own. Program and data are at the same path on each host. --out is
# on a disk that outlives a host. If it is not, upload with --after-checkpoint, and give in GPT_FETCH the command that brings
# the newest checkpoint back; it runs on the first host before each start, and sees GPT_OUT:
#
#   GPT_FETCH='rclone copy remote:run "$GPT_OUT"' dev/cluster/elastic.sh ...
#
# It ends with the training's exit code: 0 when all steps are done, 75 when the run was stopped (SIGUSR1, SIGTERM or Ctrl-C to
# this script, --stop-when, --max-hours), 2 for options that can't be, and otherwise with that of a job that failed three
# times in a row without a new checkpoint while all its hosts answered. Other variables:
#
#   GPT_LOOK=5          seconds between two looks; a host that does not answer in two of them is gone
#   OMPI_MCA_plm_rsh_agent=ssh    the command that runs another one on a host, as for mpirun
set -uo pipefail
say() { printf 'elastic.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

[[ ${1:-} =~ ^[^:,\ ]+:[1-9][0-9]*(,[^:,\ ]+:[1-9][0-9]*)*$ ]] || fail "the hosts '${1:-}' are not like node1:8,node2:8: elastic.sh HOSTS -- OPTIONS of train_gpt"
IFS=, read -ra hosts <<< "$1"
[ "${2:-}" = -- ] || fail "'${2:-}' is in the place of --: elastic.sh HOSTS -- OPTIONS of train_gpt"
shift 2
options=("$@") out=runs/gpt look=${GPT_LOOK:-5} islands=
[[ $look =~ ^[1-9][0-9]*$ ]] || fail "GPT_LOOK is '$look': it must be an integer from 1"
# The question to `train_gpt --plan`: with --mesh auto, whether the ranks could all train on samples of their own.
asked=()
for ((i = 0; i < $#; i++)); do
  case ${options[i]} in
    --out) out=${options[i + 1]:-} ;;
    --out=*) out=${options[i]#*=} ;;
    --mesh | --mesh=*) asked+=(--micro-batch 1) ;;
    --islands) islands=${options[i + 1]:-} ;;
    --islands=*) islands=${options[i]#*=} ;;
  esac
  case ${options[i]} in
    --mesh | --ceilings | --cluster) i=$((i + 1)) ;;
    --mesh=* | --ceilings=* | --cluster=* | --resume=*) ;;
    --resume) [[ ${options[i + 1]:---} = --* ]] || i=$((i + 1)) ;;  # the folder may be left out
    *) asked+=("${options[i]}") ;;
  esac
done
[ -n "$out" ] || fail "--out is empty: a job without checkpoints can't go on"
here=$(cd "$(dirname "$0")" && pwd)
export GPT_PROGRAM; GPT_PROGRAM=$(realpath -m "${GPT_PROGRAM:-$here/../../train_gpt}")
# Every process of this job can be found by this variable, which mpirun.sh passes on.
GPT_ELASTIC=$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
export GPT_ELASTIC
agent=${OMPI_MCA_plm_rsh_agent:-ssh}
[ "$agent" != ssh ] || agent='ssh -o BatchMode=yes -o ConnectTimeout=5'
on() { timeout -k 1 "$1" $agent "${2%:*}" "cd $(printf %q "$PWD") && $3" < /dev/null; }  # SECONDS HOST:RANKS COMMAND

# Prints the hosts that answer, in the order in which they were given.
answering() {
  local host answers
  answers=" $(for host in "${hosts[@]}"; do on 5 "$host" true > /dev/null 2>&1 && echo "$host" & done; wait) "
  for host in "${hosts[@]}"; do [[ ${answers//$'\n'/ } != *" $host "* ]] || echo "$host"; done
}
count() { local sum=0 host; for host in "$@"; do sum=$((sum + ${host#*:})); done; echo $sum; }
# The hosts of one list that are not in another: others ONE OTHER (names of arrays)
others() {
  local -n one=$1 other=$2
  local host found=()
  for host in "${one[@]}"; do [[ " ${other[*]} " = *" $host "* ]] || found+=("$host"); done
  echo "${found[*]}"
}
quoted() { printf '%q ' "$@"; }
newest_checkpoint() { on 10 "$1" "ls -d $(printf %q "$out")/step_* 2>/dev/null | grep -E '/step_[0-9]+\$' | tail -1" 2> /dev/null; }

# Ends the remaining processes of a start on the hosts that answer.
sweep() {
  local host
  for host in "$@"; do
    on 10 "$host" "for p in \$(grep -lzx GPT_ELASTIC=$GPT_ELASTIC /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3); do
      case \$(cat /proc/\$p/comm) in $(printf %q "$(basename "$GPT_PROGRAM" | cut -c 1-15)") | orted | prted) kill -KILL \$p ;; esac; done" > /dev/null 2>&1
  done
}

# The ranks of an island, if all hosts are there.
[[ $islands =~ ^([1-9][0-9]*)?$ ]] || fail "--islands is '$islands': it must be an integer from 1"
island_ranks=$(($(count "${hosts[@]}") / ${islands:-1}))
[ -z "$islands" ] || [ $((island_ranks * islands)) = "$(count "${hosts[@]}")" ] || fail "--islands $islands does not divide the $(count "${hosts[@]}") places of all hosts"
islands_of() { [ -z "$islands" ] || echo "--islands $(($1 / island_ranks))"; }  # RANKS: options, of which the last counts

# Prints the largest number of ranks, at most $1, that the options allow. Exit code 2: none, and why $1 ranks can't train is
# said (fewer may fail for reasons of their own); 1: the first host does not say.
ranks_that_fit() {
  local ranks answer problem= code=0
  for ((ranks = $1; ranks > 0; ranks--)); do
    [ -z "$islands" ] || [ $((ranks % island_ranks)) = 0 ] || continue
    answer=$(on 60 "${used[0]}" "$(quoted "$GPT_PROGRAM" --plan --ranks $ranks "${asked[@]}" $(islands_of $ranks))" 2>&1 > /dev/null) && { echo $ranks; return; } || code=$?
    case $code in 124 | 137 | 255) return 1 ;; esac
    problem=${problem:-${answer##*$'\n'}}
  done
  [ -n "${waits:-}" ] || say "no number of ranks up to $1 can train: $problem"
  return 2
}

stopped=
trap 'stopped=yes' USR1 TERM INT

failures=0
while :; do
  mapfile -t used < <(answering)
  [ -z "$stopped" ] || exit 75
  if [ ${#used[@]} -eq 0 ]; then
    [ -n "${waits:-}" ] || say "no host answers to '$agent ${hosts[0]%:*} true' and its like; looking again every $look s"
    waits=yes; sleep "$look"; continue
  fi
  sweep "${used[@]}"
  if [ -n "${GPT_FETCH:-}" ]; then
    on 3600 "${used[0]}" "export GPT_OUT=$(printf %q "$out"); $GPT_FETCH" > /dev/null || say "GPT_FETCH failed on ${used[0]%:*}; going on with what is there"
  fi
  places=$(count "${used[@]}")
  code=0
  ranks=$(ranks_that_fit "$places") || code=$?
  [ -z "$stopped" ] || exit 75
  if [ $code != 0 ]; then
    [ $code = 1 ] || [ "$places" -lt "$(count "${hosts[@]}")" ] || exit 2
    [ $code = 1 ] || waits=yes  # for more hosts
    sleep "$look"; continue
  fi
  waits=
  said="$ranks ranks on ${used[*]}" fewer=$(islands_of "$ranks")
  [ -z "$fewer" ] || said+=", $fewer"
  [ "$ranks" = "$places" ] || said+=" ($places places; the options allow no more ranks)"
  say "starting $said"
  started=$(newest_checkpoint "${used[0]}") ending=
  set -m  # a process group of its own: Ctrl-C reaches it by this script alone
  HOSTS=$(IFS=,; echo "${used[*]}") "$here/mpirun.sh" "$ranks" "${options[@]}" $fewer --resume & job=$!
  set +m

  missed=() returned='' told=''
  while kill -0 $job 2> /dev/null; do
    if [ -n "$stopped" ] && [ -z "$told" ]; then  # once, and not before mpirun is there
      case $(cat /proc/$job/comm 2> /dev/null) in mpirun | orterun | prterun) told=yes; kill -USR1 $job ;; esac
    fi
    sleep "$look" & wait $! 2> /dev/null  # a signal ends the wait
    kill -0 $job 2> /dev/null || break
    [ -z "$stopped" ] || continue
    mapfile -t now < <(answering)
    read -ra missing <<< "$(others used now)"
    gone=$(for host in "${missing[@]}"; do [[ " ${missed[*]} " != *" $host "* ]] || echo "$host"; done)  # in two looks
    missed=("${missing[@]}")
    if [ -n "$gone" ]; then
      say "no answer from" $gone; ending=gone
      kill -KILL $job 2> /dev/null
      break
    fi
    [ -z "${missing[*]}$ending" ] && [ ${#now[@]} -gt ${#used[@]} ] || continue
    newest=$(newest_checkpoint "${used[0]}")
    if [ -z "$returned" ]; then
      returned=${newest:-none}
      say "$(others now used) answers again, and is taken back after the next checkpoint"
    elif [ -n "$newest" ] && [ "$newest" != "$returned" ]; then
      ending=returned
      kill -USR1 $job
    fi
  done
  code=0; wait $job 2> /dev/null || code=$?
  job=
  [ "$code" != 0 ] || exit 0
  [ "$code" != 2 ] || exit 2
  [ "$code" != 75 ] || [ "$ending" = returned ] || exit 75
  [ -z "$stopped" ] || exit 75
  if [ -z "$ending" ]; then
    mapfile -t now < <(answering)
    newest=$(newest_checkpoint "${used[0]}")
    if [ "${#now[@]}" -ge "${#used[@]}" ] && [ "$newest" = "$started" ]; then failures=$((failures + 1)); else failures=0; fi
    say "the job ended with exit code $code"
    [ $failures -lt 3 ] || { say "three times in a row without a new checkpoint, while all hosts answered: giving up"; exit "$code"; }
  fi
done
