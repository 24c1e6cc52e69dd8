#!/usr/bin/env python3
"""Draws loss, learning rate and throughput of one or more runs, from the metrics.jsonl in each run's folder.

metrics.jsonl holds one JSON object per line; runtime/report.h lists the keys. A value that was not finite is null, and
is drawn as a gap. The last line may be incomplete, after a crash or while the job is running; then it is left out. Both
are reported.

Usage: python dev/plot.py OUT... [--output plot.png]
"""
import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draw into a file: no display needed
import matplotlib.pyplot as plt  # noqa: E402  after the choice of backend


def read_metrics(run):
  """The list of JSON objects in run/metrics.jsonl."""
  file = run / "metrics.jsonl"
  try:
    *lines, rest = file.read_bytes().split(b"\n")  # rest: what follows the last newline, normally nothing
  except OSError as error:
    sys.exit(f"error: {file}: {error.strerror}: give the --out folder of a run")
  if rest:
    print(f"note: {file}: line {len(lines) + 1} is unfinished, left out", file=sys.stderr)
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      row["step"]
    except (ValueError, TypeError, KeyError):
      shown = line[:60].decode(errors="replace")
      sys.exit(f"error: {file}:{number}: not a JSON object with a step: {shown!r}: delete or repair the line")
    rows.append(row)
  if not rows:
    sys.exit(f"error: {file}: no complete line yet: wait for the first step")
  return rows


def series(run, rows, key):
  """Steps and values of the rows that have this key; null becomes NaN, which matplotlib draws as a gap."""
  steps = [row["step"] for row in rows if key in row]
  values = [row[key] for row in rows if key in row]
  nulls = [step for step, value in zip(steps, values) if value is None]
  if nulls:
    print(f"note: {run}: {key} is null in {len(nulls)} of {len(values)} steps, first in step {nulls[0]}",
          file=sys.stderr)
  return steps, [float("nan") if value is None else value for value in values]


# What is drawn below the losses, where a run has it.
LOWER_PANELS = {"lr": "learning rate", "tokens_per_s": "tokens/s"}


def draw_losses(panel, runs):
  """The line of the first of several runs is broad, so that both can be seen where another lies on it."""
  for number, (run, rows) in enumerate(runs.items()):
    color, width = f"C{number}", 4 if number == 0 and len(runs) > 1 else 1
    panel.plot(*series(run, rows, "loss"), color=color, linewidth=width, alpha=1 / width ** 0.5, label=f"{run} train")
    if any("val_loss" in row for row in rows):
      panel.plot(*series(run, rows, "val_loss"), "o--", color=color, markersize=4, label=f"{run} validation")
  panel.set_ylabel("loss, nats per token")
  panel.legend()


def draw(folders, output):
  runs = {folder: read_metrics(folder) for folder in folders}
  keys = [key for key in LOWER_PANELS if any(key in row for rows in runs.values() for row in rows)]
  figure, panels = plt.subplots(1 + len(keys), 1, figsize=(9, 6 + 2 * len(keys)), sharex=True, squeeze=False,
                                height_ratios=(3, *[1] * len(keys)), layout="constrained")
  losses, *lower = panels[:, 0]
  draw_losses(losses, runs)
  for panel, key in zip(lower, keys):
    for number, (run, rows) in enumerate(runs.items()):
      panel.plot(*series(run, rows, key), color=f"C{number}")
    panel.set_ylabel(LOWER_PANELS[key])
    if key == "tokens_per_s":
      panel.set_ylim(bottom=0)
  panels[-1, 0].set_xlabel("step")
  for panel in panels[:, 0]:
    panel.grid(alpha=0.3)
  try:
    figure.savefig(output, dpi=150)
  except (OSError, ValueError) as error:
    sys.exit(f"error: --output {output}: {error}")
  print(f"wrote {output}")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("runs", metavar="OUT", nargs="+", type=Path, help="folder with metrics.jsonl")
  parser.add_argument("--output", type=Path, default=Path("plot.png"), help="default %(default)s")
  arguments = parser.parse_args()
  draw(arguments.runs, arguments.output)


if __name__ == "__main__":
  main()
