"""Reads the files of runs, and keeps the data that the page shows.

A run's folder has metrics.jsonl (runtime/reports/report.h lists its keys), monitor.jsonl (runtime/monitor/monitor.h)
and plan.json (runtime/planner/plan.h). Only the new part of a growing file is read, and only whole lines. A file that
was cut or replaced, as by a rollback, --resume or --overwrite, is read anew.

The memory for a run is bounded, however long the run is. A curve has at most 2,000 points. As long as they fit, they
are the file's. Then neighbours share a bucket, of which the lowest and the highest value are drawn, so that spikes
stay, and the mean, from which the page computes smoothed curves. A curve of a rank or a host has at most 200 points.

Each change has a serial number, so that a page asks only for the changes since the last one that it has seen. Names of
curves:

  loss, val_loss_NAME, ...     keys of metrics.jsonl
  time compute, time lost.data seconds that went into it so far; "time wall": all of them
  rank 0 gpu.power_w           numbers of each rank, of metrics.jsonl and monitor.jsonl
  host node1 cpu               numbers of each host
"""
import bisect
import collections
import json
import os
import stat
import time
from pathlib import Path

MOST_POINTS, MOST_EVENTS, MOST_CHARACTERS = 2000, 500, 4000
FILES = ("metrics.jsonl", "monitor.jsonl", "plan.json")
TEXTS = {"sample": "sample", "incident": "incident", "warning": "warning", "reason": "rollback", "left_out": "left out"}
CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "goodput", "tokens", "hours", "cost")


def number(value):
  """The value if it is a finite number, else None."""
  return value if type(value) in (int, float) and -1e300 < value < 1e300 else None


def flatten(value, name=""):
  """Name and value of each number in an object: "gpu.pcie_bytes_per_s.in". A list counts as its length."""
  found = []
  for key, inner in value.items() if isinstance(value, dict) else ():
    kind = type(inner)
    if kind in (float, int) and -1e300 < inner < 1e300:
      found.append((name + key, inner))
    elif kind is dict:
      found += flatten(inner, f"{name}{key}.")
    elif kind is list:
      found.append((name + key, len(inner)))
  return found


class Tail:
  """The lines that were added to a file since the last read."""

  def __init__(self, path):
    self.path, self.offset, self.seen, self.state, self.changed = path, 0, b"", None, None

  def read(self, most=1 << 20):
    """Returns new lines, of about `most` bytes, and whether the file is another one now, to be read anew."""
    try:
      file = os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError:
      return [], False
    with file:
      status = os.fstat(file.fileno())
      state, self.changed = (status.st_ino, status.st_size, status.st_mtime_ns), status.st_mtime
      if state == self.state or not stat.S_ISREG(status.st_mode):
        return [], False
      file.seek(self.offset - len(self.seen))
      if file.read(len(self.seen)) != self.seen:
        return [], True
      text = file.read(most)
      while len(text) >= most and b"\n" not in text:
        more = file.read(most)
        if not more:  # the last line is not finished
          break
        text += more
    whole = text[:text.rfind(b"\n") + 1]
    self.offset, self.seen = self.offset + len(whole), (self.seen + whole)[-512:]
    self.state = state if len(text) < most else None  # None: there is more to read
    return whole.split(b"\n")[:-1], False


def objects_in(lines):
  """Yields the JSON objects with a step among these lines."""
  for line in lines:
    try:
      row = json.loads(line)
    except (ValueError, RecursionError):
      continue
    if isinstance(row, dict) and number(row.get("step")) is not None:
      yield row


Bucket = collections.namedtuple("Bucket", "serial length count total low high")  # low, high: (value, step)
Event = collections.namedtuple("Event", "serial step kind text")


def bucket_of(serial, steps, values):
  known = [value for value in values if value is not None] if None in values else values
  low, high = (min(known), max(known)) if known else (None, None)
  ends = ((value, steps[values.index(value)]) for value in (low, high))
  return Bucket(serial, len(values), len(known), sum(known), *ends)


def merged(one, other):
  known = [bucket for bucket in (one, other) if bucket.count] or [one]
  return Bucket(other.serial, one.length + other.length, one.count + other.count, one.total + other.total,
                min(bucket.low for bucket in known), max(bucket.high for bucket in known))


class Curve:
  def __init__(self, serial, most):
    self.width, self.buckets, self.rebuilt, self.most = 1, [], serial, most

  def extend(self, serial, steps, values):
    at = 0
    while at < len(values):
      last = self.buckets[-1] if self.buckets else None
      room = max(0, self.width - last.length) if last else 0
      end = at + (room or self.width)
      bucket = bucket_of(serial, steps[at:end], values[at:end])
      self.buckets[len(self.buckets) - (room > 0):] = [merged(last, bucket) if room else bucket]
      at = end
      while len(self.buckets) * min(self.width, 2) > self.most:
        pairs = zip(self.buckets[::2], self.buckets[1::2] + [None])
        self.buckets = [merged(one, other) if other else one for one, other in pairs]
        self.width, self.rebuilt = 2 * self.width, serial

  def since(self, serial):
    """From which bucket on, and these: count, mean, and step and value of its lowest and highest, the earlier first."""
    first = 0 if self.rebuilt > serial else bisect.bisect(self.buckets, serial, key=lambda bucket: bucket.serial)
    new = []
    for bucket in self.buckets[first:]:
      ends = sorted({bucket.low[::-1], bucket.high[::-1]}, key=lambda end: end[0])
      mean = float(f"{bucket.total / bucket.count:.9g}") if bucket.count else None
      new.append([bucket.count, mean, *sum(ends, ())])
    return [first, new]

  def mean(self, begin, end=None):
    part = self.buckets[begin:end]
    count = sum(b.count for b in part)
    return sum(b.total for b in part) / count if count else None


class Run:
  def __init__(self, folder):
    self.folder, self.name, self.plan, self.plan_state, self.serial = folder, str(folder), None, None, 0
    self.clear()

  def clear(self):
    self.files = [Tail(self.folder / name) for name in FILES[:2]]
    self.curves, self.events, self.rebuilt = {}, [], self.serial
    self.last, self.bill = {}, {}  # the last step's line, and the last line of whatever kind
    self.spent = collections.defaultdict(float)
    self.new = collections.defaultdict(list)  # steps and values that their curves do not have yet

  def read(self, serial, until=float("inf")):
    """Reads new data, until this time. Returns whether there is more."""
    self.serial = serial
    self.read_plan()
    for file in self.files:
      while True:
        lines, is_another = file.read()
        if is_another:
          self.clear()
          return True
        if not lines:
          break
        self.add_rows(list(objects_in(lines)))
        self.add_new()
        if time.monotonic() > until:
          return True
    return False

  def read_plan(self):
    try:
      status = (path := self.folder / FILES[2]).lstat()
      if stat.S_ISREG(status.st_mode) and status.st_mtime_ns != self.plan_state and status.st_size < 1 << 26:
        self.plan_state, self.plan_serial, plan = status.st_mtime_ns, self.serial, json.loads(path.read_bytes())
        self.plan = {"device": plan["device"], "ranks": plan["ranks"], "steps": plan.get("steps")}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
      pass

  def add_new(self):
    for name, new in self.new.items():
      most = MOST_POINTS // 10 if name.startswith(("rank ", "host ")) else MOST_POINTS
      self.curves.setdefault(name, Curve(self.serial, most)).extend(self.serial, *zip(*new))
    self.new.clear()

  def add_rows(self, rows):
    for place, row in enumerate(rows):
      step, is_step = row["step"], "loss" in row
      self.last, self.bill = row if is_step else self.last, row if "hours" in row else self.bill
      for key, value in row.items():
        if is_step and key in CURVES or key.startswith("val_loss"):
          value = number(value)
          if value is not None or key in self.new or key in self.curves:
            self.new[key].append((step, value))
        elif key == "ranks" or key == "hosts":
          self.add_parts(step, key[:-1], value)
        elif key in TEXTS and value:
          more = f"from step {row.get('rolled_back_from')}: " if key == "reason" else ""
          text = "the update was not applied" if key == "left_out" else f"{more}{value}"
          self.events.append(Event(self.serial, step, TEXTS[key], text[:MOST_CHARACTERS]))
      self.add_times(row, place % max(1, len(rows) // 100) == 0 or place == len(rows) - 1)
    del self.events[:-MOST_EVENTS]

  def add_parts(self, step, kind, parts):
    for place, part in enumerate(parts if isinstance(parts, list) else ()):
      for name, value in flatten(part):
        if name != kind and not name.startswith("comm_bytes"):
          self.new[f"{kind} {part.get(kind, place)} {name}"].append((step, value))

  def add_times(self, row, is_shown):
    """Adds how the time was spent. (Where steps' times are split, waiting for data is a part of these.)"""
    for name, milliseconds in flatten(row.get("time_ms") or {"steps": row.get("step_ms")}):
      self.spent[name] += milliseconds / 1e3
    if is_shown and "hours" in row:
      lost = {f"lost.{name}": seconds for name, seconds in flatten(row.get("lost_s"))}
      if "data" in self.spent:
        lost.pop("lost.data", None)
      for name, seconds in {**self.spent, **lost, "wall": 3600 * (number(row["hours"]) or 0)}.items():
        self.new[f"time {name}"].append((row["step"], seconds))

  def since(self, serial):
    """The new data, in the page's format."""
    return {"name": self.name, "cleared": self.rebuilt > serial,
            "curves": {name: part for name, curve in self.curves.items() if (part := curve.since(serial))[1]},
            "events": [event[1:] for event in self.events if event.serial > serial],
            "plan": self.plan if self.plan and self.plan_serial > serial else None}


class Runs:
  """The runs in these folders: each is a run's, or holds folders of runs, of which more may come."""

  def __init__(self, folders):
    self.folders, self.runs, self.serial = folders, {}, 0
    self.find()

  def find(self):
    """Links are followed only where they were given by name."""
    for given in self.folders:
      try:
        below = sorted(Path(entry.path) for entry in os.scandir(given) if entry.is_dir(follow_symlinks=False))
      except OSError:
        continue
      for folder in [given, *below]:
        is_run = any((folder / name).is_file() and not (folder / name).is_symlink() for name in FILES)
        if is_run and (key := folder.resolve()) not in self.runs:
          self.runs[key] = Run(folder)

  def read(self, seconds=float("inf")):
    """Reads new data, for about this number of seconds. Returns whether there is more."""
    self.serial += 1
    self.find()
    until = time.monotonic() + seconds
    return any([run.read(self.serial, until) for run in self.runs.values()])
