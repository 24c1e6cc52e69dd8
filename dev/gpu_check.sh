#!/usr/bin/env bash
# Runs on a machine with a GPU, and checks there what was written without one: builds, tests, sanitizers, times. What tells
# most comes first; no failure stops it.
#
#   dev/gpu_check.sh                            everything: some hours on one GPU
#   dev/gpu_check.sh --minutes 9                as much as fits; called again, it goes on with what is not done
#   dev/gpu_check.sh --minutes 9 kernels bench  some parts: build kernels training ceilings bench torch sanitizers ladders
#                                               ranks tests torch_all sanitizers_all
#   dev/gpu_check.sh --again bench              these parts (or all) anew
#   DEVICE=cpu dev/gpu_check.sh kernels         tries the script itself, on the CPU device
#
# build/gpu/check keeps the result of each check in files, and report.md, which says all of it (dev/gpu_report.py). It may be
# carried to another machine. Results of other sources do not count: they are moved to build/gpu/check-HASH.
# PYTHON: the interpreter that has torch. Neither network nor root is needed; the settings of the card are not changed.
# Exit code: 0 all passed, 1 a check failed, 2 bad arguments, 3 the time was over before all was done.
cd "$(dirname "$0")/.." || exit 1
set -u

all_parts=(build kernels training ceilings bench torch sanitizers ladders ranks tests torch_all sanitizers_all)
device=${DEVICE:-gpu} again='' minutes='' parts=()
export python=${PYTHON:-python3}
usage() { echo "gpu_check.sh: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --again) again=yes ;;
    --minutes) minutes=${2:-}; shift; [[ $minutes =~ ^[0-9]+(\.[0-9]+)?$ ]] || usage "--minutes '$minutes': give a number" ;;
    *) [[ " ${all_parts[*]} " = *" $1 "* ]] || usage "'$1' is no part: choose from ${all_parts[*]}"; parts+=("$1") ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=("${all_parts[@]}")
[ "$device" = cpu ] || [ "$device" = gpu ] || usage "DEVICE is '$device': give gpu or cpu"
if [ "$device" = gpu ] && ! nvidia-smi > /dev/null 2>&1; then
  usage "nvidia-smi finds no GPU: run this where one is, or try it with DEVICE=cpu"
fi

export build=build/$device
results=$build/check
export runs=$results/runs  # of train_gpt, while this runs
deadline=$((SECONDS + $(awk "BEGIN { print int(${minutes:-100000} * 60) }") - 10))  # programs have 10 s to end

torch_version=$("$python" -c 'import torch; print(torch.__version__)' 2> /dev/null)

# What is compiled: a copy need not be a git checkout.
sources=$(find Makefile ./*.cu ./*.cuh cpu dev kernels parallel processes runtime test training -type f \
  \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' -o -name '*.mk' -o -name Makefile \) -print0 2> /dev/null \
  | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-12)
before=$(cat "$results/sources" 2> /dev/null)
if [ -d "$results" ] && [ "$before" != "$sources" ]; then
  echo "results of other sources: moved to $results-${before:-unknown}"
  rm -rf "$results-${before:-unknown}"
  mv "$results" "$results-${before:-unknown}"
fi
mkdir -p "$runs" || exit 1
echo "$sources" > "$results/sources"
trap '"$python" dev/gpu_report.py "$results" > "$results/report.md"; rm -rf "$runs"; echo "written to $results/report.md"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0 unfinished=0

# ---- checks and their results: PART/NUMBER-NAME.log and .result

# place LABEL: sets `file` to where the result goes, without its ending. Numbers keep the checks' order; where they have
# changed, an earlier result is renamed.
place() {
  local name=${1//[^A-Za-z0-9]/_} ending old
  number=$((number + 1))
  file=$results/$part/$(printf %03d $number)-$name
  for ending in log result; do
    for old in "$results/$part"/[0-9][0-9][0-9]-"$name.$ending"; do
      if [ -f "$old" ] && [ "$old" != "$file.$ending" ]; then mv "$old" "$file.$ending"; fi
    done
  done
}

# result_of FILE LABEL STATUS SECONDS COMMAND...
result_of() {
  local file=$1
  { echo "label $2"; echo "status $3"; echo "seconds $4"; shift 4; [ $# -eq 0 ] || echo "command $(printf '%q ' "$@")"; } \
    > "$file.partial"
  mv "$file.partial" "$file.result"
}

# attempt FILE LABEL SECONDS COMMAND...: runs the command, at most that long.
attempt() {
  local file=$1 label=$2 limit=$3 status begin=$SECONDS left=$((deadline - SECONDS)) code
  shift 3
  : > "$file.log"
  if [ "$left" -le 0 ]; then
    status="unfinished: no time was left"
  else
    # (so that a command may be a function of this script)
    timeout -k 10 $((limit < left ? limit : left)) bash -c '"$@"' check "$@" > "$file.log" 2>&1 < /dev/null
    code=$?
    if [ $code -eq 0 ]; then status=passed
    elif [ $((SECONDS - begin)) -lt $((limit < left ? limit : left)) ]; then status="failed: exit code $code"
    elif [ "$limit" -le "$left" ]; then status="failed: not done after $limit s"
    else status="unfinished: stopped after $left s"
    fi
  fi
  result_of "$file" "$label" "$status" $((SECONDS - begin)) "$@"
}

# is_done FILE: has an earlier call finished it?
is_done() { grep -qsE '^status (passed|failed)' "$1.result"; }

# show FILE [WHEN]: prints a result, and counts it.
show() {
  local status
  status=$(sed -n 's/^status //p' "$1.result")
  case $status in
    passed) passed=$((passed + 1)) ;;
    unfinished*) unfinished=$((unfinished + 1)) ;;
    failed*) failed=$((failed + 1)) ;;
  esac
  printf '%-52s %s, %s s%s\n' "$(sed -n 's/^label //p' "$1.result")" "$status" "$(sed -n 's/^seconds //p' "$1.result")" \
    "${2:-}"
}

# check LABEL SECONDS COMMAND...: an attempt, unless it has been done.
check() {
  place "$1"
  if [ "$part" != build ] && is_done "$file"; then show "$file" ', earlier'; return; fi  # (make knows what is built)
  attempt "$file" "$@"
  show "$file"
}

# start LABEL SECONDS COMMAND...: a check that runs at the same time as others; wait_for_started waits for all of them.
started=()
start() {
  place "$1"
  if is_done "$file"; then show "$file" ', earlier'; return; fi
  while [ "$(jobs -rp | wc -l)" -ge 8 ] || [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  attempt "$file" "$@" &
  started+=("$file")
}
wait_for_started() {
  local file
  wait
  for file in "${started[@]}"; do show "$file"; done
  started=()
}

# leave_out WHAT WHY
leave_out() {
  place "$1"
  result_of "$file" "$1" "left out: $2" 0
  printf '%-52s left out: %s\n' "$1" "$2"
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
  echo "commit      $(git describe --always --dirty=', with changes' 2> /dev/null || echo 'not a git checkout'), sources $sources"
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
  echo "PyTorch     ${torch_version:-not installed}"
}

# ---- the parts, in the order in which they are worth their time

part_build() {
  check "program, tests and ladders" 3600 make -j "$(nproc)" "$device-tests"
  check "ceilings" 600 make "DEVICE=$device" "$build/ceilings"
}

kernel_tests() {
  local kernel test
  for kernel in kernels/device/*.cuh kernels/*.cuh; do
    test=test_$(basename "$kernel" .cuh)
    if [ -f "test/$test.cu" ]; then echo "$build/$test"; fi
  done | awk '!seen[$0]++'
}

part_kernels() {
  local test
  for test in $(kernel_tests); do start "$(basename "$test")" 120 "$test"; done
  wait_for_started
}

# The run that dev/results/cpu-training holds, as the CPU device did it. Every dtype must learn the same.
small_training() {  # dtype, out, other options
  "$build/train_gpt" --train LICENSE --layers 2 --heads 2 --channels 128 --seq-len 64 --micro-batch 8 --steps 20 \
    --lr 3e-4 --schedule constant --dtype "$1" --out "$2" "${@:3}"
}
learns_like_the_cpu() {  # dtype, tolerance
  set -ex
  small_training "$1" "$runs/$1"
  "$python" dev/same_losses.py dev/results/cpu-training "$runs/$1" --tolerance "$2"
}
computes_like_the_cpu() {  # dtype, tolerance, other options
  set -ex
  small_training "$1" '' --steps 1 --trace-tensors "$runs/$1.jsonl" "${@:3}"
  "$python" dev/compare.py dev/results/cpu-training/tensors.jsonl "$runs/$1.jsonl" --rtol "$2"
}
resumes_with_the_same_bits() {  # dtype
  set -ex
  small_training "$1" "$runs/whole-$1"
  small_training "$1" "$runs/resumed-$1" --steps 10
  small_training "$1" "$runs/resumed-$1" --resume
  "$python" dev/same_losses.py "$runs/whole-$1" "$runs/resumed-$1" --tolerance 0
}

part_training() {
  local dtype
  check "every tensor of a step in fp32, beside the CPU's" 60 computes_like_the_cpu fp32 1e-3
  check "20 steps in fp32, beside the CPU's" 60 learns_like_the_cpu fp32 2e-5
  check "every tensor of a step in bf16, beside fp32" 60 computes_like_the_cpu bf16 0.05
  check "the same with our own attention" 60 computes_like_the_cpu bf16 0.05 --attention own
  check "20 steps in bf16, beside the CPU's fp32" 60 learns_like_the_cpu bf16 0.002
  check "20 steps in fp16, beside the CPU's fp32" 60 learns_like_the_cpu fp16 2e-4
  for dtype in fp32 bf16 fp16; do check "stopped and resumed: the same bits in $dtype" 90 resumes_with_the_same_bits $dtype; done
}

counts_what_launchers_count() {
  set -ex
  "$build/train_gpt" --train README.md --model gpt2 --vocab 50257 --dtype bf16 --micro-batch 2 --seq-len 32 --steps 2 \
    --attention own --out '' --trace "$runs/trace.json"
  "$python" dev/roofline.py --model gpt2 --batch 2 --seq-len 32 --check "$runs/trace.json"
}
part_ceilings() {
  check "ceilings" 120 "$build/ceilings"
  if grep -q '^status passed' "$file.result"; then
    check "the floor at these rates" 30 "$python" dev/roofline.py --ceilings "$file.log"
  fi
  check "the floor counts what launchers count" 120 counts_what_launchers_count
}

# bench LABEL OPTIONS...: times a model, then compares each kernel's time with what was expected.
bench() {
  local label=$1
  check "$label" 300 "$python" dev/bench.py --build "$build" --steps 10 "${@:2}"
  if grep -q '^status passed' "$file.result"; then
    check "expected and measured: $label" 30 "$python" dev/expected.py "$file.log"
  fi
}
part_bench() {
  bench "gpt2" --model gpt2
  if grep -qx cudnn "$build/attention" 2> /dev/null; then
    bench "gpt2, our own attention" --model gpt2 -- --attention own
    CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0 bench "gpt2, cuDNN's attention without workspace" --model gpt2
  else
    leave_out "gpt2, our own attention" "this build has no other (make build/cudnn fetches cuDNN)"
  fi
  if [ "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -1)" = 9.0 ]; then
    bench "gpt2, Hopper's attention" --model gpt2 -- --attention hopper
  else
    leave_out "gpt2, Hopper's attention" "it needs an H100 or H200"
  fi
  if [ "$device" = cpu ]; then leave_out "gpt2-xl" "it needs a GPU"
  else bench "gpt2-xl" --model gpt2-xl --micro-batch 16
  fi
}

# torch LABEL SECONDS OPTIONS...: times PyTorch and train_gpt by turns.
torch() {
  local options=(--device cuda --dtype bf16 --seq-len 1024)
  if [ "$device" = cpu ]; then options=(--model d2 --vocab 1000 --batch 4 --attention explicit); fi
  if [ -z "$torch_version" ]; then
    leave_out "$1" "$python has no torch"
    return
  fi
  check "$1" "$2" "$python" dev/bench_torch.py --ours "$build/train_gpt" "${@:3}" "${options[@]}"
}
part_torch() {
  torch "PyTorch beside train_gpt, gpt2" 480 --batch 64 --compile default --rounds 1 --warmup 5 --steps 10
  torch "both curves, gpt2" 300 --batch 16 --compile default --curve "$results/curve"
}
part_torch_all() {
  torch "PyTorch in all its ways, gpt2" 7200 --model gpt2 --batch 64
  torch "PyTorch in all its ways, gpt2-xl" 10800 --model gpt2-xl --batch 16
}

# sanitize TOOLS PROGRAMS...: each tool over each program, and over a small training run.
sanitize() {
  local tools=$1 tool program sanitizer options
  shift
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
  if [ "$device" = cpu ] || [ -z "$sanitizer" ]; then
    leave_out "compute-sanitizer" "$([ "$device" = cpu ] && echo 'it needs a GPU' || echo 'it is not installed')"
    return
  fi
  for tool in $tools; do
    options=(--tool "$tool" --error-exitcode 3)
    # Each array is an allocation of its own, so that a kernel that runs past its end is found.
    start "$tool of training" 300 env GPT_SEPARATE_ARRAYS=1 "$sanitizer" "${options[@]}" "$build/train_gpt" --train LICENSE \
      --layers 1 --heads 1 --channels 64 --seq-len 64 --micro-batch 2 --steps 2 --dtype bf16 --out ''
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
ladders() { for ladder in "$build"/ladder_*; do case $ladder in *.* | *_all_reduce) ;; *) echo "$ladder" ;; esac; done; }
part_sanitizers_all() {
  # shellcheck disable=SC2046
  sanitize "memcheck racecheck initcheck" $(kernel_tests) $(ladders)
}

part_ladders() {
  local ladder launcher=dev/cluster/torchrun.sh profiler metrics='' kind plot=() can_plot=''
  if "$python" -c 'import matplotlib' 2> /dev/null; then can_plot=yes; fi
  for ladder in $(ladders); do
    if [ -n "$can_plot" ]; then plot=(--plot "$results/$(basename "$ladder").png"); fi
    check "$(basename "$ladder")" 120 env "PYTHON=$python" "$ladder" "${plot[@]}"
  done
  if [ "$device" = cpu ]; then launcher=dev/cluster/mpirun.sh; fi
  check "ladder_all_reduce, two ranks" 120 env "GPT_PROGRAM=$build/ladder_all_reduce" "$launcher" 2 --share-gpu
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

# Two ranks on one GPU: --share-gpu gives each an NCCL_HOSTID of its own, so that NCCL allows it.
ranks_like_one() {  # options
  local job=(--train LICENSE --layers 4 --heads 2 --channels 128 --seq-len 64 --micro-batch 2 --global-batch 8)
  job+=(--steps 10 --overwrite)
  local launcher=dev/cluster/torchrun.sh
  case $build in *cpu) launcher=dev/cluster/mpirun.sh ;; esac
  set -ex
  [ -f "$runs/one/metrics.jsonl" ] || "$build/train_gpt" "${job[@]}" --out "$runs/one"
  GPT_PROGRAM=$build/train_gpt NCCL_DEBUG=VERSION "$launcher" 2 "${job[@]}" --share-gpu "$@" --out "$runs/two"
  "$python" dev/same_losses.py "$runs/one" "$runs/two"
}
part_ranks() {
  local mode
  for mode in '--zero 0' '--zero 1' '--zero 2' '--zero 3' '--tp 2' '--cp 2' '--cp 2 --cp-method ulysses' '--pp 2' \
    '--pp 2 --pp-schedule gpipe' '--pp 2 --pp-schedule interleaved' '--pp 2 --pp-schedule zb'; do
    # shellcheck disable=SC2086  # several options
    check "two ranks, $mode: the curve of one" 120 ranks_like_one $mode
  done
}

part_tests() { check "all tests" 3600 test/run.sh "$build"; }

export -f small_training learns_like_the_cpu computes_like_the_cpu resumes_with_the_same_bits counts_what_launchers_count \
  ranks_like_one
describe_machine > "$results/machine.txt"
for part in "${parts[@]}"; do
  number=0
  if [ -n "$again" ]; then rm -rf "${results:?}/$part"; fi
  mkdir -p "$results/$part"
  echo "---- $part"
  "part_$part"
done
echo "$passed passed, $failed failed, $unfinished unfinished"
if [ "$unfinished" -gt 0 ]; then exit 3; fi
[ "$failed" -eq 0 ]
