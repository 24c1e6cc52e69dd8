#!/usr/bin/env python3
"""Reads the machine code of our kernels, and says how fast it can be on an H100 or H200 before one is at hand.

A kernel that is bound by memory can only be fast if three numbers of its machine code allow it. dev/machine_code.md
derives them, and shows how to read the table:

  issue   the time in which its instructions are issued: at most 0.7 of the time that its bytes take
  flight  bytes on their way to a multiprocessor at a time: at least 32 KiB
  waste   the share of the multiprocessors' time that is lost while the last blocks run: less than a tenth

  make DEVICE=gpu ARCHS=90a build/gpu/step_kernels.o && make DEVICE=cpu build/cpu/launches
  python3 dev/machine_code.py                                        # the table
  python3 dev/machine_code.py --check                                # exit code 1 if a kernel misses a rule unexplained
  python3 dev/machine_code.py --kernel layernorm_backward_kernel     # the loops of one kernel

Needs cuobjdump: of a CUDA toolkit, or of a wheel (make build/cuobjdump).
Exit code: 0 all within the rules or explained, 1 not all, 2 bad input.
"""
import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

# An H100 or H200 (SXM): "CUDA C++ Programming Guide", compute capability 9.0; the bandwidth as measured (roofline.md),
# the latency as microbenchmarks find it (Luo et al., arXiv:2402.13499), the last as it is usual for a kernel in a graph.
PROCESSORS, CLOCK, BANDWIDTH, LATENCY, LAUNCH = 132, 1.755e9, 4.3e12, 700e-9, 2e-6
ISSUE_RATE = 4 * PROCESSORS * CLOCK  # warp instructions a second: four schedulers
# Kernels with products have waits that a count does not show: softmax and products for one another, warps at barriers.
# For these the machine code gives only the least time. Expected is the rate that others have measured of the same
# method, products a second: FlashAttention-2 on an H100, heads of 64 channels, 1,024 tokens, forward causal, backward
# without a mask (arXiv:2407.08608, figures 5 and 6; roofline.md has the other methods). With a mask, backward is slower
# still.
METHODS = {"attention_forward": ("FlashAttention-2", 229e12), "attention_backward": ("FlashAttention-2", 238e12)}
REGISTERS, SHARED, THREADS, BLOCKS = 65536, 228 * 1024, 2048, 32  # of a multiprocessor
MOST_ISSUE, LEAST_FLIGHT, MOST_WASTE = 0.7, 32 * 1024, 0.1
SMALL = 5e-6  # seconds: bytes that take less are not worth a rule, launching takes as long

def loops(s, operation, launch):
  """How often a warp runs each loop of a kernel (machine code does not tell), in the order of addresses, for the shape s.
  Where a kernel does other things for other rows, the most common ones count. nvcc unrolls some loops: then one loop does
  several rounds at once, and another loop does the rest."""
  rows, grid, block = s.B * s.T, launch.grid, launch.block[0]
  logits = s.V // 8 / 512  # packs of a thread
  return {
    "embedding_forward_kernel": [1, 0],  # with positions, without
    "flash_forward_kernel": [(s.T / 64 + 2) / 2],
    "cross_entropy_kernel": [logits // 4, logits % 4] * 2 + [0, 0, 1 / 16],
    "layernorm_backward_kernel": [rows / grid[0] / 2, rows / grid[0] / 2 * block / 32],
    "column_sum_kernel": [16],
    "add_partial_sums_kernel": [0, 1 if grid[1] == 2 else rows / 64 / 512, 1 / 16, 0],
    "flash_backward_queries_kernel": [(s.T / 48 + 2.67) / 2],
    "flash_backward_keys_kernel": [(s.T / 32 + 4) / 2],
    "token_embedding_backward_kernel": [1, 1, 8],
    "add_runs_kernel": [3, 0, 0, 0, 0, 0, 0],  # few blocks have a run
    "position_embedding_backward_kernel": [1, s.B / 8],
    "sum_kernel": [1] if operation == "add_up" else [1, 0],
    "fp8_maximum_kernel": [rows * 4 * s.C / 8 / (grid[0] * block * 4)],
  }.get(launch.kernel, [])


def template_arguments(s, operation, kernel, seen):
  """The template arguments of the instance that is launched, for kernels of which step_kernels.o has several. seen: the
  type by which it tracks the largest number (kernels/device/maximum.cuh)"""
  return {
    "embedding_forward_kernel": "__nv_bfloat16, 8",
    "residual_layernorm_forward_kernel": f"__nv_bfloat16, 8, {-(-s.C // 256)}, {seen}",
    "flash_forward_kernel": f"__nv_bfloat16, 64, {seen}",
    "cross_entropy_kernel": "__nv_bfloat16, 8, true, true",
    "layernorm_backward_kernel": f"__nv_bfloat16, 8, {seen}",
    "column_sum_kernel": "__nv_bfloat16, 8",
    "add_partial_sums_kernel": "4",
    "flash_backward_queries_kernel": f"__nv_bfloat16, __nv_bfloat16, 64, {seen}",
    "flash_backward_keys_kernel": f"__nv_bfloat16, __nv_bfloat16, 64, {seen}",
    "gelu_forward_kernel": f"__nv_bfloat16, 8, {seen}",
    "fp8_maximum_kernel": "__nv_bfloat16, 8",
    "cast_fp8_kernel": "__nv_bfloat16, (__nv_fp8_interpretation_t)0, 16",
    "cast_transpose_fp8_kernel": "__nv_bfloat16, (__nv_fp8_interpretation_t)0",
    "gelu_backward_kernel": f"__nv_bfloat16, 8, {seen}",
    "token_embedding_backward_kernel": "__nv_bfloat16, 8",
    "add_runs_kernel": "4",
    "position_embedding_backward_kernel": "__nv_bfloat16, 8",
    "sum_kernel": {"square_sums": "double, 4, float, float, AddFloats<true>",
                   "cross_entropy": "double, 4, float, float, AddFloats<false>",
                   "add_up": "double, 1, double, float, AddFloats<false>"}.get(operation),
  }.get(kernel)


# Rules that a kernel misses for a good reason: (kernel, rule): why.
EXPLAINED = {}

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
WIDTHS = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}


class Instruction(NamedTuple):
  address: int
  predicate: str
  name: str
  operands: str

  def is_a(self, *names):
    return self.name.split(".")[0] in names

  def loads(self):
    return self.is_a("LDG", "LDGSTS")

  def bytes(self):
    """Bytes of global memory that one thread loads or stores."""
    if not self.is_a("LDG", "LDGSTS", "STG", "RED", "ATOMG"):
      return 0
    return next((WIDTHS[part] for part in self.name.split(".") if part in WIDTHS), 4)

  def target(self):
    """The address that a branch goes to."""
    found = re.findall(r"0x([0-9a-f]+)", self.operands) if self.is_a("BRA") else []
    return int(found[-1], 16) if found else None

  def registers(self):
    return [int(number) for number in re.findall(r"\bR(\d+)", self.operands)]


class Function(NamedTuple):
  """A kernel's machine code for one set of template arguments."""
  kernel: str
  arguments: str
  registers: int
  shared: int
  code: list

  def loops(self):
    """(begin, end) in `code` of each loop: a target of branches back, and the last of these branches."""
    at = {instruction.address: i for i, instruction in enumerate(self.code)}
    ends = {}
    for i, instruction in enumerate(self.code):
      target = instruction.target()
      if target is not None and target < instruction.address:
        ends[at[target]] = i + 1
    return sorted(ends.items())

  def executions(self, runs):
    """How often a warp executes each instruction, if it runs through the loops as often as `runs` says. Between loops it
    takes the shortest way; code without loops counts as a whole."""
    loops = sorted(zip(self.loops(), runs), key=lambda loop: loop[0][0] - loop[0][1])  # outer ones first
    times = [0.0 if loops else 1.0] * len(self.code)
    position = 0
    for (begin, end), count in sorted(loops) + [((len(self.code) - 1, len(self.code)), 1)] * bool(loops):
      if count >= 1 and begin >= position:
        for i in self.shortest_way(position, begin):
          times[i] = 1.0
        position = end
    for (begin, end), count in loops:
      times[begin:end] = [count] * (end - begin)
    return times

  def shortest_way(self, begin, end):
    """The instructions of [begin, end) on the shortest way forward to `end`, the way with the fewest instructions."""
    at = {instruction.address: i for i, instruction in enumerate(self.code)}
    before = {begin: None}  # the instruction that comes before, on the shortest way
    length = {begin: 0}
    for i in range(begin, end):
      if i not in length:
        continue
      instruction = self.code[i]
      goes_on = not instruction.is_a("BRA", "EXIT") or instruction.predicate
      for following in [i + 1] * bool(goes_on) + [at.get(instruction.target(), -1)]:
        if following > i and length[i] + 1 < length.get(following, len(self.code)):
          before[following], length[following] = i, length[i] + 1
    way = [end] if end in before else []
    while way and before[way[-1]] is not None:
      way.append(before[way[-1]])
    return way[1:] or range(begin, end)

  def in_flight(self):
    """The most bytes that a thread has asked for without having used any of them."""
    pending, copies, most = {}, 0, 0
    for instruction in self.code:
      registers = instruction.registers()
      if instruction.is_a("LDGSTS"):
        copies += instruction.bytes()
      elif instruction.is_a("LDG"):
        if any(r in pending for r in registers[1:]):
          pending = {}
        for k in range(max(1, instruction.bytes() // 4)):
          pending[registers[0] + k] = min(instruction.bytes(), 4)
      elif instruction.is_a("DEPBAR", "LDGDEPBAR") and "SB0" in instruction.operands:
        copies = 0
      elif any(r in pending for r in registers):
        pending = {}
      most = max(most, sum(pending.values()) + copies)
    return most

  def count(self, *names):
    return sum(instruction.is_a(*names) for instruction in self.code)


class Row(NamedTuple):
  """A launch and its expected time. Times in seconds."""
  operation: str
  kernel: str
  calls: int
  grid: int
  block: int
  registers: int
  resident: int  # blocks of a multiprocessor
  waves: float
  per_element: float  # instructions of a thread
  flight: float  # bytes of a multiprocessor
  issue: float
  floor: float
  expected: float
  source: str  # of the expected time
  misses: list


def main_part(code):
  """The code without the parts behind it: the paths of diverged warps (targets of BRA.DIV), and the padding of the last
  line."""
  aside = [instruction.target() for instruction in code if instruction.name.startswith("BRA.DIV")]
  aside += [instruction.address for instruction in code if instruction.target() == instruction.address]
  return [instruction for instruction in code if instruction.address < min(aside, default=1 << 32)]


def read_functions(path, cuobjdump):
  """{kernel: [Function]} of an object file."""
  def run(*options):
    done = subprocess.run([cuobjdump, *options, path], capture_output=True, text=True)
    if done.returncode != 0 or "Function" not in done.stdout + done.stderr:
      sys.exit(bad_input(f"cuobjdump finds no kernels in {path}: {done.stderr.strip() or 'is it built for sm_90a?'}"))
    return done.stdout + done.stderr

  usage = {name: (int(registers), int(shared)) for name, registers, shared in
           re.findall(r"Function (\S+):\n\s+REG:(\d+) STACK:\d+ SHARED:(\d+)", run("-res-usage"))}
  parts = [part.split("\n", 1) for part in run("-sass").split("Function : ")[1:]]
  mangled = [name.strip() for name, _ in parts]
  plain = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True).stdout.split("\n")
  functions = {}
  for name, (_, text), readable in zip(mangled, parts, plain):
    kernel, arguments = re.match(r"(?:void )?(?:\(anonymous namespace\)::)?(\w+)(?:<((?:[^()]|\(\w+\))*)>)?", readable).groups()
    code = main_part([Instruction(int(address, 16), *rest) for address, *rest in INSTRUCTION.findall(text)])
    functions.setdefault(kernel, []).append(Function(kernel, (arguments or "").strip(), *usage[name], code))
  return functions


def resident_blocks(function, block, dynamic_shared):
  """Blocks that a multiprocessor holds at a time."""
  warps = -(-block // 32)
  registers_of_warp = -(-function.registers * 32 // 256) * 256
  shared = -(-(function.shared + dynamic_shared) // 128) * 128
  return min(BLOCKS, THREADS // block, REGISTERS // registers_of_warp // warps, SHARED // shared)


def wasted(blocks, resident, flight_of_block, is_bound_by_memory):
  """The share of time that is lost while the last blocks run, which are less than a wave. If memory is the bound, they
  lose nothing as long as they have enough bytes on the way; else each multiprocessor without a block is lost."""
  wave = PROCESSORS * resident
  full, rest = divmod(blocks, wave)
  if rest == 0 or blocks < PROCESSORS:
    return 0
  if is_bound_by_memory:
    last = rest / wave * max(1, BANDWIDTH * LATENCY / (flight_of_block * rest))
  else:
    last = -(-rest // PROCESSORS) / resident
  return 1 - (full + rest / wave) / (full + last)


def expect(shape, operation, launch, function, is_main):
  kernel, grid, block = launch.kernel, launch.grid, launch.block[0]
  blocks = grid[0] * grid[1] * grid[2]
  runs = loops(shape, operation["operation"], launch)
  if len(runs) != len(function.loops()):
    raise ValueError(f"{kernel} has {len(function.loops())} loops, loops() knows {len(runs)}: say how often a warp "
                     f"runs each (--kernel {kernel} lists them)")
  times = function.executions(runs)
  warps = blocks * -(-block // 32)
  instructions = warps * sum(times)
  special = warps * sum(count for count, i in zip(times, function.code) if i.is_a("MUFU", "F2F", "I2F", "F2I"))
  moved = warps * 32 * sum(count * instruction.bytes() for count, instruction in zip(times, function.code))
  bytes_ = operation["bytes"] if is_main else min(moved, operation["bytes"])  # the rest comes from caches

  resident = resident_blocks(function, block, launch.shared)
  flight = function.in_flight() * block * min(resident, blocks / PROCESSORS)
  floor = bytes_ / BANDWIDTH
  issue = max(instructions, 8 * special) / ISSUE_RATE  # special functions: 4 lanes of a scheduler a cycle
  source, products = "machine code", 0
  if function.count("HMMA", "HGMMA"):
    if operation["operation"] not in METHODS:
      raise ValueError(f"{kernel} has products: name what is measured of its method in METHODS")
    source, rate = METHODS[operation["operation"]]
    products = operation["flops"] / len(operation["launches"]) / rate
  memory = bytes_ / min(BANDWIDTH, flight * PROCESSORS / LATENCY)
  waste = wasted(blocks, resident, function.in_flight() * block, memory > max(issue, products))
  misses = []
  if floor > SMALL:
    misses += ["waste"] * (waste >= MOST_WASTE)
    if not products:
      misses += ["issue"] * (issue > MOST_ISSUE * floor) + ["flight"] * (flight < LEAST_FLIGHT)
  misses += ["spills"] * (function.count("STL", "LDL") > 0)
  return Row(operation["operation"], kernel, operation["calls"], blocks, block, function.registers, resident,
             blocks / (PROCESSORS * resident), instructions * 32 / operation["elements"], flight, issue, floor,
             max(max(memory, issue) / (1 - waste), products) + LAUNCH, source, misses)


def instance(functions, shape, operation, kernel):
  found = functions.get(kernel, [])
  seen = "Unseen" if operation["calls"] else "Largest<__nv_bfloat16>"  # those that are not in a step's sum are for --fp8
  arguments = template_arguments(shape, operation["operation"], kernel, seen)
  if arguments:
    found = [function for function in found if function.arguments == arguments]
  if len(found) != 1:
    choices = "; ".join(function.arguments for function in functions.get(kernel, [])) or "none"
    raise ValueError(f"{kernel} has not one instance ({choices}): name the one that is launched in template_arguments()")
  return found[0]


def rows_of(model, functions):
  rows, errors = [], []
  shape = SimpleNamespace(**model["shape"])
  for operation in model["operations"]:
    for number, launch in enumerate(operation["launches"]):
      launch = SimpleNamespace(**launch)
      try:
        function = instance(functions, shape, operation, launch.kernel)
        rows.append(expect(shape, operation, launch, function, number == 0))
      except ValueError as error:
        errors.append(str(error))
  if errors:
    sys.exit(bad_input("\n".join(errors)))
  return rows


def print_table(name, rows):
  print(f"\n### {name}\n")
  print("| kernel | calls | grid × block | registers | blocks an SM | waves | instructions an element | KiB in flight "
        "| issue, µs | floor, µs | expected, µs | misses |")
  print("|---|---|---|---|---|---|---|---|---|---|---|---|")
  for r in rows:
    print(f"| {r.kernel} | {r.calls} | {r.grid} × {r.block} | {r.registers} | {r.resident} | {r.waves:.2f} "
          f"| {r.per_element:.2f} | {r.flight / 1024:.0f} | {1e6 * r.issue:.1f} | {1e6 * r.floor:.1f} "
          f"| {1e6 * r.expected:.1f} | {', '.join(r.misses)} |")
  total, floor = (sum(r.calls * time for r, time in zip(rows, times))
                  for times in ([r.expected for r in rows], [r.floor for r in rows]))
  print(f"\nA step: {1e3 * total:.2f} ms in these kernels, {1e3 * floor:.2f} ms by their bytes alone.")


def print_loops(function):
  print(f"{function.kernel}<{function.arguments}>: {function.registers} registers, {function.shared} bytes of shared "
        f"memory, {len(function.code)} instructions, {function.in_flight()} bytes of a thread in flight")
  for begin, end in function.loops():
    code = function.code[begin:end]
    part = Function(function.kernel, "", 0, 0, code)
    print(f"  {code[0].address:#07x} to {code[-1].address:#07x}: {len(code)} instructions, loads "
          f"{sum(i.bytes() for i in code if i.loads())} bytes, stores {sum(i.bytes() for i in code if not i.loads())}; "
          f"in flight {part.in_flight()}; {part.count('MUFU')} MUFU, {part.count('F2F')} F2F, "
          f"{part.count('LDS', 'STS', 'LDSM')} of shared memory, {part.count('HMMA', 'HGMMA')} products")


def bad_input(message):
  print(f"machine_code.py: {message}", file=sys.stderr)
  return 2


def find_cuobjdump():
  root = Path(__file__).resolve().parent.parent
  places = [*root.glob("build/cuobjdump/nvidia/*/bin/cuobjdump"), *Path("/usr/local").glob("cuda*/bin/cuobjdump")]
  return str(places[0]) if places else "cuobjdump"


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("object", nargs="?", default="build/gpu/step_kernels.o")
  parser.add_argument("--launches", default="build/cpu/launches", help="the program that prints them")
  parser.add_argument("--cuobjdump", default=find_cuobjdump())
  parser.add_argument("--kernel", help="show the loops of this kernel alone")
  parser.add_argument("--json", help="write the rows to this file")
  parser.add_argument("--check", action="store_true", help="print misses alone, and judge by them")
  options = parser.parse_args()
  functions = read_functions(options.object, options.cuobjdump)
  if options.kernel:
    if options.kernel not in functions:
      return bad_input(f"{options.object} has no {options.kernel}; it has {', '.join(sorted(functions))}")
    for function in functions[options.kernel]:
      print_loops(function)
    return 0
  models = json.loads(subprocess.run([options.launches], capture_output=True, text=True, check=True).stdout)
  table = {name: rows_of(model, functions) for name, model in models.items()}
  if options.json:
    rows = {name: [{"operation": r.operation, "kernel": r.kernel, "calls": r.calls, "floor_us": round(1e6 * r.floor, 1),
                    "expected_us": round(1e6 * r.expected, 1), "source": r.source} for r in of_model] for name, of_model in table.items()}
    Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
  if not options.check:
    for name, rows in table.items():
      print_table(name, rows)
  missed = {(r.kernel, rule) for rows in table.values() for r in rows for rule in r.misses}
  for kernel, rule in sorted(missed - EXPLAINED.keys()):
    print(f"machine_code.py: {kernel} misses the rule of {rule}")
  for kernel, rule in sorted(EXPLAINED.keys() - missed):
    print(f"machine_code.py: {kernel} keeps the rule of {rule}: take it out of EXPLAINED")
  return 1 if missed ^ EXPLAINED.keys() else 0


if __name__ == "__main__":
  sys.exit(main())
