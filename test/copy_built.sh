#!/usr/bin/env bash
# Makes a copy of the sources anew, with what is built for the CPU device: there a patch's files alone are built again.
#
#   test/copy_built.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf "$1"
test/copy_sources.sh "$1"
mkdir -p "$1/build"
for built in build/host build/cpu; do if [ -d $built ]; then cp -rp $built "$1/build"; fi; done
