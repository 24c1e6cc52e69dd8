#!/usr/bin/env python3
"""Writes the tables of dev/ladders/README.md, what the program of each ladder prints, after its marker there; and one
ladder's picture, matmul.svg.

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
PICTURE = README.with_name("matmul.svg")


def printed_by(ladder):
  """The line that names dtype and shape, then the table."""
  run = subprocess.run([ROOT / "build/cpu" / ladder], capture_output=True, text=True)
  if run.returncode:
    sys.exit(f"{ladder} failed: make ladders DEVICE=cpu builds it\n{run.stdout}{run.stderr}")
  said, _, _ = run.stdout.rpartition("\n\npicture ")
  title, _, table = said[said.index("\n\n"):].strip().partition("\n\n")
  return f"{title}:\n\n{table}"


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true", help="write nothing")
  arguments = parser.parse_args()
  old = README.read_text()
  new = re.sub(r"<!-- (ladder_\w+) -->\n.*?<!-- end -->",
               lambda match: f"<!-- {match[1]} -->\n{printed_by(match[1])}\n<!-- end -->", old, flags=re.DOTALL)
  picture = (ROOT / "build/cpu/ladder_matmul.svg").read_text()
  if arguments.check:
    same = new == old and picture == PICTURE.read_text()
    sys.exit(0 if same else "dev/ladders/README.md: its tables or matmul.svg are not what the ladders write now")
  README.write_text(new)
  PICTURE.write_text(picture)


if __name__ == "__main__":
  main()
