#!/usr/bin/env python3
"""Times one GPT-2 training step in PyTorch, to compare gpt.cu's speed with it.

A step is forward, backward, gradient norm with clipping, and AdamW, on the tokens that dev/bench.py draws. Every way
that PyTorch offers is timed in turn, each in a process of its own (dev/torch_gpt.py): torch.compile's modes, attention,
how bf16 is kept, AdamW's implementation. The fastest one is compared with gpt.cu. bf16 is either autocast with
float32 weights, as nanoGPT trains, or weights that are bf16 themselves; fp32 means fp32 (no TF32).

--ours times train_gpt on the same device, tokens and batch, alternately with the fastest way, and prints the ratio.
--curve trains both for 200 steps from the same weights on the same tokens, and draws both losses in one picture.

Usage: python3 dev/bench_torch.py --batch 4 --seq-len 64 --threads 2
       python3 dev/bench_torch.py --device cuda --dtype bf16 --batch 64 --seq-len 1024 --ours ./train_gpt
       python3 dev/bench_torch.py --device cuda --dtype bf16 --batch 16 --seq-len 1024 --ours ./train_gpt --curve DIR
"""
import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import Failed, draw_tokens, train, write_shard
from same_losses import compare

HERE = Path(__file__).resolve().parent
# layers, heads, channels
MODELS = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}
CURVE_STEPS, CURVE_RATE, CURVE_WARMUP = 200, 6e-4, 20


def shape_of(name):
  """Layers, heads, channels; dN as train_gpt has it."""
  if name in MODELS:
    return MODELS[name]
  if name[:1] == "d" and name[1:].isdigit() and int(name[1:]) > 0:
    return int(name[1:]), int(name[1:]), 64 * int(name[1:])
  raise argparse.ArgumentTypeError(f"{name!r} is unknown: give {', '.join(MODELS)}, or dN")


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("--model", default="gpt2", help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN")
  parser.add_argument("--vocab", type=int, default=50257, help="padded to a multiple of 128, but not for --curve")
  parser.add_argument("--batch", type=int, default=4, help="sequences")
  parser.add_argument("--seq-len", type=int, default=64, help="tokens")
  parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads, at best one per core")
  parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
  parser.add_argument("--steps", type=int, help="timed steps of each way; default: 10 on the CPU, 30 on a GPU")
  parser.add_argument("--warmup", type=int, help="steps before timing starts; default: 2 on the CPU, 10 on a GPU")
  parser.add_argument("--grad-clip", type=float, default=1.0, help="0: no gradient norm either")
  parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
  parser.add_argument("--compile", nargs="+", choices=("none", "default", "max-autotune"),
                      help="torch.compile's modes; default: none on the CPU, default and max-autotune on a GPU")
  parser.add_argument("--attention", nargs="+", choices=("explicit", "sdpa", "flash", "cudnn"),
                      help="sdpa: PyTorch chooses; flash, cudnn: CUDA only; default: all that fit")
  parser.add_argument("--weights", nargs="+", choices=("autocast", "bf16"),
                      help="of --dtype bf16; default: autocast on the CPU, both on a GPU")
  parser.add_argument("--adamw", nargs="+", choices=("fused", "foreach"),
                      help="default: both on the CPU, fused on a GPU")
  parser.add_argument("--plain-mkl", action="store_true", help="leave MKL with AVX2 on AMD's processors")
  parser.add_argument("--timeout", type=int, default=1200, help="seconds for one way, compilation included")
  parser.add_argument("--ours", metavar="PROGRAM", help="time this train_gpt, too")
  parser.add_argument("--rounds", type=int, default=3, help="turns of the fastest way and --ours")
  parser.add_argument("--curve", metavar="DIR", type=Path, help="compare losses instead of times; needs --ours")
  arguments = parser.parse_args()
  complete(parser, arguments)
  return arguments


def complete(parser, arguments):
  """Sets the defaults that depend on the device, and refuses options that do not fit together."""
  on_cpu, narrow = arguments.device == "cpu", arguments.dtype == "bf16"
  arguments.steps = arguments.steps or (10 if on_cpu else 30)
  arguments.warmup = (2 if on_cpu else 10) if arguments.warmup is None else arguments.warmup
  arguments.compile = arguments.compile or (["none"] if on_cpu else ["default", "max-autotune"])
  arguments.attention = arguments.attention or (["flash", "cudnn"] if narrow and not on_cpu else ["explicit", "sdpa"])
  arguments.adamw = arguments.adamw or (["fused", "foreach"] if on_cpu else ["fused"])
  if arguments.weights and not narrow:
    parser.error(f"--weights {' '.join(arguments.weights)} needs --dtype bf16")
  arguments.weights = (arguments.weights or (["autocast"] if on_cpu else ["autocast", "bf16"])) if narrow else ["fp32"]
  if on_cpu and set(arguments.attention) & {"flash", "cudnn"}:
    parser.error(f"--attention {' '.join(arguments.attention)} needs --device cuda: on the CPU use explicit or sdpa")
  if arguments.curve and not arguments.ours:
    parser.error("--curve compares with train_gpt: name it, --ours ./train_gpt")
  if arguments.ours and not Path(arguments.ours).is_file():
    parser.error(f"--ours {arguments.ours}: is not there: build it with make")
  for option in "vocab", "batch", "seq_len", "threads", "steps", "warmup", "rounds":
    least = {"vocab": 2, "warmup": 0}.get(option, 1)
    if getattr(arguments, option) < least:
      parser.error(f"--{option.replace('_', '-')} {getattr(arguments, option)}: must be at least {least}")
  try:
    arguments.shape = shape_of(arguments.model)
  except argparse.ArgumentTypeError as error:
    parser.error(f"--model {error}")


# ---- running both

def reason_of(done):
  """The line that names the error. (Lines of advice may follow it.)"""
  lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
  return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def run_torch(arguments, way, data, **changes):
  """The output of torch_gpt.py for one way: a dictionary. Raises Failed with PyTorch's reason."""
  given = {name: getattr(arguments, name) for name in ("shape", "vocab", "batch", "seq_len", "threads", "device",
                                                       "plain_mkl", "grad_clip", "steps", "warmup")}
  job = {**given, "lr": 1e-4, "lr_warmup": 0, "init": None, "data": str(data), **way, **changes}
  command = [sys.executable, str(HERE / "torch_gpt.py"), json.dumps(job)]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout)
  except subprocess.TimeoutExpired:
    raise Failed(f"not done after {arguments.timeout} s") from None
  if done.returncode != 0:
    raise Failed(reason_of(done))
  return json.loads(done.stdout.splitlines()[-1])


def model_of(arguments):
  return ["--model", arguments.model, "--vocab", str(arguments.vocab)]


def options_of_ours(arguments, data, start):
  """start: where the weights come from, model_of(arguments) or --init."""
  return [*start, "--train", str(data), "--dtype", arguments.dtype, "--micro-batch", str(arguments.batch), "--seq-len",
          str(arguments.seq_len), "--grad-clip", str(arguments.grad_clip), "--schedule", "constant"]


def train_ours(arguments, options, warmup, steps, folder):
  os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
  done, _, _ = train(Path(arguments.ours).resolve(), options, warmup, steps, folder, arguments.timeout)
  return done


# ---- times

def name_of(way):
  return f"{way['compile']:13} {way['attention']:10} {way['weights']:9} {way['adamw']:8}"


def row(way, times, tokens):
  median = statistics.median(times)
  return f"{name_of(way)} {median:10.2f} {min(times):9.2f} {max(times):9.2f} {tokens / median * 1e3:14,.0f}"


def time_ways(arguments, data):
  """Times of all ways that work, in a table; returns the fastest way."""
  ways = [dict(zip(("compile", "attention", "weights", "adamw"), values)) for values in
          itertools.product(arguments.compile, arguments.attention, arguments.weights, arguments.adamw)]
  tokens, medians, rows, failures = arguments.batch * arguments.seq_len, {}, [], []
  for number, way in enumerate(ways):
    try:
      result = run_torch(arguments, way, data)
    except Failed as error:
      rows.append(f"{name_of(way)} failed: {error}")
      failures.append(str(error))
      continue
    if not medians:
      print("\n".join(result["setup"]))
    medians[number] = statistics.median(result["times"])
    rows.append(row(way, result["times"], tokens))
  if not medians:
    raise Failed(f"PyTorch ran in none of {len(ways)} ways: {'; '.join(dict.fromkeys(failures))}")
  fastest = min(medians, key=medians.get)
  print(f"step: {arguments.model}, V={arguments.vocab}, B={arguments.batch}, T={arguments.seq_len}, {arguments.dtype}, "
        f"grad clip {arguments.grad_clip:g}; {arguments.steps} steps timed after {arguments.warmup}\n")
  titles = {"compile": "torch.compile", "attention": "attention", "weights": "weights", "adamw": "AdamW"}
  print(f"{name_of(titles)} {'median ms':>10} {'min ms':>9} {'max ms':>9} {'tokens/s':>14}")
  for number, line in enumerate(rows):
    print(line + ("  <- fastest" if number == fastest else ""))
  sys.stdout.flush()
  return ways[fastest]


def compare_times(arguments, way, data, folder):
  """Times PyTorch's fastest way and train_gpt, alternately."""
  print(f"\n{'round':5} {'PyTorch ms':>11} {'train_gpt ms':>13} {'ratio':>7}   (medians of {arguments.steps} steps)")
  options = options_of_ours(arguments, data, model_of(arguments))
  torch_medians, our_medians = [], []
  for number in range(1, arguments.rounds + 1):
    torch_medians.append(statistics.median(run_torch(arguments, way, data)["times"]))
    done = train_ours(arguments, options, arguments.warmup, arguments.steps, folder)
    our_medians.append(statistics.median(step["step_ms"] for step in done[arguments.warmup:]))
    ratio = torch_medians[-1] / our_medians[-1]
    print(f"{number:5} {torch_medians[-1]:11.2f} {our_medians[-1]:13.2f} {ratio:7.3f}", flush=True)
  torch_ms, our_ms = statistics.median(torch_medians), statistics.median(our_medians)
  tokens = arguments.batch * arguments.seq_len * 1e3
  print(f"PyTorch {tokens / torch_ms:,.0f} tokens/s, train_gpt {tokens / our_ms:,.0f} tokens/s: "
        f"train_gpt is {torch_ms / our_ms:.3f} times as fast")


# ---- losses

def export_weights(arguments, data, folder):
  """Writes train_gpt's initial weights as a Hugging Face folder: a step with learning rate 0 changes nothing."""
  out = Path(folder) / "start"
  command = [str(Path(arguments.ours).resolve()), *options_of_ours(arguments, data, model_of(arguments)),
             "--steps", "1", "--lr", "0", "--shard-size", "1000", "--out", str(out)]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise Failed(f"{' '.join(command)}: {done.stderr.strip()}")
  return out / "step_00000001"


def write_metrics(folder, losses):
  folder.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
  (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def draw(arguments):
  if not importlib.util.find_spec("matplotlib"):
    print("the curves are not drawn: install matplotlib, and run dev/plot.py on the two folders")
    return
  command = [sys.executable, str(HERE / "plot.py"), "gpt.cu", "pytorch", "--output", "curve.png"]
  subprocess.run(command, cwd=arguments.curve, check=True)


def compare_curves(arguments, data, folder):
  """The exit code: in fp32 both curves must agree within 1e-4; in bf16 the differences are printed."""
  way = {"compile": arguments.compile[0], "attention": arguments.attention[0], "weights": arguments.weights[0],
         "adamw": arguments.adamw[0]}
  start = export_weights(arguments, data, folder)
  options = [*options_of_ours(arguments, data, ["--init", str(start)]), "--lr", str(CURVE_RATE), "--warmup",
             str(CURVE_WARMUP)]
  ours = [step["loss"] for step in train_ours(arguments, options, 0, CURVE_STEPS, folder)]
  theirs = run_torch(arguments, way, data, init=str(start), steps=CURVE_STEPS, lr=CURVE_RATE,
                     lr_warmup=CURVE_WARMUP)["losses"]
  write_metrics(arguments.curve / "gpt.cu", ours)
  write_metrics(arguments.curve / "pytorch", theirs)
  draw(arguments)
  print(f"{arguments.model}, {arguments.dtype}: loss {ours[0]:.6f} to {ours[-1]:.6f}, "
        f"PyTorch ({', '.join(way.values())}) {theirs[0]:.6f} to {theirs[-1]:.6f}")
  agree = compare(dict(enumerate(ours, start=1)), dict(enumerate(theirs, start=1)),
                  1e-4 if arguments.dtype == "fp32" else math.inf)
  return 0 if agree else 1


def main():
  arguments = parse_arguments()
  with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "tokens.bin"
    tokens = max(1 << 20, arguments.batch * arguments.seq_len * 16 + 1)
    write_shard(data, draw_tokens(tokens, min(arguments.vocab, 50257)))
    try:
      if arguments.curve:
        sys.exit(compare_curves(arguments, data, folder))
      way = time_ways(arguments, data)
      if arguments.ours:
        compare_times(arguments, way, data, folder)
    except Failed as error:
      sys.exit(f"error: {error}")


if __name__ == "__main__":
  main()
