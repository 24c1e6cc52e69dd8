#!/usr/bin/env python3
"""The planner's forecasts for the CPU device beside the clock: twelve runs, by what dev/ceilings alone has measured.

Other programs, and other virtual machines, take parts of a machine for seconds or minutes. So everything is measured in
several rounds, with dev/ceilings before each round and after the last. The least disturbed measurements count: the
highest value of each rate, and the fastest step of each run (without the first step after a start). The medians of all
steps are printed beside them.

Ranks start as dev/cluster/mpirun.sh starts them, and share the cores. Kendall's tau compares the order of meshes. It
looks at the pairs of runs that have the same model and batch, and whose times differ by more than a tenth: the number
of pairs that the forecast puts in the right order, less the number in the wrong order, divided by the number of pairs.

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
MESHES = "--model d4 --global-batch 8"  # the order of these runs is compared
TIMES = {"launch_s", "norm_row_s", "loss_row_s"}  # times that dev/ceilings prints; all else are rates, or do not change
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


def best_of(measurements):
  """The highest of each rate (per second), the least of each time."""
  first = measurements[0]
  if isinstance(first, dict):
    return {key: best_of([m[key] for m in measurements]) if key not in TIMES else least_of([m[key] for m in measurements])
            for key in first}
  return max(measurements)


def least_of(measurements):
  first = measurements[0]
  return {key: min(m[key] for m in measurements) for key in first} if isinstance(first, dict) else min(measurements)


def forecast_ms(build, ranks, options, ceilings):
  plan = output_of([build / "train_gpt", "--plan", "--json", "--ranks", ranks, "--ceilings", ceilings, *options])
  return json.loads(plan)["step_ms"]


def measured_ms(build, ranks, options, steps):
  """Milliseconds of each step but the first."""
  start = ["env", f"GPT_PROGRAM={build / 'train_gpt'}", ROOT / "dev/cluster/mpirun.sh", ranks]
  printed = output_of([*(start if ranks > 1 else [build / "train_gpt"]), *options, "--out", "", "--steps", steps])
  return [float(ms) for ms in re.findall(r"^step .* ([\d.]+) ms \|", printed, re.MULTILINE)][1:]


def kendalls_tau(times):
  """times: (measured, forecast) of each mesh. Returns tau, and of how many pairs."""
  pairs = [(a, b) for a, b in itertools.combinations(sorted(times), 2) if b[0] > 1.1 * a[0]]
  same = sum(1 if a[1] < b[1] else -1 for a, b in pairs)
  return (same / len(pairs) if pairs else float("nan")), len(pairs)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--build", type=Path, default=ROOT / "build/cpu", help="where train_gpt and ceilings are")
  parser.add_argument("--steps", type=int, default=8, help="of a start of a run; the first is left out")
  parser.add_argument("--rounds", type=int, default=3)
  a = parser.parse_args()
  build = a.build.resolve()
  measure = lambda: ceilings.append(json.loads(output_of([build / "ceilings"])))
  ceilings, steps = [], [[] for _ in RUNS]
  for number in range(a.rounds):
    print(f"round {number + 1} of {a.rounds}", file=sys.stderr)
    measure()
    for (ranks, text), own in zip(RUNS, steps):
      own += measured_ms(build, ranks, options_of(text), a.steps)
  measure()
  with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    file.write(json.dumps(best_of(ceilings)))
    file.flush()
    forecasts = [forecast_ms(build, ranks, options_of(text), file.name) for ranks, text in RUNS]

  print("Ceilings: " + json.dumps(best_of(ceilings)) + "\n")
  print("| ranks | options | fastest step, ms | forecast, ms | error | median step, ms |\n|--:|---|--:|--:|--:|--:|")
  errors, meshes = [], []
  for (ranks, text), own, forecast in zip(RUNS, steps, forecasts):
    error = forecast / min(own) - 1
    errors.append(abs(error))
    if text.startswith(MESHES):
      meshes.append((min(own), forecast))
    print(f"| {ranks} | `{text}` | {min(own):.0f} | {forecast:.0f} | {100 * error:+.0f} % | {statistics.median(own):.0f} |")
  tau, pairs = kendalls_tau(meshes)
  print(f"\nThe errors' median is {100 * statistics.median(errors):.0f} %, the largest {100 * max(errors):.0f} %. "
        f"Kendall's tau of {len(meshes)} meshes is {tau:.2f}, over the {pairs} pairs that are more than 10 % apart.")


if __name__ == "__main__":
  main()
