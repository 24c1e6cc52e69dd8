"""The calls of ranks to their streams: the log of the CPU device (cpu/log.h) and the trace of the same run, as operations
that dev/sm_player.py plays, with the time that each takes alone on a model GPU.
"""
import collections
import itertools
import json
import sys
from pathlib import Path

# An H100, with the shares of runtime/planner/forecast.md
SMS = 132
PRODUCTS, MEMORY, LINK = 0.62 * 989e12, 0.9 * 3.35e12, 0.8 * 450e9  # FLOP/s, bytes/s, bytes/s
HOP = 3e-6         # seconds of a message's way to the next rank
USUAL_CTAS = 24    # where maxCTAs is not set: NCCL's own choice on an H100 without NVLS


def fail(message):
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


class Operation:
  """A call to a stream. kind: "persistent" or "short" (kernels), "nccl", "record" or "wait"."""

  def __init__(self, kind, line, launcher, step):
    self.kind, self.stream, self.line, self.launcher, self.step = kind, int(line[1]), line, launcher, step
    self.is_product = line[0] == "product"
    self.seconds = 0      # alone on an idle device
    self.has_margin = False
    self.parts = []       # of an operation of NCCL: (meeting, ranks in it, seconds)
    self.next_product = None

  def reset(self):
    self.ready = self.begin = self.end = None  # it wants SMs; it works (NCCL: it moves data); it has ended
    self.wants = self.held = self.left = 0     # SMs; SMs that it has got so far; the rest of its work


def read_trace(path):
  """By rank the launchers' ranges, in the order of the host's calls."""
  try:
    events = json.loads(Path(path).read_bytes())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranges = collections.defaultdict(list)
    for e in events:
      if e["ph"] == "X":
        ranges[e["pid"]].append({"name": e["name"], "stream": names[e["pid"], e["tid"]], "kernels": 0, **e["args"]})
    return ranges
  except (OSError, ValueError, KeyError, TypeError):
    fail(f"{path}: not a trace: give the file that train_gpt --trace wrote in the run of the log")


def read_log(path, ranges, options):
  """A rank's operations in the order of the host's calls, in all steps but the first."""
  try:
    lines = [line.split() for line in Path(path).read_text().splitlines()]
  except (OSError, UnicodeDecodeError):
    fail(f"{path}: can't be read: give all ranks' logs")
  names, traced = [line[1] for line in lines if line[0] == "range"], [r["name"] for r in ranges]
  untraced = next((i for i in range(len(names)) if traced and names[i:i + len(traced)] == traced), None)
  if untraced is None:  # the trace begins later than the log, and has all launchers from there on
    fail(f"{path}: not the log of the run that wrote the trace")
  launchers = itertools.chain([{}] * untraced, ranges, itertools.repeat({}))
  operations, open_ranges, step = [], [], 0
  for line in lines:
    launcher = open_ranges[-1] if open_ranges else {}
    if line[0] == "range":
      open_ranges.append(next(launchers))
      step = open_ranges[-1].get("step", step)
    elif line[0] == "end":
      open_ranges.pop()
    elif line[0] != "stream" and step >= 2:
      if line[0] == "nccl" and line[-1] != "0" and operations[-1].line[-1:] == line[-1:] and operations[-1].kind == "nccl":
        add_part(operations[-1], line, options)  # the same group
        continue
      is_persistent = line[0] == "product" or launcher.get("name") == "attention_forward"
      kind = line[0] if line[0] in ("record", "wait", "nccl") else "persistent" if is_persistent else "short"
      operations.append(Operation(kind, line, launcher, step))
      if line[0] == "nccl":
        add_part(operations[-1], line, options)
      elif line[0] == "kernel" and launcher:
        launcher["kernels"] += 1
  for o in operations:
    set_time(o, options)
  choose_products(operations, options.rule)
  find_next_products(operations)
  return operations


def set_time(o, options):
  if o.is_product:
    m, n, k, read, written = map(int, o.line[2:])
    o.seconds = max(2 * m * n * k / PRODUCTS, (m + n) * k * read / MEMORY) + m * n * written / MEMORY
  elif o.line[0] in ("copy", "memset"):
    o.seconds = int(o.line[2]) * (2 if o.line[0] == "copy" else 1) / MEMORY
  elif o.line[0] == "kernel" and o.launcher:  # each kernel of a launcher takes an equal part of its time
    rate = options.attention.get(o.launcher["name"])
    arithmetic = 1e9 * o.launcher.get("GFLOP", 0) / rate if rate else 0
    o.seconds = max(o.launcher["bytes"] / MEMORY, arithmetic) / o.launcher["kernels"]


def add_part(o, line, options):
  """Adds a collective, a send or a receive to an operation of NCCL."""
  call, comm, (rank, ranks, ctas, size, number, peer) = line[2], line[3], map(int, line[4:10])
  lane = "lanes" if o.launcher.get("stream", "").startswith(("to_", "from_")) else o.launcher.get("stream")
  o.wants_at_most = options.ctas.get(lane) or ctas or USUAL_CTAS
  o.call, o.title = call, f"{o.launcher.get('name', call)}, {ranks} ranks, {lane}"
  rate, others = min(LINK, options.cta * o.wants_at_most), ranks - 1
  ring = others * (HOP + size / ranks / rate)
  seconds = {"ncclAllReduce": 2 * ring, "ncclBroadcast": others * HOP + size / rate}.get(call, ring)
  if peer < 0:
    o.parts.append(((comm, number), ranks, seconds))
  else:
    ends = (rank, peer) if call == "ncclSend" else (peer, rank)
    o.parts.append(((comm, *ends, number), 2, HOP + size / rate))


def choose_products(operations, rule):
  """Which products have the margin: "pass": those of passes in which the rank gives something to NCCL; "pending": those that
  are given while another stream has something of NCCL for which theirs does not wait yet."""
  def pass_of(o):
    return tuple(o.launcher.get(key) for key in ("step", "micro-batch", "work", "chunk"))
  loud = {pass_of(o) for o in operations if o.kind == "nccl"}
  given, recorded, awaited = collections.Counter(), {}, collections.Counter()  # operations of NCCL by stream, record, pair
  for o in operations:
    if o.kind == "nccl":
      given[o.stream] += 1
    elif o.kind == "record":
      recorded[o.line[2]] = (o.stream, given[o.stream])
    elif o.kind == "wait" and o.line[2] in recorded:
      other, count = recorded[o.line[2]]
      awaited[o.stream, other] = max(awaited[o.stream, other], count)
    o.has_margin = o.kind == "persistent" and (pass_of(o) in loud if rule == "pass" else
                                     any(count > awaited[o.stream, other] for other, count in given.items()))


def find_next_products(operations):
  """For each reduce_scatter, the next product on the stream whose data it sums."""
  stream_of = {o.line[2]: o.stream for o in operations if o.kind == "record"}
  awaited, without = {}, collections.defaultdict(list)  # by stream: the one it waits for; reduce_scatters that have none yet
  for o in operations:
    if o.kind == "wait":
      awaited[o.stream] = stream_of.get(o.line[2])
    elif o.kind == "nccl" and o.call == "ncclReduceScatter":
      without[awaited.get(o.stream)].append(o)
    elif o.is_product:
      for collective in without.pop(o.stream, []):
        collective.next_product = o
