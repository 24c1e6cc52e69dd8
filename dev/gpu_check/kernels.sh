# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: the parts `build` and `kernels`.

part_build() {
  if [ -n "$built" ]; then leave_out "all programs" "--built: what was brought along is used"; return; fi
  check "program, tests and ladders" 3600 make -j "$(nproc)" "$device-tests"
  check "ceilings, collectives" 600 make "DEVICE=$device" "$build/ceilings" "$build/collectives" "$build/collectives"
}

# Of the core's kernels and the rooms'. Their tests lie in test/ and test/ROOM/; those in test/cpu/ are the CPU device's.
kernel_tests() {
  local kernel test room
  for kernel in kernels/device/*.cuh kernels/*.cuh kernels/*/*.cuh {extensions,runtime}/*/kernels/*.cuh; do
    [ -f "$kernel" ] || continue  # a folder has none
    test=test_$(basename "$kernel" .cuh)
    for room in '' extensions/*/ runtime/*/; do
      if [ -f "test/${room:+$(basename "$room")/}$test.cu" ]; then echo "$build/$test"; fi
    done
  done | awk '!seen[$0]++'
}

# A test that runs by itself. If it fails it runs again under memcheck.
alone() {  # label, seconds, test and its options
  local sanitizer
  check "$1" "$2" run_cases "${@:3}"
  if grep -q '^status failed' "$file.result" && sanitizer=$(find_tool compute-sanitizer); then
    check "$1, under memcheck" 200 "$sanitizer" --tool memcheck "${@:3}"
  fi
}

# The newest code comes first, one program at a time, so that it is clear which one hangs. In test_hopper, a failure of
# "multiply_m64k16" names the layout that is wrong, one of "two blocks share a tile" the address in a descriptor.
check_hopper() {
  local i
  alone "Hopper's instructions" 60 "$build/test_hopper"
  alone "attention on Hopper" 200 "$build/test_attention" '-tc=attention on Hopper*'
  alone "attention, all other" 100 "$build/test_attention" '-tce=attention on Hopper*'
  # Several programs at once make blocks come in other orders. Nothing but this shows on a GPU that dQ is added up in order,
  # and that no register is used too early (dev/wgmma_hazards.py).
  for i in 1 2 3; do start "the same bits under load, $i of 3" 120 "$build/test_attention" '-tc=*the same bits each time*'; done
  wait_for_started
}

# Compares attention by Hopper's instructions with the kernels for all cards, and with the library.
time_attention() {
  local pass why
  for pass in forward backward; do
    check "attention $pass: how fast" 120 "$build/ladder_attention_$pass" --rung tensor_cores --rung hopper --rung library \
      --csv "$results/attention_$pass.csv"
  done
  why=$(why_no_counters)
  if [ -n "$why" ]; then leave_out "attention by Nsight Compute" "$why"
  else check "attention by Nsight Compute" 300 count_attention "$(find_tool ncu)" "$results/attention"
  fi
}
count_attention() {  # the profiler, where its report goes
  set -ex
  "$1" --clock-control none --set full --force-overwrite --launch-count 2 --kernel-name 'regex:forward_kernel|gradients_kernel' \
    --export "$2" "$build/ladder_attention_backward" --rung hopper --once --shape batch=16,seq_len=1024,heads=12
  "$1" --import "$2.ncu-rep" --page details
}

part_kernels() {
  local tests test hopper=''
  tests=$(kernel_tests)
  if is_hopper && [[ $tests = */test_hopper* ]]; then hopper=yes; fi
  if [ -n "$hopper" ]; then
    check_hopper
    tests=$(grep -vE '/test_(hopper|attention)$' <<< "$tests")
  fi
  for test in $tests; do start "$(basename "$test")" 120 run_cases "$test"; done
  wait_for_started
  if [ -n "$hopper" ]; then time_attention; fi
}

export -f count_attention
