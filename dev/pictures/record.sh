#!/usr/bin/env bash
# Records anew what the pictures of runs are drawn from, by ./train_gpt on two CPU cores that do nothing else: some twelve
# minutes, and `make shakespeare` before. Then `make pictures` draws them.
#
#   dev/pictures/record.sh               all of it; or some: runs zero tensor_parallel context_parallel pipeline
#
# runs: two runs of make train's recipe, four minutes each, for the screenshots of the dashboard; what thin_run.py keeps of
# them. The others: traces of the commands of dev/results/2026-11-22-meshes.md, of which the boxes of the fastest step stay.
# (dev/pictures/terminal.py says how README's terminal is recorded.)
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

recipe() {  # NAME, then what differs
  local name=$1 headers
  headers=$(dirname "$(printf '#include <vector>\n' | g++ -x c++ -M - | tr ' ' '\n' | grep '/vector$' | head -1)")
  shift
  "$@" --train "$headers/[!st]*" "$headers/bits/[!st]*" "$headers/ext/*" --val "$headers/[st]*" "$headers/bits/[st]*" \
    --layers 6 --heads 2 --channels 128 --seq-len 128 --global-batch 8 --steps 400 --warmup 50 --min-lr 1e-4 --beta2 0.99 --shuffle \
    --val-batches 40 --val-every 50 --sample-seconds 20 --sample-len 200 --prompt 'template<typename' --checkpoint-every 200 \
    --monitor-every 5 --log-every 50 --out "$folder/$name"
  python3 dev/pictures/thin_run.py "$folder/$name" "dev/pictures/runs/$name"
}
runs() {
  OMP_NUM_THREADS=2 recipe one-rank ./train_gpt --micro-batch 8 --lr 3e-3
  recipe two-ranks dev/cluster/mpirun.sh 2 --micro-batch 4 --zero 2 --lr 1e-3
}

trace() {  # RANKS NAME OPTIONS
  dev/cluster/mpirun.sh "$1" "${@:3}" --train data/tinyshakespeare.txt --trace "$folder/$2" --out '' >/dev/null
}
draw() {  # RECORD TRACE=TITLE... OPTIONS
  local record=dev/pictures/traces/$1.json
  shift
  (cd "$folder" && python3 "$OLDPWD/dev/timeline.py" "$@" --record "$OLDPWD/$record" -o picture.svg)
}
small="--layers 4 --heads 4 --channels 256 --vocab 1024 --seq-len 128 --micro-batch 4 --steps 40"
zero() {
  for level in 0 1 2 3; do trace 2 "zero$level" $small --global-batch 16 --zero "$level"; done
  draw zero zero{0='ZeRO 0',1='ZeRO 1',2='ZeRO 2',3='ZeRO 3'}
}
tensor_parallel() {
  trace 1 one $small --global-batch 8
  trace 2 pieces1 $small --global-batch 8 --tp 2
  trace 2 pieces4 $small --global-batch 8 --tp 2 --tp-pieces 4
  trace 4 four $small --global-batch 8 --tp 4
  draw tensor_parallel one='one rank' pieces1='tp 2, 1 piece' pieces4='tp 2, 4 pieces' four='tp 4, 1 piece (four ranks on two cores)' --ranks 0
}
context_parallel() {
  for method in ring ulysses; do
    trace 4 $method --layers 2 --heads 4 --channels 256 --vocab 256 --seq-len 4096 --micro-batch 1 --global-batch 1 --steps 8 --cp 4 --cp-method $method
  done
  draw context_parallel ring='ring, cp 4' ulysses='Ulysses, cp 4' --ranks 0,3
}
pipeline() {
  for schedule in gpipe 1f1b interleaved zb; do
    trace 4 $schedule --layers 16 --heads 4 --channels 256 --vocab 256 --seq-len 128 --micro-batch 4 --global-batch 32 --steps 10 --pp 4 --pp-schedule $schedule
  done
  draw pipeline --stages gpipe 1f1b interleaved zb
}

mkdir -p dev/pictures/traces
for part in ${*:-runs zero tensor_parallel context_parallel pipeline}; do "$part"; done
