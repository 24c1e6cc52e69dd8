# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: the part `scale`: checks that need a machine with several GPUs. They look for hangs, too,
# so each check has a short time. The CPU device tries the part itself, with eight ranks and a tiny model.

# The largest power of two that is not above the number of GPUs, so that layers and heads can be divided.
count_ranks() {
  local gpus=8 count=1
  if [ "$device" = gpu ]; then  # (MIG instances have lines of their own below their GPU's)
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c .)
    else gpus=$(nvidia-smi --list-gpus | grep -c '^GPU '); fi
  fi
  while [ $((2 * count)) -le "$gpus" ]; do count=$((2 * count)); done
  echo "$count"
}

on_all() {  # options of train_gpt
  set -ex
  GPT_PROGRAM=$build/train_gpt "$launcher" "$ranks" "$@"
}

# NCCL's messages go to a file; printed once are its findings and choices: version, networks, rings and trees, how a
# channel reaches the next GPU. --check-ranks times the link from each rank to the next.
what_nccl_says() {
  set -ex
  NCCL_DEBUG=INFO GPT_PROGRAM=$build/train_gpt "$launcher" "$ranks" "$@" --check-ranks > "$results/nccl.log" 2>&1 || {
    cat "$results/nccl.log"; return 1; }
  sed -nE 's/.*NCCL INFO //; /NCCL version|NET\/|Using network|NVLS|Channel [0-9]+[\/: ].*(via|\[)|Connected all|GB\/s/p' \
    "$results/nccl.log" | sort | uniq -c | sort -rn | head -100
  sed -n '/TFLOP/,/^[^0-9r]/p' "$results/nccl.log"
}

# Without overlap a step takes as long as the kernels and the collectives of a GPU together; --profile has both.
time_step() {  # label, options
  local label=$1 nsys
  check "$label" 240 on_all "${@:2}" --steps 8
  check "$label: its kernels" 240 on_all "${@:2}" --steps 4 --profile
  if nsys=$(find_tool nsys); then check "$label: by nsys" 300 under_nsys "$nsys" "$file" "${@:2}" --steps 3; fi
}
under_nsys() {  # the program, where its report goes, options of train_gpt
  set -ex
  GPT_PROGRAM=$build/train_gpt "$1" profile --trace cuda,nvtx --force-overwrite true --output "$2" "$launcher" "$ranks" "${@:3}"
  "$1" stats --report cuda_gpu_kern_sum "$2.nsys-rep"
}

# Text from a pipeline of two stages with two chunks each. (A kernel that is loaded late stops such a pipeline for good.)
generates_from_interleaved() {  # options
  set -ex
  GPT_PROGRAM=$build/train_gpt "$launcher" "$ranks" "$@" --pp 2 --pp-schedule interleaved --steps 2 --overwrite \
    --out "$runs/text"
  GPT_PROGRAM=$build/train_gpt "$launcher" "$ranks" --generate --resume "$runs/text" --pp 2 --pp-schedule interleaved \
    --sample-len 32
}

# Which processes use which GPU while it runs: each must have one of its own, and none may be on the first GPU as well.
chooses_a_mesh() {  # options
  set -ex
  GPT_PROGRAM=$build/train_gpt "$launcher" "$ranks" --mesh auto "$@" &
  local job=$! bus_ids
  if [[ $build != *cpu ]]; then
    for _ in $(seq 60); do
      sleep 2
      if ! kill -0 $job 2> /dev/null; then break; fi
      bus_ids=$(nvidia-smi --query-compute-apps=gpu_bus_id,pid,used_memory --format=csv,noheader)
      if [ "$(wc -l <<< "$bus_ids")" -gt "$ranks" ]; then
        printf 'more contexts than ranks:\n%s\n' "$bus_ids"
        kill $job
        return 1
      fi
    done
  fi
  wait $job
}

# One of the data-parallel ranks reads a token that is not in the vocabulary after a few steps: the job must end at once and
# say so, not after --collective-timeout.
reports_a_bad_token() {  # options
  set -ex
  local text="$runs/bad_token"
  { head -c 3000 README.md | tr -d '\200-\377'; printf '\200'; head -c 3000 README.md | tr -d '\200-\377'; } > "$text"
  if GPT_PROGRAM=$build/train_gpt "$launcher" "$ranks" "$@" --train "$text" --vocab 128 --micro-batch 2 --steps 999 \
    > "$text.log" 2>&1; then return 1; fi
  tail -5 "$text.log"
  grep 'has id 128' "$text.log"
}

part_scale() {
  local ctas schedule pieces shape job data model
  local -x ranks
  ranks=$(count_ranks)
  if [ "$ranks" -lt 2 ]; then leave_out "several ranks" "this machine has one GPU"; return; fi
  shape=(--layers 8 --heads 8 --channels 128 --seq-len 64 --steps 3 --out '')
  job=(--train 'kernels/*.cuh' 'kernels/*/*.cuh' "${shape[@]}")
  if [ "$device" = cpu ]; then
    local -x GPT_CPU_DEVICES=$ranks
    data=("${job[@]}") model=("${job[@]}")
  else  # gpt2-xl has 25 heads, which cannot be divided
    data=(--train 'kernels/*.cuh' 'kernels/*/*.cuh' --vocab 50257 --dtype bf16 --out '' --model gpt2-xl)
    model=(--train 'kernels/*.cuh' 'kernels/*/*.cuh' --vocab 50257 --dtype bf16 --out '' --model gpt3-1.3b)
    if [ "$ranks" -ge 8 ]; then model+=(--model gpt3-6.7b); fi
  fi

  check "what NCCL says" 180 what_nccl_says "${job[@]}"
  for ctas in 8 16 24 32; do
    check "collectives with $ctas CTAs" 120 env "NCCL_MIN_CTAS=$ctas" "NCCL_MAX_CTAS=$ctas" "GPT_PROGRAM=$build/collectives" \
      "$launcher" "$ranks"
  done
  time_step "dp $ranks, ZeRO 1" "${data[@]}" --micro-batch 16 --zero 1
  time_step "dp $ranks, ZeRO 3" "${data[@]}" --micro-batch 16 --zero 3
  for pieces in 1 2; do
    time_step "tp $ranks in $pieces pieces" "${model[@]}" --micro-batch 4 --tp "$ranks" --tp-pieces $pieces
  done
  for margin in 0 8 16 24; do
    check "dp $ranks, ZeRO 1, margin of $margin SMs" 240 on_all "${data[@]}" --micro-batch 16 --zero 1 --sm-margin $margin --steps 8
    check "tp $ranks, margin of $margin SMs" 240 on_all "${model[@]}" --micro-batch 4 --tp "$ranks" --sm-margin $margin --steps 8
  done
  if [ "$ranks" -ge 4 ]; then
    time_step "pp $((ranks / 2)), tp 2" "${model[@]}" --micro-batch 2 --global-batch 16 --pp $((ranks / 2)) --tp 2
  fi

  # Up to four stages; the global batch is one micro-batch for each pipeline.
  for schedule in gpipe 1f1b zb; do
    check "a pipeline with one micro-batch, $schedule" 120 on_all "${job[@]}" --pp $((ranks < 4 ? ranks : 4)) \
      --pp-schedule $schedule
  done
  check "text from an interleaved pipeline" 180 generates_from_interleaved "${job[@]}"
  check "the rates of a device, for --mesh auto" 120 "$build/ceilings"
  check "--mesh auto" 180 chooses_a_mesh "${data[@]}" --steps 3 --global-batch 16 --ceilings "$file.log"
  check "a bad token, and two ranks for each layer" 120 reports_a_bad_token "${shape[@]}" --tp 2
}

export -f on_all what_nccl_says under_nsys generates_from_interleaved chooses_a_mesh reports_a_bad_token
