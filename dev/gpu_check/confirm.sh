# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: the part `confirm`: checks that failed in the first run on a card (dev/results/2026-11-26-h200.md);
# they were repaired without one, and only a card can confirm that. First results, several programs at once; then times, alone.

# Random tokens, as dev/bench.py draws them.
random_tokens() {
  [ -f "$runs/tokens.bin" ] || "$python" -c "
import sys; sys.path.insert(0, 'dev')
from bench import draw_tokens, write_shard
write_shard('$runs/tokens.bin', draw_tokens($1, 50257))"
}
times_a_step() {  # options
  set -ex
  random_tokens 2000000
  "$build/train_gpt" --train "$runs/tokens.bin" --schedule constant --steps 20 --log-every 5 --out '' "$@"
}

# Two starts of the same job. The first one times products and keeps its choices; the second one finds them, or, with
# --products none, neither of them times anything.
two_starts_have_the_same_bits() {  # options
  set -ex
  local start
  random_tokens 200000
  rm -rf "$runs/cache"
  for start in one other; do
    XDG_CACHE_HOME=$runs/cache "$build/train_gpt" --train "$runs/tokens.bin" --schedule constant --steps 10 --overwrite \
      --out "$runs/start-$start" "$@"
  done
  "$python" dev/same_losses.py "$runs/start-one" "$runs/start-other" --tolerance 0
  rm -rf "$runs"/start-*
}

# A program in which each lane arrives at barriers is built from a copy of the sources: each_lane_arrives.patch says why.
racecheck() {  # compute-sanitizer, program, attention
  set -ex
  if [ "$3" = hopper ] && [ ! -x "$2" ]; then
    test/copy_sources.sh build/each_lane
    mkdir -p build/each_lane/build
    for library in cuda nccl cudnn; do if [ -d build/$library ]; then ln -sfn "../../$library" "build/each_lane/build/$library"; fi; done
    patch -d build/each_lane -p1 < dev/gpu_check/each_lane_arrives.patch
    make -C build/each_lane DEVICE=gpu DTYPES=bf16 build/gpu/train_gpt
    cp build/each_lane/build/gpu/train_gpt "$2"
  fi
  trains_under "$1" racecheck "$2" --attention "$3"
}

part_confirm() {
  local test attention dtype model sanitizer bodies=(own hopper cudnn auto) gpt2 gpt2_xl small
  gpt2=(--model gpt2 --dtype bf16 --micro-batch 64 --seq-len 1024)
  gpt2_xl=(--model gpt2-xl --dtype bf16 --micro-batch 16 --seq-len 1024)
  small=(--layers 4 --heads 12 --channels 768 --vocab 50257 --seq-len 1024 --micro-batch 8)
  if [ "$device" = cpu ]; then
    small=(--layers 3 --heads 2 --channels 128 --vocab 50257 --seq-len 32 --micro-batch 2)
    # shellcheck disable=SC2034  # named below
    gpt2=("${small[@]}" --dtype bf16) gpt2_xl=("${small[@]}" --dtype bf16)
  fi

  # Eight bits: scales' addresses, tiles, the step compared with PyTorch's. (Cards without them skip these.)
  start "products and casts in eight bits" 120 run_cases "$build/test_fp8"
  start "a step in eight bits beside PyTorch's" 120 run_cases "$build/test_model" '-tc=a step in eight bits*'
  # Attention
  start "attention by a library" 120 run_cases "$build/test_attention" '-tc=attention*by a library*'
  start "attention on Hopper" 200 run_cases "$build/test_attention" '-tc=attention on Hopper*'
  # Tests that asked more than the card does, or less than they should
  for test in hopper ring matmul trace; do start "test_$test" 120 run_cases "$build/test_$test"; done
  start "test_model, all other" 120 run_cases "$build/test_model" '-tce=a step in eight bits*'
  wait_for_started
  check "eight bits on meshes of 4 ranks" 1200 env "GPT_PROGRAM=$build/test_fp8_meshes" "$launcher" 4

  # Is each start bit-identical?
  for dtype in fp32 bf16; do
    check "two starts have the same bits in $dtype" 120 two_starts_have_the_same_bits "${small[@]}" --dtype $dtype
    check "two starts with --products none, in $dtype" 120 two_starts_have_the_same_bits "${small[@]}" --dtype $dtype --products none
  done

  # Times of a step. auto should be as fast as the fastest
  is_hopper || bodies=(own cudnn auto)
  for model in gpt2 gpt2_xl; do
    local -n options=$model
    for attention in "${bodies[@]}"; do
      if [ "$attention" = cudnn ] && ! grep -qsx cudnn "$build/attention"; then
        leave_out "a step of ${model/_/-}, --attention cudnn" "this build has no cuDNN (make build/cudnn fetches it)"
      else check "a step of ${model/_/-}, --attention $attention" 120 times_a_step "${options[@]}" --attention "$attention"
      fi
    done
  done
  if has_fp8; then check "a step of gpt2-xl, --fp8" 120 times_a_step "${gpt2_xl[@]}" --fp8
  else leave_out "a step of gpt2-xl, --fp8" "this GPU has no tensor cores for eight bits"
  fi

  for attention in own hopper; do
    if ! sanitizer=$(find_tool compute-sanitizer); then leave_out "racecheck of --attention $attention" "$(no_tool compute-sanitizer)"
    elif [ $attention = own ]; then check "racecheck of --attention own" 300 racecheck "$sanitizer" "$build/train_gpt" own
    else check "racecheck of --attention hopper, where each lane arrives" 1800 racecheck "$sanitizer" "$build/train_gpt_each_lane" hopper
    fi
  done
}

export -f random_tokens times_a_step two_starts_have_the_same_bits racecheck
