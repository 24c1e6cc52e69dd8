# What remove_barriers.sh and remove_events.sh have in common: they find lines of the product, number them, and build copies
# of the sources in which GPT_REMOVED_LINE leaves one of them out (test/removed_line.h).
#
# Which lines, and which tests must notice, follows from the files themselves, wherever they lie:
#   - A file of the product is one that names CUDA's things, a Lane or a Communicator, outside the folders cpu/, dev/ and test/.
#   - "// Its barriers are tested by test_a, test_b." (or events) in a file names its tests. Without that line it is the test
#     of the file's name.
#   - A line that looks like one of those in question, and has no form that the script knows, ends the script, and so
#     does a file without a test, or a test that make cannot build.
#
#   --names     finds lines and tests, asks make for the tests (make -n), and stops
#   --slice     tries some of the lines, the next ones after each commit, until some 100 seconds of processor time are spent
#   FILE ...    tries the lines of these files, or of FILE:LINE this one; default: all files
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "$(basename "$0"): $*" >&2; exit 1; }
mode=whole
case ${1:-} in --names | --slice) mode=${1#--}; shift ;; esac
wanted=("$@") reused=(build/host build/cpu)

product_files() {
  find . \( -path './.*' -o -path ./build -o -path ./cpu -o -path ./dev -o -name test \) -prune -o -type f \
    \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' \) ! -name 'test_*' -print0 |
    xargs -0 grep -lE '\bcuda[A-Z]|__(device|global|sync)|\b(Lane|Communicator)\b' | sed 's#^\./##' | LC_ALL=C sort
}
source_of() { find . -path ./build -prune -o -type f -name "$1.cu" -print -quit; }  # a test

# Fills places (FILE:LINE) and tests (of each place, names with spaces between them).
# $1: barriers or events; $2: awk that sets `found` for a line in question, and `known` for one that can be left out. It sees
# the line without its comment as `code`, and its comment as `comment`.
places=() tests=()
find_lines() {
  local kind=$1 file line names name
  while IFS=: read -r file line known; do
    [ "$known" = 1 ] || fail "$file:$line: one of the $kind, in a form that this script cannot leave out: $(sed -n "${line}s/^ *//p" "$file")"
    if [ "${places[*]:+${places[-1]%:*}}" != "$file" ]; then
      names=$(sed -nE "s#^// Its $kind are tested by (test_[a-z0-9_]+(, test_[a-z0-9_]+)*)\.\$#\1#p" "$file" | tr -d ,)
      if [ -z "$names" ]; then
        names=test_$(basename "${file%.*}")
        [ -n "$(source_of "$names")" ] || fail "$file:$line: which test is it of? Write '// Its $kind are tested by test_NAME.' into the file"
      fi
      for name in $names; do [ -n "$(source_of "$name")" ] || fail "$file names $name, and there is no $name.cu"; done
    fi
    places+=("$file:$line") tests+=("$names")
  done < <(product_files | xargs awk '
    { at = index($0, "//"); code = at ? substr($0, 1, at - 1) : $0; comment = at ? substr($0, at) : ""; sub(/ +$/, "", code); found = known = 0 }
    '"$2"'
    found { print FILENAME ":" FNR ":" known }')
  [ ${#places[@]} -gt 0 ] || fail "no $kind found"
}
all_tests() { printf '%s\n' "${tests[@]}" | tr ' ' '\n' | LC_ALL=C sort -u; }

# Asks make whether it can build the tests. $1: the folder of the build; the rest: for make
check_names() {
  local build=$1; shift
  env -u MAKEFLAGS -u MAKELEVEL make -n DEVICE=cpu "$@" $(all_tests | sed "s#^#$build/#") > /dev/null || fail "make cannot build all tests"
  echo "$kind: ${#places[@]} in $(printf '%s\n' "${places[@]%:*}" | uniq | wc -l) files, of which $(all_tests | wc -l) tests are built"
}

# Copies the sources to $1, with a condition around each of the lines. $2: sed that replaces a line, in which NUMBER is its
# number. reused: folders that are copied, too. A file that is as it was keeps its time, so that little is built again. All lines have a condition, whichever are
# tried, so that a line's number is the same in each call.
copy_sources() {
  local copy=$1 file i changed built
  changed=$(printf '%s\n' "${places[@]%:*}" | uniq)
  test/copy_sources.sh "$copy" $changed
  # What is built already, but for the lines in question, need not be built again.
  if [ ! -d "$copy/build" ]; then
    mkdir "$copy/build"
    for built in "${reused[@]}"; do if [ -d $built ]; then cp -rp $built "$copy/build"; fi; done
  fi
  for file in $changed; do
    for i in "${!places[@]}"; do
      if [ "${places[i]%:*}" = "$file" ]; then echo "${places[i]#*:}${2//NUMBER/$((i + 1))}"; fi
    done > "$copy/build/script"
    mkdir -p "$copy/$(dirname "$file")"
    sed -E -f "$copy/build/script" "$file" > "$copy/build/changed"
    [ "$(grep -c 'removed_line != ' "$copy/build/changed")" = "$(wc -l < "$copy/build/script")" ] || fail "$file: a line did not change"
    cmp -s "$copy/build/changed" "$copy/$file" || mv "$copy/build/changed" "$copy/$file"
  done
}

spent() { local stat; read -ra stat < /proc/$$/stat; echo $(((stat[13] + stat[14] + stat[15] + stat[16]) / $(getconf CLK_TCK))); }  # seconds
is_over() { [ $mode = slice ] && [ "$(spent)" -ge 100 ]; }

# Calls try_line I for each line I that is wanted. It says what it saw, and returns 0 if the line was missed, 1 if not, and
# 2 if the time was over before all was tried.
try_lines() {
  local first=0 n i status found=0 open=0 tried=0
  if [ $mode = slice ]; then first=$(($(test/turn.sh) % ${#places[@]})); fi
  for ((n = 0; n < ${#places[@]}; ++n)); do
    i=$(((first + n) % ${#places[@]}))
    case " ${wanted[*]:-${places[i]}} " in *" ${places[i]%:*} "* | *" ${places[i]} "*) ;; *) continue ;; esac
    if [ $tried -gt 0 ] && is_over; then break; fi
    status=0
    try_line "$i" || status=$?
    tried=$((tried + 1))
    case $status in 0) found=$((found + 1)) ;; 2) open=$((open + 1)) ;; esac
  done
  [ $tried -gt 0 ] || fail "${wanted[*]}: no $kind there"
  echo "$kind removed: $tried of ${#places[@]}, found missing: $found$([ $open = 0 ] || echo ", not decided in the time of a slice: $open")"
  [ $tried -eq $((found + open)) ]
}
