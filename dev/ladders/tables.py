#!/usr/bin/env python3
"""Writes the tables of dev/ladders/README.md: what the program of each ladder prints, after its marker there.

The markers are comments, <!-- ladder_gelu --> ... <!-- end -->. Counts of the CPU device are the same on every machine
with the same g++; times are for dev/results/.

Usage: make ladders DEVICE=cpu && python dev/ladders/tables.py          or --check: says what would change, and exits with 1
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "dev/ladders/README.md"


def printed_by(ladder):
  """The line that names dtype and shape, then the table."""
  run = subprocess.run([ROOT / "build/cpu" / ladder], capture_output=True, text=True)
  if run.returncode:
    sys.exit(f"{ladder} failed: make ladders DEVICE=cpu builds it\n{run.stdout}{run.stderr}")
  title, _, table = run.stdout[run.stdout.index("\n\n"):].strip().partition("\n\n")
  return f"{title}:\n\n{table}"


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true", help="write nothing")
  arguments = parser.parse_args()
  old = README.read_text()
  new = re.sub(r"<!-- (ladder_\w+) -->\n.*?<!-- end -->",
               lambda match: f"<!-- {match[1]} -->\n{printed_by(match[1])}\n<!-- end -->", old, flags=re.DOTALL)
  if arguments.check:
    sys.exit(0 if new == old else "dev/ladders/README.md: its tables are not what the ladders print now")
  README.write_text(new)


if __name__ == "__main__":
  main()
