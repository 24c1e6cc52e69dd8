#!/usr/bin/env python3
"""Compares the losses of two runs, step by step, from the metrics.jsonl in each run's folder.

Usage: python3 dev/same_losses.py ONE OTHER --tolerance 1e-5
The exit code is 0 if both have the same steps and no loss differs by more than this share of it; else 1.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path


def read_losses(run):
  """Loss by step; evaluations are left out."""
  file = run / "metrics.jsonl"
  try:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
  except (OSError, ValueError, TypeError, KeyError) as error:
    sys.exit(f"error: {file}: {error!r}: give the --out folder of a run that has ended")


def compare(one, other, tolerance):
  """Prints how much two dictionaries of losses differ, as shares of `one`; returns if that is within tolerance."""
  if not one or one.keys() != other.keys():
    shared = len(one.keys() & other.keys())
    print(f"the runs have different steps: {len(one)} and {len(other)}, of which they share {shared}")
    return False
  missing = [step for step in one if one[step] is None or other[step] is None]
  if missing:
    print(f"a loss of step {missing[0]} is not finite")
    return False
  differences = {step: abs(one[step] - other[step]) / abs(one[step]) for step in one}
  worst = max(differences, key=differences.get)
  within = differences[worst] <= tolerance
  print(f"{len(one)} steps, relative difference: mean {statistics.mean(differences.values()):.2e}, largest "
        f"{differences[worst]:.2e} at step {worst}" + ("" if within else f", more than {tolerance:g}"))
  return within


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("runs", metavar="OUT", nargs=2, type=Path, help="folder with metrics.jsonl")
  parser.add_argument("--tolerance", type=float, default=1e-5, help="default %(default)s")
  arguments = parser.parse_args()
  one, other = map(read_losses, arguments.runs)
  sys.exit(0 if compare(one, other, arguments.tolerance) else 1)


if __name__ == "__main__":
  main()
