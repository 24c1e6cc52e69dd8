#!/usr/bin/env python3
"""The planner's forecasts for the CPU device beside the clock: twelve runs, by what dev/ceilings alone has measured.

dev/ceilings measures this machine before each four runs, and after the last. A run's forecast is the mean of the two that
`train_gpt --plan --json --ceilings FILE` makes with the measurements before and after it; its time is the median of the
steps after the first. How far the measurements are apart says how steady the machine was: on one that others use, too,
all of this says little.

Ranks start as dev/cluster/mpirun.sh starts them, and share the cores. Kendall's tau compares the order of meshes: of pairs
of runs with the same model and batch, whose times are more than a tenth apart, those that the forecast has in the same
order less those that it has in the other, divided by all.

Usage: make DEVICE=cpu build/cpu/train_gpt build/cpu/ceilings && python dev/cpu_forecasts.py
"""
import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS_A_ROUND = 4
MESHES = "--model d4 --global-batch 8"  # of these runs the order is compared
# (ranks, options)
RUNS = [(1, f"{MESHES} --micro-batch 4"),
        (2, f"{MESHES} --micro-batch 4"),
        (2, f"{MESHES} --micro-batch 2 --zero 1"),
        (2, f"{MESHES} --micro-batch 2 --zero 3 --recompute block"),
        (2, f"{MESHES} --micro-batch 4 --tp 2"),
        (2, f"{MESHES} --micro-batch 4 --cp 2"),
        (2, f"{MESHES} --micro-batch 2 --pp 2"),
        (2, f"{MESHES} --micro-batch 4 --pp 2 --pp-schedule gpipe"),
        (1, "--model gpt2 --vocab 50257 --seq-len 64 --micro-batch 4"),
        (2, "--model gpt2 --vocab 50257 --seq-len 64 --micro-batch 4 --dtype bf16 --zero 1"),
        (1, "--layers 4 --heads 8 --channels 512 --vocab 8192 --seq-len 128 --dtype bf16"),
        (1, "--layers 6 --heads 6 --channels 384 --seq-len 512 --micro-batch 2 --dtype fp16 --recompute gelu")]


def options_of(text):
  return ["--train", str(ROOT / "README.md"), *text.split()]


def output_of(command):
  environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
  done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                        timeout=300, env=environment)
  if done.returncode != 0:
    sys.exit(f"error: {' '.join(map(str, command))}: {(done.stdout.splitlines() or ['it printed nothing'])[-1]}")
  return done.stdout


def measure_ceilings(build, path):
  path.write_text(output_of([build / "ceilings"]))
  return path


def forecast_ms(build, ranks, options, ceilings):
  plan = output_of([build / "train_gpt", "--plan", "--json", "--ranks", ranks, "--ceilings", ceilings, *options])
  return json.loads(plan)["step_ms"]


def measured_ms(build, ranks, options, steps):
  start = ["env", f"GPT_PROGRAM={build / 'train_gpt'}", ROOT / "dev/cluster/mpirun.sh", ranks]
  printed = output_of([*(start if ranks > 1 else [build / "train_gpt"]), *options, "--out", "", "--steps", steps])
  return statistics.median([float(ms) for ms in re.findall(r"^step .* ([\d.]+) ms \|", printed, re.MULTILINE)][1:])


def kendalls_tau(times):
  """times: (measured, forecast) of each mesh. Returns tau, and of how many pairs."""
  pairs = [(a, b) for a, b in itertools.combinations(sorted(times), 2) if b[0] > 1.1 * a[0]]
  same = sum(1 if a[1] < b[1] else -1 for a, b in pairs)
  return (same / len(pairs) if pairs else float("nan")), len(pairs)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--build", type=Path, default=ROOT / "build/cpu", help="where train_gpt and ceilings are")
  parser.add_argument("--steps", type=int, default=8, help="of a run; the first is left out")
  a = parser.parse_args()
  build = a.build.resolve()
  files, rows = [], []
  with tempfile.TemporaryDirectory() as folder:
    measure = lambda: files.append(measure_ceilings(build, Path(folder) / f"{len(files)}.json"))
    for i, (ranks, text) in enumerate(RUNS):
      if i % RUNS_A_ROUND == 0:
        measure()
      print(f"run {i + 1} of {len(RUNS)}: {text}", file=sys.stderr)
      rows.append((ranks, text, measured_ms(build, ranks, options_of(text), a.steps)))
    measure()
    for i, (ranks, text, ms) in enumerate(rows):
      before = i // RUNS_A_ROUND
      rows[i] += tuple(forecast_ms(build, ranks, options_of(text), file) for file in files[before:before + 2])
    print(*(file.read_text() for file in files), sep="")

  print("| ranks | options | step, ms | forecast, ms | error | by the ceilings before, after |\n|--:|---|--:|--:|--:|--:|")
  errors, meshes = [], []
  for ranks, text, ms, *forecasts in rows:
    mean = statistics.mean(forecasts)
    errors.append(abs(mean / ms - 1))
    if text.startswith(MESHES):
      meshes.append((ms, mean))
    print(f"| {ranks} | `{text}` | {ms:.0f} | {mean:.0f} | {100 * (mean / ms - 1):+.0f} % | "
          f"{', '.join(f'{forecast:.0f}' for forecast in forecasts)} |")
  tau, pairs = kendalls_tau(meshes)
  print(f"\nThe errors' median is {100 * statistics.median(errors):.0f} %, the largest {100 * max(errors):.0f} %. "
        f"Kendall's tau of {len(meshes)} meshes is {tau:.2f}, over the {pairs} pairs that are more than 10 % apart.")


if __name__ == "__main__":
  main()
