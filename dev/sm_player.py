#!/usr/bin/env python3
"""Plays training steps on model GPUs on which a block keeps its multiprocessor (SM), with and without a margin.

The CPU device logs the host's calls to each stream (cpu/log.h), and the trace has their bytes and FLOPs:

  GPT_CPU_LOG=log GPT_CPU_DRY=1 mpirun -np 8 ./train_gpt --tp 8 --steps 3 --trace trace.json ...
  python3 dev/sm_player.py log trace.json --margin 0,8,16,24

All steps but the first are played, the last one is reported, without collectives that move data in less than 1 % of it.
The model of a GPU:

- A product, and attention's forward, has SMs − margin blocks, and each the same share of the work. A block takes an SM that
  is free, keeps it until its share is done, and is alone on it. Blocks that find no free SM wait for one. The margin holds
  in passes in which the rank gives something to NCCL; in others it is 0.
- Other kernels have many short blocks: they use the SMs that are free at each moment, and leave them at once.
- An operation of NCCL takes free SMs before all kernels (its streams have the highest priority), one for each of its CTAs. It
  moves data when all its ranks have all theirs, and keeps them until it ends. A receive waits on its SMs for its sender.
- An operation of a stream begins GAP after the end of the one before it, or after EVENT and GAP if it waits for another stream.

Not in the model: tiles, caches, links and memory bandwidth that several share, fewer CTAs for short messages, the host.

Needs only Python. Exit code: 0 played, 2 bad input.
"""
import argparse
import collections
import glob
import heapq
import itertools
import statistics

from sm_log import SMS, fail, read_log, read_trace

GAP, EVENT = 2e-6, 2e-6  # seconds; EVENT is assumed


# ---- playing

class Player:
  """All ranks' devices, the clock, and the events to come."""

  def __init__(self, ranks, margin):
    self.now, self.events, self.order = 0.0, [], itertools.count()
    self.meetings = collections.defaultdict(list)  # by name: the operations of NCCL that have all their SMs, with their devices
    self.devices = [Device(self, operations, margin) for operations in ranks]
    for device in self.devices:
      for stream in list(device.queues):
        device.go_on(stream)
    while self.events:
      self.now, _, call, arguments = heapq.heappop(self.events)
      call(*arguments)
    stuck = [(rank, o) for rank, operations in enumerate(ranks) for o in operations if o.kind == "nccl" and o.end is None]
    stuck += [(rank, queue[0]) for rank, device in enumerate(self.devices) for queue in device.queues.values() if queue]
    if stuck:
      rank, o = stuck[0]
      fail(f"rank {rank} waits for ever for '{' '.join(o.line)}': were all ranks' logs read?")

  def at(self, time, call, *arguments):
    heapq.heappush(self.events, (time, next(self.order), call, arguments))

  def is_resident(self, device, o):
    """The operation of NCCL has all its SMs: its parts begin when the other ranks have theirs."""
    o.left = len(o.parts)
    for meeting, ranks, seconds in o.parts:
      present = self.meetings[meeting]
      present.append((device, o))
      if len(present) == ranks:
        for its_device, its_o in present:
          its_o.begin = self.now if its_o.begin is None else its_o.begin
          self.at(self.now + seconds, its_device.end_part, its_o)


class Device:
  """One rank's GPU: its streams, its SMs, and the operations that want some."""

  def __init__(self, player, operations, margin):
    self.player, self.margin, self.free = player, margin, SMS
    self.queues = collections.defaultdict(collections.deque)
    for o in operations:
      o.reset()
      self.queues[o.stream].append(o)
    self.ready = collections.Counter()      # by stream: when its next operation might begin, without GAP
    self.pending = {o.line[2] for o in operations if o.kind == "record"}  # others are of earlier steps
    self.recorded, self.waiting = {}, collections.defaultdict(list)       # by record: when; the streams that wait for it
    self.wanting, self.short = [], []       # operations that want more SMs; kernels that use free SMs
    self.since, self.rate, self.version = 0.0, 0.0, 0  # of the short kernels: the share of an idle device that each has

  def go_on(self, stream):
    """Executes a stream's next operations, up to one that takes time."""
    queue = self.queues[stream]
    while queue:
      o = queue[0]
      if o.kind == "wait" and o.line[2] in self.pending:
        return self.waiting[o.line[2]].append(stream)
      queue.popleft()
      if o.kind == "wait":
        self.ready[stream] = max(self.ready[stream], self.recorded.get(o.line[2], -1) + EVENT)
      elif o.kind == "record":
        self.pending.discard(o.line[2])
        self.recorded[o.line[2]] = max(self.ready[stream], self.player.now)
        for other in self.waiting.pop(o.line[2], []):
          self.player.at(self.recorded[o.line[2]], self.go_on, other)
      else:
        return self.player.at(max(self.ready[stream] + GAP, self.player.now), self.start, o)

  def start(self, o):
    o.ready = self.player.now
    self.advance()
    if o.kind == "short":
      o.begin, o.left = o.ready, o.seconds
      self.short.append(o)
    else:
      o.wants = o.wants_at_most if o.kind == "nccl" else SMS - (self.margin if o.has_margin else 0)
      o.left = o.wants
      self.wanting.append(o)
    self.deal()

  def advance(self):
    """Brings the short kernels' work up to now."""
    for o in self.short:
      o.left -= (self.player.now - self.since) * self.rate
    self.since = self.player.now

  def deal(self):
    """Gives free SMs to those that want some, NCCL first. Must follow each change of `free`."""
    self.advance()
    now = self.player.now
    for o in sorted(self.wanting, key=lambda o: o.kind != "nccl"):  # otherwise in the order in which they came
      given = min(o.wants - o.held, self.free)
      o.held, self.free = o.held + given, self.free - given
      if given and o.kind == "persistent":
        o.begin = now if o.begin is None else o.begin
        self.player.at(now + o.seconds * SMS / o.wants, self.end_blocks, o, given)
      elif given and o.held == o.wants:
        self.player.is_resident(self, o)
    self.wanting = [o for o in self.wanting if o.held < o.wants]
    self.rate, self.version = self.free / SMS / max(1, len(self.short)), self.version + 1
    if self.short and self.rate:
      least = max(0, min(o.left for o in self.short))
      self.player.at(now + least / self.rate, self.end_short, self.version)

  def end_blocks(self, o, count):
    self.free, o.left = self.free + count, o.left - count
    self.end(o, o.left == 0)

  def end_part(self, o):
    o.left -= 1
    self.free += o.held if o.left == 0 else 0
    self.end(o, o.left == 0)

  def end_short(self, version):
    if version == self.version:  # otherwise the rate has changed since
      o = min(self.short, key=lambda o: o.left)
      self.short.remove(o)
      self.end(o, True)

  def end(self, o, is_over):
    self.deal()
    if is_over:
      o.end = self.ready[o.stream] = self.player.now
      self.go_on(o.stream)


# ---- results

def within(o, intervals):
  """The part of o's working time that is in one of the intervals, which are in order and do not overlap."""
  inside = sum(max(0, min(o.end, end) - max(o.begin, begin)) for begin, end in intervals)
  return inside / (o.end - o.begin) if o.end > o.begin else 0


def union(operations):
  joined = []
  for begin, end in sorted((o.begin, o.end) for o in operations):
    if joined and begin <= joined[-1][1]:
      joined[-1] = (joined[-1][0], max(joined[-1][1], end))
    else:
      joined.append((begin, end))
  return joined


def report(ranks, margin):
  """Rows of the two tables for the last step: of the step (means over ranks, ms), and of each kind of collective."""
  timed = [[o for o in operations if o.kind not in ("record", "wait")] for operations in ranks]
  last = max(o.step for o in timed[0])
  ends = {step: max(o.end for operations in timed for o in operations if o.step == step) for step in (last - 1, last)}
  step = 1e3 * (ends[last] - ends[last - 1])
  alone, slowed, kinds = [], [], collections.defaultdict(list)
  for operations in timed:
    kernels = [o for o in operations if o.kind != "nccl"]
    mine = [o for o in kernels if o.step == last]
    alone.append(1e3 * sum(o.seconds for o in mine))
    slowed.append(1e3 * sum(o.end - o.ready for o in mine) - alone[-1])
    busy = union(kernels)
    for o in operations:
      if o.kind == "nccl" and o.step == last:
        there = o.next_product
        places = there and [within(o, [place]) for place in ((0, there.begin), (there.begin, there.end), (there.end, 1e9))]
        kinds[o.title].append((1e3 * (o.end - o.begin), within(o, busy), places, 1e3 * (o.begin - o.ready)))
  mean = [statistics.mean(values) for values in (alone, slowed)]
  cells = [round(value, 2) + 0.0 for value in (step, *mean, step - sum(mean))]  # -0.0 + 0.0 is 0.0
  rows = ["| " + " | ".join([str(margin), *(f"{cell:.2f}" for cell in cells)]) + " |"]
  of_kinds = []
  for title, values in sorted(kinds.items()):
    moves = sum(v[0] for v in values)
    if moves < 0.01 * step * len(timed):
      continue  # not worth a line
    hidden = sum(v[0] * v[1] for v in values) / moves
    places = zip(*(v[2] for v in values if v[2]))  # before the next product, beside it, after it
    of_kinds.append(f"| {margin} | {title} | {len(values) / len(timed):g} | {moves / len(timed):.2f} | {100 * hidden:.0f} | "
                    + ", ".join(f"{100 * statistics.mean(place):.0f}" for place in places)
                    + f" | {sum(v[3] for v in values) / len(timed):.2f} |")
  return rows, of_kinds


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.error = fail
  parser.add_argument("log", help="what GPT_CPU_LOG was: LOG.0, LOG.1, ... are read")
  parser.add_argument("trace", help="what --trace wrote in the same run")
  parser.add_argument("--margin", default="0,8,16,24", help="SMs that products leave free, several with commas (%(default)s)")
  parser.add_argument("--rule", choices=("pass", "pending"), default="pass",
                      help="which products have the margin: all of a pass in which NCCL is given something, or those that are "
                           "given while something of NCCL is pending (%(default)s)")
  parser.add_argument("--ctas", action="append", default=[], metavar="STREAM=N",
                      help="another maxCTAs of what runs on this stream ('communication', 'inner communication', 'lanes')")
  parser.add_argument("--cta-gb", type=float, default=22.5,
                      help="GB/s that a CTA of NCCL moves, assumed (%(default)s: 16 fill a link)")
  parser.add_argument("--attention", default="480,330", metavar="FORWARD,BACKWARD", help="TFLOP/s (%(default)s)")
  options = parser.parse_args()
  try:
    margins = [int(margin) for margin in options.margin.split(",")]
    options.ctas = {stream: int(number) for stream, number in (one.split("=") for one in options.ctas)}
    rates = [1e12 * float(rate) for rate in options.attention.split(",")]
    options.attention = dict(zip(("attention_forward", "attention_backward"), rates, strict=True))
  except ValueError:
    fail("--margin takes numbers, --ctas STREAM=N, --attention two rates")
  if not all(0 <= margin < SMS for margin in margins) or min(rates) <= 0 or options.cta_gb <= 0:
    fail(f"--margin is from 0 to {SMS - 1}, and rates are above 0")
  options.cta = 1e9 * options.cta_gb
  ranges = read_trace(options.trace)
  count = len(glob.glob(glob.escape(options.log) + ".[0-9]*"))
  ranks = [read_log(f"{options.log}.{rank}", ranges[rank], options) for rank in range(count)]
  if not ranks or not all(operations and operations[-1].step > 2 for operations in ranks):
    fail(f"{options.log}.0: no log, or one of fewer than three steps: GPT_CPU_LOG={options.log} writes it")
  steps, kinds = [], []
  for margin in margins:
    Player(ranks, margin)
    rows, of_kinds = report(ranks, margin)
    steps += rows
    kinds += of_kinds
  print("| margin | step, ms | kernels alone | slowed down by | waiting |\n|--:|--:|--:|--:|--:|", *steps, sep="\n")
  print("\n| margin | collective | times | moves, ms | beside kernels, % | before, beside, after the next product, % | waits, ms |\n"
        "|--:|---|--:|--:|--:|--:|--:|", *kinds, sep="\n")


if __name__ == "__main__":
  main()
