#!/usr/bin/env bash
# Is each room a room? Deletes one after the other, with the rooms that include files of it (test/core.txt), and builds the program: their
# options are unknown then, all others are there, and one rank and two learn the same bits.
#
#   test/without_rooms.sh [ROOM ...]           default: all that are whole, which are listed here
#   test/without_rooms.sh --slice              one of them, the next one after each commit
set -euo pipefail
cd "$(dirname "$0")/.."
whole=(budget cache compression context_parallel control cudnn delay fp8 generation hooks hopper islands lora monitor offload pipeline
  planner shares sm_margin stochastic_rounding tensor_parallel)
rooms=("$@")
if [ $# -eq 0 ]; then rooms=("${whole[@]}"); fi
if [ "${rooms[*]}" = --slice ]; then rooms=("${whole[$(test/turn.sh) % ${#whole[@]}]}"); fi
export OMP_NUM_THREADS=1
make -s DEVICE=cpu DTYPES=fp32 build/cpu/train_gpt build/cpu/filter
for i in {1..5000}; do echo "line $((i * i))."; done >build/text
# What one rank and two have learned. $1: the program
curve() {
  for ranks in 1 2; do curve_of "$1" $ranks; done
}
curve_of() {
  local launcher=()
  if [ "$2" -gt 1 ]; then launcher=(env GPT_PROGRAM="$1" dev/cluster/mpirun.sh "$2" --share-gpu --zero 2); fi
  "${launcher[@]:-$1}" --train build/text --layers 2 --heads 2 --channels 32 --seq-len 32 --micro-batch 2 --steps 5 --out build/run --overwrite >build/said || { cat build/said; exit 1; }
  python3 -c 'import json, sys
for line in open("build/run/metrics.jsonl"):
  values = json.loads(line)
  print([values[key] for key in ("step", "loss", "grad_norm", "lr")])'
}
options() { "$1" --help all | grep -oE '^  (-h,)?--[a-z0-9-]+' | sort; }
curve build/cpu/train_gpt >build/curve
options build/cpu/train_gpt >build/options

gone=0
for room in "${rooms[@]}"; do
  folder=extensions/$room
  if [ ! -d "$folder" ]; then folder=runtime/$room; fi
  copy=build/without
  rm -rf $copy
  test/copy_sources.sh $copy
  # objects that do not need the room are not built again
  mkdir -p $copy/build/cpu
  cp -rp build/host $copy/build
  cp -p build/cpu/*.o build/cpu/*.d build/cpu/*.a build/cpu/filter build/cpu/flags $copy/build/cpu
  mapfile -t folders < <(echo "$folder"; sed -n "s|^\([a-z_]*/[a-z0-9_]*\) -> $folder\$|\1|p" test/core.txt)
  for one in "${folders[@]}"; do
    build/cpu/train_gpt --help "${one#*/}" 2>/dev/null | grep -oE '^  --[a-z0-9-]+' || true
    rm -r "${copy:?}/$one"
  done | sort >build/own
  make -s -C $copy DEVICE=cpu DTYPES=fp32 build/cpu/train_gpt >build/log 2>&1 || { echo "without $room: nothing is built"; cat build/log; exit 1; }
  curve $copy/build/cpu/train_gpt | cmp - build/curve || { echo "without $room: what is learned has other bits"; exit 1; }
  options $copy/build/cpu/train_gpt | diff - <(comm -23 build/options build/own) || { echo "without $room: these options are not as they should be"; exit 1; }
  gone=$((gone + 1))
  echo "without ${folders[*]#*/}: built, same bits, and $(wc -l <build/own) options fewer"
done
echo "rooms deleted: $gone of ${#rooms[@]}"
