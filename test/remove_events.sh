#!/usr/bin/env bash
# Is every event between streams needed, and would its absence be found?
#
# Takes each line that orders compute and communication out in turn, in a copy of the sources under build/remove_events,
# and runs tests of data and context parallelism on three ranks, and some of tensor parallelism, its checkpoints and pipelines
# on four, on the CPU device with streams in permuted order, until one of a few orders fails. A line that nobody misses is
# redundant and should go.
#
#   test/remove_events.sh [FILE.cuh ...]      default: the store, tensor and context parallelism, links of stages,
#                                             the collectives, the model, batches and steps
set -euo pipefail
cd "$(dirname "$0")/.."
files=("$@")
if [ $# -eq 0 ]; then
  files=(parallel/zero.cuh parallel/tensor_parallel.cuh parallel/ring_attention.cuh parallel/ulysses.cuh
         parallel/text_cache.cuh parallel/stage_links.cuh parallel/collectives.cuh gpt.cuh model.cuh
         training/batch_buffers.cuh training/steps_in_flight.cuh)
fi
events='^ +((data_|tp_|ends_|world_|world|ranks_|d\.from|d\.to|mesh_\.world\(\))\.(after|wait|wait_for_all)\('
events+='|if \(.*\) (ranks_|d\.to)\.wait\(|settle\(slot\)'
events+='|(slot\.moved|order_|arrived|arrived_.*|gathered_|issued_.*|buffer.*\.copied|end_.*|d\.left|d\.arrived.*)\.record|CUDA_CHECK\(cuda(Stream(WaitEvent|Synchronize)|EventSynchronize))'
copy=build/remove_events
mpirun=(mpirun --oversubscribe --bind-to none)
if [ "$(id -u)" = 0 ]; then mpirun+=(--allow-run-as-root); fi
export OMP_NUM_THREADS=1
mkdir -p $copy/whole $copy/dev
cp -r Makefile gpt.cu gpt.cuh model.cuh cpu kernels parallel processes runtime training test $copy
cp -r dev/make $copy/dev
cp -r gpt.cuh model.cuh parallel training $copy/whole

# The tests use fp32 alone.
build() {
  make -s -C $copy DEVICE=cpu DTYPES=fp32 FLAGS_fast=-O1 WARNINGS=-w build/cpu/test_zero build/cpu/test_tensor_parallel \
    build/cpu/test_tp_checkpoint build/cpu/test_meshes build/cpu/test_context_parallel
}
runs_clean() {  # schedule
  (cd $copy && export GPT_CPU_SCHEDULE=$1
   timeout 300 "${mpirun[@]}" -np 3 build/cpu/test_zero -tc='*take turns' > log 2>&1 &&
   timeout 300 "${mpirun[@]}" -np 3 build/cpu/test_context_parallel > log 2>&1 &&
   timeout 300 "${mpirun[@]}" -np 4 build/cpu/test_tensor_parallel -tc='rows are*,the gradients*,*few tokens*' > log 2>&1 &&
   timeout 300 "${mpirun[@]}" -np 4 build/cpu/test_tp_checkpoint > log 2>&1 &&
   timeout 300 "${mpirun[@]}" -np 4 build/cpu/test_meshes -tc='any number*,the gradients*,*few tokens*' > log 2>&1)
}
# Prints the first schedule that fails.
failing_schedule() {
  for schedule in reverse random:{1..6}; do
    if ! runs_clean $schedule; then echo $schedule; return; fi
  done
}

build
if [ -n "$(failing_schedule)" ]; then echo "the test fails with all events in place"; cat $copy/log; exit 1; fi
removed=0 found=0
for file in "${files[@]}"; do
  for line in $(grep -nE "$events" "$copy/whole/$file" | cut -d: -f1); do
    removed=$((removed + 1))
    what=$(sed -n "${line}s/^ *//p" "$copy/whole/$file")
    sed "${line}s/.*/;/" "$copy/whole/$file" > "$copy/$file"
    build
    schedule=$(failing_schedule)
    if [ -n "$schedule" ]; then
      found=$((found + 1))
      echo "$file:$line: without $what the test fails (GPT_CPU_SCHEDULE=$schedule)"
    else
      echo "$file:$line: without $what the test runs clean: it is redundant, or the test does not reach it"
    fi
  done
  cp "$copy/whole/$file" "$copy/$file"
done
echo "events removed: $removed, found missing: $found"
[ "$removed" -eq "$found" ]
