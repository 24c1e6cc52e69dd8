#!/usr/bin/env python3
"""Draws one training step of each trace that `train_gpt --trace FILE` wrote, one below the other in one SVG.

A row is a stream of a rank, a box what ran there, its colour the kind of work, a gap the wait between two boxes. Boxes
of one layer that follow each other within a pixel are drawn as one, with the layer's number where it fits. A
collective's box lasts from its start on this rank, so it holds the wait for the other ranks too. Every file has the
same time scale. --step is by default the shortest step of each file, the one least disturbed by other programs.

A trace is in the Trace Event Format (kernels/profile.cuh). Needs Python alone. Exit code: 0 drawn, 2 bad input.

  python dev/timeline.py run.json
  python dev/timeline.py zero0.json='ZeRO 0' zero3.json='ZeRO 3' --ranks 0,1 --step 4 -o timeline.svg
"""
import argparse
import itertools
import json
import math
import re
import sys
from html import escape
from pathlib import Path

KINDS = {  # name in the legend: colour, names in the trace
  "forward": ("#c6dbef", r".*_forward|cross_entropy"),
  "backward, gradients": ("#6baed6", r".*_backward|.*_gradient|column_sum|narrow|accumulate"),
  "optimizer": ("#bcaee0", r"adamw.*|square_sums|add_up|clip_factor"),
  "all_reduce": ("#f4978e", r"all_reduce"), "reduce_scatter": ("#fdbe6f", r"reduce_scatter"),
  "all_gather": ("#a1d99b", r"all_gather"), "broadcast": ("#e7cb94", r"broadcast"),
  "send_receive": ("#e7969c", r"send_receive"), "other": ("#cccccc", r".*")}
LEFT, WIDTH, ROW, BOX, LETTER = 150, 1150, 24, 19, 6.2  # pixels; a letter's width is an upper estimate


def fail(message):
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


def read_trace(path):
  """Names of streams by (rank, stream), and the ranges (X events) that belong to a step."""
  try:
    events = json.loads(Path(path).read_bytes())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranges = [e for e in events if e["ph"] == "X" and "step" in e["args"]]
    [(e["ts"] + e["dur"], names[e["pid"], e["tid"]]) for e in ranges]
  except OSError as error:
    fail(f"{path}: {error.strerror}: give a file that train_gpt --trace wrote")
  except (ValueError, KeyError, TypeError):
    fail(f"{path}: not a trace: give a file that train_gpt --trace wrote")
  return names, ranges or fail(f"{path}: no step in it: trace a run that trains")


def choose_step(path, ranges, wanted, ranks):
  """The ranges of one step of the wanted ranks, times in ms from its start on the first of all ranks."""
  steps = {}
  for e in ranges:
    steps.setdefault(e["args"]["step"], []).append(e)
  length = {step: max(e["ts"] + e["dur"] for e in of) - min(e["ts"] for e in of) for step, of in steps.items()}
  step = wanted or min(length, key=length.get)
  if step not in steps:
    fail(f"{path}: no step {step}: it has {min(steps)} to {max(steps)}")
  missing = set(ranks or []) - {e["pid"] for e in steps[step]}
  if missing:
    fail(f"{path}: no rank {min(missing)}: it has 0 to {max(e['pid'] for e in steps[step])}")
  start = min(e["ts"] for e in steps[step])
  return step, [{**e["args"], "row": (e["pid"], e["tid"]), "name": e["name"], "start": (e["ts"] - start) / 1e3,
                 "end": (e["ts"] + e["dur"] - start) / 1e3, "kind": kind_of(e["name"])}
                for e in steps[step] if not ranks or e["pid"] in ranks]


def kind_of(name):
  return next(kind for kind, (_, pattern) in KINDS.items() if re.fullmatch(pattern, name))


def join(ranges, gap):
  """Boxes of a row: ranges of one kind, layer and micro-batch with less than `gap` ms between them are one."""
  boxes = []
  for r in sorted(ranges, key=lambda r: r["start"]):
    same = boxes and all(boxes[-1].get(key) == r.get(key) for key in ("kind", "layer", "micro-batch"))
    if same and r["kind"] != r["name"] and r["start"] - boxes[-1]["end"] < gap:  # not two collectives
      boxes[-1]["end"] = r["end"]
    else:
      boxes.append(dict(r))
  return boxes


def text(x, y, words, style=""):
  return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(words)}</text>'


def draw_box(box, y, scale):
  x, width = LEFT + box["start"] * scale, (box["end"] - box["start"]) * scale
  is_collective = box["kind"] == box["name"]
  layer = f"layer {box['layer']}" if "layer" in box and not is_collective else ""
  hint = f"{box['kind']} {layer} {box['end'] - box['start']:.2f} ms"
  svg = (f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.3):.1f}" height="{BOX}" fill="{KINDS[box["kind"]][0]}">'
         f"<title>{escape(hint)}</title></rect>")
  labels = [box["name"]] if is_collective else [layer, layer[6:]] if layer else []
  label = next((label for label in labels if label and len(label) * LETTER < width), None)
  return svg + (text(x + width / 2, y + 14, label, ' text-anchor="middle"') if label else "")


def draw_file(title, names, ranges, y, scale):
  """SVG of one file from height y on, and where it ends."""
  svg = [text(8, y + 14, title, ' font-weight="bold" font-size="13"')]
  rank = min(r["row"][0] for r in ranges)
  steps = sorted({r["micro-batch"] for r in ranges if r["row"][0] == rank and "micro-batch" in r})
  for number, micro_batch in enumerate([*steps, None], start=1):
    of = [r for r in ranges if r["row"][0] == rank and names[r["row"]] == "compute" and r.get("micro-batch") == micro_batch]
    if of:
      x, end = (LEFT + edge * scale for edge in (of[0]["start"], of[-1]["end"]))
      svg.append(f'<path d="M{x:.1f} {y + 21}v-4H{end:.1f}v4" fill="none" stroke="#888"/>')
      svg.append(text((x + end) / 2, y + 13, "update" if micro_batch is None else f"micro-step {number}",
                      ' text-anchor="middle" fill="#555"'))
  y += ROW
  rows = sorted({r["row"] for r in ranges}, key=lambda row: (row[0], names[row] != "compute", row))
  for row in rows:
    svg.append(text(LEFT - 8, y + 14, f"rank {row[0]} {names[row]}", ' text-anchor="end"'))
    svg += [draw_box(box, y, scale) for box in join([r for r in ranges if r["row"] == row], 1 / scale)]
    y += ROW
  return svg, y + 8


def draw(panels):
  longest = max(r["end"] for _, _, ranges in panels for r in ranges)
  scale = WIDTH / longest  # pixels a ms
  used = {r["kind"] for _, _, ranges in panels for r in ranges}
  svg, x = [], LEFT
  for kind in (kind for kind in KINDS if kind in used):
    svg += [f'<rect x="{x}" y="9" width="14" height="14" fill="{KINDS[kind][0]}"/>', text(x + 19, 20, kind)]
    x += 19 + len(kind) * LETTER + 22
  y = 34
  for panel in panels:
    of_file, y = draw_file(*panel, y, scale)
    svg += of_file
  tick = next(t for t in (m * 10.0 ** e for e in itertools.count(-3) for m in (1, 2, 5)) if longest / t <= 12)
  for ms in (i * tick for i in range(math.floor(longest / tick) + 1)):
    x = LEFT + ms * scale
    svg.insert(0, f'<path d="M{x:.1f} 34V{y}" stroke="#e4e4e4"/>')
    svg.append(text(x, y + 14, f"{ms:g}", ' text-anchor="middle"'))
  svg.append(text(LEFT - 8, y + 14, "ms", ' text-anchor="end"'))
  size = f"{LEFT + WIDTH + 20} {y + 24}"
  return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11">\n'
          '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(svg) + "\n</svg>\n")


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("files", metavar="FILE[=TITLE]", nargs="+")
  parser.add_argument("--step", type=int, metavar="N", help="default: the shortest of each file")
  parser.add_argument("--ranks", metavar="R,R", help="default: all")
  parser.add_argument("-o", "--output", default="timeline.svg", help="default %(default)s")
  arguments = parser.parse_args()
  if arguments.ranks and not re.fullmatch(r"\d+(,\d+)*", arguments.ranks):
    fail(f"--ranks {arguments.ranks}: give numbers with commas between them, like 0,1")
  ranks = [int(rank) for rank in arguments.ranks.split(",")] if arguments.ranks else None
  panels = []
  for path, _, title in (file.partition("=") for file in arguments.files):
    names, ranges = read_trace(path)
    step, ranges = choose_step(path, ranges, arguments.step, ranks)
    panels.append((title or path, names, ranges))
    print(f"{path}: step {step}")
  try:
    Path(arguments.output).write_text(draw(panels))
  except OSError as error:
    fail(f"--output {arguments.output}: {error.strerror}")
  print(f"wrote {arguments.output}")


if __name__ == "__main__":
  main()
