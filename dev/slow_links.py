#!/usr/bin/env python3
"""Trains the same small model in all ways that send less, and compares them: loss by step, by byte and by hour.

    python3 dev/slow_links.py TEXT [--program ./train_gpt] [--out runs/slow_links] [--plot slow_links.svg]
    python3 dev/slow_links.py TEXT --best [--program ./train_gpt] [--out runs/slow_links]
    python3 dev/slow_links.py --plan [--program ./train_gpt]

Each way is trained with three seeds on four ranks of this machine, on the first nine tenths of the text, and validated on
the last. A run that is there is not made again. Losses and bytes are measured. Hours are computed from them, for links
that this machine does not have:

    seconds of a step = compute + bytes that a rank sends / bandwidth         where training waits for messages
    seconds of a step = max(compute, bytes that a rank sends / bandwidth)     with --delay 1, where a step hides it

With --outer-delay N of H steps, communication overlaps N/H of a step's computing, and training waits for the rest.

All ways have one learning rate there. Some bear a higher one than others: --best trains each way at three rates, and
compares them each at its best. (One seed is not enough to find that: islands at 3e-3 end at 2.41, 2.66 and 2.67.)

compute is the median compute time of the synchronous run's steps. In two hosts' network namespaces the time of communication is
measured: test/cluster/slow_links.sh.

--plan asks the planner instead about a larger model on four rented hosts with a card each: the share of the speed that
they would have without communication, and dollars for a billion tokens. The tables are Markdown: dev/results has them,
with machine and date.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SEEDS = (1, 2, 3)
RATES = ("1e-3", "2e-3", "3e-3")  # the first one is that of the tables without --best
H10 = "--islands 4 --local-steps 10"
ISLANDS = H10 + " --outer-lr 1 --outer-momentum 0.5"
WAYS = {
  "synchronous": "",
  "`--compress int8`": "--compress int8",
  "`--compress int4`": "--compress int4",
  "`--compress powersgd:4`": "--compress powersgd:4",
  "`--delay 1`": "--delay 1",
  "`--delay 1 --compress int8`": "--delay 1 --compress int8",
  "four islands, H 10, `--outer-lr 1 --outer-momentum 0.5`": ISLANDS,
  "the same, `--outer-dtype int8`": ISLANDS + " --outer-dtype int8",
  "the same in fp32, `--outer-delay 1`": ISLANDS + " --outer-delay 1",
  "the same in fp32, `--outer-delay 5`": ISLANDS + " --outer-delay 5",
  "four islands, H 10, 0.7 and 0.9 (the defaults)": H10,
}
LINKS = {"NVLink": 450e9, "100 Gbit/s": 12.5e9, "1 Gbit/s": 125e6, "100 Mbit/s": 12.5e6}  # bytes/s, one way
JOB = ("--layers 2 --heads 4 --channels 64 --seq-len 64 --micro-batch 4 --global-batch 16 --steps 500 --min-lr 1e-4 "
       "--warmup 50 --shuffle --val-every 50 --val-batches 20 --log-every 100").split()


def folder(out, way, rate, seed):
  return out / f"{'-'.join(WAYS[way].split()).replace('--', '') or 'synchronous'}-lr{rate}-seed{seed}"


def trained(program, texts, out, way, rate, seed):
  """The measurements of a run. A run that is there and has ended is only read."""
  where = folder(out, way, rate, seed)
  metrics = where / "metrics.jsonl"
  if metrics.exists() and '"step": 500' in metrics.read_text():
    return read(where)
  mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-np", "4"]
  command = [*mpirun, program, "--train", texts[0], "--val", texts[1], *JOB, "--lr", rate, *WAYS[way].split(),
             "--seed", str(seed), "--out", str(where), "--overwrite"]
  environment = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
  ran = subprocess.run(command, capture_output=True, text=True, env=environment)
  if ran.returncode:
    sys.exit(f"error: {' '.join(command)}:\n{ran.stderr or ran.stdout}")
  print(f"{where.name} trained", file=sys.stderr)
  return read(where)


def read(where):
  rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
  steps = [row for row in rows if "loss" in row]
  sent, total = {0: 0}, 0
  for row in steps:
    total += sum(row["comm_bytes"].values())
    sent[row["step"]] = total
  return {
    "val": {row["step"]: row["val_loss"] for row in rows if "val_loss" in row},
    "sent": sent,  # bytes that rank 0 has sent until after this step
    "compute": statistics.median(row["time_ms"]["compute"] for row in steps if "time_ms" in row) / 1e3,
  }


def hidden_by(way):
  """The share of a step's computing that communication can overlap."""
  words = WAYS[way].split()
  number = lambda option: int(words[words.index(option) + 1]) if option in words else 0  # noqa: E731
  return number("--outer-delay") / number("--local-steps") if "--outer-delay" in words else number("--delay")


def seconds(run, step, compute, bandwidth, hides):
  """The time of the first `step` steps on a link, by the formulas above."""
  return step * compute + max(0, run["sent"][step] / bandwidth - hides * step * compute)


def first_step_below(run, loss):
  return next((step for step, value in run["val"].items() if value <= loss), None)


PLANS = {
  "synchronous": "",
  "`--reduce-dtype bf16`": "--reduce-dtype bf16",
  "`--zero 1`": "--zero 1",
  "`--compress int8`": "--compress int8",
  "`--compress int4`": "--compress int4",
  "`--compress powersgd:4`": "--compress powersgd:4",
  "`--compress powersgd:32`": "--compress powersgd:32",
  "`--zero 1 --compress int8 --compress-weights int8`": "--zero 1 --compress int8 --compress-weights int8",
  "`--delay 1`": "--delay 1",
  "`--delay 1 --compress int8`": "--delay 1 --compress int8",
  "`--delay 1 --compress int4`": "--delay 1 --compress int4",
  "`--delay 1 --compress powersgd:32`": "--delay 1 --compress powersgd:32",
  "four islands, H 10": "--islands 4 --local-steps 10",
  "four islands, H 50": "--islands 4 --local-steps 50",
  "four islands, H 50, `--outer-dtype int8`": "--islands 4 --local-steps 50 --outer-dtype int8",
  "four islands, H 10, `--outer-delay 5`": "--islands 4 --local-steps 10 --outer-delay 5",
  "four islands, H 50, `--outer-delay 5`": "--islands 4 --local-steps 50 --outer-delay 5",
  "four islands, H 50, `--outer-delay 25`": "--islands 4 --local-steps 50 --outer-delay 25",
}
# GPT-3 of 350 M at its own batch of half a million tokens, on cards of 24 GB
PLANNED = "--model gpt3-350m --global-batch 256 --micro-batch 4 --recompute block".split()


def plan(program, bandwidth, options):
  """The planner's answer for four hosts with links of this bandwidth (bytes/s)."""
  cluster = {"name": "four hosts", "device": "RTX 4090", "devices_per_host": 1, "hosts": 4,
             "links": {"inside": {"kind": "PCIe", "gb_per_s": 32, "latency_us": 8},
                       "between": {"kind": "network", "gb_per_s": bandwidth / 1e9, "latency_us": 100}},
             "price_per_device_hour": 0.6, "date": "2026-11-22", "source": "runtime/planner/clusters/4x4090.json"}
  with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    json.dump(cluster, file)
    file.flush()
    ran = subprocess.run([program, "--plan", "--json", "--cluster", file.name, *PLANNED, *options], capture_output=True, text=True)
  if ran.returncode:
    sys.exit(f"error: {' '.join(options)}: {ran.stderr}")
  return json.loads(ran.stdout)


def plan_table(program):
  links = {name: bandwidth for name, bandwidth in LINKS.items() if name != "NVLink"}
  alone = plan(program, 1e15, [])["tokens_per_s"]  # nothing takes time on its way
  row("", *(f"{link}: speed" for link in links), *(f"{link}: $ a billion" for link in links))
  row("---", *["--:"] * (2 * len(links)))
  for way, options in PLANS.items():
    plans = [plan(program, bandwidth, options.split()) for bandwidth in links.values()]
    if not all(p["fits"] for p in plans):
      sys.exit(f"error: {way} does not fit")
    row(way, *(f"{100 * p['tokens_per_s'] / alone:.0f} %" for p in plans),
        *(f"{p['cost']['dollars_per_billion_tokens']:.1f}" for p in plans))
  print(f"\nWithout communication: {alone:,.0f} tokens/s.")


def row(*cells):
  print("| " + " | ".join(str(cell) for cell in cells) + " |")


def mean_and_spread(values):
  return f"{statistics.mean(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


def tables(runs, compute):
  last = max(runs["synchronous"][0]["val"])
  full = statistics.mean(run["val"][last] for run in runs["synchronous"])
  print(f"val_loss after so many steps, mean and half the range of {len(SEEDS)} seeds:\n")
  marks = [100, 250, last]
  row("", *marks, "to synchronous", "bytes a step")
  row("---", *["--:"] * 5)
  for way, all_seeds in runs.items():
    end = statistics.mean(run["val"][last] for run in all_seeds)
    row(way, *(mean_and_spread([run["val"][step] for run in all_seeds]) for step in marks), f"{100 * (end / full - 1):+.2f} %",
        f"{all_seeds[0]['sent'][last] / last:,.0f}")
  target = 1.02 * full
  print(f"\nUntil val_loss is {target:.3f}, 2 % above synchronous training's last: steps, MB that a rank sends, and seconds (compute: "
        f"{compute * 1e3:.1f} ms a step):\n")
  row("", "steps", "MB", *LINKS)
  row("---", *["--:"] * (2 + len(LINKS)))
  for way, all_seeds in runs.items():
    reached = [(run, first_step_below(run, target)) for run in all_seeds]
    if any(step is None for _, step in reached):
      row(way, *["not reached"] * (2 + len(LINKS)))
      continue
    mean = lambda value: statistics.mean(value(run, step) for run, step in reached)  # noqa: E731
    times = [mean(lambda run, step, b=b: seconds(run, step, compute, b, hidden_by(way))) for b in LINKS.values()]
    row(way, f"{mean(lambda run, step: step):.0f}", f"{mean(lambda run, step: run['sent'][step]) / 1e6:.2f}", *(f"{t:.1f}" for t in times))


def best_table(train):
  """train(way, rate, seed): a run"""
  last = lambda run: run["val"][max(run["val"])]  # noqa: E731
  print(f"val_loss after the last step at three learning rates, mean and half the range of {len(SEEDS)} seeds:\n")
  row("", *(f"lr {rate}" for rate in RATES), "best", "to synchronous at its best")
  row("---", *["--:"] * (len(RATES) + 2))
  full = None
  for way in WAYS:
    ends = {rate: [last(train(way, rate, seed)) for seed in SEEDS] for rate in RATES}
    best = min(ends, key=lambda rate: statistics.mean(ends[rate]))
    mean = statistics.mean(ends[best])
    full = full or mean  # the first way is synchronous
    row(way, *map(mean_and_spread, ends.values()), best, f"{100 * (mean / full - 1):+.2f} %")
    sys.stdout.flush()


def plot(runs, compute, file):
  try:
    import matplotlib
  except ImportError:
    sys.exit("error: a picture needs matplotlib: python3 -m pip install matplotlib")
  matplotlib.use("Agg")
  matplotlib.rcParams["svg.hashsalt"] = "slow links"
  import matplotlib.pyplot as plt
  figure, panels = plt.subplots(1, 4, figsize=(16, 4.2), sharey=True, layout="constrained")
  slow = [(name, LINKS[name]) for name in ("1 Gbit/s", "100 Mbit/s")]
  for number, (way, all_seeds) in enumerate(runs.items()):
    for run in all_seeds:
      steps = list(run["val"])
      hides = hidden_by(way)
      by = [steps, [max(run["sent"][s], 1) / 1e6 for s in steps],
            *([seconds(run, s, compute, bandwidth, hides) for s in steps] for _, bandwidth in slow)]
      for panel, x in zip(panels, by):
        panel.plot(x, run["val"].values(), color=f"C{number}", linewidth=1, label=way.replace("`", "") if run is all_seeds[0] else None)
  for panel, what in zip(panels, ["steps", "MB that a rank has sent", *(f"seconds on links of {name}" for name, _ in slow)]):
    panel.set_xlabel(what)
  panels[1].set_xscale("log")
  panels[0].set_ylabel("val_loss")
  lowest = min(min(run["val"].values()) for all_seeds in runs.values() for run in all_seeds)
  panels[0].set_ylim(0.99 * lowest, 1.3 * lowest)  # higher losses are at the very beginning
  panels[0].legend(fontsize=8)
  figure.savefig(file, metadata={"Date": None} if file.endswith("svg") else {})


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("text", metavar="TEXT", type=Path, nargs="?", help="such as data/tinyshakespeare.txt (make shakespeare)")
  parser.add_argument("--plan", action="store_true", help="ask the planner, and train nothing")
  parser.add_argument("--best", action="store_true", help="each way at the best of three learning rates")
  parser.add_argument("--program", default="./train_gpt")
  parser.add_argument("--out", type=Path, default=Path("runs/slow_links"), metavar="DIR", help="of the runs; default %(default)s")
  parser.add_argument("--plot", metavar="FILE", help="and draw them: needs matplotlib")
  arguments = parser.parse_args()
  if arguments.plan == bool(arguments.text):
    parser.error("give a text, or --plan")
  if arguments.plan:
    return plan_table(arguments.program)
  try:
    text = arguments.text.read_bytes()
  except OSError as error:
    sys.exit(f"error: {arguments.text}: {error.strerror}: give a text")
  arguments.out.mkdir(parents=True, exist_ok=True)
  texts = [str(arguments.out / name) for name in ("train.txt", "val.txt")]
  for name, part in zip(texts, (text[:len(text) * 9 // 10], text[len(text) * 9 // 10:])):
    Path(name).write_bytes(part)
  train = lambda way, rate, seed: trained(arguments.program, texts, arguments.out, way, rate, seed)  # noqa: E731
  if arguments.best:
    return best_table(train)
  for seed in SEEDS:
    for way in WAYS:
      train(way, RATES[0], seed)
  runs = {way: [train(way, RATES[0], seed) for seed in SEEDS] for way in WAYS}
  compute = statistics.median(run["compute"] for run in runs["synchronous"])
  tables(runs, compute)
  if arguments.plot:
    plot(runs, compute, arguments.plot)


if __name__ == "__main__":
  main()
