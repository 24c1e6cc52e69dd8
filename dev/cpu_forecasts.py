#!/usr/bin/env python3
"""The planner's forecasts for the CPU device and measured times: twelve runs, forecast from dev/ceilings alone.

Other programs, and other virtual machines, take parts of a machine for seconds or minutes. So everything is measured in
several rounds, with dev/ceilings before each round and after the last. The least disturbed measurements count: the
highest value of each rate, and the fastest step of each run (without the first step after a start). The medians of all
steps are printed beside them.

Ranks start as dev/cluster/mpirun.sh starts them, and share the cores. Kendall's tau compares the order of meshes. It
looks at the pairs of runs that have the same model and batch, and whose times differ by more than a tenth: the number
of pairs that the forecast puts in the right order, less the number in the wrong order, divided by the number of pairs.

Usage: make DEVICE=cpu build/cpu/train_gpt build/cpu/ceilings && python3 dev/cpu_forecasts.py

--calibrate: instead, `train_gpt --calibrate` measures one small model before each of eight other runs, which are forecast
by its file. Medians count: of all steps of a run, beside the median of the rounds' forecasts. "before" is the forecast
by the same file without the speeds that the steps had: by the ceilings that it measured and the built-in rates.

Usage: make DEVICE=cpu build/cpu/train_gpt && python3 dev/cpu_forecasts.py --calibrate
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

CALIBRATED = "--layers 6 --heads 2 --channels 128 --seq-len 128 --micro-batch 8"  # the model of `make train`
# (ranks, options), chosen before any of them was measured
UNSEEN = [(1, "--layers 5 --heads 5 --channels 320 --seq-len 192 --micro-batch 3"),
          (1, "--layers 3 --heads 8 --channels 512 --seq-len 256 --micro-batch 2"),
          (1, "--layers 2 --heads 10 --channels 640 --seq-len 96 --micro-batch 8"),
          (1, "--layers 10 --heads 3 --channels 192 --seq-len 256 --micro-batch 2"),
          (1, "--layers 4 --heads 4 --channels 256 --seq-len 512 --micro-batch 1 --global-batch 4"),
          (1, "--layers 6 --heads 6 --channels 384 --seq-len 128 --micro-batch 4 --recompute block"),
          (1, "--layers 4 --heads 8 --channels 256 --seq-len 128 --micro-batch 8"),
          (2, "--layers 4 --heads 4 --channels 256 --seq-len 256 --micro-batch 4 --global-batch 8 --zero 1")]


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


def forecast_ms(build, ranks, options, *rates):
  """rates: --ceilings or --cluster, and its file"""
  plan = output_of([build / "train_gpt", "--plan", "--json", "--ranks", ranks, *rates, *options])
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


def compare_calibrated(build, rounds, steps):
  """Calibrates and trains in turns, and prints the table."""
  measured, before, after = ([[] for _ in UNSEEN] for _ in range(3))
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "calibrated.json"
    for number in range(rounds):
      print(f"round {number + 1} of {rounds}", file=sys.stderr)
      for (ranks, text), own, *forecasts in zip(UNSEEN, measured, before, after):
        output_of([build / "train_gpt", *options_of(CALIBRATED), "--calibrate", path, "--overwrite"])
        own += measured_ms(build, ranks, options_of(text), steps)[1:]
        device = (calibrated := json.loads(path.read_text()))["device"]
        for times, speeds in zip(forecasts, (dict.fromkeys(device["measured"], 1), device["measured"])):
          path.write_text(json.dumps({**calibrated, "device": {**device, "measured": speeds}}))
          times.append(forecast_ms(build, ranks, [*options_of(text), "--dtype", "fp32"], "--cluster", path))
  print("| ranks | options | median step, ms | forecast before | error | forecast after | error |\n|--:|---|--:|--:|--:|--:|--:|")
  errors = [[], []]
  for (ranks, text), *columns in zip(UNSEEN, measured, before, after):
    step, *forecasts = map(statistics.median, columns)
    for own, forecast in zip(errors, forecasts):
      own.append(abs(forecast / step - 1))
    row = " | ".join(f"{forecast:.1f} | {100 * (forecast / step - 1):+.0f} %" for forecast in forecasts)
    print(f"| {ranks} | `{text}` | {step:.1f} | {row} |")
  print("\n" + " ".join(f"{when} the errors' median is {100 * statistics.median(own):.1f} %, the largest {100 * max(own):.0f} %."
                        for when, own in zip(("Before,", "After,"), errors)))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--build", type=Path, default=ROOT / "build/cpu", help="where train_gpt and ceilings are")
  parser.add_argument("--steps", type=int, default=8, help="of a start of a run; the first (with --calibrate: two) is left out")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--calibrate", action="store_true", help="compare forecasts of a calibrated cluster instead")
  a = parser.parse_args()
  build = a.build.resolve()
  if a.calibrate:
    return compare_calibrated(build, a.rounds, a.steps)
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
    forecasts = [forecast_ms(build, ranks, options_of(text), "--ceilings", file.name) for ranks, text in RUNS]

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
