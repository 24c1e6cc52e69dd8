#!/usr/bin/env bash
# Runs a test program. A kernel that faults breaks the device for all that its process still does, so the program stops
# there (test/run_cases.h), and the cases after that one run in a new process. The last line adds up all processes.
#
#   test/every_case.sh build/gpu/test_hopper [OPTIONS]
output=$(mktemp)
trap 'rm -f "$output"' EXIT
passed=0 failed=0 skipped=0 code=0 first=1 options=()
while :; do
  "$@" "${options[@]}" 2>&1 | tee "$output"
  status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] || code=$status
  p=0 f=0 s=
  read -r p f s < <(sed -n 's/^cases: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$output")
  if [ -z "$s" ] && [ ${#options[@]} -gt 0 ]; then f=1; fi  # it crashed
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  next=$(sed -n 's/^stopped: .*: --first=\([0-9]*\)$/\1/p' "$output" | tail -1)
  if [ "${next:-0}" -le "$first" ]; then break; fi  # all have run, or it faults before its first case
  first=$next options=("--first=$next")
done
if [ ${#options[@]} -gt 0 ]; then echo "cases: $passed passed, $failed failed, $skipped skipped"; fi
exit "$code"
