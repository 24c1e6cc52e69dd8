#!/usr/bin/env python3
"""Looks in machine code for instructions that use the registers of a matrix product that is not done.

A product of Hopper's tensor cores (wgmma in PTX, HGMMA in machine code) is asynchronous: its warps go on at once. Until
they have waited for it, the tensor cores add to its sums, which are registers, and read its left operand, which may be
registers, too. In that time no other instruction may read or write the sums, or write the left operand.

In CUDA these are variables. Which registers they become, and when a register is free for something else, is decided by
ptxas, and ptxas before CUDA 13.3 may decide wrongly: it may take the registers of a left operand while they are still
read (release notes of CUDA 13.3; github.com/triton-lang/triton/pull/11781). Some numbers are then wrong, now and then,
and no message says so. Therefore CI reads the machine code that the compiler at hand has made of our kernels.

  HGMMA.64x64x16.F32 R24, R4, gdesc[UR8], R24          R24 to R55 += (R4 to R7) times a tile in shared memory
  HGMMA.64x64x16.F32 R24, R8, gdesc[UR8], R24, gsb0    the same; gsb0 ends a group of products
  WARPGROUP.DEPBAR.LE gsb0, 0x1                        waits until only the last group is not done

The method is a data-flow analysis. Each register of a product has an age: how many groups have ended since the product
started. A wait for all but N groups finishes the products whose age is above N. Where two ways through the code meet,
the younger age counts, because that product is finished later. We follow all ways until no age becomes younger.

To show that the check can find something, each kernel is checked a second time as if nobody waited. If this finds no
hazard, this program does not understand the code, and that is an error.

  make wgmma-hazards                                    # all our kernels that have such products
  python3 dev/wgmma_hazards.py FILE...                   # objects, .cubin files, or .sass files (cuobjdump -sass)

Exit code: 0 no hazard, 1 hazards, 2 bad input.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

from machine_code import INSTRUCTION, Instruction, find_cuobjdump

SUMS, LEFT = "the sums", "the left operand"
MOST_SHOWN = 8  # hazards of a kernel

# ---- one instruction


def operands_of(instruction):
  return [operand.strip() for operand in instruction.operands.split(",")]


def register(operand):
  """The number of a register that is an operand by itself, as in R4 or R4.reuse; else None."""
  found = re.fullmatch(r"R(\d+)(\.\w+)*", operand)
  return int(found.group(1)) if found else None


def product_registers(product):
  """Sets of the registers that hold a product's sums and its left operand."""
  rows, columns, _ = map(int, product.name.split(".")[1].split("x"))
  first, left, *_ = map(register, operands_of(product))
  of_a_thread = rows * columns // 128 // (1 if "F32" in product.name.split(".") else 2)  # 128 threads share the sums
  return set(range(first, first + of_a_thread)), set() if left is None else set(range(left, left + 4))


def registers_in_a_row(name):
  """How many registers an instruction reads or writes where it names the first of them. Too many would be a false
  alarm, too few a hazard that is missed."""
  kind, *parts = name.split(".")
  if "128" in parts:
    return 4
  if kind == "LDSM":
    return int(parts[-1]) if parts[-1].isdigit() else 1
  if kind in ("HMMA", "IMMA", "DMMA"):
    return 4
  is_wide = {"64", "WIDE", "F64", "U64", "S64"} & {*parts} or kind in ("CS2R", "DADD", "DMUL", "DFMA", "SYNCS")
  return 2 if is_wide and not kind.startswith("SHF") and "32" not in parts else 1


def written_registers(instruction):
  """The result is the first operand that is no predicate. Some instructions have none, but a source at that place."""
  if re.match(r"\w*SETP|FCHK|R2P|BAR|WARPSYNC|NANOSLEEP|BRX|JMX|CALL|RET", instruction.name):
    return set()
  results = (operand for operand in operands_of(instruction) if not re.fullmatch(r"!?U?P(\d+|T|R)", operand))
  first = register(next(results, ""))
  return set() if first is None else set(range(first, first + registers_in_a_row(instruction.name)))


def used_registers(instruction):
  """All registers that an instruction reads or writes. Its last operand (stored, or added to a wide product) may be
  several."""
  used = written_registers(instruction)
  for number, suffix in re.findall(r"(?<!\w)R(\d+)(\.U?64)?", instruction.operands):
    used |= {int(number), int(number) + bool(suffix)}
  last = [r for r in map(register, operands_of(instruction)) if r is not None][-1:]
  return used.union(*(range(first, first + registers_in_a_row(instruction.name)) for first in last))


# ---- a kernel


def followers(code, at, i):
  """The instructions that may run after number i of the code."""
  instruction = code[i]
  addresses = re.findall(r"0x([0-9a-f]+)", instruction.operands)
  ways = []
  if instruction.is_a("BRX", "JMX"):
    sys.exit(bad_input(f"{instruction.name} at {instruction.address:#x} goes to an address that only a run knows"))
  if instruction.is_a("BRA", "JMP", "CALL"):
    ways.append(at[int(addresses[-1], 16)])
  is_conditional = instruction.predicate or len(operands_of(instruction)) > 1 or "DIV" in instruction.name
  if not instruction.is_a("BRA", "JMP", "EXIT", "RET") or (is_conditional and not instruction.is_a("RET")):
    ways.append(i + 1)
  return [way for way in ways if way < len(code)]


def youngest(one, other):
  """The ages where two ways through the code meet."""
  never = (float("inf"),)
  return other if one is None else {key: min(one.get(key, never), other.get(key, never)) for key in {*one, *other}}


def after(instruction, ages, waits_count):
  """{(SUMS or LEFT, register): (age, address of the product)} after the instruction."""
  new = ages
  if instruction.is_a("HGMMA"):
    sums, left = product_registers(instruction)
    new = {**ages, **{key: (0, instruction.address) for key in [(SUMS, r) for r in sums] + [(LEFT, r) for r in left]}}
    if "gsb0" in operands_of(instruction):
      new = {key: (age + 1, product) for key, (age, product) in new.items()}
  elif instruction.name.startswith("WARPGROUP.DEPBAR") and waits_count:
    groups = int(operands_of(instruction)[-1], 16)
    new = {key: (age, product) for key, (age, product) in ages.items() if age <= groups}
  return youngest(ages, new) if instruction.predicate else new  # it may not be executed


def ages_before(code, waits_count):
  """For each instruction, the ages of all products that may not be done; None where no way leads."""
  at = {instruction.address: i for i, instruction in enumerate(code)}
  before = [{}] + [None] * (len(code) - 1)
  changed = [0]
  while changed:
    i = changed.pop()
    ages = after(code[i], before[i], waits_count)
    for way in followers(code, at, i):
      met = youngest(before[way], ages)
      if met != before[way]:
        before[way] = met
        changed.append(way)
  return before


def uses(instruction, ages, products):
  """{(verb, part of a product): registers}: how an instruction uses registers of products that may not be done."""
  if instruction.is_a("WARPGROUP"):
    return {}
  if instruction.is_a("HGMMA"):
    # Products are done in their order: they may add to the same sums one after the other. But all of the sums.
    written, used = product_registers(instruction)
    used |= {r for r in written if (SUMS, r) in ages and product_registers(products[ages[SUMS, r][1]])[0] != written}
  else:
    written, used = written_registers(instruction), used_registers(instruction)
  found = {("uses", SUMS): {r for r in used if (SUMS, r) in ages},
           ("writes", LEFT): {r for r in written if (LEFT, r) in ages}}
  return {use: registers for use, registers in found.items() if registers}


def hazards_of(code, before):
  """[(instruction, verb, part of a product, registers, address of that product)]"""
  products = {instruction.address: instruction for instruction in code if instruction.is_a("HGMMA")}
  return [(instruction, verb, part, sorted(registers), min(ages[part, r][1] for r in registers))
          for instruction, ages in zip(code, before) if ages
          for (verb, part), registers in uses(instruction, ages, products).items()]


def check(name, code):
  """Prints the number of a kernel's products, and its hazards; returns the number of hazards."""
  products = [instruction for instruction in code if instruction.is_a("HGMMA")]
  from_registers = [product for product in products if product_registers(product)[1]]
  before = ages_before(code, waits_count=False)
  for instruction, ages in zip(code, before):
    if ages is None and instruction.is_a("HGMMA"):
      sys.exit(bad_input(f"{name}: no way leads to the product at {instruction.address:#x}: the check is blind here"))
  seen = {part for _, _, part, *_ in hazards_of(code, before)}
  for part in [SUMS] + [LEFT] * bool(from_registers):
    if part not in seen:
      sys.exit(bad_input(f"{name}: even without waits nothing touches {part} of a product: the check is blind here"))
  found = hazards_of(code, ages_before(code, waits_count=True))
  print(f"{len(products):4} products, {len(from_registers):3} with a left operand in registers, "
        f"{len(found)} hazards: {name}")
  for instruction, verb, part, registers, product in found[:MOST_SHOWN]:
    print(f"     {instruction.address:#06x} {instruction.name} {instruction.operands.strip()}: {verb} {part} "
          f"(R{', R'.join(map(str, registers))}) of the product at {product:#06x}, which may not be done")
  return len(found)


# ---- files


def read_kernels(path, cuobjdump):
  """{name: code} of the kernels that have asynchronous products."""
  if path.suffix == ".sass":
    text = path.read_text()
  else:
    done = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True)
    if done.returncode != 0:
      sys.exit(bad_input(f"cuobjdump cannot read {path}: {done.stderr.strip()}"))
    text = done.stdout
  parts = [part.split("\n", 1) for part in text.split("Function : ")[1:] if "HGMMA" in part]
  mangled = "\n".join(name for name, _ in parts)
  names = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True).stdout.split("\n")
  kernels = {}
  for name, (_, body) in zip(names, parts):
    code = [Instruction(int(address, 16), *rest) for address, *rest in INSTRUCTION.findall(body)]
    kernels[re.sub(r"\(.*|^void ", "", name)] = code
  if not kernels:
    sys.exit(bad_input(f"{path} has no HGMMA: is it compiled for sm_90a?"))
  return kernels


def bad_input(message):
  print(f"wgmma_hazards.py: {message}", file=sys.stderr)
  return 2


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("files", nargs="+", type=Path)
  parser.add_argument("--cuobjdump", default=find_cuobjdump())
  options = parser.parse_args()
  kernels = [kernel for path in options.files for kernel in read_kernels(path, options.cuobjdump).items()]
  hazards = sum(check(name, code) for name, code in kernels)
  print(f"{len(kernels)} kernels, {hazards} hazards")
  return 1 if hazards else 0


if __name__ == "__main__":
  sys.exit(main())
