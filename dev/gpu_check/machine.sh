# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: which hardware, libraries and tools this machine has.

# Starts ranks: LAUNCHER NUMBER OPTIONS...
export launcher=dev/cluster/torchrun.sh
if [ "$device" = cpu ]; then launcher=dev/cluster/mpirun.sh; fi

# Of the first GPU that programs will see
compute_capability() {
  nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "${CUDA_VISIBLE_DEVICES%%,*}"} --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -1
}
# An H100 or H200. The CPU device has their instructions, too.
is_hopper() { [ "$device" = cpu ] || [ "$(compute_capability)" = 9.0 ]; }

# Tensor cores for eight bits: from compute capability 8.9 on.
has_fp8() { [ "$device" = cpu ] || compute_capability | awk '$1 >= 8.9 { yes = 1 } END { exit !yes }'; }

# The path of one of NVIDIA's tools, which need a GPU. Fails where there is none.
find_tool() { [ "$device" = gpu ] && PATH=$PATH:/usr/local/cuda/bin command -v "$1"; }
no_tool() { if [ "$device" = cpu ]; then echo "it needs a GPU"; else echo "$1 is not installed"; fi; }

# Prints why Nsight Compute cannot count here; nothing, if it can. The card's clocks stay as they are.
why_no_counters() {
  local ncu
  if ! ncu=$(find_tool ncu); then no_tool ncu
  elif "$ncu" --clock-control none "$build/ladder_gelu" --once 2>&1 | grep -q ERR_NVGPUCTRPERM; then
    echo "this user may not read the GPU's counters (ERR_NVGPUCTRPERM)"
  fi
}

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
