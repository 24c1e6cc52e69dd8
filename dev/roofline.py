#!/usr/bin/env python3
"""The floor: the least time that a training step takes, operation by operation, at a given matrix rate and bandwidth.

Counts the FLOPs and bytes of one step of gpt.cuh (one micro-batch, 16-bit weights with fp32 masters, nothing
recomputed, one rank), prints them as the tables of dev/roofline.md, and then the savings by fusions.

Usage: python3 dev/roofline.py                                 the tables of dev/roofline.md: an H200's rates
       python3 dev/roofline.py --ceilings ceilings.json        rates that dev/ceilings.cu measured
       python3 dev/roofline.py --model gpt2 --batch 4 --seq-len 64 --check trace.json
With --check: do the launchers count the same? trace.json is the trace of that very model in bf16, by `train_gpt
--trace`.
"""
import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace

from bench_torch import MODELS

BATCHES = {"gpt2": 64, "gpt2-medium": 32, "gpt2-large": 16, "gpt2-xl": 16}
POSITIONS = 1024
SHORT, WIDE = 2, 4  # bytes of bf16 and of fp32
# TFLOP/s of the best published attention in 16 bits on an H100, heads of 64 channels, 1024 tokens: forward with causal
# masks (Triton; cuDNN 288, FlashAttention-3 265), backward without a mask, for lack of one with (FlashAttention-3;
# cuDNN 348). From the bars of the figures that show attention's speed in arXiv:2407.08608.
ATTENTION = {"attention_forward": 291, "attention_backward": 363}


@dataclass
class Operation:
  kernel: str  # as --profile calls it; "" if no launcher counts it
  what: str
  calls: int
  flops: float  # of all calls
  bytes: float  # the least that must move through device memory


@dataclass
class Shape:
  layers: int
  heads: int
  channels: int
  vocabulary: int
  batch: int
  seq_len: int

  @property
  def rows(self):
    return self.batch * self.seq_len

  @property
  def padded(self):
    return (self.vocabulary + 127) // 128 * 128

  @property
  def block_parameters(self):
    C = self.channels
    return 12 * C * C + 13 * C

  @property
  def parameters(self):
    C = self.channels
    return (self.vocabulary + POSITIONS) * C + self.layers * self.block_parameters + 2 * C

  @property
  def flops_per_token(self):
    """6·Ψ + 6·L·C·T, Ψ parameters: the FLOPs that MFU counts."""
    return 6 * self.parameters + 6 * self.layers * self.channels * self.seq_len


def product(kernel, what, calls, m, n, k, out=SHORT, also=0):
  """D (m,n) = A (m,k) · B (k,n); `also`: bytes that an epilogue moves besides D."""
  return Operation(kernel, what, calls, calls * 2 * m * n * k, calls * ((m * k + k * n) * SHORT + m * n * out + also))


def linear_layers(s):
  """Name, inputs, outputs."""
  C = s.channels
  return [("qkv", C, 3 * C), ("projection", C, C), ("up", C, 4 * C), ("down", 4 * C, C)]


def forward(s):
  R, C, T, L = s.rows, s.channels, s.seq_len, s.layers
  return [
    Operation("embedding_forward", "wte + wpe", 1, R * C, 3 * R * C * SHORT),
    # The first LayerNorm has no residual to add: 2 elements per channel instead of 4.
    Operation("residual_layernorm_forward", "two per block, one at the end", 2 * L + 1, 8 * R * C * (2 * L + 1),
              (4 * (2 * L + 1) - 2) * R * C * SHORT),
    *[product("matmul_forward", name, L, R, outputs, inputs) for name, inputs, outputs in linear_layers(s)],
    Operation("attention_forward", "causal half", L, L * 2 * R * T * C, L * 4 * R * C * SHORT),
    Operation("gelu_forward", "reads 4C, writes 4C", L, L * 10 * 4 * R * C, L * 2 * 4 * R * C * SHORT),
    product("matmul_forward", "head: logits", 1, R, s.padded, C),
    Operation("cross_entropy", "logits to their gradient", 1, 6 * R * s.padded, 2 * R * s.padded * SHORT),
  ]


def backward(s):
  R, C, T, L = s.rows, s.channels, s.seq_len, s.layers
  layers = linear_layers(s)
  return [
    product("matmul_weight_gradient", "head", 1, s.padded, C, R, WIDE),
    product("matmul_input_gradient", "head", 1, R, C, s.padded),
    Operation("", "memset of the stream's gradient", 1, 0, R * C * SHORT),
    Operation("layernorm_backward", "two per block, one at the end", 2 * L + 1, 20 * R * C * (2 * L + 1),
              4 * (2 * L + 1) * R * C * SHORT),
    *[product("matmul_weight_gradient", name, L, inputs, outputs, R, WIDE) for name, inputs, outputs in layers],
    Operation("column_sum", "bias gradients", 4 * L, L * 9 * R * C, L * 9 * R * C * SHORT),
    *[product("matmul_input_gradient", name, L, R, inputs, outputs) for name, inputs, outputs in layers],
    Operation("gelu_backward", "reads 8C, writes 4C", L, L * 20 * 4 * R * C, L * 3 * 4 * R * C * SHORT),
    Operation("attention_backward", "S and dP computed twice", L, L * 7 * R * T * C, L * 8 * R * C * SHORT),
    Operation("embedding_backward", "dwte, dwpe", 1, 2 * R * C, 2 * R * C * (SHORT + WIDE) + 4 * POSITIONS * C),
  ]


def update(s):
  stored = s.parameters + (s.padded - s.vocabulary) * s.channels
  partials = stored // 8192  # at most: one for each block
  return [
    Operation("square_sums", "gradient norm", s.layers + 2, 2 * stored, WIDE * stored),
    Operation("add_up", "partial sums", 1, partials, WIDE * partials),
    Operation("adamw", "reads w, g, m, v; writes w, m, v and bf16", s.layers + 2, 15 * stored, 30 * stored),
  ]


def operations_of(s):
  return forward(s) + backward(s) + update(s)


# ---- fusions: functions from a list of operations to another

def without(what):
  return lambda operations: [o for o in operations if o.what != what and o.kernel != what]


def with_more_bytes(kernel, what, more):
  return lambda operations: [replace(o, bytes=o.bytes + more) if (o.kernel, o.what) == (kernel, what) else o
                             for o in operations]


def attention_in_one_pass(operations):
  return [replace(o, flops=o.flops * 5 / 7, what="S and dP computed once") if o.kernel == "attention_backward" else o
          for o in operations]


def fusions(s):
  """Possible fusions, and the functions that apply them to the list of operations."""
  gelu = s.layers * 4 * s.rows * s.channels * SHORT
  return [
    ("GELU in the epilogue of the product `up`, which also keeps what was before it",
     [without("gelu_forward"), with_more_bytes("matmul_forward", "up", gelu)]),
    ("GELU's derivative in the epilogue of `down`'s input gradient",
     [without("gelu_backward"), with_more_bytes("matmul_input_gradient", "down", gelu)]),
    ("bias gradients in the epilogues of the weight gradients", [without("column_sum")]),
    ("attention backward: S and dP computed once", [attention_in_one_pass]),
    ("the stream's gradient: written first by the last LayerNorm, not cleared",
     [without("memset of the stream's gradient")]),
  ]


# ---- tables

@dataclass
class Rates:
  product: float  # FLOP/s
  copy: float     # bytes/s
  peak: float     # FLOP/s, the data sheet's
  attention: dict  # FLOP/s of these kernels, where that is less than `product`

  def arithmetic(self, operation):
    """Milliseconds of the FLOPs alone."""
    return 1e3 * operation.flops / min(self.product, self.attention.get(operation.kernel, self.product))

  def memory(self, operation):
    """Milliseconds of the bytes alone."""
    return 1e3 * operation.bytes / self.copy

  def milliseconds(self, operation):
    return max(self.arithmetic(operation), self.memory(operation))


def total(operations, rates):
  return sum(rates.milliseconds(o) for o in operations)


def describe(s, milliseconds, rates):
  tokens_per_s = s.rows / milliseconds * 1e3
  share = tokens_per_s * s.flops_per_token / rates.peak
  return (f"{milliseconds:.1f} ms, {tokens_per_s / 1e3:,.1f} thousand tokens/s, {100 * share:.1f} % of "
          f"{rates.peak / 1e12:.0f} TFLOP/s")


def print_operations(name, s, operations, rates):
  whole = total(operations, rates)
  print(f"\n## {name}: B={s.batch}, T={s.seq_len}, {s.parameters:,} parameters\n")
  print("| operation | | calls | GFLOP | GB | ms at the matrix rate | ms at the bandwidth | floor, ms | share |")
  print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
  for o in operations:
    arithmetic, memory = rates.arithmetic(o), rates.memory(o)
    floor = rates.milliseconds(o)
    kernel = o.kernel or "(not counted by a launcher)"
    print(f"| {kernel} | {o.what} | {o.calls} | {o.flops / 1e9:,.1f} | {o.bytes / 1e9:.2f} | "
          f"{arithmetic:.2f} | {memory:.2f} | {floor:.2f} | {100 * floor / whole:.1f} % |")
  flops, moved = sum(o.flops for o in operations), sum(o.bytes for o in operations)
  print(f"| **sum** | | | {flops / 1e9:,.1f} | {moved / 1e9:.2f} | | | **{whole:.2f}** | |")
  print(f"\nThe floor of the step as it is: **{describe(s, whole, rates)}**.")


def print_fusions(s, operations, rates):
  print("\n| fusion | saves, ms | the floor then |")
  print("|---|--:|---|")
  before = total(operations, rates)
  for name, steps in fusions(s):
    for step in steps:
      operations = step(operations)
    after = total(operations, rates)
    print(f"| {name} | {before - after:.2f} | {describe(s, after, rates)} |")
    before = after
  memory = sum(rates.milliseconds(o) for o in operations if rates.memory(o) > rates.arithmetic(o))
  print(f"\nOf what is then left, {before - memory:.1f} ms are bound by arithmetic and {memory:.1f} ms by memory.")


# ---- against the launchers

def counted_by_launchers(path):
  """FLOPs and bytes of a step by kernel, in the order that launchers reported them; the last step of the trace."""
  with open(path) as file:
    events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
  last = max(event["args"]["step"] for event in events if "step" in event["args"])
  sums = defaultdict(lambda: [0.0, 0.0])
  for event in events:
    if event["args"].get("step") == last:
      sums[event["name"]][0] += event["args"].get("GFLOP", 0) * 1e9
      sums[event["name"]][1] += event["args"]["bytes"]
  return sums


def without_fusions(measured, s):
  """The same as if no product had computed GELU, its derivative or sums of columns besides (kernels/linear.cuh)."""
  for fused, product, kernel, flops, passes in (
      ("matmul_gelu_forward", "matmul_forward", "gelu_forward", 10, 2),
      ("matmul_gelu_gradient", "matmul_input_gradient", "gelu_backward", 20, 3),
      ("matmul_bias_gradient", "matmul_weight_gradient", None, 0, 0)):
    if fused not in measured:
      continue
    all_flops, all_bytes = measured.pop(fused)
    moved = all_flops / (2 * s.channels) if kernel else 0  # elements that the fused product reads or writes besides
    for name, more in ((product, (all_flops, all_bytes - moved * SHORT)),
                       (kernel, (flops * moved, passes * moved * SHORT))):
      measured[name] = [before + x for before, x in zip(measured[name], more)]
    if not kernel:  # which layers' sums these were is not known
      measured["column_sum"] = [s.layers * 9 * s.rows * s.channels * x for x in (1, SHORT)]
  measured.pop(None, None)
  return measured


def check(operations, path, s):
  """Exits with 1 and a list, if a launcher counts other FLOPs or bytes than this script."""
  measured, expected = without_fusions(counted_by_launchers(path), s), defaultdict(lambda: [0.0, 0.0])
  for o in operations:
    if o.kernel:
      expected[o.kernel][0] += o.flops
      expected[o.kernel][1] += o.bytes
  differences = []
  small = {"clip_factor", "add_up", "adamw_count"}  # take no time; the padding changes them, or they are not listed
  for kernel in sorted((measured.keys() | expected.keys()) - small):
    for unit, here, there in zip(("FLOPs", "bytes"), expected[kernel], measured[kernel]):
      if abs(here - there) > 0.01 * max(here, there):
        differences.append(f"{kernel}: {there:.6g} {unit} by its launcher, {here:.6g} here")
  sys.exit("\n".join(["roofline.py no longer counts what the launchers do:", *differences]) if differences else 0)


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("--model", choices=MODELS, action="append", help="default: gpt2 and gpt2-xl")
  parser.add_argument("--batch", type=int, help="sequences; default: 64 for gpt2, 16 for gpt2-xl")
  parser.add_argument("--seq-len", type=int, default=1024, help="tokens")
  parser.add_argument("--vocab", type=int, default=50257, help="padded to a multiple of 128")
  parser.add_argument("--tflops", type=float, default=790, help="matrix rate, TFLOP/s")
  parser.add_argument("--attention", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"),
                      default=list(ATTENTION.values()), help="rates of attention, TFLOP/s")
  parser.add_argument("--bandwidth", type=float, default=4.3, help="of a copy, read and written, TB/s")
  parser.add_argument("--peak", type=float, default=989, help="TFLOP/s that shares are of: dense bf16, data sheet")
  parser.add_argument("--ceilings", metavar="FILE", help="bf16 matrix rate and bandwidth from dev/ceilings.cu instead")
  parser.add_argument("--check", metavar="TRACE", help="compare with what the launchers count, and print nothing else")
  arguments = parser.parse_args()
  for option in "batch", "seq_len", "vocab", "tflops", "attention", "bandwidth", "peak":
    value = getattr(arguments, option)
    if value is not None and not min(value if isinstance(value, list) else [value]) > 0:
      parser.error(f"--{option.replace('_', '-')} {value}: must be positive")
  return arguments


def rates_of(arguments):
  attention = {kernel: rate * 1e12 for kernel, rate in zip(ATTENTION, arguments.attention)}
  if not arguments.ceilings:
    return Rates(arguments.tflops * 1e12, arguments.bandwidth * 1e12, arguments.peak * 1e12, attention)
  try:
    with open(arguments.ceilings) as file:
      measured = json.load(file)
    return Rates(measured["flops_per_s"]["bf16"], measured["copy_bytes_per_s"], arguments.peak * 1e12, attention)
  except (OSError, ValueError, KeyError, TypeError) as error:
    sys.exit(f"error: --ceilings {arguments.ceilings}: {error!r}: give what dev/ceilings.cu printed")


def main():
  arguments = parse_arguments()
  rates = rates_of(arguments)
  if not arguments.check:
    attention = [min(rate, rates.product) / 1e12 for rate in rates.attention.values()]
    print(f"Matrix rate {rates.product / 1e12:g} TFLOP/s, in attention {attention[0]:g} forward and {attention[1]:g} "
          f"backward, bandwidth {rates.copy / 1e12:g} TB/s, shares of {rates.peak / 1e12:g} TFLOP/s.")
  for name in arguments.model or ["gpt2", "gpt2-xl"]:
    layers, heads, channels = MODELS[name]
    s = Shape(layers, heads, channels, arguments.vocab, arguments.batch or BATCHES[name], arguments.seq_len)
    operations = operations_of(s)
    if arguments.check:
      check(operations, arguments.check, s)
    print_operations(name, s, operations, rates)
    print_fusions(s, operations, rates)


if __name__ == "__main__":
  main()
