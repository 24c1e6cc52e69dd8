#!/usr/bin/env python3
"""Writes the report of dev/gpu_check.sh, as Markdown: the failed checks, the machine, each check with its output.

Usage: python3 dev/gpu_report.py build/gpu/check > report.md
"""
import sys
from pathlib import Path

# The most basic first: where one fails, the later ones mean less.
PARTS = ["build", "confirm", "kernels", "training", "ceilings", "bench", "scale", "torch", "sanitizers", "ladders", "ranks", "tests",
         "torch_all", "sanitizers_all"]
WARNINGS = {
  "build": "Not everything was built: what follows may be of other programs, or missing.",
  "confirm": "What was mended without a card is not right on this one.",
  "kernels": "A kernel computes something wrong: until it is right, all numbers below mean nothing.",
  "training": "A training run computes something wrong: times below are of a wrong program.",
}
MOST_LINES, MOST_CHARACTERS = 120, 400  # of a log
LAST = "expected and measured: "  # the output of checks of this name ends the report


def read_check(file):
  """A dictionary of the values that gpu_check.sh wrote: label, status, seconds, command, and its log."""
  check = dict(line.split(" ", 1) for line in file.read_text().splitlines())
  log = file.with_suffix(".log")
  check["log"] = log.read_text(errors="replace").splitlines() if log.exists() else []
  return check


def read_parts(folder):
  return {part: [read_check(file) for file in sorted((folder / part).glob("*.result"))]
          for part in PARTS if (folder / part).is_dir()}


def print_summary(parts):
  checks = [(part, check) for part in parts for check in parts[part]]
  of = {kind: [(part, check) for part, check in checks if check["status"].startswith(kind)]
        for kind in ("passed", "failed", "unfinished", "left out")}
  print(", ".join(f"{len(of[kind])} {kind}" for kind in of) + ".")
  missing = [part for part in PARTS if part not in parts]
  if missing:
    print(f"Not begun: {', '.join(missing)}.")
  if of["failed"]:
    print("\n**Failed, the most basic first:**\n")
    for part, check in of["failed"]:
      print(f"- {part}: {check['label']} ({check['status']}, {check['seconds']} s)")
    for part in WARNINGS:
      if any(part == failed for failed, _ in of["failed"]):
        print(f"\n**{WARNINGS[part]}**")
  if of["unfinished"]:
    print("\nUnfinished:\n")
    for part, check in of["unfinished"]:
      print(f"- {part}: {check['label']} ({check['status'].removeprefix('unfinished: ')})")


def print_check(check):
  print(f"\n### {check['label']}: {check['status']}, {check['seconds']} s")
  if "command" in check:
    print(f"\n```\n$ {check['command'].rstrip()}")
    for line in check["log"][-MOST_LINES:]:
      print(line[:MOST_CHARACTERS])
    print("```")


def main():
  if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "machine.txt").exists():
    sys.exit("error: give the folder where gpu_check.sh keeps its results, build/gpu/check")
  folder = Path(sys.argv[1])
  parts = read_parts(folder)
  print("# What dev/gpu_check.sh found\n")
  print_summary(parts)
  print(f"\n```\n{(folder / 'machine.txt').read_text().rstrip()}\n```")
  for part, checks in parts.items():
    print(f"\n## {part}")
    for check in checks:
      if not (check["label"].startswith(LAST) and check["status"] == "passed"):
        print_check(check)
    for picture in sorted((folder / part).glob("*.svg")):
      print(f"\n![{picture.stem}]({part}/{picture.name})")
  for check in (check for checks in parts.values() for check in checks):
    if check["label"].startswith(LAST) and check["status"] == "passed":
      print(f"\n## Largest differences from what was expected: {check['label'].removeprefix(LAST)}\n")
      print("\n".join(check["log"]))


if __name__ == "__main__":
  main()
