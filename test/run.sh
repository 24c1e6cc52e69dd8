#!/usr/bin/env bash
# Runs every test program of a build folder and adds up how their test cases ended.
#
#   test/run.sh build/cpu           of what takes turns, those whose turn it is after this commit
#   test/run.sh build/cpu --all     all of it
#
# Of a test that runs in several ways, on several numbers of ranks or under several schedules, each case runs in half of
# them, and after the next commit in the others; so does every second ladder. Of the three tests that start train_gpt most
# often every second case runs. Meshes, stages and options that are alike take turns, too (turns.h).
#
# Tests of a room lie in test/ROOM/. Those in test/ranks/ and test/ROOM/ranks/ are started by mpirun, on several numbers of ranks.
# On the CPU device, tests of kernels and some tests of ranks run under a permuted schedule too: there a missing barrier
# or event fails. Some tests of ranks run under the switches of cpu/README.md too; `make test-strict` runs all so.
build=${1:?build folder}
cd "$(dirname "$0")/.." || exit 1
counts=$(mktemp -d)
trap 'rm -rf "$counts"' EXIT
if [ -z "${GPT_SHARES:-}" ]; then  # which share of its bound each error took (test/tolerances.md)
  export GPT_SHARES=$PWD/$build/shares
  rm -f "$GPT_SHARES"
fi

commits=
if [ "${2:-}" != --all ]; then
  commits=$(test/turn.sh)
  export GPT_TURN=$((commits / 2))  # so that what takes turns within a case meets all ways that the case runs in
fi
# way NUMBER COMMAND: a test in the way of this number has those cases whose turn it is there.
way() { GPT_CASES_TURN=${commits:+$((commits + $1))} "${@:2}"; }

# A budget for each test on the CPU device, in processor time. As machines differ by a factor of four, its unit is what g++
# takes here to read a large header, some three seconds (2026-11-27, Zen 3). A test that takes more than 120 of these fails:
# find out what takes so long, or let its cases take turns. The budget keeps `make test` short, so `make test-strict` has none:
# sums as on Hopper are played product by product, and make test_fp8_meshes take eight times as long.
unit=
case $build${GPT_CPU_SUMS:+, strictly} in
  build/cpu)
    TIMEFORMAT=%U
    unit=$( { time g++ -std=c++20 -fsyntax-only -x c++ - <<< '#include <nlohmann/json.hpp>'; } 2>&1 ) ;;
esac

# Two at a time without a GPU, where many tests keep one core busy, beside two that mostly wait: for ranks that are silent,
# and for mpirun. The lines of a test stay together.
run() {  # name, schedule, number of ranks (none: without mpirun), options of the test
  while [ "$(jobs -pr | grep -vcxF "${waiting:--}")" -ge "$at_once" ]; do wait -n; done
  run_one "$@" &
}
case $build in
  build/cpu*) at_once=2 beside=(test_control test_mesh) ;;
  *) at_once=1 beside=() ;;
esac

run_one() {
  local ranks=${3:-} label=$1${3:+, $3 ranks}${strictly:+, $strictly} start=$SECONDS spent status launcher=(test/every_case.sh)
  local log="$build/$1${ranks:+-$ranks}${2:+-${2/:/-}}${strictly:+-$strictly}.log"
  if [ -n "$ranks" ]; then launcher=("${mpirun[@]}" -np "$ranks"); fi
  # `make test-strict` sets switches for all. Tests that are about them set them by themselves; and a ladder connects ranks when a
  # rung needs them, which a trainer may not.
  case $1 in
    test_device | test_failures | test_strict | test_cublaslt | test_sm_player)
      launcher=(env -u GPT_CPU_QUEUE -u GPT_CPU_LAZY -u GPT_CPU_DEVICES -u GPT_CPU_NCCL -u GPT_CPU_SUMS "${launcher[@]}") ;;
    ladder_all_reduce) launcher=(env -u GPT_CPU_NCCL "${launcher[@]}") ;;
  esac
  local TIMEFORMAT='%U %S'  # of processors
  spent=$( { time GPT_CPU_SCHEDULE=$2 GPT_BUILD=$build "${launcher[@]}" "$build/$1" "${@:4}" > "$log" 2>&1; } 2>&1)
  status=$?
  spent=$(awk '{ print $1 + $2 }' <<< "$spent")
  local p=0 f=0 s=0
  read -r p f s < <(sed -n 's/^cases: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$log" | tail -1)
  if [ -z "$s" ] || { [ $status -ne 0 ] && [ "$f" -eq 0 ]; }; then f=1; fi  # it crashed
  if [ -n "$unit" ] && awk "BEGIN { exit !($spent > 120 * $unit) }"; then
    f=$((f + 1))
    echo " ERROR: $label took $spent s of processor time, more than 120 times the $unit s of a large header (test/run.sh)" >> "$log"
  fi
  echo "${p:=0} $f ${s:=0}" > "$counts/$(basename "$log")"
  local line; line=$(printf '%-28s %-10s %4d passed %3d failed %3d skipped  %3d s, of processors %3.0f s' "$label" "$2" "$p" "$f" "$s" $((SECONDS - start)) "$spent")
  if [ "$f" -gt 0 ]; then
    line+=$'\n'$(cat "$log")
    # said again at the end, where it is seen
    { echo "failed: $label $2 ($log)"; grep -m 6 -A 1 ' ERROR: ' "$log" || tail -3 "$log"; } > "$counts/$(basename "$log").failed"
  fi
  echo "$line"
}

run_scheduled() {  # name
  case $build in
    build/cpu*) way 0 run "$1" ""; way 1 run "$1" random:1 ;;
    *) run "$1" "" ;;
  esac
}
on_ranks() {  # name, numbers of ranks
  local ranks number=0
  for ranks in "${@:2}"; do way $((number++)) run "$1" "" "$ranks"; done
}

strictly=
run_strictly() {  # name, number of ranks, options
  strictly=strictly GPT_CPU_QUEUE=1000 GPT_CPU_LAZY=1 GPT_CPU_DEVICES=8 GPT_CPU_NCCL=ring GPT_CPU_SUMS=hopper run "$1" "" "${@:2}"
}

for name in "${beside[@]}"; do
  if [ "$name" = test_mesh ]; then way 0 run_one "$name" "" & else run_one "$name" "" & fi
done
waiting=$(jobs -pr)
room_tests=()  # of the rooms that are there
for room in extensions/*/ runtime/*/; do
  mapfile -t -O ${#room_tests[@]} room_tests < <(compgen -G "test/$(basename "$room")/test_*.c*")
done
for source in test/test_*.cu test/test_*.cpp "${room_tests[@]}" test/cpu/test_*.cu test/cpu/test_*.cpp test/cpu/*/test_*.cu; do
  name=$(basename "${source%.*}")
  case " ${beside[*]} " in *" $name "*) continue ;; esac
  case $build-$source in
    build/gpu*-test/cpu/*) ;;
    *test_program.cpp | *test_mesh_resume.cpp) way 1 run "$name" "" ;;
    *test_counts.cu | *test_cublaslt.cu | *test_gemm.cu) run "$name" "" ;;  # no kernels, or such as have tests of their own
    *.cu) run_scheduled "$name" ;;
    *) run "$name" "" ;;
  esac
done
case $build in
  build/cpu*)  # sums as on Hopper
    run_strictly test_fp8 "" --test-case='*product*'
    run_strictly test_model "" --test-case='a step in eight bits*' ;;
esac
ladders=0
for source in dev/ladders/*.cu; do
  if [ -n "$commits" ] && [ $(((commits + ladders++) % 2)) = 1 ]; then continue; fi
  run "ladder_$(basename "${source%.cu}")" "" "" --check
done

# More ranks than cores: each has one thread, and sleeps when it waits. Without a GPU three jobs at a time, which keep two
# cores busy.
mpirun=(env OMP_NUM_THREADS=1 mpirun --oversubscribe --bind-to none)
if [ "$(id -u)" = 0 ]; then mpirun+=(--allow-run-as-root); fi
if command -v mpirun > /dev/null; then
  case $build in build/cpu*) at_once=3 ;; esac
  way 0 run test_meshes "" 8 --test-case-exclude='a NaN*,a rehearsed*'  # the longest first; these as on 6 ranks
  way 1 run test_meshes "" 6 --test-case-exclude='fp16*,any number*,the same mesh*'  # as on 8 and on 3
  way 1 run test_meshes "" 3
  way 0 run test_meshes "" 2
  on_ranks test_tensor_parallel 8 3
  on_ranks test_zero 8 3
  run test_second_block "" 8
  run test_fp8_meshes "" 4
  on_ranks test_islands 4 3
  run test_offload "" 4
  run test_delay "" 4
  run test_lora_meshes "" 4
  on_ranks test_compression 4 2
  on_ranks test_powersgd 4 2
  on_ranks test_context_parallel 8 4 3 2
  on_ranks test_collectives 8 3 2
  on_ranks test_sync_check 8 3
  run test_tp_checkpoint "" 6
  for ranks in 8 3; do run ladder_all_reduce "" $ranks --check --share-gpu; done
  case $build in
    build/cpu*)
      run test_sm_margin "" 4
      run test_collectives reverse 3
      for ranks in 2 4; do run test_context_parallel reverse $ranks; done
      run test_zero reverse 3 --test-case='*take turns*'
      run test_compression reverse 3 --test-case='*sum*,*errors*'
      run test_powersgd reverse 3
      run test_offload random:1 2 --test-case='*rank alone,*each kind*,gradients*bits'
      run test_delay random:1 2
      run test_islands reverse 4 --test-case='an outer step under way*<float>'
      for ranks in 2 4; do run test_tensor_parallel reverse $ranks --test-case='rows are*,the gradients*,*few tokens*,*runtime*'; done
      run test_meshes reverse 4 --test-case='any number*,every schedule*,the gradients*,*few tokens*'
      run ladder_all_reduce random:1 3 --check
      run_strictly test_collectives 3
      run_strictly test_zero 3 --test-case='*take turns*'
      run_strictly test_meshes 4 --test-case='any number*,every schedule*,text*' ;;
  esac
else
  left_out=' (mpirun is not here: tests of several ranks were not run)'
fi
wait
cat "$counts"/*.failed 2>/dev/null
read -r passed failed skipped < <(cat "$counts"/*.log | awk '{p += $1; f += $2; s += $3} END {print p, f, s}')
larger=$(python3 test/shares.py "$GPT_SHARES" 2>/dev/null | grep -c '^larger')
if [ "${larger:-0}" -gt 0 ]; then
  echo "$larger errors take a larger share of their bound than test/tolerances.md has: python3 test/shares.py $GPT_SHARES"
fi
echo "$skipped skipped, as they say: grep -h '^skipped: ' $build/*.log | sort | uniq -c"
echo "$passed passed, $failed failed$left_out"
[ "$failed" -eq 0 ]
