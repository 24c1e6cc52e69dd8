#!/usr/bin/env bash
# Is every event between streams needed, and would its absence be found?
#
# Puts each line that orders compute and communication behind a condition (test/removed_line.h), in a copy of the sources
# under build/remove_events, and runs tests of data and context parallelism on three ranks, and some of tensor parallelism,
# its checkpoints, pipelines and islands on four, on the CPU device without one of these lines after another, with streams in permuted
# order, until one of a few orders fails. A line that nobody misses is redundant and should go.
#
#   test/remove_events.sh [FILE.cuh ...]      default: the store, offload, tensor and context parallelism, links of stages,
#                                             the collectives, islands, sums, logits, batches and steps
set -euo pipefail
cd "$(dirname "$0")/.."
files=("$@")
if [ $# -eq 0 ]; then
  files=(parallel/zero.cuh parallel/offload.cuh parallel/tensor_parallel.cuh parallel/ring_attention.cuh parallel/ulysses.cuh
         parallel/text_cache.cuh parallel/stage_links.cuh parallel/collectives.cuh parallel/islands.cuh parallel/step_sums.cuh parallel/logits.cuh
         runtime/training/batch_buffers.cuh runtime/training/steps_in_flight.cuh)
fi
events='^ +((data_group_|tp_|world_|world|group|islands_|ranks_|d\.from|d\.to|mesh_\.world\(\))\.(after|wait|wait_for_all)\('
events+='|if \(.*\) (ranks_|d\.to)\.wait(_for_all)?\(|settle\(buffer\)|ends_\.wait_for_all'
events+='|(buffer\.moved|buffers_.*\.used|to\.arrived|from\.left|order_|issued_.*|buffer.*\.copied|end_.*)\.record|d\.(last_sent|arrivals.*) =|call\.end->record|CUDA_CHECK\(cuda(StreamWaitEvent|EventSynchronize))'
copy=build/remove_events
mpirun=(mpirun --oversubscribe --bind-to none)
if [ "$(id -u)" = 0 ]; then mpirun+=(--allow-run-as-root); fi
export OMP_NUM_THREADS=1
# What is built already, but for the lines in question, need not be built again.
mkdir -p $copy/dev $copy/build
cp -rp Makefile *.cuh cpu kernels parallel runtime test $copy
cp -rp dev/make $copy/dev
for built in build/host build/cpu; do if [ -d $built ]; then cp -rp $built $copy/build; fi; done

places=()
for file in "${files[@]}"; do
  for line in $(grep -nE "$events" "$file" | cut -d: -f1); do
    places+=("$file:$line")
    sed -Ei "${line}s#^(.*;)( *//.*)?\$#if (removed_line != ${#places[@]}) { \\1 }#" "$copy/$file"
  done
done

# The tests that reach all of these files: ranks and cases of each. They use fp32 alone.
declare -A tests=([context_parallel]=3)
case ${files[*]} in
  parallel/offload.cuh) tests=([offload]="2 -tc=*rank alone,gradients: the same bits") ;;
  parallel/ulysses.cuh | parallel/ring_attention.cuh) ;;
  parallel/islands.cuh) tests=([islands]="4 -tc=an outer step under way*<float>") ;;
  *) tests+=([zero]="3 -tc=*take turns" [delay]="4 -tc=*take turns<float>,*curve of one rank" [tensor_parallel]="4 -tc=rows are*,the gradients*,*few tokens*" [tp_checkpoint]=4
             [offload]="2 -tc=*rank alone" [meshes]="4 -tc=any number*,the gradients*,*few tokens*" [islands]="4 -tc=an outer step under way*<float>") ;;
esac
names=("${!tests[@]}")
make -s -C $copy DEVICE=cpu DTYPES=fp32 FLAGS_fast=-O1 WARNINGS='-w -include test/removed_line.h' \
  "${names[@]/#/build/cpu/test_}"

runs_clean() {  # schedule
  local ranks options
  for test in "${names[@]}"; do
    read -r ranks options <<< "${tests[$test]}"
    (cd $copy && GPT_CPU_SCHEDULE=$1 timeout 300 "${mpirun[@]}" -np "$ranks" "build/cpu/test_$test" ${options:+"$options"}) \
      > $copy/log 2>&1 || return 1
  done
}
# Prints the first schedule that fails.
failing_schedule() {
  for schedule in reverse random:{1..6}; do
    if ! runs_clean $schedule; then echo $schedule; return; fi
  done
}

if [ -n "$(failing_schedule)" ]; then echo "the test fails with all events in place"; cat $copy/log; exit 1; fi
found=0
for i in "${!places[@]}"; do
  export GPT_REMOVED_LINE=$((i + 1))
  line=${places[i]#*:} file=${places[i]%:*} schedule=$(failing_schedule)
  what=$(sed -n "${line}s/^ *//p" "$file")
  if [ -n "$schedule" ]; then
    found=$((found + 1))
    echo "${places[i]}: without $what the test fails (GPT_CPU_SCHEDULE=$schedule)"
  else
    echo "${places[i]}: without $what the test runs clean: it is redundant, or the test does not reach it"
  fi
done
echo "events removed: ${#places[@]}, found missing: $found"
[ ${#places[@]} -eq $found ]
