"""Reads the output of dev/bench.py: the ceilings, and the table per kernel of each case."""
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

NEEDED = "give what dev/bench.py printed"


@dataclass
class Kernel:
  name: str
  calls: float
  measured: float  # ms a step
  flops: float     # a step
  bytes: float
  expected: float = 0.0
  source: str = ""


def read_kernels(table):
  """The rows of a table per kernel (--profile)."""
  rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +[\d.]+% +([\d.]+) +([\d.]+)", table, re.MULTILINE)
  return [Kernel(name, float(calls), float(ms), float(gflop_per_s) * float(ms) * 1e6, float(gb_per_s) * float(ms) * 1e6)
          for name, calls, ms, gb_per_s, gflop_per_s in rows]


def read_log(path):
  """Ceilings, and for each table: (model, dtype, B, T), milliseconds of a step that was not profiled, kernels; and is
  attention computed by others than the kernels of the table of machine code?"""
  ceilings, cases, in_table = None, [], False
  for line in Path(path).read_text().splitlines():
    title = re.match(r"(\S+), (\w+), B=(\d+), T=(\d+): median", line)
    if line.startswith("ceilings  "):
      ceilings = json.loads(line.split(None, 1)[1])
    elif title:
      model, dtype, *sizes = title.groups()
      cases.append({"case": (model, dtype, *map(int, sizes)), "kernels": [], "other_attention": False, "step": None})
    elif line.startswith("step  ") and cases:
      cases[-1]["step"] = float(line.split()[1].replace(",", ""))
    elif line.startswith("attention ") and cases:
      cases[-1]["other_attention"] = not re.search("own kernels(:|$)", line)
    elif line.startswith("kernel  ") and cases:
      in_table = True
    elif line.startswith("all  "):
      in_table = False
    elif in_table:
      cases[-1]["kernels"] += read_kernels(line)
  if ceilings is None or not any(case["kernels"] for case in cases):
    sys.exit(f"error: {path} has no ceilings or no table per kernel: {NEEDED}")
  return ceilings, [case for case in cases if case["kernels"]]
