#!/usr/bin/env bash
# Copies what the program and its tests are built from, wherever it lies, with its times.
#
#   test/copy_sources.sh FOLDER [FILE ...]      the files are left out
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
find . \( -path './.*' -o -path ./build \) -prune -o -type f \
  \( -path './test/*' -o -path './cpu/*' -o -path './dev/make/*' -o -name Makefile -o -name '*.mk' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.c' -o -name '*.cpp' \) \
  -print | sed 's#^\./##' | grep -vxFf <(printf '%s\n' "${@:2}") | tr '\n' '\0' | xargs -0 cp -p --parents -t "$1"
