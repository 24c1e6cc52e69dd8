# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: the part `training`.

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
# A run that stopped after step 10 is the folder of the whole run without its last checkpoint: the choices of products are the same.
resumes_with_the_same_bits() {  # dtype
  set -ex
  small_training "$1" "$runs/whole-$1" --checkpoint-every 10
  cp -r "$runs/whole-$1" "$runs/resumed-$1"
  rm -r "$runs/resumed-$1/step_00000020"
  small_training "$1" "$runs/resumed-$1" --checkpoint-every 10 --resume
  "$python" dev/same_losses.py "$runs/whole-$1" "$runs/resumed-$1" --tolerance 0
}
# With 512 tokens Hopper's rings of tiles go round, and both of its consumers take turns; with 64 there is one tile. The
# weights have been trained: with fresh ones a query sees all keys alike, and it would not show if tiles were mixed up. Single
# numbers are test_attention's affair, which compares with float64: two bf16 gradients may differ by more than any fixed share.
hopper_learns_like_fp32() {  # tolerance
  set -ex
  local long=(--train README.md --seq-len 512 --micro-batch 2)
  small_training fp32 "$runs/trained" "${long[@]}" --lr 1e-2 --steps 40 --overwrite
  small_training fp32 "$runs/long-own" "${long[@]}" --init "$runs/trained/step_00000040" --attention own --overwrite
  small_training bf16 "$runs/long-hopper" "${long[@]}" --init "$runs/trained/step_00000040" --attention hopper --overwrite
  "$python" dev/same_losses.py "$runs/long-own" "$runs/long-hopper" --tolerance "$1"
}

part_training() {
  local dtype
  check "every tensor of a step in fp32, beside the CPU's" 60 computes_like_the_cpu fp32 1e-3
  check "20 steps in fp32, beside the CPU's" 60 learns_like_the_cpu fp32 2e-5
  check "every tensor of a step in bf16, beside fp32" 60 computes_like_the_cpu bf16 0.05
  check "the same with our own attention" 60 computes_like_the_cpu bf16 0.05 --attention own
  if is_hopper; then
    check "the same with Hopper's attention" 60 computes_like_the_cpu bf16 0.05 --attention hopper
    check "20 steps of 512 tokens, Hopper's attention in bf16 beside fp32" 120 hopper_learns_like_fp32 0.002
  else
    leave_out "the same with Hopper's attention" "it needs an H100 or H200"
  fi
  check "20 steps in bf16, beside the CPU's fp32" 60 learns_like_the_cpu bf16 0.002
  check "20 steps in fp16, beside the CPU's fp32" 60 learns_like_the_cpu fp16 2e-4
  for dtype in fp32 bf16 fp16; do check "stopped and resumed: the same bits in $dtype" 90 resumes_with_the_same_bits $dtype; done
  # Is it fast, too? Attention in a step of gpt2, and its products alone, compared with the library's.
  if [ "$device" = cpu ] || ! is_hopper; then leave_out "gpt2, Hopper's attention" "it needs an H100 or H200"
  else bench "gpt2, Hopper's attention" --model gpt2 -- --attention hopper
  fi
  if [ -n "$built" ] || [ -x "$build/ladder_matmul" ]; then
    check "products: how fast" 180 "$build/ladder_matmul" --csv "$results/matmul.csv"
  fi
}

export -f small_training learns_like_the_cpu computes_like_the_cpu resumes_with_the_same_bits hopper_learns_like_fp32
