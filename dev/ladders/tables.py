#!/usr/bin/env python3
"""Writes dev/ladders/tables.txt, which has the output of each ladder's program, and one ladder's picture, matmul.svg. From
that file it makes the tables of docs/kernels.md and the picture of all times, h200.svg.

In tables.txt counts of the CPU device, between <!-- ladder_gelu --> and <!-- end -->, are the same on every machine with the same g++.
Times, between <!-- h200_gelu --> and <!-- end of h200 -->, were printed by the same programs on the card; nothing here changes them.

Usage: make ladders DEVICE=cpu && python3 dev/ladders/tables.py          or --check: names files that would change; exits with 1
       python3 dev/ladders/tables.py --times                             only kernels.md and h200.svg: nothing has to be built
       python3 dev/ladders/tables.py --plot-times FILE                   the picture of times alone, into this file
"""
import argparse
import math
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import svg

ROOT = Path(__file__).resolve().parent.parent.parent
TABLES = ROOT / "dev/ladders/tables.txt"
PICTURE = TABLES.with_name("matmul.svg")
TIMES = TABLES.with_name("h200.svg")
PAGE = ROOT / "docs/kernels.md"
LEFT, WIDTH, RIGHT, TOP, ROW = 180, 620, 220, 62, 30  # pixels
LEAST = 0.05  # % of the ceiling, at the left edge


def printed_by(ladder):
  """The line that names dtype and shape, then the table."""
  run = subprocess.run([ROOT / "build/cpu" / ladder], capture_output=True, text=True)
  if run.returncode:
    sys.exit(f"{ladder} failed: make ladders DEVICE=cpu builds it\n{run.stdout}{run.stderr}")
  said, _, _ = run.stdout.rpartition("\n\npicture ")
  title, _, table = said[said.index("\n\n"):].strip().partition("\n\n")
  return f"{title}:\n\n{table}"


def times_in(tables):
  """For each ladder the rungs that were timed: name, microseconds, % of the ceiling."""
  return {name: [(cells[0].strip(), cells[1].strip(), float(cells[6]))
                 for cells in (line.strip("|").split("|") for line in table.splitlines() if line.startswith("| "))
                 if cells[0].strip() != "rung"]
          for name, table in re.findall(r"<!-- h200_(\w+) -->\n(.*?)<!-- end of h200 -->", tables, re.DOTALL)}


def rows_of(table):
  """{rung: {column: cell}} of a table."""
  lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
  return {line[0]: dict(zip(lines[0], line)) for line in lines[1:]}


def counted_and_timed(name, tables):
  """One table of a ladder for docs/kernels.md: counts beside times."""
  counted = re.search(rf"<!-- ladder_{name} -->\n(.*?)<!-- end -->", tables, re.DOTALL)[1]
  timed = re.search(rf"<!-- h200_{name} -->\n(.*?)<!-- end of h200 -->", tables, re.DOTALL)[1]
  small, least = re.search(rf"^{name}, bf16, (.*?): .* at least ([\d.]+) bytes each", counted, re.MULTILINE).groups()
  large, best = re.search(rf": {name}, bf16, (.*?): .* at best (.*?):", timed).groups()
  times = rows_of(timed)
  lines = [f"Counted at {small}: at least {least} bytes an element. Timed at {large}: at best {best}.", "",
           "| rung | bytes an element | × least | µs | % of the ceiling | idea |", "|---|--:|--:|--:|--:|---|"]
  for rung, row in rows_of(counted).items():
    time = times.get(rung, {})
    cells = rung, row["moved"], row["× least"], time.get("µs", "–"), time.get("% of ceiling", "–"), row["idea"]
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines)


def page_with(tables, page):
  return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->",
                lambda match: f"<!-- {match[1]} -->\n{counted_and_timed(match[1], tables)}\n<!-- end -->", page, flags=re.DOTALL)


def draw_times(ladders):
  """A row for each ladder, a dot for each rung, from the first one (hollow) to the last."""
  def place(share):
    return LEFT + WIDTH * math.log(max(share, LEAST) / LEAST) / math.log(100 / LEAST)
  bottom = TOP + ROW * len(ladders)
  parts = [svg.text(12, 22, "Kernels from naive to fast on one H200, in bf16", 'font-weight="bold" font-size="14"'),
           svg.text(12, 40, "a dot is a rung of the ladder; hollow the first; beside the last one its time and share", 'fill="#555"'),
           svg.text(LEFT, bottom + 30, "% of the ceiling: the card's own copy, or its products", 'fill="#555"')]
  for share in 0.1, 1, 10, 100:
    parts += [f'<path d="M{place(share):.1f} {TOP - 8}V{bottom}" stroke="{"#c33" if share == 100 else "#ddd"}"/>',
              svg.text(place(share), bottom + 14, f"{share:g} %", 'text-anchor="middle" fill="#555"')]
  for row, (name, rungs) in enumerate(ladders.items()):
    y = TOP + ROW * (row + 0.5) - 8
    rungs = [rung for rung in rungs if rung[0] != "library"]
    parts += [svg.text(LEFT - 10, y + 4, name, 'text-anchor="end" font-weight="bold"'),
              f'<path d="M{" L".join(f"{place(share):.1f} {y:.1f}" for *_, share in rungs)}" stroke="#4a86c5" fill="none"/>']
    for number, (rung, time, share) in enumerate(rungs):
      fill = "white" if number == 0 else "#4a86c5"
      parts.append(f'<circle cx="{place(share):.1f}" cy="{y:.1f}" r="{5 if number == len(rungs) - 1 else 3.5}" '
                   f'fill="{fill}" stroke="#4a86c5"><title>{rung}: {time} µs, {share:g} %</title></circle>')
    rung, time, share = rungs[-1]
    parts.append(svg.text(LEFT + WIDTH + 12, y + 4, f"{rung}: {time} µs, {share:g} %"))
  return svg.document(LEFT + WIDTH + RIGHT, bottom + 40, "", parts)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true", help="write nothing")
  parser.add_argument("--times", action="store_true", help="only what follows from tables.txt: docs/kernels.md and the picture of times")
  parser.add_argument("--plot-times", metavar="FILE", help="draw the picture of times into this file, and nothing else")
  arguments = parser.parse_args()
  old = TABLES.read_text()
  if arguments.plot_times:
    return svg.write("--plot-times", arguments.plot_times, draw_times(times_in(old)))
  new, picture = old, PICTURE.read_text()
  if not arguments.times:
    new = re.sub(r"<!-- (ladder_\w+) -->\n.*?<!-- end -->",
                 lambda match: f"<!-- {match[1]} -->\n{printed_by(match[1])}\n<!-- end -->", old, flags=re.DOTALL)
    picture = (ROOT / "build/cpu/ladder_matmul.svg").read_text()
  files = {TABLES: new, PICTURE: picture, TIMES: draw_times(times_in(old)), PAGE: page_with(new, PAGE.read_text())}
  changed = [path for path, text in files.items() if path.read_text() != text]
  if arguments.check:
    sys.exit("\n".join(f"{path.relative_to(ROOT)} is not what the ladders write now: python3 dev/ladders/tables.py" for path in changed) or 0)
  for path in changed:
    path.write_text(files[path])


if __name__ == "__main__":
  main()
