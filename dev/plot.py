#!/usr/bin/env python3
"""Draws loss, learning rate and throughput of one or more runs, from the metrics.jsonl in each run's folder.

metrics.jsonl holds one JSON object per line; runtime/reports/report.h lists the keys. A value that was not finite is null, and
is drawn as a gap. The last line may be incomplete, after a crash or while the job is running; then it is left out. Both
are reported.

The loss of each step is faint, and above it lies its mean over a fiftieth of the run. The axis of the loss is
logarithmic if the loss has fallen to less than a third. The suffix of --output determines the format: png, svg, pdf.

Usage: python3 dev/plot.py OUT... [--output OUT/plot.png]
"""
import argparse
import json
import sys
from pathlib import Path

try:
  import matplotlib
except ImportError:
  sys.exit("error: a picture needs matplotlib: python3 -m pip install matplotlib")
matplotlib.use("Agg")  # draw into a file: no display needed
import matplotlib.pyplot as plt  # noqa: E402  after the choice of backend
import numpy as np  # noqa: E402  matplotlib brings it along

# The colours of Okabe and Ito, which people with any kind of colour vision can tell apart; without the yellow, which is
# too pale for a line on white.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000"]


def read_metrics(run):
  """The list of JSON objects in run/metrics.jsonl."""
  file = run / "metrics.jsonl"
  try:
    *lines, rest = file.read_bytes().split(b"\n")  # rest: the text behind the last newline, normally none
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


def color_of(number):
  return COLORS[number % len(COLORS)]


# Curves that are drawn below the losses, where a run has them.
LOWER_PANELS = {"lr": "learning rate", "tokens_per_s": "tokens/s"}


def smoothed(values):
  """The mean of each value and its neighbours, a fiftieth of all values together; gaps are left out of it."""
  reach = len(values) // 100
  known = np.isfinite(values)
  sums = np.cumsum(np.r_[0, np.where(known, values, 0)])
  counts = np.cumsum(np.r_[0, known])
  begin = np.maximum(np.arange(len(values)) - reach, 0)
  end = np.minimum(np.arange(len(values)) + reach + 1, len(values))
  return np.where(known, (sums[end] - sums[begin]) / np.maximum(counts[end] - counts[begin], 1), np.nan)


def draw_losses(panel, runs):
  """The line of the first of several runs is broad, so that both can be seen where another lies on it."""
  drawn = []
  for number, (run, rows) in enumerate(runs.items()):
    color, width = color_of(number), 4 if number == 0 and len(runs) > 1 else 1.5
    steps, losses = series(run, rows, "loss")
    panel.plot(steps, losses, color=color, linewidth=0.7, alpha=0.3)
    panel.plot(steps, smoothed(losses), color=color, linewidth=width, alpha=0.6 if width == 4 else 1, label=f"{run} train")
    drawn += losses
    if any("val_loss" in row for row in rows):
      panel.plot(*series(run, rows, "val_loss"), "o--", color=color, markersize=4, label=f"{run} validation")
  if np.nanmin(drawn, initial=np.inf) > 0 and np.nanmax(drawn, initial=0) > 3 * np.nanmin(drawn, initial=np.inf):
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
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
      panel.plot(*series(run, rows, key), color=color_of(number), linewidth=1)
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
  parser.add_argument("--output", type=Path, help="png, svg or pdf; default: plot.png in the first run's folder")
  arguments = parser.parse_args()
  draw(arguments.runs, arguments.output or arguments.runs[0] / "plot.png")


if __name__ == "__main__":
  main()
