# shellcheck shell=bash disable=SC2154  # dev/gpu_check.sh sets these names
# Sourced by dev/gpu_check.sh: runs checks, and keeps their results: PART/NUMBER-NAME.log and .result.

# place LABEL: sets `file` to where the result goes, without its ending. Numbers keep the checks' order; where they have
# changed, an earlier result is renamed.
place() {
  local name=${1//[^A-Za-z0-9]/_} ending old
  number=$((number + 1))
  file=$results/$part/$(printf %03d $number)-$name
  for ending in log result; do
    for old in "$results/$part"/[0-9][0-9][0-9]-"$name.$ending"; do
      if [ -f "$old" ] && [ "$old" != "$file.$ending" ]; then mv "$old" "$file.$ending"; fi
    done
  done
}

# result_of FILE LABEL STATUS SECONDS COMMAND...
result_of() {
  local file=$1
  { echo "label $2"; echo "status $3"; echo "seconds $4"; shift 4; [ $# -eq 0 ] || echo "command $(printf '%q ' "$@")"; } \
    > "$file.partial"
  mv "$file.partial" "$file.result"
}

# missing_program COMMAND...: the first program of the build folder that the command needs and that is not there. The command may be
# a function of this script, which is exported then: programs that its text names count, and those of functions that it calls.
missing_program() {
  local words=" $* " name text length=0
  while [ ${#words} -gt "$length" ]; do
    length=${#words}
    for name in $(declare -Fx | sed 's/.* //'); do
      text=$(declare -f "$name")
      if [[ $words = *[!A-Za-z0-9_]"$name"[!A-Za-z0-9_]* && $words != *"$text"* ]]; then words+=$text; fi
    done
  done
  # shellcheck disable=SC2016  # functions name the folder so
  grep -oE "(\\\$build|$build)/[a-z][a-z0-9_]*" <<< "$words" | sed "s|.*/|$build/|" | while read -r name; do
    if [ ! -x "$name" ] && [ "$name" != "$results" ]; then echo "$name"; break; fi
  done
}

# attempt FILE LABEL SECONDS COMMAND...: runs the command, at most that long.
attempt() {
  local file=$1 label=$2 limit=$3 status begin=$SECONDS left=$((deadline - SECONDS)) code missing=''
  shift 3
  : > "$file.log"
  if [ -n "$built" ]; then missing=$(missing_program "$@"); fi
  if [ -n "$missing" ]; then
    status="unfinished: $missing is not built"
  elif [ "$left" -le 0 ]; then
    status="unfinished: no time was left"
  else
    # (so that a command may be a function of this script)
    local job=''
    # (the shell acts on a signal while it waits, not while a program runs in front of it)
    if [ $BASHPID != $$ ]; then trap 'kill $job 2> /dev/null; exit 130' TERM; fi
    timeout -k 10 $((limit < left ? limit : left)) bash -c '"$@"' check "$@" > "$file.log" 2>&1 < /dev/null &
    job=$!
    wait $job
    code=$?
    if [ $code -eq 0 ]; then status=passed
    elif [ $((SECONDS - begin)) -lt $((limit < left ? limit : left)) ]; then status="failed: exit code $code"
    elif [ "$limit" -le "$left" ]; then status="failed: not done after $limit s"
    else status="unfinished: stopped after $left s"
    fi
  fi
  result_of "$file" "$label" "$status" $((SECONDS - begin)) "$@"
}

# is_done FILE: has an earlier call finished it?
is_done() { grep -qsE '^status (passed|failed)' "$1.result"; }

# show FILE [WHEN]: prints a result, and counts it.
show() {
  local status
  status=$(sed -n 's/^status //p' "$1.result")
  case $status in
    passed) passed=$((passed + 1)) ;;
    unfinished*) unfinished=$((unfinished + 1)) ;;
    failed*) failed=$((failed + 1)) ;;
  esac
  printf '%-52s %s, %s s%s\n' "$(sed -n 's/^label //p' "$1.result")" "$status" "$(sed -n 's/^seconds //p' "$1.result")" \
    "${2:-}"
}

# check LABEL SECONDS COMMAND...: an attempt, unless it has been done.
check() {
  place "$1"
  if [ "$part" != build ] && is_done "$file"; then show "$file" ', earlier'; return; fi  # (make knows what is built)
  attempt "$file" "$@"
  show "$file"
}

# start LABEL SECONDS COMMAND...: a check that runs at the same time as others; wait_for_started waits for all of them.
started=()
start() {
  place "$1"
  if is_done "$file"; then show "$file" ', earlier'; return; fi
  while [ "$(jobs -rp | wc -l)" -ge 8 ] || [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  attempt "$file" "$@" &
  started+=("$file")
}
wait_for_started() {
  local file
  wait
  for file in "${started[@]}"; do show "$file"; done
  started=()
}

# run_cases TEST OPTIONS...: runs a test program. If it fails, each of its test cases runs again, in a process of its own: after an
# error of the device every later call of a process fails, and says nothing of its case.
run_cases() {
  local code name failed=0
  "$@" && return
  code=$?
  echo "exit code $code; each case by itself:"
  "$@" --list-test-cases | sed '/^\[doctest\]/d; /^=*$/d' > "$results/cases-$$"
  while IFS= read -r name; do
    # (a comma would begin another name; the last of these options counts)
    if "$@" "-tc=${name//,/?}" > "$results/case-$$" 2>&1 < /dev/null; then echo "passed: $name"
    else echo "failed, exit code $?: $name"; cat "$results/case-$$"; failed=$((failed + 1))
    fi
  done < "$results/cases-$$"
  echo "$failed of $(wc -l < "$results/cases-$$") cases failed in processes of their own"
  rm -f "$results/cases-$$" "$results/case-$$"
  return $code
}
export -f run_cases

# trains_under compute-sanitizer TOOL PROGRAM OPTIONS...: a small training run, in which each array is an allocation of its own, so that
# a kernel that runs past its end is found.
trains_under() {
  set -ex
  GPT_SEPARATE_ARRAYS=1 "$1" --tool "$2" --error-exitcode 3 "$3" --train LICENSE --layers 1 --heads 1 --channels 64 --seq-len 64 \
    --micro-batch 2 --steps 2 --dtype bf16 --out '' "${@:4}"
}
export -f trains_under

# leave_out WHAT WHY
leave_out() {
  place "$1"
  result_of "$file" "$1" "left out: $2" 0
  printf '%-52s left out: %s\n' "$1" "$2"
}
