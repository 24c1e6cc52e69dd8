#!/usr/bin/env bash
# dev/cluster/container/Dockerfile without a container engine: every command of its CPU target, in order, in empty roots of its
# distribution (dockerfile.py). Then the image's program trains in there, on one rank and on two, and writes a recipe.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh

python3 test/cluster/dockerfile.py dev/cluster/container/Dockerfile cpu "$work" DTYPES=fp32 > "$work/build.log" 2>&1 ||
  fail "the image is not built"
grep -E '^  (FROM|RUN) ' "$work/build.log"
grep -q -- '-march=x86-64-v3\|-march=armv8-a' "$work/build.log" || fail "the program is for this processor only"

in_image() { chroot "$work/cpu" env -i HOME=/tmp PATH=/opt/gpt.cu:/usr/bin:/bin OMP_NUM_THREADS=1 sh -c "cd /work && $1"; }
mkdir "$work/cpu/work/my"
cp README.md "$work/cpu/work/my/text.txt"
train="train_gpt --train 'my/*.txt' --model d6 --seq-len 64 --steps 10 --micro-batch 4 --global-batch 8"  # as in README.md
in_image "$train --out runs/one" > "$work/one.log" 2>&1 || fail "one rank does not train"
in_image "/opt/gpt.cu/dev/cluster/mpirun.sh 2 ${train#train_gpt} --out runs/two" > "$work/two.log" 2>&1 || fail "two ranks do not train"
for name in one two; do
  echo "  $(grep 'step *10/10' "$work/$name.log" | cut -d '|' -f 1,2) ($name)"
done
in_image "$train --plan --cluster 8xh100 --ranks 2 --dtype fp32 --recipe kubernetes 2> plan > job.yaml" || fail "the image has no recipes"
grep -q 'image: gpt.cu' "$work/cpu/work/job.yaml" || fail "the recipe is empty"
chroot --userspec=1000:1000 "$work/cpu" env -i PATH=/opt/gpt.cu:/usr/bin:/bin sh -c "cd /work && $train --out mine" > "$work/user.log" 2>&1 ||
  fail "another user than root does not train"
