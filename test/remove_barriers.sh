#!/usr/bin/env bash
# Is every barrier needed, and would its absence be found?
#
# Takes each __syncthreads() and __syncwarp() of kernels/ out in turn, in a copy of the sources under
# build/remove_barriers, builds that kernel's test with ThreadSanitizer, and asks it to report a race with both source
# lines. A barrier whose removal nobody detects is redundant and should go.
#
#   test/remove_barriers.sh [kernels/FILE.cuh ...]      default: all files
set -euo pipefail
cd "$(dirname "$0")/.."
files=("${@:-kernels/*.cuh kernels/device/*.cuh}")
copy=build/remove_barriers
export OMP_NUM_THREADS=1 TSAN_OPTIONS='history_size=7 halt_on_error=1'
mkdir -p $copy/whole
cp -r Makefile cpu dev kernels test $copy
cp -r kernels $copy/whole

# The first report on standard input with both sides in kernels/: "FILE:LINE and FILE:LINE", preferably of file $1 and
# not of a helper that it calls.
race_in() {
  awk -v file="$1:" '
    function end_side() { if (line) sides = sides ? sides " and " line : line; line = ""; in_side = 0 }
    /^WARNING: ThreadSanitizer: data race/ { sides = "" }
    /^  (Previous )?([Rr]ead|[Ww]rite) of size/ { in_side = 1; next }
    in_side && /^$/ { end_side(); if (sides ~ / and /) { print sides; exit } }
    in_side && match($0, /kernels\/[a-z_\/]+\.cuh:[0-9]+/) {
      place = substr($0, RSTART, RLENGTH)
      if (!line || (index(place, file) == 1 && index(line, file) != 1)) line = place
    }'
}

removed=0 found=0
for file in ${files[*]}; do
  kernel=$(basename "$file" .cuh)
  case $kernel in
    common) test=test_cross_entropy ;;  # which uses both block reductions
    flash_attention | hopper_attention*) test=test_attention ;;
    *) test=test_$kernel ;;
  esac
  for line in $(grep -nE '^[^/]*__sync(threads|warp)\(' "$copy/whole/$file" | cut -d: -f1); do
    removed=$((removed + 1))
    sed -E "${line}s/__sync(threads|warp)\([^)]*\);/;/" "$copy/whole/$file" > "$copy/$file"
    make -s -C $copy DEVICE=cpu VARIANT=tsan "build/cpu-tsan/$test"
    report=$(cd $copy && "build/cpu-tsan/$test" 2>&1 || true)
    race=$(race_in "$file" <<< "$report")
    if [ -n "$race" ]; then
      found=$((found + 1))
      echo "$file:$line: without this barrier, ThreadSanitizer finds a race of $race"
    else
      echo "$file:$line: without this barrier, $test runs clean: it is redundant, or the test does not reach it"
    fi
  done
  cp "$copy/whole/$file" "$copy/$file"
done
echo "barriers removed: $removed, found missing: $found"
[ "$removed" -eq "$found" ]
