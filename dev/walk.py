#!/usr/bin/env python3
"""Which files does a reader walk through who follows a step, or a checkpoint? Counted, not chosen: the files of the functions
that the program enters, in the order in which it enters them.

    make walk

runs two ranks with ZeRO 2 on the CPU device, built without optimization and with a call at the beginning of each function
(walk.cpp), and calls this script. A step is all calls below Trainer::step at its second call, when graphs are made and memory
is there; a checkpoint is all calls below Trainer::save. Functions of the C++ library, of other libraries and of cpu/ are not
entered, and other threads (the control thread, the writer of checkpoints) are not followed.

For each walk it prints the files in the order of their first visit, how often a reader comes to each from another file who
reads each function once, where it is entered first, and the number of functions that were entered there.
"""
import argparse
import array
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def places_of(program, addresses):
  """{address: (function, file)}; file is a path in the repository."""
  asked = "\n".join(hex(address) for address in addresses)
  out = subprocess.run(["addr2line", "-Cfe", program], input=asked, capture_output=True, text=True, check=True).stdout
  lines = out.splitlines()
  root = str(Path.cwd()) + "/"
  places = {}
  for address, function, place in zip(addresses, lines[::2], lines[1::2]):
    file = place.rsplit(":", 1)[0].removeprefix(root)
    file = re.sub(r"^\./|^(.*/)?build/[^/]*/src/", "", file)
    places[address] = (function, file)
  return places


def cut(walk, begin, ends, number):
  """The part of the walk from the entry into `begin` with this number (from 1) to the next entry into one of `ends`."""
  starts = [i for i, (function, _) in enumerate(walk) if function.startswith(begin)]
  if len(starts) < number:
    sys.exit(f"walk.py: {begin} was entered {len(starts)} times")
  first = starts[number - 1]
  for last in range(first + 1, len(walk)):
    if walk[last][0].startswith(ends):
      return walk[first:last]
  return walk[first:]


def report(title, walk):
  """A reader reads a function once: where it is entered again, nothing is turned to."""
  first_entries = list(dict.fromkeys(walk))
  visits, functions = defaultdict(int), defaultdict(int)
  for i, (_, file) in enumerate(first_entries):
    visits[file] += i == 0 or first_entries[i - 1][1] != file
    functions[file] += 1
  all_visits = sum(visits.values())
  print(f"{title}: {len(visits)} files, {len(first_entries)} functions, {all_visits - len(visits)} returns to a file that was left\n")
  print("| file | visits | functions |\n|---|--:|--:|")
  for file in visits:
    print(f"| {file} | {visits[file]} | {functions[file]} |")
  print()


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("program")
  parser.add_argument("log", help="what the program wrote into GPT_WALK")
  options = parser.parse_args()
  numbers = array.array("Q", Path(options.log).read_bytes())
  places = places_of(options.program, sorted(set(numbers)))
  walk = [places[number] for number in numbers if places[number][1].startswith(("gpt/", "kernels/", "extensions/", "runtime/")) or "/" not in places[number][1]]
  report("A step", cut(walk, "Trainer::step(", ("Trainer::done(", "Trainer::validates("), 2))
  report("A checkpoint", cut(walk, "Trainer::save(", ("Trainer::samples(", "Trainer::finish("), 1))


if __name__ == "__main__":
  main()
