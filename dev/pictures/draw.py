#!/usr/bin/env python3
"""Draws the pictures of this repository's pages again, each from its record or from what a program prints: `make pictures`.

    python3 dev/pictures/draw.py            draws all of them in their places; what is missing for one is said in a line
    python3 dev/pictures/draw.py --check    compares those that take seconds with what is there; exit code 1 if one differs

The rows below are the list of pictures. dev/pictures/record.sh makes the records of runs anew.
"""
import argparse
import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LADDER, SCHEDULE = "build/cpu/ladder_matmul", "build/host/schedule"
TRACES = "dev/pictures/traces"
# A picture, and the command to which its file is added
QUICK = {
  "dev/pictures/train.svg": "python3 dev/pictures/terminal.py dev/pictures/train.txt -o",
  "dev/pictures/step.svg": "python3 dev/roofline_plot.py dev/results/2026-11-26-h200-kernels.txt --bars -o",
  "dev/ladders/h200.svg": "python3 dev/ladders/tables.py --plot-times",
  "dev/results/2026-11-26-h200.svg": "python3 dev/roofline_plot.py dev/results/2026-11-26-h200-kernels.txt -o",
  "gpt/timeline.svg": f"python3 dev/timeline.py --recorded {TRACES}/zero.json -o",
  "extensions/tensor_parallel/tensor_parallel.svg": f"python3 dev/timeline.py --recorded {TRACES}/tensor_parallel.json -o",
  "extensions/context_parallel/context_parallel.svg": f"python3 dev/timeline.py --recorded {TRACES}/context_parallel.json -o",
  "extensions/pipeline/pipeline_traces.svg": f"python3 dev/timeline.py --recorded {TRACES}/pipeline.json -o",
  "extensions/pipeline/pipeline_schedules.svg": f"python3 dev/schedule.py --program {SCHEDULE} -o",
}
# Not compared by --check: the ladder counts for half a minute, and a browser of another version draws other letters
SLOW = {
  "dev/ladders/matmul.svg": f"{LADDER} --plot",
  **{f"dev/dashboard/{name}.png": f"python3 test/dashboard/screenshots.py --picture {name} -o" for name in ("light", "dark", "phone")},
}
# Half an hour of training on a quiet machine, and matplotlib
BY_HAND = {"dev/results/2026-11-25-slow-links.svg": "python3 dev/slow_links.py data/tinyshakespeare.txt --plot"}


def missing(command):
  """What this machine lacks for it, as a line that says where it comes from; empty: nothing."""
  for word in command.split():
    if word.startswith("build/") and not (ROOT / word).exists():
      return f"{word} is not built: make DEVICE=cpu {word}"
    if word.startswith(TRACES) and not (ROOT / word).exists():
      return f"{word} is not recorded: dev/pictures/record.sh {Path(word).stem}, on a quiet machine"
  if "screenshots" in command:
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
      return "chromium is not here: apt-get install chromium"
    if not importlib.util.find_spec("plotly"):
      return "plotly is not here: python3 -m pip install plotly"
  return ""


def draw(command, file):
  ran = subprocess.run([*shlex.split(command), str(file)], cwd=ROOT, capture_output=True, text=True)
  if ran.returncode:
    sys.exit(f"error: {command} {file}:\n{ran.stdout}{ran.stderr}")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true", help="change nothing, compare the pictures that are drawn in seconds")
  check = parser.parse_args().check
  differ = []
  with tempfile.TemporaryDirectory() as folder:
    for picture, command in (QUICK if check else QUICK | SLOW).items():
      if lacks := missing(command):
        print(f"{picture} is left out: {lacks}")
        continue
      file = Path(folder) / Path(picture).name
      draw(command, file)
      is_same = file.read_bytes() == (ROOT / picture).read_bytes()
      differ += [] if is_same else [picture]
      if not check:
        shutil.copyfile(file, ROOT / picture)
        print(f"{picture}: {'the same' if is_same else 'drawn anew'}", flush=True)
  if check:
    pictures = {str(file.relative_to(ROOT)) for ending in ("svg", "png") for top in ("dev", "docs", "extensions", "gpt", "runtime")
                for file in (ROOT / top).rglob(f"*.{ending}")}
    unknown = pictures - (QUICK | SLOW | BY_HAND).keys()
    sys.exit("\n".join([f"{picture} is not what its command draws now: make pictures" for picture in differ] +
                       [f"{picture}: no row of dev/pictures/draw.py draws it" for picture in sorted(unknown)]) or 0)
  for picture, command in BY_HAND.items():
    print(f"{picture} is left out: {command} {picture}")


if __name__ == "__main__":
  main()
