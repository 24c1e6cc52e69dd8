"""Reads what runs write, and keeps what the page shows of it.

A run's folder has metrics.jsonl (runtime/reports/report.h lists its keys), monitor.jsonl (runtime/reports/monitor.h) and
plan.json (runtime/planner/plan.h). Only what is new in a growing file is read, and only whole lines. A file that was cut or
replaced, as by a rollback, --resume or --overwrite, is read anew.

However long a run is, what is kept of it is bounded:

- A curve has at most 2,000 points. As long as they fit, they are the file's. Then neighbours share a bucket, of which the
  lowest and the highest value are drawn, so that spikes stay, and the mean, from which the page computes smoothed curves.
- What is drawn over time in columns (where time goes, ranks) has at most 200 columns. Seconds are added up; of a rank, the
  value that is worst is kept: the highest temperature, the lowest clock.

Each change has a serial number, so that a page asks for what is new since the last one that it has seen.
"""
import collections
import json
import os
import stat
import time
from pathlib import Path

MOST_POINTS, MOST_COLUMNS, MOST_EVENTS, MOST_SAMPLES = 2000, 200, 500, 50
FILES = ("metrics.jsonl", "monitor.jsonl", "plan.json")
CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "goodput", "tokens", "hours", "cost")
WORST_IS_LOW = ("gpu.utilisation", "gpu.sm_mhz", "gpu.memory_mhz")


def number(value):
  """The value if it is a finite number, else None."""
  return value if type(value) in (int, float) and -1e300 < value < 1e300 else None


def flatten(value, name=""):
  """Yields name and value of each number in an object: "gpu.pcie_bytes_per_s.in". A list counts as its length."""
  for key, inner in value.items():
    if isinstance(inner, dict):
      yield from flatten(inner, f"{name}{key}.")
    elif (known := number(len(inner) if isinstance(inner, list) else inner)) is not None:
      yield name + key, known


class Tail:
  """The lines that were added to a file since the last read."""

  def __init__(self, path):
    self.path, self.offset, self.inode, self.seen, self.state = path, 0, None, b"", None

  def read(self, most=1 << 22):
    """Returns new lines, of about `most` bytes, and whether the file is another one now: then it has to be read anew."""
    try:
      file = os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError:
      return [], False
    with file:
      status = os.fstat(file.fileno())
      state = status.st_ino, status.st_size, status.st_mtime_ns
      if state == self.state or not stat.S_ISREG(status.st_mode):
        return [], False
      file.seek(self.offset - len(self.seen))
      if self.offset > 0 and (status.st_ino != self.inode or file.read(len(self.seen)) != self.seen):
        return [], True
      self.inode = status.st_ino
      file.seek(self.offset)
      text = file.read(most)
      while len(text) >= most and b"\n" not in text:
        text += file.read(most)
    whole = text[:text.rfind(b"\n") + 1]
    self.offset += len(whole)
    self.seen = (self.seen + whole)[-256:]
    self.state = None if len(text) >= most else state  # None: there is more to read
    return whole.split(b"\n")[:-1], False

  def age(self):
    """Seconds since the file last changed, or None."""
    try:
      return time.time() - os.stat(self.path).st_mtime
    except OSError:
      return None


def objects_in(lines):
  """The JSON objects with a step among these lines."""
  try:
    found = json.loads(b"[" + b",".join(lines) + b"]")
  except (ValueError, RecursionError):  # one of them is broken: line by line
    found = []
    for line in lines:
      try:
        found.append(json.loads(line))
      except (ValueError, RecursionError):
        pass
  return [row for row in found if isinstance(row, dict) and number(row.get("step")) is not None]


Bucket = collections.namedtuple("Bucket", "serial length count total low high")  # low, high: (value, step) or None


def bucket_of(serial, steps, values):
  if None in values:
    steps, values = [s for s, v in zip(steps, values) if v is not None], [v for v in values if v is not None]
    if not values:
      return Bucket(serial, 1, 0, 0, None, None)
  low, high = min(values), max(values)
  return Bucket(serial, len(values), len(values), sum(values), (low, steps[values.index(low)]), (high, steps[values.index(high)]))


def merged(one, other):
  lows, highs = filter(None, (one.low, other.low)), filter(None, (one.high, other.high))
  return Bucket(max(one.serial, other.serial), one.length + other.length, one.count + other.count, one.total + other.total,
                min(lows, default=None), max(highs, default=None))


class Curve:
  def __init__(self, serial):
    self.width, self.buckets, self.rebuilt = 1, [], serial

  def extend(self, serial, steps, values):
    at = 0
    while at < len(values):
      last = self.buckets[-1] if self.buckets else None
      room = max(0, self.width - last.length) if last else 0
      end = at + (room or self.width)
      bucket = bucket_of(serial, steps[at:end], values[at:end])
      self.buckets[len(self.buckets) - (room > 0):] = [merged(last, bucket) if room else bucket]
      at = end
      while len(self.buckets) * min(self.width, 2) > MOST_POINTS:
        pairs = zip(self.buckets[::2], self.buckets[1::2] + [None])
        self.buckets = [merged(one, other) if other else one for one, other in pairs]
        self.width, self.rebuilt = 2 * self.width, serial

  def since(self, serial):
    """From which bucket on, and these: [count, mean, step and lowest value, step and highest value], [1, step, value]."""
    first = 0 if self.rebuilt > serial else first_since(self.buckets, serial)
    return [first, [[b.count, float(f"{b.total / b.count:.7g}"), b.low[1], b.low[0], b.high[1], b.high[0]] if b.count > 1
                    else [1, b.low[1], b.low[0]] if b.count else [0] for b in self.buckets[first:]]]

  def mean(self, begin, end=None):
    part = self.buckets[begin:end]
    count = sum(b.count for b in part)
    return sum(b.total for b in part) / count if count else None


Column = collections.namedtuple("Column", "serial length step cells")


class Grid:
  def __init__(self, serial, combine):
    self.width, self.columns, self.rebuilt, self.combine = 1, [], serial, combine

  def both(self, one, other):
    cells = {**one.cells, **{k: self.combine(one.cells[k], v) if k in one.cells else v for k, v in other.cells.items()}}
    return Column(max(one.serial, other.serial), one.length + other.length, other.step, cells)

  def add(self, serial, step, cells, length=1):
    column = Column(serial, length, step, cells)
    if self.columns and self.columns[-1].length < self.width:
      self.columns[-1] = self.both(self.columns[-1], column)
    else:
      self.columns.append(column)
    if len(self.columns) > MOST_COLUMNS:
      pairs = zip(self.columns[::2], self.columns[1::2] + [None])
      self.columns = [self.both(one, other) if other else one for one, other in pairs]
      self.width, self.rebuilt = 2 * self.width, serial

  def since(self, serial):
    first = 0 if self.rebuilt > serial else first_since(self.columns, serial)
    return [first, [[c.step, {k: float(f"{v:.6g}") for k, v in c.cells.items()}] for c in self.columns[first:]]]


def first_since(entries, serial):
  """Which of these entries, whose serial numbers rise, is the first one after this serial number?"""
  first = len(entries)
  while first and entries[first - 1].serial > serial:
    first -= 1
  return first


Event = collections.namedtuple("Event", "serial step kind text")


class Run:
  def __init__(self, folder, name):
    self.folder, self.name, self.plan, self.plan_state = folder, name, None, None
    self.clear(0)

  def clear(self, serial):
    self.metrics, self.monitor = (Tail(self.folder / name) for name in FILES[:2])
    self.rebuilt = serial
    self.curves, self.ranks, self.events, self.samples = {}, {}, [], []
    self.times = Grid(serial, lambda one, other: one + other)
    self.first, self.last = {}, {}  # the step's line that was read first, and last
    self.bill = {}                  # of the last line, of whatever kind
    self.lost_before, self.hours_before = {}, 0

  def read(self, serial, until=float("inf")):
    """Reads what is new, until this time. Returns whether there is more."""
    self.read_plan(serial)
    for name, add in (("metrics", self.add_metrics), ("monitor", self.add_monitor)):
      while True:
        lines, restarted = getattr(self, name).read()
        if restarted:
          self.clear(serial)
          return True
        if not lines:
          break
        add(serial, objects_in(lines))
        if time.monotonic() > until:
          return True
    return False

  def read_plan(self, serial):
    try:
      path = self.folder / FILES[2]
      state = path.stat().st_mtime_ns if not path.is_symlink() and path.stat().st_size < 1 << 26 else None
      if state != self.plan_state:
        plan = json.loads(path.read_bytes()) if state else None
        self.plan, self.plan_state, self.plan_serial = plan if isinstance(plan, dict) else None, state, serial
    except (OSError, ValueError, RecursionError):
      pass

  def curve(self, serial, name):
    return self.curves.setdefault(name, Curve(serial))

  def add_metrics(self, serial, rows):
    steps = [row for row in rows if "loss" in row]
    for key in CURVES:
      known = [row for row in steps if key in row]
      if known:
        self.curve(serial, key).extend(serial, [row["step"] for row in known], [number(row[key]) for row in known])
    self.first, self.last = self.first or (steps or [{}])[0], (steps or [self.last])[-1]
    self.bill = rows[-1] if rows else self.bill
    for row in rows:
      if "ranks" in row:
        self.add_ranks(serial, row)
      if "loss" not in row or "left_out" in row:
        self.add_event(serial, row)
    batch = max(1, self.times.width // 8)
    for at in range(0, len(rows), batch):
      self.add_times(serial, rows[at:at + batch])

  def add_event(self, serial, row):
    for key in row:
      if key.startswith("val_loss"):
        self.curve(serial, key).extend(serial, [row["step"]], [number(row[key])])
    step, samples, events = row["step"], self.samples, self.events
    if "sample" in row:
      samples.append(Event(serial, step, "sample", str(row["sample"])[:20_000]))
    for kind in ("incident", "warning"):
      if kind in row:
        if events and events[-1].step == step and events[-1].kind == "left out":
          events.pop()  # the incident says why
        events.append(Event(serial, step, kind, str(row[kind])[:2000]))
    if "rolled_back_from" in row:
      events.append(Event(serial, step, "rollback", f"back from step {row['rolled_back_from']}: {row.get('reason')}"[:2000]))
    if "left_out" in row and not (events and events[-1].step == step):
      events.append(Event(serial, step, "left out", "the update was left out"))
    del samples[:-MOST_SAMPLES], events[:-MOST_EVENTS]

  def add_times(self, serial, rows):
    """Adds the seconds of these lines: of steps by what they went into, and what lost_s and hours grew by."""
    cells = collections.Counter()
    for row in rows:
      parts = row.get("time_ms")
      if isinstance(parts, dict):
        for name, milliseconds in flatten(parts):
          cells[name] += milliseconds / 1e3
      elif number(row.get("step_ms")) is not None:
        cells["steps"] += row["step_ms"] / 1e3
    is_split = "steps" not in cells
    row, lost = rows[-1], rows[-1].get("lost_s")
    for name, seconds in flatten(lost) if isinstance(lost, dict) else ():
      if not (name == "data" and is_split):  # that is a part of the steps' time
        cells[f"lost.{name}"] += max(0, seconds - self.lost_before.get(name, 0))
      self.lost_before[name] = seconds
    if (hours := number(row.get("hours"))) is not None:
      cells["wall"] += 3600 * max(0, hours - self.hours_before)
      self.hours_before = hours
    self.times.add(serial, row["step"], dict(cells), len(rows))

  def add_ranks(self, serial, row):
    """Adds the numbers of each rank: a grid for each quantity."""
    found = collections.defaultdict(dict)
    for place, rank in enumerate(row["ranks"] if isinstance(row["ranks"], list) else ()):
      if isinstance(rank, dict):
        label = str(rank.get("rank", place))
        for name, value in flatten({k: v for k, v in rank.items() if k != "rank" and not k.startswith("comm_bytes")}):
          found[name][label] = value
    for name, cells in found.items():
      combine = min if name in WORST_IS_LOW else max
      self.ranks.setdefault(name, Grid(serial, combine)).add(serial, row["step"], cells)

  def add_monitor(self, serial, rows):
    for row in rows:
      self.add_ranks(serial, row) if "ranks" in row else self.add_event(serial, row)
      for host in row.get("hosts") if isinstance(row.get("hosts"), list) else ():
        for name, value in flatten(host) if isinstance(host, dict) else ():
          self.curve(serial, f"host {host.get('host')} {name}").extend(serial, [row["step"]], [value])

  def since(self, serial):
    """What is new, as the page takes it."""
    new = {"name": self.name, "cleared": self.rebuilt > serial}
    for name, group in (("curves", self.curves), ("ranks", self.ranks)):
      new[name] = {key: part for key, one in group.items() if (part := one.since(serial))[1]}
    new["times"] = self.times.since(serial)
    for name, events in (("events", self.events), ("samples", self.samples)):
      new[name] = [event[1:] for event in events[first_since(events, serial):]]
    if self.plan and self.plan_serial > serial:
      new["plan"] = {"device": self.plan.get("device"), "ranks": self.plan.get("ranks")}
    return new


def is_run(folder):
  return any((folder / name).is_file() and not (folder / name).is_symlink() for name in FILES)


class Runs:
  """The runs in these folders: each is a run's, or holds folders of runs, of which more may come."""

  def __init__(self, folders):
    self.folders, self.runs, self.serial = folders, {}, 0
    self.find()

  def find(self):
    """Links are followed only where they were given by name."""
    for given in self.folders:
      below = []
      try:
        below = sorted((Path(e.path) for e in os.scandir(given) if e.is_dir(follow_symlinks=False)), key=lambda p: p.name)
      except OSError:
        pass
      for folder in [given, *below]:
        if (key := folder.resolve()) not in self.runs and is_run(folder):
          self.runs[key] = Run(folder, str(folder))

  def read(self, seconds=float("inf")):
    """Reads what is new, for about so many seconds. Returns whether there is more."""
    self.serial += 1
    self.find()
    until = time.monotonic() + seconds
    return any([run.read(self.serial, until) for run in self.runs.values()])
