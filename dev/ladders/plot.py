#!/usr/bin/env python3
"""Draws a ladder's table, which one of the programs of dev/ladders wrote as CSV: a bar a rung.

On a GPU a bar is the share of what the card can do at best; on the CPU device, the share of the bytes moved that had to
be moved.

Usage: build/gpu/ladder_gelu --plot gelu.png             which calls
       python dev/ladders/plot.py --title gelu gelu.csv gelu.png
"""
import argparse
import csv
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt


def percent(row):
  if "% of ceiling" in row:
    return float(row["% of ceiling"])
  least = row["× least"]
  return 100 / float(least) if least != "–" else 0.0


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--title", required=True)
  parser.add_argument("csv", type=Path)
  parser.add_argument("png", type=Path)
  arguments = parser.parse_args()
  with open(arguments.csv, newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
  timed = "% of ceiling" in rows[0]
  figure, axes = plt.subplots(figsize=(8, 0.9 + 0.45 * len(rows)), layout="constrained")
  bars = axes.barh([row["rung"] for row in rows], [percent(row) for row in rows], color="#4477aa")
  axes.bar_label(bars, labels=[f"{row['µs']} µs" if timed else f"{row['moved']} bytes" for row in rows], padding=4)
  axes.axvline(100, color="#bb5566", linewidth=1)
  axes.invert_yaxis()
  axes.set_xlim(0, 118)
  axes.set_xlabel("% of the ceiling" if timed else "% of the moved bytes that had to be moved")
  axes.set_title(arguments.title)
  axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(arguments.png, dpi=150)


if __name__ == "__main__":
  main()
