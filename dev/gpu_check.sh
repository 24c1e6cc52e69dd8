#!/usr/bin/env bash
# Runs on a machine with a GPU, and checks there the code that was written without one: builds, tests, sanitizers, times.
# The most telling checks come first; no failure stops it. The parts are in dev/gpu_check/.
#
#   dev/gpu_check.sh                            everything: some hours on one GPU
#   dev/gpu_check.sh --minutes 9                as much as fits; called again, it goes on with the other checks
#   dev/gpu_check.sh --minutes 9 kernels bench  some parts: build confirm kernels training ceilings bench scale torch
#                                               sanitizers ladders ranks tests torch_all sanitizers_all
#   dev/gpu_check.sh --built confirm            builds nothing: programs were brought along, and missing ones are named
#   dev/gpu_check.sh build confirm kernels training scale   the first hour on a machine with several GPUs
#   dev/gpu_check.sh --again bench              these parts (or all) anew
#   DEVICE=cpu dev/gpu_check.sh kernels         tries the script itself, on the CPU device
#
# build/gpu/check keeps the result of each check in files, and report.md, which says all of it (dev/gpu_report.py). It may be
# carried to another machine. Results of other sources do not count: they are moved to build/gpu/check-HASH.
# `confirm` first checks repairs after the first run on a card, which only a card can confirm (dev/results/2026-11-27-h100.md).
# PYTHON: the interpreter that has torch. Neither network nor root is needed; the settings of the card are not changed.
# Exit code: 0 all passed, 1 a check failed, 2 bad arguments, 3 not all was done: the time was over, or a program is not built.
# shellcheck disable=SC2034  # the files in dev/gpu_check/ use names that are set here

cd "$(dirname "$0")/.." || exit 1
set -u

all_parts=(build confirm kernels training ceilings bench scale torch sanitizers ladders ranks tests torch_all sanitizers_all)
device=${DEVICE:-gpu} again='' built='' minutes='' parts=()
export python=${PYTHON:-python3}
usage() { echo "gpu_check.sh: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --again) again=yes ;;
    --built) built=yes ;;
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
export results=$build/check
export runs=$results/runs  # of train_gpt, while this runs
deadline=$((SECONDS + $(awk "BEGIN { print int(${minutes:-100000} * 60) }") - 10))  # programs have 10 s to end

torch_version=$("$python" -c 'import torch; print(torch.__version__)' 2> /dev/null)

# The compiled sources: a copy need not be a git checkout.
sources=$(find . \( -path ./build -o -name '.?*' \) -prune -o -type f \
  \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' -o -name '*.mk' -o -name Makefile \) -print0 \
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
trap 'kill $(jobs -p) 2> /dev/null; wait; exit 130' INT TERM
passed=0 failed=0 unfinished=0

for file in checks machine confirm kernels training speed scale ranks tests; do
  # shellcheck disable=SC1090  # each of them is checked by itself
  . "dev/gpu_check/$file.sh"
done
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
