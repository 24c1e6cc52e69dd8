"""Writes the metrics of runs for other programs: a table as CSV, or event files for TensorBoard."""
import csv
import sys

from runs import FILES, Tail, flatten, objects_in


def numbers_by_step(run):
  """Yields each step of metrics.jsonl and its numbers: of its own line and of those that follow it at that step."""
  tail, step, numbers = Tail(run.folder / FILES[0]), None, {}
  while lines := tail.read()[0]:
    for row in objects_in(lines):
      if row["step"] != step and numbers:
        yield step, numbers
        numbers = {}
      step = row["step"]
      numbers.update((name, value) for name, value in flatten(row) if name not in ("step", "ranks"))
  if numbers:
    yield step, numbers


def export_csv(run):
  file = run.folder / "metrics.csv"
  columns = dict.fromkeys(name for _, numbers in numbers_by_step(run) for name in numbers)
  with open(file, "w", newline="") as stream:
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(["step", *columns])
    table.writerows([step, *(numbers.get(name, "") for name in columns)] for step, numbers in numbers_by_step(run))
  return file


def export_tensorboard(run):
  """The event files of an earlier export are replaced."""
  try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
  except ImportError:
    sys.exit("error: --export tensorboard: tensorboard is not installed: python3 -m pip install tensorboard")
  folder = run.folder / "tensorboard"
  for file in folder.glob("events.out.tfevents.*.gpt_cu"):
    file.unlink()
  writer = EventFileWriter(str(folder), filename_suffix=".gpt_cu")
  written = (run.folder / FILES[0]).stat().st_mtime  # lines have hours, but no time of day: this is the last line's
  for step, numbers in numbers_by_step(run):
    values = [Summary.Value(tag=name.replace(".", "/"), simple_value=value) for name, value in numbers.items()]
    then = written - 3600 * (run.bill.get("hours", 0) - numbers.get("hours", 0))
    writer.add_event(Event(wall_time=then, step=step, summary=Summary(value=values)))
  writer.close()
  return folder


def export(runs, kind):
  for run in runs:
    try:
      print("wrote", {"csv": export_csv, "tensorboard": export_tensorboard}[kind](run))
    except OSError as error:
      sys.exit(f"error: --export {kind}: {error.filename or run.folder}: {error.strerror}")
