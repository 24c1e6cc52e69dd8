#!/usr/bin/env python3
"""Prints the innermost loops of kernels with Hopper's asynchronous products, and their instructions.

The first number is the length of a round, the shortest way through the loop: masks at the diagonal and waits that try
again are not in it. The other numbers count all instructions of the loop. Loops of a few instructions (copies that ask
which lane starts them, waits) are taken as a part of the loop around them. Of the fences,

  MEMBAR.ALL.GPU, MEMBAR.SC.GPU   wait until the thread's writes are visible to the whole GPU
  CCTL.IVALL                      empties the SM's L1 cache
  MEMBAR.ALL.CTA, FENCE.VIEW      order the memory of a block, or between threads and engines: cheap

  make wgmma-hazards              # compiles the kernels
  python3 dev/product_loops.py build/gpu/product_kernels.cubin [--kernel PART_OF_A_NAME]
"""
import argparse
import sys
from collections import Counter
from pathlib import Path

from machine_code import find_cuobjdump
from wgmma_hazards import followers, read_kernels, used_registers

SHOWN = ("HGMMA", "UTMALDG", "UTMASTG", "UBLKRED", "UBLKCP", "MEMBAR", "FENCE", "CCTL", "ERRBAR", "REDG", "ATOMG",
         "R2UR", "STL", "LDL")
NEEDED = ("HGMMA", "UTMALDG", "UBLKRED")  # one of these
SMALL = 20  # instructions


def dominators(ways, before):
  """For each instruction, as bits, those that every way to it passes."""
  every = (1 << len(ways)) - 1
  found = [1] + [every] * (len(ways) - 1)
  changed = True
  while changed:
    changed = False
    for i in range(1, len(ways)):
      met = every
      for earlier in before[i]:
        met &= found[earlier]
      if before[i] and found[i] != met | 1 << i:
        found[i], changed = met | 1 << i, True
  return found


def loops(code):
  """{first instruction: all} of each natural loop: all that reach a jump back to the first without passing it again."""
  at = {instruction.address: i for i, instruction in enumerate(code)}
  ways = [followers(code, at, i) for i in range(len(code))]
  before = [[] for _ in code]
  for i, following in enumerate(ways):
    for j in following:
      before[j].append(i)
  passed = dominators(ways, before)
  found = {}
  for i, following in enumerate(ways):
    for first in following:
      if passed[i] >> first & 1:
        body, rest = found.setdefault(first, {first}), [i]
        while rest:
          j = rest.pop()
          if j not in body:
            body.add(j)
            rest += before[j]
  return found, ways


def highest_register(code, ways, begin):
  """The highest register in instructions that may run after number `begin`."""
  reached, rest = {begin}, [begin]
  while rest:
    for following in set(ways[rest.pop()]) - reached:
      reached.add(following)
      rest.append(following)
  return max(number for i in reached for number in used_registers(code[i]))


def round_of(first, body, ways):
  """The shortest way from the first instruction back to it, inside the loop."""
  came, now = {}, [first]
  while now:
    following = []
    for i in now:
      for j in ways[i]:
        if j == first:
          way = [i]
          while way[-1] != first:
            way.append(came[way[-1]])
          return way[::-1]
        if j in body and j not in came:
          came[j] = i
          following.append(j)
    now = following
  return []


def show(name, code):
  found, ways = loops(code)
  print(f"{name}: {sum(i.is_a('STL', 'LDL') for i in code)} spills" + "".join(
      f"; registers up to R{highest_register(code, ways, i)} of {int(code[i].operands.split(', ')[-1], 16)}"
      for i in range(len(code)) if code[i].is_a("USETMAXREG")))
  kept = {first: [code[i] for i in sorted(body)] for first, body in found.items()
          if len(body) > SMALL and any(code[i].is_a(*NEEDED) for i in body)}
  for first, part in sorted(kept.items()):
    if any(other != first and other in found[first] for other in kept):
      continue
    counts = Counter(i.name for i in part if i.is_a(*SHOWN))
    print(f"  {part[0].address:#06x}: {len(round_of(first, found[first], ways))} of {len(part)} instructions; "
          + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("file", type=Path)
  parser.add_argument("--kernel", default="", help="part of a kernel's name")
  parser.add_argument("--cuobjdump", default=find_cuobjdump())
  options = parser.parse_args()
  for name, code in sorted(read_kernels(options.file, options.cuobjdump).items()):
    if options.kernel in name:
      show(name, code)


if __name__ == "__main__":
  sys.exit(main())
