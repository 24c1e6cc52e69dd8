#!/usr/bin/env bash
# Is every barrier needed, and would its absence be found?
#
# Puts each __syncthreads() and __syncwarp() of the product behind a condition, in a copy of the sources under
# build/remove_barriers, builds the kernels' tests with ThreadSanitizer, and runs them without one barrier after another: a
# race with both source lines is to be reported. A barrier whose removal nobody detects is redundant and should go.
#
#   test/remove_barriers.sh [--names | --slice | FILE[:LINE] ...]     see removed_lines.sh
. "$(dirname "$0")/removed_lines.sh"
kind=barriers copy=build/remove_barriers reused=(build/host)
export OMP_NUM_THREADS=1 TSAN_OPTIONS='history_size=4 halt_on_error=1'

find_lines $kind '
  code ~ /__sync(threads|warp)/ {
    found = 1
    known = code ~ /__sync(threads|warp)\([^)]*\);/ && gsub(/__sync/, "&", code) == 1
  }'
if [ $mode = names ]; then check_names build/cpu-tsan VARIANT=tsan; exit; fi
copy_sources $copy 's/(__sync(threads|warp)\([^)]*\);)/{ if (removed_line != NUMBER) \1 }/'

# The first report on standard input with both sides in the product: "FILE:LINE and FILE:LINE", preferably of file $1 and
# not of a helper that it calls.
race_in() {
  awk -v file="$1:" -v files="$(product_files)" '
    BEGIN { split(files, names, "\n"); for (i in names) is_product[names[i]] = 1 }
    function end_side() { if (line) sides = sides ? sides " and " line : line; line = ""; in_side = 0 }
    /^WARNING: ThreadSanitizer: data race/ { sides = "" }
    /^  (Previous )?([Rr]ead|[Ww]rite) of size/ { in_side = 1; next }
    in_side && /^$/ { end_side(); if (sides ~ / and /) { print sides; exit } }
    in_side && match($0, /[a-z0-9_\/]+\.cuh?:[0-9]+/) {
      place = substr($0, RSTART, RLENGTH)
      sub(/^.*\/src\//, "", place)
      name = place
      sub(/:.*/, "", name)
      if (!(name in is_product)) next
      if (!line || (index(place, file) == 1 && index(line, file) != 1)) line = place
    }'
}
build() { make -s -C $copy DEVICE=cpu VARIANT=tsan WARNINGS='-w -include test/removed_line.h' "${@/#/build/cpu-tsan/}"; }

declare -A is_clean
limit=(env); if [ $mode = slice ]; then limit=(timeout 60); fi
try_line() {  # its number
  local test report race status file=${places[$1]%:*}
  for test in ${tests[$1]}; do
    build "$test" || fail "$test cannot be built"
    report=$(cd $copy && GPT_REMOVED_LINE=$(($1 + 1)) "build/cpu-tsan/$test" 2>&1 || true)
    race=$(race_in "$file" <<< "$report")
    if [ -n "$race" ]; then
      status=0
      if [ -z "${is_clean[$test]:-}" ]; then (cd $copy && "${limit[@]}" "build/cpu-tsan/$test") > $copy/log 2>&1 || status=$?; fi
      # (124: no race in the time of a slice)
      [ $status -eq 0 ] || [ "${limit[*]:-}/$status" = "timeout 60/124" ] || { cat $copy/log; fail "$test fails with all barriers in place"; }
      is_clean[$test]=1
      echo "${places[$1]}: without this barrier, ThreadSanitizer finds a race of $race"
      return 0
    fi
  done
  echo "${places[$1]}: without this barrier, ${tests[$1]} runs clean: it is redundant, or the test does not reach it"
  return 1
}
if [ $mode = whole ] && [ ${#wanted[@]} = 0 ]; then build $(all_tests); fi
try_lines
