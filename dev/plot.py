#!/usr/bin/env python3
"""Draws loss, learning rate and throughput of one or more runs, from the metrics.jsonl in each run's folder.

metrics.jsonl holds one JSON object a line: training lines with step, loss, lr, tokens_per_s, ...; evaluation
lines with step, val_loss; null where a value was not finite. A last line left unfinished, by a crash or a job
that is still running, is left out; nulls are drawn as gaps; both are reported.

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


def draw(runs, output):
  figure, panels = plt.subplots(3, 1, figsize=(9, 10), sharex=True, height_ratios=(3, 1, 1),
                                layout="constrained")
  loss, rate, speed = panels
  for number, run in enumerate(runs):
    rows = read_metrics(run)
    color = f"C{number}"
    loss.plot(*series(run, rows, "loss"), color=color, linewidth=1, label=f"{run} train")
    if any("val_loss" in row for row in rows):
      loss.plot(*series(run, rows, "val_loss"), "o--", color=color, markersize=4, label=f"{run} validation")
    rate.plot(*series(run, rows, "lr"), color=color)
    speed.plot(*series(run, rows, "tokens_per_s"), color=color)
  loss.set_ylabel("loss, nats per token")
  loss.legend()
  rate.set_ylabel("learning rate")
  speed.set_ylabel("tokens/s")
  speed.set_ylim(bottom=0)
  speed.set_xlabel("step")
  for panel in panels:
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
