#!/usr/bin/env bash
# Is every barrier needed, and would its absence be found?
#
# Puts each __syncthreads() and __syncwarp() of kernels/ behind a condition (test/removed_line.h), in a copy of the sources
# under build/remove_barriers, builds the kernels' tests with ThreadSanitizer, and runs them without one barrier after
# another: a race with both source lines is to be reported. A barrier whose removal nobody detects is redundant and should go.
#
#   test/remove_barriers.sh [kernels/FILE.cuh ...]      default: all files
set -euo pipefail
cd "$(dirname "$0")/.."
files=("$@")
if [ $# -eq 0 ]; then files=(kernels/*.cuh kernels/*/*.cuh); fi
copy=build/remove_barriers
export OMP_NUM_THREADS=1 TSAN_OPTIONS='history_size=4 halt_on_error=1'
mkdir -p $copy
cp -r Makefile cpu dev kernels parallel test $copy
cp -r --parents runtime/checkpoints runtime/input $copy  # what tests read files with

# The first report on standard input with both sides in kernels/: "FILE:LINE and FILE:LINE", preferably of file $1 and
# not of a helper that it calls.
race_in() {
  awk -v file="$1:" '
    function end_side() { if (line) sides = sides ? sides " and " line : line; line = ""; in_side = 0 }
    /^WARNING: ThreadSanitizer: data race/ { sides = "" }
    /^  (Previous )?([Rr]ead|[Ww]rite) of size/ { in_side = 1; next }
    in_side && /^$/ { end_side(); if (sides ~ / and /) { print sides; exit } }
    in_side && match($0, /kernels\/[a-z0-9_\/]+\.cuh:[0-9]+/) {
      place = substr($0, RSTART, RLENGTH)
      if (!line || (index(place, file) == 1 && index(line, file) != 1)) line = place
    }'
}
test_of() {  # file
  local kernel; kernel=$(basename "$1" .cuh)
  case $kernel in
    common) echo test_embedding ;;  # which uses the block reduction
    sums) echo test_norm ;;
    flash_attention | hopper_attention*) echo test_attention ;;
    *) echo "test_$kernel" ;;
  esac
}

places=() tests=()
for file in "${files[@]}"; do
  for line in $(grep -nE '^[^/]*__sync(threads|warp)\(' "$file" | cut -d: -f1); do
    places+=("$file:$line") tests+=("$(test_of "$file")")
    sed -Ei "${line}s/(__sync(threads|warp)\([^)]*\);)/{ if (removed_line != ${#places[@]}) \1 }/" "$copy/$file"
  done
done
names=$(printf '%s\n' "${tests[@]}" | sort -u)
make -s -C $copy DEVICE=cpu VARIANT=tsan WARNINGS='-w -include test/removed_line.h' $(printf 'build/cpu-tsan/%s ' $names)
for name in $names; do
  (cd $copy && "build/cpu-tsan/$name") > $copy/log 2>&1 || { cat $copy/log; echo "$name fails with all barriers in place"; exit 1; }
done
found=0
for i in "${!places[@]}"; do
  report=$(cd $copy && GPT_REMOVED_LINE=$((i + 1)) "build/cpu-tsan/${tests[i]}" 2>&1 || true)
  race=$(race_in "${places[i]%:*}" <<< "$report")
  if [ -n "$race" ]; then
    found=$((found + 1))
    echo "${places[i]}: without this barrier, ThreadSanitizer finds a race of $race"
  else
    echo "${places[i]}: without this barrier, ${tests[i]} runs clean: it is redundant, or the test does not reach it"
  fi
done
echo "barriers removed: ${#places[@]}, found missing: $found"
[ ${#places[@]} -eq $found ]
