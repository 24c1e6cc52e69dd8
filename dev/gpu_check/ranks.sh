# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: the part `ranks`.

# Two ranks on one GPU: --share-gpu gives each an NCCL_HOSTID of its own, so that NCCL allows it.
ranks_like_one() {  # options
  local job=(--train LICENSE --layers 4 --heads 2 --channels 128 --seq-len 64 --micro-batch 2 --global-batch 8)
  job+=(--steps 10 --overwrite)
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

export -f ranks_like_one
