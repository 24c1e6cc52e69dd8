#!/usr/bin/env python3
"""Draws a ladder's table, which one of the programs of dev/ladders wrote as CSV: one bar per rung.

On a GPU a bar is the share of what the card can do at best. On the CPU device it is the share of the moved bytes that
had to be moved. For all-reduce it is the bus bandwidth.

Usage: build/gpu/ladder_gelu --plot gelu.png             which calls
       python dev/ladders/plot.py --title gelu gelu.csv gelu.png
"""
import argparse
import csv
import sys
from pathlib import Path

try:
  import matplotlib
except ImportError:
  sys.exit("plot.py needs matplotlib: python3 -m pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt


def bars_of(rows):
  """Returns the lengths of the bars, their labels, the name of the axis, and the length of a perfect bar."""
  if "% of ceiling" in rows[0]:
    return [float(row["% of ceiling"]) for row in rows], [f"{row['µs']} µs" for row in rows], "% of the ceiling", 100
  if "bus GB/s" in rows[0]:
    return [float(row["bus GB/s"]) for row in rows], [f"{row['µs']} µs" for row in rows], "GB/s of the bus", None
  least = [float(row["× least"] or "inf") for row in rows]
  return ([100 / times for times in least], [f"{row['moved']} bytes" for row in rows],
          "% of the moved bytes that had to be moved", 100)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--title", required=True)
  parser.add_argument("csv", type=Path)
  parser.add_argument("png", type=Path)
  arguments = parser.parse_args()
  with open(arguments.csv, newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
  lengths, labels, axis, perfect = bars_of(rows)
  figure, axes = plt.subplots(figsize=(8, 0.9 + 0.45 * len(rows)), layout="constrained")
  bars = axes.barh([row["rung"] for row in rows], lengths, color="#4477aa")
  axes.bar_label(bars, labels=labels, padding=4)
  if perfect:
    axes.axvline(perfect, color="#bb5566", linewidth=1)
  axes.invert_yaxis()
  axes.set_xlim(0, 1.18 * (perfect or max(lengths)))
  axes.set_xlabel(axis)
  axes.set_title(arguments.title)
  axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(arguments.png, dpi=150)


if __name__ == "__main__":
  main()
