#!/usr/bin/env python3
"""Weak and strong scaling of train_gpt over ranks: time of a step, efficiency, communication by rank, the forecast.

Strong: all ranks together do the same global batch; efficiency is T(1) / (N · T(N)). Weak: N ranks do N times as much;
efficiency is T(1) / T(N). T(1) is one rank alone, with as many threads as each of the N has. On one machine without a
GPU there is also the ratio: T(N) divided by the time in which one rank does the same step with the threads of all N, or
one for each core if cores are fewer. That is the cost of splitting; efficiency falls by itself where cores run out.

Communication is taken from metrics.jsonl (runtime/reports/report.h): time in collectives, waiting for other ranks included,
and the part of it that is exposed, in which the device only waited. A rank computes during the rest of the step. The program
times collectives in steps 1 to 10 and in every tenth after: medians are over such steps.

A mode is made of dp, zero 0 to 3, tp, cp, cp ulysses, pp, pp zb and the like. tp, cp and pp take all ranks, or as many
as a number after them says: "tp 2 zero 1" leaves the rest to data parallelism. Ranks start by srun in a Slurm job, by
dev/cluster/torchrun.sh on GPUs, else (and with HOSTS) by mpirun.sh. A rank has OMP_NUM_THREADS threads.

Usage: python3 dev/scaling.py --build build/cpu --ranks 2,4 --strong -- --model d4
"""
import argparse
import dataclasses
import json
import math
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import bench

CORES = len(os.sched_getaffinity(0))
KINDS = {"tp": ("", ()), "cp": ("--cp-method", ("ring", "ulysses")),
         "pp": ("--pp-schedule", ("gpipe", "1f1b", "interleaved", "zb"))}


@dataclasses.dataclass
class Run:
  scaling: str  # weak or strong
  mode: str
  ranks: int
  threads: int  # of a rank
  options: list
  steps: list = dataclasses.field(default_factory=list)  # lines of metrics.jsonl
  error: str = ""


# ---- arguments

def fail(message):
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


def options_of(mode, ranks):
  options, words = [], mode.split() or [""]
  while words:
    name = words.pop(0)
    if name == "zero" and words and words[0] in ("0", "1", "2", "3"):
      options += ["--zero", words.pop(0)]
    elif name in KINDS:
      options += [f"--{name}", words.pop(0) if words and words[0].isdigit() else str(ranks)]
      option, values = KINDS[name]
      options += [option, words.pop(0)] if words and words[0] in values else []
    elif name != "dp":
      fail(f"--modes '{mode}' is not made of dp, zero 0 to 3, tp, cp, cp ulysses, pp, pp zb and the like")
  return options


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.error = fail
  parser.add_argument("--build", type=Path, required=True, help="build/gpu or build/cpu: where train_gpt is")
  parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks; one rank is always measured")
  parser.add_argument("--modes", default="dp, zero 3, tp, cp, pp", help="what ranks do; see the top of this file")
  parser.add_argument("--weak", action="store_true", help="without either: both")
  parser.add_argument("--strong", action="store_true", help="without either: both")
  parser.add_argument("--global-batch", type=int, default=8, help="samples a step: strong of all ranks, weak of each")
  parser.add_argument("--steps", type=int, default=5, help="timed steps of a run")
  parser.add_argument("--warmup", type=int, default=2, help="steps before them")
  parser.add_argument("--rounds", type=int, default=1, help="in each of them every run takes its turn")
  parser.add_argument("--ceilings", type=Path, help="what dev/ceilings.cu measured, with all cores, for the forecast")
  parser.add_argument("--folder", type=Path, help="for data and runs; several hosts must share its disk")
  parser.add_argument("--json", type=Path, help="file to write")
  parser.add_argument("--plot", type=Path, help="picture to write")
  parser.add_argument("options", nargs="*", help="after --: options of train_gpt, for all runs")
  a = parser.parse_args()
  if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", a.ranks):
    fail(f"--ranks '{a.ranks}' is not like 1,2,4,8")
  a.ranks = sorted({int(n) for n in a.ranks.split(",")})
  a.modes = [mode.strip() for mode in a.modes.split(",")]
  if min(a.steps, a.rounds, a.global_batch, a.warmup + 1) < 1:
    fail("--steps, --rounds and --global-batch must be at least 1, --warmup at least 0")
  a.program, a.on_gpu = (a.build / "train_gpt").resolve(), not a.build.name.startswith("cpu")
  a.one_host = not {"SLURM_JOB_ID", "HOSTS"} & os.environ.keys()
  for path in (a.program, a.ceilings, a.folder, *(file and file.resolve().parent for file in (a.json, a.plot))):
    if path and not path.exists():
      fail(f"{path} is not there")
  threads = os.environ.get("OMP_NUM_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK") or str(CORES // a.ranks[-1])
  a.threads = max(1, int(threads)) if threads.isdigit() else fail(f"OMP_NUM_THREADS '{threads}' is not a number")
  return a


def train_options(a, folder):
  """Options of all runs: the options that were given, bench.py's first case for the others, and data."""
  model, dtype, _, seq_len = bench.CASES["gpu" if a.on_gpu else "cpu"][0]
  usual = {"model": model, "dtype": dtype, "seq-len": seq_len, "vocab": bench.VOCABULARY, "schedule": "constant",
           "micro-batch": max(1, a.global_batch // a.ranks[-1])}
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.error = fail
  for name, value in usual.items():
    parser.add_argument(f"--{name}", type=type(value), default=value, dest=name)
  parser.add_argument("--train", nargs="+")
  known, others = parser.parse_known_args(a.options)
  if not known.train:
    known.train = [str(folder / "tokens.bin")]
    if not 1 <= known.vocab <= 1 << 16 or vars(known)["seq-len"] < 1:
      fail("--vocab must be from 1 to 65536, --seq-len at least 1")
    count = (a.warmup + a.steps) * a.global_batch * a.ranks[-1] * vars(known)["seq-len"] + 1
    bench.write_shard(known.train[0], bench.draw_tokens(min(count, 1 << 21), known.vocab))
  return ["--train", *known.train, *(f"--{name}={vars(known)[name]}" for name in usual), *others]


def planned_runs(a):
  """T(1), then for each number of ranks one rank with all threads, and the modes."""
  for scaling in [kind for kind in ("weak", "strong") if getattr(a, kind)] or ("weak", "strong"):
    yield Run(scaling, "alone", 1, a.threads, ["--global-batch", str(a.global_batch)])
    for n in [n for n in a.ranks if n > 1]:
      batch = ["--global-batch", str(a.global_batch * (n if scaling == "weak" else 1))]
      if a.one_host and not a.on_gpu:
        yield Run(scaling, f"alone, work of {n}", 1, max(a.threads, min(n * a.threads, CORES)), batch)
      for mode in a.modes:
        yield Run(scaling, mode, n, a.threads, batch + options_of(mode, n))


# ---- running train_gpt

def start_of(a, run):
  if "SLURM_JOB_ID" in os.environ:
    a_host = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return ["srun", *([f"--nodes={math.ceil(run.ranks / int(a_host))}"] if a_host.isdigit() else []),
            f"--ntasks={run.ranks}", "--mpi=" + os.environ.get("GPT_SRUN_MPI", "pmix"),
            f"--cpus-per-task={run.threads}", "--kill-on-bad-exit=1", "--wait=30", str(a.program)]
  script = "torchrun.sh" if a.on_gpu and a.one_host else "mpirun.sh"
  return [str(bench.ROOT / "dev/cluster" / script), str(run.ranks)]


def execute(a, run, options, out, seconds=600):
  """Adds the timed steps to the run, or sets its error."""
  command = ["timeout", "--foreground", str(seconds), *start_of(a, run), *options, "--overwrite", "--out", str(out),
             "--steps", str(a.warmup + a.steps)]  # launchers pass SIGTERM on to the ranks
  environment = {**os.environ, "GPT_PROGRAM": str(a.program), "GPT_JOB_TOKEN": secrets.token_hex(16),
                 "OMP_NUM_THREADS": str(run.threads)}
  (out / "metrics.jsonl").unlink(missing_ok=True)
  done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  run.steps += [step for step in bench.read_steps(out / "metrics.jsonl") if "step_ms" in step][a.warmup:]
  if done.returncode != 0 or not run.steps:  # launchers print more after the program's own line
    lines = [line for line in done.stdout.splitlines() if line.strip("- ")] or ["it printed nothing"]
    run.error = next((line for line in lines if re.match(r"(train_gpt|\w+\.sh|srun): ", line)), lines[-1])
  if done.returncode == 124:
    run.error = f"not done after {seconds} s"


def forecast(a, run, options):
  """Milliseconds, or None where the planner knows no rates."""
  command = [a.program, *options, "--plan", "--json", "--ranks", str(run.ranks),
             *(["--ceilings", a.ceilings] if a.ceilings else [])]
  try:
    return json.loads(subprocess.run(command, capture_output=True, timeout=60).stdout).get("step_ms")
  except (ValueError, subprocess.TimeoutExpired):
    return None


# ---- reporting

def result_of(run, alone, together, forecast_ms):
  """A run's entry in --json. alone, together: T(1) of efficiency and of the ratio, None if not measured."""
  ms = statistics.median(step["step_ms"] for step in run.steps) if run.steps and not run.error else None
  result = {"scaling": run.scaling, "mode": run.mode, "ranks": run.ranks, "threads": run.threads,
            "options": run.options, "error": run.error or None, "step_ms": ms, "forecast_ms": forecast_ms}
  if run.ranks == 1 or ms is None:
    return result
  traffic = list(zip(*(step["ranks"] for step in run.steps if "ranks" in step)))  # by rank, then by step
  timed = [[step for step in rank if "comm_ms" in step] for rank in traffic]
  comm, exposed = ([statistics.median(step[key] for step in rank) for rank in timed if rank]
                   for key in ("comm_ms", "comm_exposed_ms"))
  work = run.ranks if run.scaling == "strong" else 1
  return result | {"efficiency": alone and alone / (work * ms), "ratio": together and ms / together,
                   "comm_ms": comm, "comm_per_compute": [c / max(ms - e, 1e-9) for c, e in zip(comm, exposed)],
                   "exposed_share": [e / ms for e in exposed],
                   "bytes_by_group": [rank[-1]["comm_bytes_by_group"] for rank in traffic]}


def print_table(results):
  """Markdown; columns in which nothing would be are left out."""
  each = lambda values, form: ", ".join(form.format(value) for value in values)
  columns = {
      "mode": lambda r: r["mode"], "ranks": lambda r: str(r["ranks"]), "threads each": lambda r: str(r["threads"]),
      "step, ms": lambda r: f"{r['step_ms']:,.1f}" if r["step_ms"] else r["error"].replace("|", "/"),
      "efficiency": lambda r: f"{r['efficiency']:.0%}" if r.get("efficiency") else "",
      "ratio": lambda r: f"{r['ratio']:.2f}" if r.get("ratio") else "",
      "communication / computation, by rank": lambda r: each(r.get("comm_per_compute", []), "{:.2f}"),
      "exposed, by rank": lambda r: each(r.get("exposed_share", []), "{:.0%}"),
      "sent, MB": lambda r: each([sum(sum(group.values()) for group in rank.values()) / 1e6
                                  for rank in r.get("bytes_by_group", [])], "{:,.1f}"),
      "forecast, ms": lambda r: f"{r['forecast_ms']:,.1f}" if r["forecast_ms"] else ""}
  rows = [[cell(r) for cell in columns.values()] for r in results]
  shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
  for line in [list(columns), ["---"] * len(columns), *rows]:
    print("| " + " | ".join(line[i] for i in shown) + " |")


def main():
  a = parse_arguments()
  if a.plot:
    import scaling_plot  # needs matplotlib
  runs = list(planned_runs(a))
  with tempfile.TemporaryDirectory(dir=a.folder) as folder:
    options = train_options(a, Path(folder))
    for turn in range(a.rounds * len(runs)):
      run = runs[turn % len(runs)]
      print(f"{turn + 1} of {a.rounds * len(runs)}: {run.scaling}, {run.ranks} ranks, {run.mode}", file=sys.stderr)
      if not run.error:
        execute(a, run, options + run.options, Path(folder) / "run")
    results, alone, together = [], None, None
    for run in runs:
      fills = a.on_gpu or run.ranks * run.threads >= CORES  # --ceilings have the rates of all cores
      results.append(result_of(run, alone, together, forecast(a, run, options + run.options) if fills else None))
      if run.mode == "alone":
        alone, together = results[-1]["step_ms"], None
      elif run.ranks == 1:
        together = results[-1]["step_ms"]
  print(" ".join(options[2:]), f"\n{CORES} cores; medians of {a.rounds} x {a.steps} steps after {a.warmup} of a run")
  for scaling in dict.fromkeys(run.scaling for run in runs):
    print(f"\n{scaling} scaling: {a.global_batch} samples a step", "a rank\n" if scaling == "weak" else "in all\n")
    print_table([result for result in results if result["scaling"] == scaling])
  try:
    if a.json:
      a.json.write_text(json.dumps({"options": options, "cores": CORES, "runs": results}, indent=1) + "\n")
    if a.plot:
      scaling_plot.draw(results, a.plot)
  except (OSError, ValueError) as error:
    fail(error)
  sys.exit(0 if any(run.steps for run in runs) else 1)


if __name__ == "__main__":
  main()
