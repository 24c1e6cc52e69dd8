# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: the parts `tests`, `sanitizers` and `sanitizers_all`.

part_tests() {
  local test
  if [ -z "$built" ]; then check "all tests" 3600 test/run.sh "$build" --all; return; fi
  for test in test/test_*.cu test/test_*.cpp test/*/test_*.cu test/*/test_*.cpp; do  # (test/run.sh would count missing tests as failed)
    case $test in test/cpu/* | test/faults/* | test/ranks/* | test/sm_margin/*) continue ;; esac
    test=$build/$(basename "${test%.*}")
    start "$(basename "$test"), of all" 300 run_cases "$test"
  done
  wait_for_started
}

# sanitize TOOLS PROGRAMS...: each tool over each program, and over a small training run.
sanitize() {
  local tools=$1 tool program sanitizer options
  shift
  if ! sanitizer=$(find_tool compute-sanitizer); then
    leave_out "compute-sanitizer" "$(no_tool compute-sanitizer)"
    return
  fi
  for tool in $tools; do
    options=(--tool "$tool" --error-exitcode 3)
    start "$tool of training" 300 trains_under "$sanitizer" "$tool" "$build/train_gpt"
    for program in "$@"; do
      case $program in
        */ladder_*) start "$tool of $(basename "$program")" 900 "$sanitizer" "${options[@]}" "$program" --check ;;
        *) start "$tool of $(basename "$program")" 900 "$sanitizer" "${options[@]}" "$program" ;;
      esac
    done
  done
  wait_for_started
}
part_sanitizers() {
  # shellcheck disable=SC2046  # several names
  sanitize "memcheck racecheck" $(printf "$build/test_%s " gelu layernorm adamw cross_entropy embedding column_sum norm attention)
}
part_sanitizers_all() {
  # shellcheck disable=SC2046
  sanitize "memcheck racecheck initcheck" $(kernel_tests) $(ladders)
}
