#!/usr/bin/env python3
"""Times a training step split over ranks against one rank with as many threads, on the CPU device.

One rank with N threads and N ranks with one thread each (ZeRO stages 0 to 3) train on the same global batch,
one after the other, in several rounds. Printed are the median step of each and its ratio to that of one rank; for
several ranks also the time in communication, and the part of it during which nothing was computed (means over ranks).

Usage: python dev/bench_ranks.py --train FILE [--ranks 2] [--dtype bf16]      (after make cpu)
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "train_gpt"


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("--train", required=True, help="text to train on")
  parser.add_argument("--ranks", type=int, default=2, help="ranks, and threads of the one rank")
  parser.add_argument("--model", default="gpt2")
  parser.add_argument("--vocab", default="50257")
  parser.add_argument("--dtype", default="fp32")
  parser.add_argument("--seq-len", type=int, default=256, help="tokens")
  parser.add_argument("--global-batch", type=int, default=8, help="sequences")
  parser.add_argument("--micro-batch", type=int, help="sequences; default: the global batch / ranks, for one rank too")
  parser.add_argument("--steps", type=int, default=4, help="steps of a run; the first is not counted")
  parser.add_argument("--rounds", type=int, default=3)
  return parser.parse_args()


def train(arguments, folder, launcher, threads, options):
  """The metrics of each step but the first."""
  command = [*launcher, str(PROGRAM), "--train", arguments.train, "--model", arguments.model, "--vocab", arguments.vocab,
             "--dtype", arguments.dtype, "--seq-len", str(arguments.seq_len), "--steps", str(arguments.steps),
             "--global-batch", str(arguments.global_batch), "--micro-batch", str(arguments.micro_batch),
             "--checkpoint-every", "0", "--overwrite", "--out", folder, *options]
  environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  if done.returncode != 0:
    sys.exit(f"{' '.join(command)}\nfailed: {done.stderr.strip()}")
  lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines[1:]]


def main():
  arguments = parse_arguments()
  n = arguments.ranks
  arguments.micro_batch = arguments.micro_batch or max(1, arguments.global_batch // n)
  mpirun = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none",
            "-np", str(n)]
  ways = {f"1 rank, {n} threads": ([], n, [])}
  ways |= {f"{n} ranks, --zero {stage}": (mpirun, 1, ["--zero", str(stage)]) for stage in range(4)}
  measured = {way: [] for way in ways}
  with tempfile.TemporaryDirectory() as folder:
    for _ in range(arguments.rounds):
      for way, (launcher, threads, options) in ways.items():
        measured[way] += train(arguments, folder, launcher, threads, options)
  tokens = arguments.global_batch * arguments.seq_len
  print(f"{arguments.model}, {arguments.dtype}, {tokens:,} tokens per step, micro-batch {arguments.micro_batch}, "
        f"{arguments.rounds} rounds of {arguments.steps - 1} steps")
  median = {way: {key: statistics.median(step.get(key, 0.0) for step in steps)
                  for key in ("step_ms", "comm_ms", "comm_exposed_ms")} for way, steps in measured.items()}
  alone = next(iter(median.values()))["step_ms"]
  for way, ms in median.items():
    print(f"{way:20} {ms['step_ms']:8.0f} ms   ratio {ms['step_ms'] / alone:5.3f}   "
          f"communication {ms['comm_ms']:7.0f} ms, {ms['comm_exposed_ms']:6.0f} exposed")


if __name__ == "__main__":
  main()
