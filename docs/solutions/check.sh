#!/usr/bin/env bash
# Do the solutions of docs/teach.md fit the sources, compile, and pass?
#
# Each patch here solves one exercise. Its first line is the program that make builds, its second line names the exercise. In a copy
# of the sources under build/solutions this script applies one patch after another, builds its program and runs it.
#
#   docs/solutions/check.sh [NAME.patch ...]      default: all, on the CPU device
#   docs/solutions/check.sh --slice               one of them, the next one after each commit
set -euo pipefail
cd "$(dirname "$0")/../.."
patches=("$@")
if [ $# -eq 0 ]; then patches=(docs/solutions/*.patch); fi
if [ "${patches[*]}" = --slice ]; then
  patches=(docs/solutions/*.patch)
  patches=("${patches[$(test/turn.sh) % ${#patches[@]}]}")
fi
copy=build/solutions
test/copy_built.sh $copy
cp -p dev/*.py $copy/dev  # tests run them
mpirun=(mpirun --oversubscribe --bind-to none)
if [ "$(id -u)" = 0 ]; then mpirun+=(--allow-run-as-root); fi

for patch in "${patches[@]}"; do
  read -r program < "$patch"
  (cd $copy && patch -s -p1) < "$patch"
  make -s -C $copy DEVICE=cpu DTYPES="fp32" "$program"
  case $program in
    */parameter_server) (cd $copy && "${mpirun[@]}" -np 4 "$program" Makefile --steps 400) ;;
    *) (cd $copy && "$program") ;;
  esac > $copy/log 2>&1 || { cat $copy/log; echo "$patch: $program fails"; exit 1; }
  (cd $copy && patch -s -R -p1) < "$patch"
  echo "$patch: $program passes"
done
