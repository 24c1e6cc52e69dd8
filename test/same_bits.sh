#!/usr/bin/env bash
# Does a change leave every bit as it was? For a change that only moves or renames code, as a redesign's steps do.
#
# Builds the program of another commit and that of this folder under build/same_bits, runs both in each of the ways below, and
# compares losses, norms and rates as metrics.jsonl has them, the tensors of checkpoints byte by byte, and texts. On the CPU
# device, whose sums have one order.
#
#   test/same_bits.sh COMMIT [PATTERN]       PATTERN: the ways whose names match it (grep -E); default: all
set -euo pipefail
cd "$(dirname "$0")/.."
commit=${1:?COMMIT, with which this folder is compared} pattern=${2:-.}
here=$PWD
export OMP_NUM_THREADS=1

# A name, and after | the number of ranks and what the run differs in. A name that ends with + goes on from the run of the name before.
ways='
fp32              | 1
bf16              | 1 --dtype bf16
fp16              | 1 --dtype fp16
fp32, accumulated | 1 --micro-batch 4 --cooldown 2 --schedule wsd --weight-decay 0.2 --grad-clip 0.5
rounding          | 1 --dtype bf16 --stochastic-rounding --moments bf16
recompute gelu    | 1 --recompute gelu --dtype bf16
recompute block   | 2 --recompute block --zero 1
resumed+          | 3 --steps 6 --zero 3
zero 0            | 2 --dtype bf16
zero 1            | 3 --zero 1 --dtype fp16
zero 2            | 3 --zero 2 --dtype bf16 --reduce-dtype bf16
zero 3            | 2 --zero 3 --recompute block
tp                | 2 --tp 2 --tp-pieces 2 --dtype bf16
tp, zero 3        | 4 --tp 2 --zero 3
ring              | 2 --cp 2 --dtype bf16
ulysses           | 4 --cp 2 --cp-method ulysses --zero 1
gpipe             | 2 --pp 2 --pp-schedule gpipe
1f1b              | 4 --pp 2 --zero 2 --dtype bf16
interleaved       | 2 --pp 2 --pp-schedule interleaved
zero bubble       | 4 --pp 4 --pp-schedule zb
all               | 8 --tp 2 --cp 2 --pp 2 --dtype bf16 --recompute gelu
fp8               | 2 --dtype bf16 --fp8
fp8, tiles        | 2 --dtype bf16 --fp8 --fp8-scale tiles
fp8, zero 3       | 2 --dtype bf16 --fp8 --zero 3
offload           | 2 --offload optimizer,activations --zero 1 --recompute block
offload gradients | 2 --offload optimizer,gradients --zero 3 --recompute block --dtype bf16
int8              | 2 --compress int8
int4              | 3 --compress int4 --compress-weights int8 --zero 1
powersgd          | 2 --compress powersgd:2 --zero 1
delay             | 2 --delay 1 --zero 1
islands           | 4 --islands 2 --local-steps 2 --outer-dtype int8 --zero 1
outer delay       | 2 --islands 2 --local-steps 2 --outer-delay 1
shares            | 2 --shares 3,1
spike             | 1 --on-spike skip --spike-window 2 --spike-z 0.5
lora              | 2 --init %base --lora-rank 4 --lr 1e-2
lora, tp          | 2 --init %base --lora-rank 4 --tp 2
'
# What is compared of a run in a folder: numbers of metrics.jsonl, and checksums.
summary() {
  python3 - "$1/metrics.jsonl" << 'P'
import json, sys
for line in open(sys.argv[1]):
  values = json.loads(line)
  print({key: values[key] for key in ("step", "loss", "val_loss", "grad_norm", "learning_rate", "lr", "loss_scale", "island") if key in values})
P
  (cd "$1" && find . -name '*.safetensors' | LC_ALL=C sort | xargs sha1sum)
}
run_all() {  # the program; a folder
  local program=$1 folder=$2 number=0 last= name way ranks options
  local tiny="--share-gpu --train text --layers 4 --heads 4 --channels 64 --seq-len 32 --micro-batch 1 --global-batch 12"
  tiny+=" --lr 1e-3 --steps 4 --val text --val-every 2 --val-batches 1 --seed 3 --shuffle"
  run() { GPT_PROGRAM=$program "$here/dev/cluster/mpirun.sh" "$@" < /dev/null 2> log || { echo "$program $*: fails"; cat log; exit 1; }; }
  rm -rf "$folder"; mkdir -p "$folder"
  cd "$folder"
  for i in {1..2000}; do echo "line $((i * i))."; done > text
  run 1 $tiny --out base > said
  while IFS='|' read -r name way; do
    name=${name%"${name##*[! ]}"} number=$((number + 1))  # without spaces at its end
    if [ "${name%+}" = "$name" ]; then last=$number; else way+=" --resume"; fi
    read -r ranks options <<< "${way//%base/base/step_00000004}"
    run "$ranks" $tiny $options --out "$last" > said
    summary "$last" > "$name.summary"
  done < <(grep -E "$pattern" <<< "$ways" | grep .)
  for way in "1" "2 --tp 2" "2 --pp 2" "2 --cp 2" "1 --no-cache"; do
    run ${way%% *} --share-gpu --generate --out base --prompt line --sample-len 20 --seed 5 ${way#${way%% *}} > "text $way.summary"
  done
}

# g++ may order sums as it likes otherwise, and add to a product without rounding it: it decides by the source around them.
exact="-O1 -march=native -ffp-contract=off"
other=build/same_bits/$(git rev-parse --short "$commit") this=build/same_bits/this
if [ ! -d "$other" ]; then git worktree prune; git worktree add -q --detach "$other" "$commit"; fi
if [ -d $this ]; then find $this -mindepth 1 -maxdepth 1 ! -name build -exec rm -r {} +; fi  # also files that are gone
test/copy_sources.sh $this
for folder in "$other" $this; do make -s -C "$folder" DEVICE=cpu FLAGS_fast="$exact"; done
(run_all "$here/$other/build/cpu/train_gpt" "$here/build/same_bits/then")
(run_all "$here/$this/build/cpu/train_gpt" "$here/build/same_bits/now")
differ=0
for then in build/same_bits/then/*.summary; do
  name=$(basename "$then" .summary)
  if ! cmp -s "$then" "build/same_bits/now/$name.summary"; then
    differ=$((differ + 1))
    echo "$name differs:"; diff "$then" "build/same_bits/now/$name.summary" | head -4 || true
  fi
done
echo "same bits: $(ls build/same_bits/then/*.summary | wc -l) ways, $differ differ"
[ $differ -eq 0 ]
