#!/usr/bin/env python3
"""Names the kernels whose measured time differs most from the time that was expected before a GPU had run them.

Measured: the table per kernel (--profile) in the output of dev/bench.py. Expected: for our own kernels the time that
dev/machine_code.py computed from their machine code, or for attention the rate that others have measured of the same
method, where its table is of the same shape; for the others, which are products and attention by a library or by our
kernels for Hopper, the floor of dev/roofline.py at the ceilings that dev/bench.py measured.

Usage: python3 dev/bench.py --build build/gpu --model gpt2 > bench.log && python3 dev/expected.py bench.log
"""
import argparse
import json
import sys
from pathlib import Path

from bench import CASES
from bench_log import read_log
from roofline import ATTENTION, Operation, Rates

TABLE = Path(__file__).resolve().parent / "results/machine_code.json"


def machine_code(path, case):
  """(milliseconds of a step, their source) by operation; empty where the table is missing, or of another shape."""
  if case not in CASES["gpu"] or not Path(path).exists():
    return {}
  sums = {}
  for row in json.loads(Path(path).read_text())[case[0]]:
    before = sums.get(row["operation"], (0, ""))[0]
    sums[row["operation"]] = before + row["calls"] * row["expected_us"] / 1e3, row["source"]
  return sums


def expect(case, ceilings, table):
  """Sets the kernels' expected times."""
  rates = Rates(ceilings["flops_per_s"][case["case"][1]], ceilings["copy_bytes_per_s"], 0,
                {kernel: rate * 1e12 for kernel, rate in ATTENTION.items()})
  for kernel in case["kernels"]:
    if kernel.name in table and not (case["other_attention"] and kernel.name in ATTENTION):
      kernel.expected, kernel.source = table[kernel.name]
    else:
      operation = Operation(kernel.name, "", kernel.calls, kernel.flops, kernel.bytes)
      kernel.expected, kernel.source = rates.milliseconds(operation), "floor"


def print_case(case, table, top):
  kernels = sorted(case["kernels"], key=lambda kernel: -abs(kernel.measured - kernel.expected))
  expected, measured = (sum(getattr(kernel, key) for kernel in kernels) for key in ("expected", "measured"))
  print("{}, {}, B={}, T={}: ".format(*case["case"]) + f"{expected:.2f} ms expected, {measured:.2f} ms measured by kernel"
        + (f", {case['step']:.2f} ms a step that is not profiled" if case["step"] else "") + ".\n")
  print("| kernel | calls | expected, ms | measured, ms | difference, ms | measured / expected | expected from |")
  print("|---|--:|--:|--:|--:|--:|---|")
  for kernel in kernels[:top]:
    ratio = f"{kernel.measured / kernel.expected:.2f}" if kernel.expected else "–"
    print(f"| {kernel.name} | {kernel.calls:g} | {kernel.expected:.2f} | {kernel.measured:.2f} | "
          f"{kernel.measured - kernel.expected:+.2f} | {ratio} | {kernel.source} |")
  if not table:
    print("\nFloors alone: the table of machine code has not this shape, or is missing.")
  unused = sorted(table.keys() - {kernel.name for kernel in kernels})
  if unused:
    print(f"\nExpected, but not measured: {', '.join(unused)}.")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("log", help="what dev/bench.py printed")
  parser.add_argument("--table", default=TABLE, help="what dev/machine_code.py --json wrote")
  parser.add_argument("--top", type=int, default=10, help="kernels to print")
  arguments = parser.parse_args()
  ceilings, cases = read_log(arguments.log)
  for case in cases:
    table = machine_code(arguments.table, case["case"])
    expect(case, ceilings, table)
    print_case(case, table, arguments.top)


if __name__ == "__main__":
  main()
