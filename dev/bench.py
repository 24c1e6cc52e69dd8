#!/usr/bin/env python3
"""Times training steps of train_gpt; `make bench` runs this.

First the device's ceilings are measured (dev/ceilings.cu). Then each model trains twice on the same tokens: once
undisturbed, for milliseconds, tokens/s, MFU and, on a GPU, power; once with --profile, for the table per kernel with
its share of the ceiling. Every figure is the median (smallest to largest) of the steps after the warm-up. At the end the
tables are drawn as one picture, build/DEVICE/roofline.svg (dev/roofline_plot.py).

Tokens are random, by Zipf's law: a few are frequent and most are rare, as in text. Half of them are determined by the
token before, so that there is something to learn.

Usage: make bench                                        or, for other cases,
       python3 dev/bench.py --build build/gpu --model gpt2 --micro-batch 32 -- --recompute gelu
"""
import argparse
import array
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import roofline_plot
import svg
from bench_log import read_kernels

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 50257
# (model, dtype, micro-batch, sequence length)
CASES = {"gpu": [("gpt2", "bf16", 64, 1024), ("gpt2-xl", "bf16", 16, 1024)],
         "cpu": [("gpt2", "fp32", 4, 64), ("gpt2", "bf16", 4, 64)]}


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("--build", type=Path, required=True, help="build/gpu or build/cpu: where train_gpt is")
  parser.add_argument("--model", help="one model alone, instead of the usual cases")
  parser.add_argument("--dtype", help="with --model; default: the first usual case's")
  parser.add_argument("--micro-batch", type=int, help="with --model; default: the first usual case's")
  parser.add_argument("--seq-len", type=int, help="with --model; default: the first usual case's")
  parser.add_argument("--steps", type=int, default=20, help="timed steps")
  parser.add_argument("--warmup", type=int, default=5, help="steps before them")
  parser.add_argument("--picture", type=Path, metavar="FILE", help="the roofline, an SVG; default: BUILD/roofline.svg")
  parser.add_argument("options", nargs="*", help="after --: further options of train_gpt")
  arguments = parser.parse_args()
  if arguments.steps < 1 or arguments.warmup < 0:
    parser.error(f"--steps {arguments.steps} --warmup {arguments.warmup}: at least 1 and 0 are needed")
  arguments.picture = arguments.picture or arguments.build / "roofline.svg"
  if not arguments.picture.parent.is_dir():
    parser.error(f"--picture {arguments.picture}: there is no such folder: create it")
  return arguments


def cases_of(arguments):
  usual = CASES["cpu" if arguments.build.name.startswith("cpu") else "gpu"]
  if not arguments.model:
    return usual
  _, *rest = usual[0]
  given = arguments.dtype, arguments.micro_batch, arguments.seq_len
  return [(arguments.model, *(value or usual_value for value, usual_value in zip(given, rest)))]


# ---- data

def draw_tokens(count, vocabulary, seed=1):
  """Zipf's law; every second token, on average, is a fixed function of the one before."""
  generator = random.Random(seed)
  weights = list(itertools.accumulate(1 / (rank + 2.7) for rank in range(vocabulary)))
  drawn = generator.choices(range(vocabulary), cum_weights=weights, k=count)
  tokens, last = array.array("H"), 0
  for token in drawn:
    last = (7919 * last + 13) % vocabulary if generator.random() < 0.5 else token
    tokens.append(last)
  return tokens


def write_shard(path, tokens):
  """The format of data/README.md."""
  header = array.array("i", [20240520, 1, len(tokens)] + 253 * [0])
  Path(path).write_bytes(header.tobytes() + tokens.tobytes())


# ---- running train_gpt

class Failed(Exception):
  """A run of train_gpt ended too early; holds the last lines that it printed."""


def gpu_power():
  """Starts nvidia-smi, which writes the power in watts every 100 ms; None where it is missing."""
  if not shutil.which("nvidia-smi"):
    return None
  gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
  command = ["nvidia-smi", "-i", gpu, "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-lms", "100"]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def take_watts(sampler):
  if sampler is None:
    return []
  sampler.kill()
  lines = sampler.communicate()[0].splitlines()
  return [float(line) for line in lines if line.strip().replace(".", "", 1).isdigit()]


def read_steps(metrics_file):
  """The steps that are complete so far; the last line may be incomplete."""
  lines = metrics_file.read_text().split("\n")[:-1] if metrics_file.exists() else []
  return [step for step in map(json.loads, lines) if "step_ms" in step]  # not evaluations, texts, incidents


def train(program, options, warmup, steps, folder, timeout=600):
  """Runs `warmup + steps` steps. Returns their metrics, the program's output, and watts during the last `steps`.

  The run has no end, and is killed when it has done enough steps: the last step of a run that ends would write a
  checkpoint, of 19 GB for gpt2-xl."""
  out, log = Path(folder) / "run", Path(folder) / "log"
  shutil.rmtree(out, ignore_errors=True)
  command = [str(program), *options, "--steps", "1000000", "--out", str(out)]
  deadline, sampler, done, ended = time.monotonic() + timeout, None, [], False
  with open(log, "w") as file:
    run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
      while len(done) < warmup + steps and not ended and time.monotonic() < deadline:
        ended = run.poll() is not None
        time.sleep(0.02)
        done = read_steps(out / "metrics.jsonl")
        if sampler is None and len(done) >= warmup:
          sampler = gpu_power()
    finally:
      run.kill()
      run.wait()
      watts = take_watts(sampler)
  printed = log.read_text()
  if len(done) < warmup + steps:
    said = (printed.strip().splitlines() or ["nothing was printed"])[-1]
    when = "it ended" if ended else f"{timeout} s were over"
    raise Failed(f"{' '.join(command)}: {len(done)} of {warmup + steps} steps when {when}: {said}")
  return done[:warmup + steps], printed, watts


def profile(program, options, ceilings, steps):
  """The table per kernel."""
  command = [str(program), *options, "--steps", str(steps), "--log-every", str(steps), "--out", "", "--profile",
             "--ceilings", str(ceilings)]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise Failed(f"{' '.join(command)}: {done.stderr.strip()}")
  return done.stdout[done.stdout.index("kernel  "):]


# ---- reporting

def spread(values, form):
  return f"{form(statistics.median(values))} ({form(min(values))} to {form(max(values))})"


def print_result(case, timed, printed, watts, warmup):
  model, dtype, micro_batch, seq_len = case
  lines = {line.split(" ", 1)[0]: line for line in printed.splitlines() if line}
  print(f"\n{model}, {dtype}, B={micro_batch}, T={seq_len}: median (smallest to largest) of {len(timed)} steps after",
        warmup)
  print("step     ", spread([step["step_ms"] for step in timed], "{:,.2f}".format), "ms")
  print("speed    ", spread([step["tokens_per_s"] for step in timed], "{:,.0f}".format), "tokens/s")
  print("rate     ", spread([step["flops_per_s"] / 1e12 for step in timed], "{:.3g}".format), "TFLOP/s")
  if timed[0]["mfu"] is not None:
    print("MFU      ", spread([100 * step["mfu"] for step in timed], "{:.1f}".format), "%")
  for name in "work", "memory", "device":
    print(lines.get(name, f"{name:9} not printed by train_gpt"))
  if "attention" in lines:  # not where no library is compiled in
    print(lines["attention"])
  if watts:
    print("power    ", spread(watts, "{:.0f}".format), f"W, {len(watts)} samples")


def bench(case, arguments, ceilings, folder):
  """Returns the values that dev/bench_log.py would read from the printed text."""
  model, dtype, micro_batch, seq_len = case
  program = arguments.build / "train_gpt"
  options = ["--train", str(Path(folder) / "tokens.bin"), "--model", model, "--dtype", dtype,
             "--micro-batch", str(micro_batch), "--seq-len", str(seq_len), "--schedule", "constant", *arguments.options]
  done, printed, watts = train(program, options, arguments.warmup, arguments.steps, folder)
  print_result(case, done[arguments.warmup:], printed, watts, arguments.warmup)
  print("options  ", " ".join(options[2:]), "\n")
  table = profile(program, options, ceilings, 8)
  print(table, end="", flush=True)
  step = statistics.median(step["step_ms"] for step in done[arguments.warmup:])
  return {"case": case, "step": step, "kernels": read_kernels(table)}


def main():
  arguments = parse_arguments()
  for program in "train_gpt", "ceilings":
    if not (arguments.build / program).exists():
      sys.exit(f"error: {arguments.build / program} is not there: build it with make bench")
  failures, done = 0, []
  with tempfile.TemporaryDirectory() as folder:
    ceilings = Path(folder) / "ceilings.json"
    measured = subprocess.run([arguments.build.resolve() / "ceilings"], capture_output=True, text=True)
    if measured.returncode != 0:
      sys.exit(f"error: {measured.stderr.strip()}")
    ceilings.write_text(measured.stdout)
    print("ceilings ", measured.stdout, end="", flush=True)
    write_shard(Path(folder) / "tokens.bin", draw_tokens(1 << 21, VOCABULARY))
    for case in cases_of(arguments):
      try:
        done.append(bench(case, arguments, ceilings, folder))
      except Failed as error:
        failures += 1
        print(f"error: {error}", file=sys.stderr)
  if done:
    svg.write("--picture", arguments.picture, roofline_plot.draw(json.loads(measured.stdout), done))
    print(f"\npicture   {arguments.picture}")
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  main()
