#!/usr/bin/env python3
"""Draws the measurements of dev/scaling.py: efficiency, the planner's forecast of it, and the exposed share of a step.

Usage: python3 dev/scaling.py --plot scaling.png ...       which calls it, or, on another machine, from --json's file
       python3 dev/scaling_plot.py scaling.json scaling.png
"""
import argparse
import json
import sys
from pathlib import Path

try:
  import matplotlib
except ImportError:
  sys.exit("error: a picture needs matplotlib: python3 -m pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(results, file):
  """Left to right the scalings; above their efficiency, below the exposed share."""
  scalings = list(dict.fromkeys(r["scaling"] for r in results))
  figure, panels = plt.subplots(2, len(scalings), figsize=(6 * len(scalings), 7), squeeze=False, layout="constrained")
  for (efficiency, exposed), scaling in zip(panels.T, scalings):
    alone, *others = [r for r in results if r["scaling"] == scaling]
    for i, mode in enumerate(dict.fromkeys(r["mode"] for r in others if r["ranks"] > 1)):
      done = [r for r in others if r["mode"] == mode and r.get("efficiency")]
      if not done:
        continue
      ranks = [1, *(r["ranks"] for r in done)]
      efficiency.plot(ranks, [1, *(r["efficiency"] for r in done)], "o-", color=f"C{i}", label=mode)
      shares = [max(r["exposed_share"], default=float("nan")) for r in done]  # no share: no step was timed
      exposed.plot(ranks, [0, *shares], "o-", color=f"C{i}")
      if alone["forecast_ms"] and all(r["forecast_ms"] for r in done):  # forecasts' efficiency
        slower = [r["forecast_ms"] / alone["forecast_ms"] * alone["step_ms"] / r["step_ms"] for r in done]
        efficiency.plot(ranks, [1, *(r["efficiency"] / s for r, s in zip(done, slower))], "--", color=f"C{i}")
    ticks = sorted({r["ranks"] for r in others} | {1})
    efficiency.set(title=f"{scaling} scaling (dashed: forecast)", ylabel="efficiency", ylim=(0, None), xticks=ticks)
    exposed.set(xlabel="ranks", ylabel="exposed, largest share of any rank", ylim=(0, 1), xticks=ticks)
    if efficiency.lines:
      efficiency.legend()
  figure.savefig(file, dpi=150)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("json", type=Path)
  parser.add_argument("png", type=Path)
  arguments = parser.parse_args()
  draw(json.loads(arguments.json.read_text())["runs"], arguments.png)


if __name__ == "__main__":
  main()
