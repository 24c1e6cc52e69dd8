#!/usr/bin/env bash
# elastic.sh on three hosts made of network namespaces, which die and return one after the other, also the one with rank 0;
# one is cut off while its processes live on, one becomes slow. What remains must be the curve of a run that nothing happened to.
# Then the same of three islands, of which one dies and returns.
#
# DEATHS=5: how many. DEATHS=20 SEED=3: more, in another order.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh
RANDOM=${SEED:-1}

# This namespace is the machine that stays; a bridge joins the hosts.
hostname head
mkdir -p /run/netns "$work/gone"
mount -t tmpfs none /run/netns
ip link add bridge type bridge && ip addr add 10.77.0.1/24 dev bridge && ip link set bridge up
printf '127.0.0.1 localhost\n10.77.0.1 head\n' > "$work/hosts"
number=2
for host in node-a node-b node-c; do
  ip netns add $host
  ip link add $host type veth peer name cable netns $host
  ip link set $host master bridge up
  ip -n $host addr add 10.77.0.$number/24 dev cable && ip -n $host link set cable up && ip -n $host link set lo up
  echo "10.77.0.$number $host" >> "$work/hosts"
  number=$((number + 1))
done
mount --bind "$work/hosts" /etc/hosts

# In the place of ssh, which would not get through either: remote.sh HOST COMMAND...
cat > "$work/remote.sh" <<END
#!/bin/sh
host=\$1; shift
if [ -e "$work/gone/\$host" ]; then sleep 9; exit 255; fi
exec ip netns exec "\$host" unshare --uts sh -c "hostname \$host; \$*"
END
chmod +x "$work/remote.sh"
export OMPI_MCA_plm_rsh_agent=$work/remote.sh GPT_LOOK=1

unplug() { : > "$work/gone/$1"; ip link set "$1" down; }
die() { unplug "$1"; ip netns pids "$1" | xargs -r kill -KILL; }
come_back() { ip link set "$1" up; rm "$work/gone/$1"; }

elastic_job=("${job[@]}" --micro-batch 1 --global-batch 12 --lr 1e-4 --schedule constant --steps 1000000 --checkpoint-every 10)
start_elastic() {  # NAME HOSTS OPTIONS...
  dev/cluster/elastic.sh "$2" -- "${elastic_job[@]}" --out "$work/$1" "${@:3}" > "$work/$1.log" 2>&1 &
  job_process=$!
}
# Waits for a line of the log beyond those that were there: wait_for_line NAME PATTERN
wait_for_line() {
  until tail -n +$((seen + 1)) "$work/$1.log" | grep -Eq "$2"; do
    job_lives || fail "elastic.sh has ended"
    sleep 0.2
  done
}
steps_of() { values "$1" loss | wc -l; }

start_elastic run node-a:2,node-b:2,node-c:2
seen=0
wait_for_line run 'starting 6 ranks on node-a:2 node-b:2 node-c:2'
wait_for_step run 15
slowest=0
for ((death = 1; death <= ${DEATHS:-5}; death++)); do
  hosts=(node-a node-b node-c)
  # The first is the host of rank 0; the second does not die, but is cut off, and its processes live.
  case $death in 1) host=node-a ;; 2) host=node-b ;; *) host=${hosts[RANDOM % 3]} ;; esac
  how=$([ $((death % 4)) = 2 ] && echo unplug || echo die)
  sleep "$((RANDOM % 3)).$((RANDOM % 10))"
  seen=$(wc -l < "$work/run.log") before=$(steps_of run) begin=$SECONDS
  $how $host
  wait_for_line run 'starting 4 ranks'
  kept=$(steps_of run)
  wait_for_step run $((before > kept ? before + 1 : kept + 1))
  took=$((SECONDS - begin))
  [ $took -le $slowest ] || slowest=$took
  seen=$(wc -l < "$work/run.log")
  come_back $host
  wait_for_line run 'starting 6 ranks'
  wait_for_step run $(($(steps_of run) + 3))
  printf '  %-6s %s: training again after %d s, with it %d s later\n' $how $host $took $((SECONDS - begin - took))
done
[ $slowest -le 60 ] || fail "it took $slowest s to go on, more than a minute"

echo "  node-c is slow: the job waits for it, and goes on"
tc -n node-c qdisc add dev cable root tbf rate 20mbit burst 64kb latency 50ms || fail "tc cannot slow the link of node-c"
wait_for_step run $(($(steps_of run) + 5))

kill -USR1 $job_process
status=0; wait $job_process || status=$?
[ $status -eq 75 ] || fail "after SIGUSR1 the exit code is $status, not 75"
steps=$(steps_of run)
[ "$(values run step | uniq)" = "$(seq "$steps")" ] || fail "metrics.jsonl does not hold each step once"
pgrep -x train_gpt > /dev/null && fail "processes are left"

# The same steps on one rank, undisturbed.
"$GPT_PROGRAM" "${elastic_job[@]}" --steps "$steps" --out "$work/alone" > "$work/alone.log" 2>&1 || fail "one rank fails"
paste <(values alone loss) <(values run loss) | awk -v limit=2e-5 '
  { d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d }
  END { printf "  losses of %d steps differ by at most %.1e from one rank'\''s, undisturbed (limit %g)\n", NR, worst, limit; exit !(worst < limit) }' ||
  fail "the curve is not the undisturbed run's"
echo "  lost: $(tail -1 "$work/run/metrics.jsonl" | grep -o '"lost_s": {[^}]*}')"

echo "  islands: those that are left go on"
tc -n node-c qdisc del dev cable root
start_elastic islands node-a:2,node-b:2,node-c:2 --islands 3 --local-steps 5
seen=0
wait_for_line islands 'starting 6 ranks on .*, --islands 3'
wait_for_step islands 15
die node-b
wait_for_line islands 'starting 4 ranks on .*, --islands 2'
wait_for_step islands $(($(steps_of islands) + 12))
come_back node-b
seen=$(wc -l < "$work/islands.log")
wait_for_line islands 'starting 6 ranks on .*, --islands 3'
wait_for_step islands $(($(steps_of islands) + 8))
kill -USR1 $job_process
status=0; wait $job_process || status=$?
[ $status -eq 75 ] || fail "after SIGUSR1 the exit code of islands is $status, not 75"
steps=$(steps_of islands)
[ $((steps % 5)) -eq 0 ] || fail "islands have stopped after step $steps, between outer steps"
[ "$(values islands step | uniq)" = "$(seq "$steps")" ] || fail "metrics.jsonl of islands does not hold each step once"
values islands loss | awk 'NR == 1 { first = $1 } END { exit !($1 < first) }' || fail "islands have learned nothing"

echo "  bad input"
for bad in "node-a -- x" "node-a:2 x" "node-a:2 -- --out=" "node-a:2,node-b:2 -- --islands 3"; do
  dev/cluster/elastic.sh $bad > "$work/bad.log" 2>&1; [ $? -eq 2 ] && [ "$(wc -l < "$work/bad.log")" -eq 1 ] || fail "elastic.sh $bad: $(cat "$work/bad.log")"
done
dev/cluster/elastic.sh node-a:2 -- --no-such-option > "$work/bad.log" 2>&1; [ $? -eq 2 ] && grep -q no-such-option "$work/bad.log" || fail "a wrong option: $(cat "$work/bad.log")"
