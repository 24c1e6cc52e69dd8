#!/usr/bin/env bash
# Fuzzes the readers of files that nobody vouches for: every fuzz_NAME.cpp for some seconds, from the inputs in
# corpus/NAME on. Needs clang with libFuzzer and its sanitizers, and is left out without.
#
#   test/fuzz/run.sh [SECONDS [NAME ...]]     default: 5 seconds, all (make fuzz)
#
# Inputs that reach something new stay in build/fuzz/corpus, and the next run starts from them, too. One that breaks a
# promise (fuzz.h) ends the run and stays as build/fuzz/NAME-...; `build/fuzz/fuzz_NAME FILE` runs it again.
seconds=${1:-5}
shift
cd "$(dirname "$0")/../.." || exit 1
build=build/fuzz
names=("$@")
if [ $# -eq 0 ]; then for source in test/fuzz/fuzz_*.cpp; do names+=("$(basename "${source#*fuzz_}" .cpp)"); done; fi

clang=$(compgen -c clang++ | grep -Ex 'clang\+\+(-[0-9]+)?' | sort -V | tail -1)
if [ -z "$clang" ]; then
  echo "fuzz: clang++ is not here, the readers of files are not fuzzed: install clang and libclang-rt-dev"
  exit 0
fi
mkdir -p $build
jobs=()
if [ -z "${MAKELEVEL:-}" ]; then jobs=(-j"$(nproc)"); fi  # `make fuzz` hands its own on
if ! printf '#include <string>\nextern "C" int LLVMFuzzerTestOneInput(const char*, size_t) { return 0; }\n' |
    "$clang" -std=c++20 -fsanitize=fuzzer,address,undefined -x c++ -o $build/probe - 2> $build/probe.log; then
  echo "fuzz: $clang lacks libFuzzer or C++ headers (see $build/probe.log), the readers of files are not fuzzed:" \
    "install libclang-rt-dev and libstdc++-dev of its version"
  exit 0
fi

# The files that are read lie in memory, where there is such a folder.
if [ -w /dev/shm ]; then TMPDIR=$(mktemp -d /dev/shm/gpt_fuzz_XXXXXX); else TMPDIR=$(mktemp -d); fi
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
export ASAN_OPTIONS=quarantine_size_mb=32 UBSAN_OPTIONS=print_stacktrace=1

# Prints how many inputs were run, the edges between blocks of code they covered of all that were compiled (much of it
# from libraries), and the number and size of the inputs that reached something of their own.
fuzz() {  # name
  local log=$build/$1.log found=$build/corpus/$1 start=$SECONDS status edges runs covered kept
  mkdir -p "$found"
  "$build/fuzz_$1" -max_total_time="$seconds" -max_len=2048 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
    -artifact_prefix="$build/$1-" "$found" "test/fuzz/corpus/$1" > "$log" 2>&1
  status=$?
  edges=$(sed -n 's/^INFO: Loaded.*(\([0-9]*\) inline 8-bit counters).*/\1/p' "$log")
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  covered=$(sed -n 's/^#.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
  kept=$(sed -n 's/^#.* corp: \([^ ]*\) .*/\1/p' "$log" | tail -1)
  printf '%-12s %3d s %9d runs %6d edges of %d, %s kept\n' "$1" $((SECONDS - start)) "${runs:-0}" "${covered:-0}" \
    "${edges:-0}" "${kept:-0}"
  if [ $status -ne 0 ]; then grep -E '^finding|ERROR|runtime/|Test unit' "$log" | head -30; fi
  return $status
}

# As many at once as there are cores; a target that did not compile fails.
make -s -k --no-print-directory "${jobs[@]}" -f test/fuzz/targets.mk CLANG="$clang" "${names[@]/#/$build/fuzz_}"
rm -f $build/passed.*
for name in "${names[@]}"; do
  while [ "$(jobs -pr | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  { [ -x "$build/fuzz_$name" ] && fuzz "$name" && touch "$build/passed.$name"; } &
done
wait
passed=$(find $build -name 'passed.*' | wc -l)
echo "$passed passed, $((${#names[@]} - passed)) failed"
[ "$passed" -eq ${#names[@]} ]
