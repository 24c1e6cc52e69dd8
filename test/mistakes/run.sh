#!/usr/bin/env bash
# Does --check-mesh find mistakes that programs of many ranks are known for? And do tests find those of what it leaves out?
#
# Each patch here plants one. Its first line is the number of ranks, and the mesh, or a test and the cases of it that have to
# find the mistake; its second line says what is wrong. In a copy of the sources under build/mistakes this script applies one
# patch after another, builds the program or the test, and demands that --check-mesh lets the mesh train, or that the cases
# pass, without the patch and not with it.
#
#   test/mistakes/run.sh [NAME.patch ...]      default: all, a minute or two each, on the CPU device
#   test/mistakes/run.sh --slice               one of them, the next one after each commit
#   DTYPE=bf16 test/mistakes/run.sh ...        default: fp32, which hides least
set -euo pipefail
cd "$(dirname "$0")/../.."
patches=("$@")
if [ "${patches[*]}" = --slice ]; then
  patches=(test/mistakes/*.patch)
  patches=("${patches[$(test/turn.sh) % ${#patches[@]}]}")
fi
if [ $# -eq 0 ]; then patches=(test/mistakes/*.patch); fi
copy=build/mistakes
mpirun=(mpirun --oversubscribe --bind-to none)
if [ "$(id -u)" = 0 ]; then mpirun+=(--allow-run-as-root); fi
dtype=${DTYPE:-fp32} dtypes=fp32
if [ "$dtype" != fp32 ]; then dtypes+=" $dtype"; fi
export OMP_NUM_THREADS=1
test/copy_built.sh $copy
for i in {1..5000}; do echo "line $((i * i))."; done > $copy/text

build() {  # the words of a first line
  local target=program
  case $2 in test_*) target=build/cpu/$2 ;; esac
  make -s -C $copy DEVICE=cpu DTYPES="$dtypes" FLAGS_fast=-O1 WARNINGS=-w "$target" > $copy/log 2>&1 || { cat $copy/log; exit 1; }
}
passes() {  # the words of a first line
  local command=(./train_gpt --train text --share-gpu --layers 2 --heads 4 --channels 64 --seq-len 32 --micro-batch 2
    --steps 1 --out '' --dtype "$dtype" --check-mesh "${@:2}")
  case $2 in test_*) command=("build/cpu/$2" -nc -tc="${*:3}") ;; esac
  (cd $copy && timeout 3600 "${mpirun[@]}" -np "$1" "${command[@]}") > $copy/log 2>&1
}

for patch in "${patches[@]}"; do
  read -ra mesh < "$patch"
  build "${mesh[@]}"
  passes "${mesh[@]}" || { echo "$patch: ${mesh[*]} fails without the mistake"; cat $copy/log; exit 1; }
done
found=0
for patch in "${patches[@]}"; do
  read -ra mesh < "$patch"
  (cd $copy && patch -s -p1) < "$patch"
  build "${mesh[@]}"
  if ! passes "${mesh[@]}" && difference=$(grep -om1 -e 'check-mesh: .* explains [^:]*' -e ' ERROR: .*' $copy/log); then
    found=$((found + 1))
    echo "$(basename "$patch"), ${mesh[*]}: ${difference#check-mesh: }"
  else
    echo "$(basename "$patch"), ${mesh[*]}: not found: $(tail -1 $copy/log)"
  fi
  (cd $copy && patch -s -p1 -R) < "$patch"
done
echo "mistakes planted: ${#patches[@]}, found: $found"
[ ${#patches[@]} -eq $found ]
