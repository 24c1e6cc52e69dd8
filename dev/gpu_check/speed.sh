# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: the parts `ceilings`, `bench`, `torch`, `torch_all` and `ladders`: how fast.

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

under_bench() {  # it runs $build/train_gpt and $build/ceilings
  : "$build/train_gpt" "$build/ceilings"
  "$python" dev/bench.py --build "$build" --steps 10 "$@"
}
# bench LABEL OPTIONS...: times a model, then compares each kernel's time with the expected one.
bench() {
  local label=$1
  check "$label" 300 under_bench --picture "$results/$part/${label//[^A-Za-z0-9]/_}.svg" "${@:2}"
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

# The ladders that run on one rank.
ladders() { for ladder in dev/ladders/*.cu; do echo "$build/ladder_$(basename "$ladder" .cu)"; done; }

part_ladders() {
  local ladder profiler why metrics='' kind
  for ladder in $(ladders); do
    check "$(basename "$ladder")" 120 "$ladder" --plot "$results/ladders/$(basename "$ladder").svg"
  done
  check "ladder_all_reduce, two ranks" 120 env "GPT_PROGRAM=$build/ladder_all_reduce" "$launcher" 2 --share-gpu \
    --plot "$results/ladders/ladder_all_reduce.svg"
  if [ "$device" = cpu ]; then check "tables of the ladders" 120 "$python" dev/ladders/tables.py --check; fi
  # The counts of the CPU device, measured by the hardware: to be compared with dev/ladders/tables.txt.
  why=$(why_no_counters)
  if [ -n "$why" ]; then leave_out "counts by Nsight Compute" "$why"; return; fi
  profiler=$(find_tool ncu)
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

export -f counts_what_launchers_count under_bench
