#!/usr/bin/env bash
# The commands of the Dockerfile's GPU target, in order, without a container engine and without its base image: NVIDIA's packages
# of the same toolkit on Debian 12 are in its place (dockerfile.py). For one architecture and one storage type, as all of them
# take hours. Its program finds all libraries but the driver's; nothing runs on a GPU here.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh

python3 test/cluster/dockerfile.py dev/cluster/container/Dockerfile gpu "$work" ARCHS=90a DTYPES=bf16 > "$work/build.log" 2>&1 ||
  fail "the image is not built"
grep -E '^  (FROM|RUN|nvidia)|built for the gpu' "$work/build.log"
missing=$(chroot "$work/gpu" ldd /opt/gpt.cu/train_gpt | grep 'not found')
[ -z "$(grep -v libcuda.so <<< "$missing")" ] || fail "libraries are missing: $missing"
