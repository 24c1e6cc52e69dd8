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

# attempt FILE LABEL SECONDS COMMAND...: runs the command, at most that long.
attempt() {
  local file=$1 label=$2 limit=$3 status begin=$SECONDS left=$((deadline - SECONDS)) code
  shift 3
  : > "$file.log"
  if [ "$left" -le 0 ]; then
    status="unfinished: no time was left"
  else
    # (so that a command may be a function of this script)
    timeout -k 10 $((limit < left ? limit : left)) bash -c '"$@"' check "$@" > "$file.log" 2>&1 < /dev/null
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

# leave_out WHAT WHY
leave_out() {
  place "$1"
  result_of "$file" "$1" "left out: $2" 0
  printf '%-52s left out: %s\n' "$1" "$2"
}
