#!/usr/bin/env bash
# Is every event between streams needed, and would its absence be found?
#
# Puts each line of the product that orders streams behind a condition, in a copy of the sources under build/remove_events,
# and runs tests of several ranks on the CPU device without one of these lines after another, with streams in permuted
# order, until one of a few orders fails. A line that nobody misses is redundant and should go.
#
# These lines are calls of after(), wait(), wait_for_all() and record(), CUDA's calls with events, and what notes the number
# of a collective for which a stream waits later. Not: an event "to measure" time, as its comment says; waits for an mbarrier
# in a kernel, or of threads of the host; waits of the host for a whole stream.
#
#   test/remove_events.sh [--names | --slice | FILE[:LINE] ...]     see removed_lines.sh
#
# A test says in a line of its own how it runs here: "// For remove_events.sh: 3 ranks, CASES", as doctest's -tc takes them.
. "$(dirname "$0")/removed_lines.sh"
kind=events copy=build/remove_events
mpirun=(mpirun --oversubscribe --bind-to none)
if [ "$(id -u)" = 0 ]; then mpirun+=(--allow-run-as-root); fi
export OMP_NUM_THREADS=1

find_lines $kind '
  code ~ /(\.|->)(after|wait|wait_for|wait_for_all|record)\(/ { found = 1 }
  code ~ /(^|[^A-Za-z_.>])(wait|wait_for|settle)\([a-z*]/ { found = 1 }
  code ~ /cuda(StreamWaitEvent|EventRecord|EventSynchronize)/ { found = 1 }
  code ~ /= [^=;]*\.last\(\);/ { found = 1 }
  comment ~ /^\/\/ to measure/ { found = 0 }
  code ~ /^ *[A-Za-z_ ]*(void|bool) (after|wait|wait_for|wait_for_all|record|settle)\(/ { found = 0 }
  code ~ /(^|[ !(])wait\(shared\./ { found = 0 }
  code ~ /wait(_for)?\((lock|std::chrono)/ { found = 0 }
  { known = code ~ /^ +(if \(.*\) )?[]a-zA-Z_.0-9>[()-]+(\(.*\)| = .*);$/ && code !~ /^ +(const |auto |return )/ }'
for test in $(all_tests); do
  grep -qE '^// For remove_events\.sh: [0-9]+ ranks(, .+)?$' "$(source_of "$test")" ||
    fail "$test: how does it run? Write '// For remove_events.sh: N ranks, CASES' into its source"
done
options=(VARIANT= DTYPES=fp32 FLAGS_fast=-O1)
if [ $mode = names ]; then check_names build/cpu "${options[@]}"; exit; fi
copy_sources $copy 's#^(.*;)( *//.*)?$#if (removed_line != NUMBER) { \1 }#'
build() { make -s -C $copy DEVICE=cpu "${options[@]}" WARNINGS='-w -include test/removed_line.h' "${@/#/build/cpu/}"; }

passes() {  # test, schedule; 124: its time was over
  local ranks cases
  IFS=, read -r ranks cases < <(sed -nE 's#^// For remove_events\.sh: ([0-9]+) ranks(, (.+))?$#\1,\3#p' "$(source_of "$1")")
  local status=0
  (cd $copy && GPT_CPU_SCHEDULE=$2 timeout 3600 "${mpirun[@]}" -np "$ranks" "build/cpu/$1" ${cases:+"-tc=$cases"}) > $copy/log 2>&1 || status=$?
  [ $status -ne 137 ] || fail "$1 was killed, which says nothing of its events"
  return $status
}
declare -A is_green
try_line() {  # its number
  local line=${places[$1]#*:} test schedule what turns status
  what=$(sed -n "${line}s/^ *//p" "${places[$1]%:*}")
  turns=$(for schedule in reverse random:{1..6}; do for test in ${tests[$1]}; do echo "$test $schedule"; done; done)
  # A slice builds the second test only if the first one notices nothing in any order.
  if [ $mode = slice ]; then turns=$(for test in ${tests[$1]}; do grep "^$test " <<< "$turns"; done); fi
  while read -r test schedule; do
    build "$test" < /dev/null || fail "$test cannot be built"
    status=0
    GPT_REMOVED_LINE=$(($1 + 1)) passes "$test" "$schedule" < /dev/null || status=$?
    if [ $status -ne 0 ]; then
      # That its time was over tells of the line only if a run with all of them ends in time now: the machine may be busy.
      if [ $status -eq 124 ] || [ -z "${is_green[$test $schedule]:-}" ]; then
        passes "$test" "$schedule" < /dev/null || { cat $copy/log; fail "$test fails with all events in place (GPT_CPU_SCHEDULE=$schedule)"; }
        is_green[$test $schedule]=1
      fi
      echo "${places[$1]}: without $what $test fails (GPT_CPU_SCHEDULE=$schedule)"
      return 0
    fi
    if is_over; then echo "${places[$1]}: without $what $test runs clean in $schedule; the time is over"; return 2; fi
  done <<< "$turns"
  echo "${places[$1]}: without $what ${tests[$1]// /, } run clean: it is redundant, or the tests do not reach it"
  return 1
}
if [ $mode = whole ] && [ ${#wanted[@]} = 0 ]; then build $(all_tests); fi
try_lines
