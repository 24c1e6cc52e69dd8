#!/usr/bin/env bash
# Runs on a machine with a GPU, and checks there what was written without one: builds, tests, sanitizers, times. Writes
# all of it into one results file, with hardware, versions, date and the exact commands.
#
#   dev/gpu_check.sh                        everything: about two hours on one GPU
#   dev/gpu_check.sh --quick                what ten minutes allow, after the build
#   dev/gpu_check.sh --quick build bench    some parts: build tests training ranks bench sanitizers torch ceilings ladders
#   DEVICE=cpu dev/gpu_check.sh --quick     tries the script itself, on the CPU device
#
# --output FILE: instead of dev/results/DATE-DEVICE-check.md. PYTHON: the interpreter that has torch. No failure stops
# the script; the last line is "N passed, N failed", and the exit code is 1 if something failed. The settings of the
# card are not changed.
cd "$(dirname "$0")/.." || exit 1
set -u

all_parts=(build tests training ranks bench sanitizers torch ceilings ladders)
device=${DEVICE:-gpu} python=${PYTHON:-python3} quick='' output='' parts=()
usage() { echo "gpu_check.sh: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=yes ;;
    --output) output=${2:-}; [ -n "$output" ] || usage "--output needs a file"; shift ;;
    *) [[ " ${all_parts[*]} " = *" $1 "* ]] || usage "'$1' is no part: choose from ${all_parts[*]}"; parts+=("$1") ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=("${all_parts[@]}")
[ "$device" = cpu ] || [ "$device" = gpu ] || usage "DEVICE is '$device': give gpu or cpu"
if [ "$device" = gpu ] && ! nvidia-smi > /dev/null 2>&1; then
  usage "nvidia-smi finds no GPU: run this where one is, or try it with DEVICE=cpu"
fi

build=build/$device
logs=$build/check
output=${output:-dev/results/$(date +%F)-$device-check.md}
mkdir -p "$logs" "$(dirname "$output")" || exit 1
runs=$logs/runs
rm -rf "$runs"
trap 'rm -rf "$runs"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0
never=$((SECONDS + 86400))
start_clock() { if [ -n "$quick" ]; then deadline=$((SECONDS + 600)); else deadline=$never; fi; }
start_clock

# ---- writing the results file

write() { printf '%s\n' "$@" >> "$output"; }

log_of() { echo "$logs/${1//[^A-Za-z0-9]/_}.log"; }

# attempt LABEL SECONDS COMMAND...: runs the command, at most that long, and writes its result beside its log. In a
# quick run all commands together have ten minutes.
attempt() {
  local label=$1 limit=$2 status begin=$SECONDS left=$((deadline - SECONDS)) log
  shift 2
  log=$(log_of "$label")
  if [ "$limit" -gt "$left" ]; then limit=$left; fi
  if [ "$limit" -le 0 ]; then
    status="failed: no time was left"
    : > "$log"
  else
    timeout -k 10 "$limit" "$@" > "$log" 2>&1 < /dev/null
    case $? in
      0) status=passed ;;
      124 | 137) status="failed: not done after $limit s" ;;
      *) status=failed ;;
    esac
  fi
  echo "$status, $((SECONDS - begin)) s" > "$log.status"
  { echo '```'; echo "\$ $(printf '%q ' "$@" | sed 's, $,,')"; tail -n 120 "$log" | cut -c 1-400; echo '```'; } > "$log.md"
}

# report LABEL: writes the result of an attempt.
report() {
  local log status
  log=$(log_of "$1")
  status=$(cat "$log.status")
  case $status in passed*) passed=$((passed + 1)) ;; *) failed=$((failed + 1)) ;; esac
  printf '%-44s %s\n' "$1" "$status"
  write "" "### $1: $status" "" "$(cat "$log.md")"
  rm -f "$log.status" "$log.md"
}

# check LABEL SECONDS COMMAND...: an attempt and its report.
check() {
  attempt "$@"
  report "$1"
}

# start LABEL SECONDS COMMAND...: an attempt that runs at the same time as others; report_started waits for all of them.
started=()
start() {
  while [ "$(jobs -rp | wc -l)" -ge 8 ] || [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  attempt "$@" &
  started+=("$1")
}
report_started() {
  local label
  wait
  for label in "${started[@]}"; do report "$label"; done
  started=()
}

# leave_out WHAT WHY
leave_out() {
  printf '%-44s left out: %s\n' "$1" "$2"
  write "" "### $1: left out, $2"
}

# ---- hardware and versions

# The version in the first header found: the numbers that its #defines give.
header_version() {  # header, names of the defines
  local header=$1 file name text=''
  shift
  for file in {/usr/local/cuda,build/cuda/nvidia/cu*,build/nccl/nvidia/nccl,build/cudnn/nvidia/cudnn,build/cudnn,/usr}/include/"$header"; do
    [ -f "$file" ] || continue
    for name in "$@"; do text+=.$(sed -n "s/^#define $name \([0-9]*\).*/\1/p" "$file" | head -1); done
    echo "${text#.}"
    return
  done
  echo "not found"
}

describe_machine() {
  echo "date        $(date -u '+%F %T UTC')"
  echo "commit      $(git describe --always --dirty=', with changes' 2> /dev/null || echo 'not a git checkout')"
  echo "processor   $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
  echo "memory      $(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
  echo "system      $(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release), Linux $(uname -r)"
  echo "g++         $(g++ --version | head -1)"
  if [ "$device" = gpu ]; then
    nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap,power.limit,clocks.max.sm,clocks.max.mem \
      --format=csv,noheader | sed 's/^/GPU         /'
    echo "CUDA        $("$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)" --version | sed -n 's/.*release //p')"
    echo "cuBLAS      $(header_version cublas_api.h CUBLAS_VER_MAJOR CUBLAS_VER_MINOR CUBLAS_VER_PATCH)"
    echo "cuDNN       $(header_version cudnn_version.h CUDNN_MAJOR CUDNN_MINOR CUDNN_PATCHLEVEL), frontend" \
      "$(header_version cudnn_frontend_version.h CUDNN_FRONTEND_{MAJOR,MINOR,PATCH}_VERSION)"
    echo "NCCL        $(header_version nccl.h NCCL_MAJOR NCCL_MINOR NCCL_PATCH)"
  fi
  echo "PyTorch     $("$python" -c 'import torch; print(torch.__version__)' 2> /dev/null || echo 'not installed')"
}

# ---- the parts

# The ten minutes of a quick run begin after the build.
part_build() {
  deadline=$never
  check "build of program and tests" 3600 make -j "$(nproc)" "$device-tests"
  check "build of ceilings" 600 make "DEVICE=$device" "$build/ceilings"
  start_clock
}

kernel_tests() {  # prefix
  local kernel name
  for kernel in kernels/*.cuh kernels/device/*.cuh; do
    name=test_$(basename "$kernel" .cuh)
    if [ -f "test/$name.cu" ]; then echo "$1$name"; fi
  done
}

part_tests() {
  local test
  if [ -z "$quick" ]; then
    check "all tests" 3600 test/run.sh "$build"
    return
  fi
  for test in $(kernel_tests "$build/"); do check "$(basename "$test")" 60 "$test"; done
}

# Every dtype must learn the same, and a run that is stopped and resumed must get the same bits.
part_training() {
  local dtype job=("$build/train_gpt" --train README.md --layers 2 --heads 2 --channels 128 --seq-len 64 --micro-batch 8)
  job+=(--lr 3e-4 --schedule constant)
  for dtype in fp32 bf16 fp16; do
    check "40 steps in $dtype" 60 "${job[@]}" --dtype $dtype --steps 40 --out "$runs/$dtype"
    check "20 steps in $dtype" 60 "${job[@]}" --dtype $dtype --steps 20 --out "$runs/resumed-$dtype"
    check "20 more in $dtype" 60 "${job[@]}" --dtype $dtype --steps 40 --out "$runs/resumed-$dtype" --resume
    check "the same bits in $dtype" 30 "$python" dev/same_losses.py "$runs/$dtype" "$runs/resumed-$dtype" --tolerance 0
  done
  for dtype in bf16 fp16; do
    check "$dtype has the curve of fp32" 30 "$python" dev/same_losses.py "$runs/fp32" "$runs/$dtype" --tolerance 0.01
  done
}

part_ceilings() {
  check "build of ceilings" 300 make "DEVICE=$device" "$build/ceilings"
  check "ceilings" 120 "$build/ceilings"
  check "the floor at these rates" 30 "$python" dev/roofline.py --ceilings "$logs/ceilings.log"
  check "a trace of gpt2" 120 "$build/train_gpt" --train README.md --model gpt2 --vocab 50257 --dtype bf16 \
    --micro-batch 2 --seq-len 32 --steps 2 --attention own --out '' --trace "$logs/trace.json"
  check "the floor counts what launchers count" 30 "$python" dev/roofline.py --model gpt2 --batch 2 --seq-len 32 \
    --check "$logs/trace.json"
}

part_bench() {
  if [ -n "$quick" ]; then check "gpt2" 240 make bench "DEVICE=$device" BENCH_OPTIONS='--model gpt2 --steps 10'
  else check "gpt2 and gpt2-xl" 1800 make bench "DEVICE=$device"
  fi
  if ! grep -qx cudnn "$build/attention" 2> /dev/null; then
    leave_out "attention by cuDNN beside our own" "this build has no cuDNN (make build/cudnn fetches it)"
  elif [ -n "$quick" ]; then
    check "gpt2, our own attention" 240 make bench "DEVICE=$device" \
      BENCH_OPTIONS='--model gpt2 --steps 10 -- --attention own'
  else
    check "gpt2 and gpt2-xl, our own attention" 1800 make bench "DEVICE=$device" BENCH_OPTIONS='-- --attention own'
  fi
}

part_ladders() {
  local ladder launcher=dev/cluster/torchrun.sh limit=300 profiler metrics='' kind plot=()
  if [ "$device" = cpu ]; then launcher=dev/cluster/mpirun.sh; fi
  if [ -n "$quick" ]; then limit=60; fi
  check "build of the ladders" 1800 make "DEVICE=$device" ladders
  for ladder in "$build"/ladder_*; do
    case $ladder in
      *.*) ;;  # no program
      *_all_reduce) GPT_PROGRAM=$ladder check "all_reduce, two ranks" $limit "$launcher" 2 --share-gpu ;;
      *)
        if "$python" -c 'import matplotlib' 2> /dev/null; then plot=(--plot "${output%.md}-$(basename "$ladder").png"); fi
        PYTHON=$python check "$(basename "$ladder")" $limit "$ladder" "${plot[@]}"
        ;;
    esac
  done
  if [ "$device" = cpu ]; then check "tables of dev/ladders/README.md" 120 "$python" dev/ladders/tables.py --check; fi
  # The counts of the CPU device, measured by the hardware: to be compared with dev/ladders/README.md.
  profiler=$(PATH=$PATH:/usr/local/cuda/bin command -v ncu)  # the card's clocks stay as they are
  if [ "$device" = cpu ] || [ -z "$profiler" ]; then
    leave_out "counts by Nsight Compute" "$([ "$device" = cpu ] && echo 'it needs a GPU' || echo 'it is not installed')"
    return
  fi
  if "$profiler" --clock-control none "$build/ladder_gelu" --once 2>&1 | grep -q ERR_NVGPUCTRPERM; then
    leave_out "counts by Nsight Compute" "this user may not read the GPU's counters (ERR_NVGPUCTRPERM)"
    return
  fi
  for kind in global_op_ld global_op_st shared_op_ld shared_op_st; do
    metrics+=,l1tex__t_requests_pipe_lsu_mem_$kind.sum
    case $kind in
      global*) metrics+=,l1tex__t_sectors_pipe_lsu_mem_$kind.sum ;;
      shared*) metrics+=,l1tex__data_pipe_lsu_wavefronts_mem_$kind.sum ;;
    esac
  done
  for ladder in layernorm_forward layernorm_backward softmax_cross_entropy matmul; do
    check "$ladder by Nsight Compute" 300 "$profiler" --clock-control none --csv --page raw --metrics "${metrics#,}" \
      "$build/ladder_$ladder" --once
  done
}

part_torch() {
  local options=(--device cuda --dtype bf16 --seq-len 1024) compare
  if [ "$device" = cpu ]; then options=(--model d2 --vocab 1000 --batch 4 --attention explicit); fi
  compare=("$python" dev/bench_torch.py --ours "$build/train_gpt")
  if ! "$python" -c 'import torch' 2> /dev/null; then
    leave_out "PyTorch beside train_gpt" "$python has no torch"
  elif [ -n "$quick" ]; then
    check "PyTorch beside train_gpt, gpt2" 300 "${compare[@]}" --batch 64 "${options[@]}" --compile default \
      --rounds 1 --warmup 5 --steps 10
  else
    check "PyTorch beside train_gpt, gpt2" 7200 "${compare[@]}" --model gpt2 --batch 64 "${options[@]}"
    check "PyTorch beside train_gpt, gpt2-xl" 10800 "${compare[@]}" --model gpt2-xl --batch 16 "${options[@]}"
    check "both curves, gpt2" 1800 "${compare[@]}" --model gpt2 --batch 16 "${options[@]}" --compile default \
      --curve "${output%.md}-curve"
  fi
}

# Several ranks on one GPU: --share-gpu gives each an NCCL_HOSTID of its own, so that NCCL allows it.
part_ranks() {
  local launcher=dev/cluster/torchrun.sh stage mode options
  local job=(--train README.md --layers 4 --heads 2 --channels 128 --seq-len 64)
  job+=(--micro-batch 2 --global-batch 8 --steps 10 --overwrite)
  if [ "$device" = cpu ]; then launcher=dev/cluster/mpirun.sh; fi
  export GPT_PROGRAM=$build/train_gpt NCCL_DEBUG=VERSION
  check "one rank" 60 "$build/train_gpt" "${job[@]}" --out "$runs/one"
  for stage in 0 1 2 3; do
    check "two ranks, ZeRO $stage" 90 "$launcher" 2 "${job[@]}" --share-gpu --zero "$stage" --out "$runs/zero$stage"
    check "ZeRO $stage has the curve of one rank" 30 "$python" dev/same_losses.py "$runs/one" "$runs/zero$stage"
  done
  for mode in '--tp 2' '--cp 2' '--cp 2 --cp-method ulysses' '--pp 2' '--pp 2 --pp-schedule gpipe' \
    '--pp 2 --pp-schedule interleaved' '--pp 2 --pp-schedule zb'; do
    read -ra options <<< "$mode"
    check "two ranks, $mode" 90 "$launcher" 2 "${job[@]}" --share-gpu "${options[@]}" --out "$runs/${mode// /_}"
    check "$mode has the curve of one rank" 30 "$python" dev/same_losses.py "$runs/one" "$runs/${mode// /_}"
  done
}

part_sanitizers() {
  local tool test sanitizer job ladder limit=900 tools=(memcheck racecheck initcheck) programs=() ladders=()
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
  if [ "$device" = cpu ] || [ -z "$sanitizer" ]; then
    leave_out "compute-sanitizer" "$([ "$device" = cpu ] && echo 'it needs a GPU' || echo 'it is not installed')"
    return
  fi
  # In training each array is an allocation of its own, so that a kernel that runs past its end is found.
  job=("$build/train_gpt" --train README.md --layers 1 --heads 1 --channels 64 --seq-len 64 --micro-batch 2)
  job+=(--steps 2 --dtype bf16 --out '')
  if [ -n "$quick" ]; then
    limit=240 tools=(memcheck racecheck)
    for test in gelu layernorm adamw cross_entropy embedding column_sum norm attention; do
      programs+=("$build/test_$test")
    done
  else
    read -ra programs <<< "$(kernel_tests "$build/" | tr '\n' ' ')"
    for ladder in "$build"/ladder_*; do
      case $ladder in *.* | *_all_reduce) ;; *) ladders+=("$ladder") ;; esac
    done
  fi
  for tool in "${tools[@]}"; do
    start "$tool of training" $limit env GPT_SEPARATE_ARRAYS=1 "$sanitizer" --tool "$tool" --error-exitcode 3 "${job[@]}"
    for test in "${programs[@]}"; do
      start "$tool of $(basename "$test")" $limit "$sanitizer" --tool "$tool" --error-exitcode 3 "$test"
    done
    for ladder in "${ladders[@]}"; do
      start "$tool of $(basename "$ladder")" $limit "$sanitizer" --tool "$tool" --error-exitcode 3 "$ladder" --check
    done
  done
  report_started
}

: > "$output" || exit 1
write "# $(date +%F): dev/gpu_check.sh${quick:+ --quick} ${parts[*]}" "" '```' "$(describe_machine)" '```'
for part in "${parts[@]}"; do
  write "" "## $part"
  "part_$part"
done
write "" "$passed passed, $failed failed"
echo "written to $output"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
