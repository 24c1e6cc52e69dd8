#!/usr/bin/env python3
"""Draws one training step of each trace that `train_gpt --trace FILE` wrote, one below the other, as an SVG.

A row is a stream of a rank. A box is work on it: the colour shows the kind of work, the label the layer, or (attention
of ranks in a ring) the step of the ring. White between two boxes is waiting. Ranges of the same kind and layer, less
than a pixel apart, are one box. A collective's box begins when its rank starts it, so that waiting for other ranks is
part of it. All files have the same scale of time.

With --stages a row is a stage of a pipeline and a box an action, twice: by the clock, with messages below, and by
dependencies (dev/stages.py). Where the title is the name of a schedule, the formula of its bubble stands beside it.

A trace is in the Trace Event Format (kernels/device/profile.cuh). --record also writes the boxes that are drawn, which take
much less room than traces; from such a file the same picture is drawn again. Needs only Python. Exit code: 0 drawn, 2 bad input.

  python3 dev/timeline.py run.json
  python3 dev/timeline.py zero0.json='ZeRO 0' zero3.json='ZeRO 3' --ranks 0,1 --step 4 -o timeline.svg
  python3 dev/timeline.py --stages 1f1b.json=1f1b zb.json=zb --record stages.json
  python3 dev/timeline.py --recorded stages.json -o stages.svg
"""
import argparse
import collections
import json
import re
import sys
from html import escape
from pathlib import Path

import schedule
import stages
import svg
from svg import LETTER, text

KINDS = {  # name in the legend: colour, names in the trace
  "attention": ("#66c2cd", r"attention_(forward|backward)"),
  "parts of attention": ("#b8a07e", r"pack_keys|copy_late_queries|(merge|add)_ring_part|finish_ring_gradients|(split|join)_heads"),
  "forward": ("#c6dbef", r".*_forward|(vocabulary_)?cross_entropy|vocabulary_statistics"),
  "backward, gradients": ("#6baed6", r".*_backward|.*_gradient|column_sum|cast|accumulate|quantize|dequantize|clear_if_left_out|project_(rows|columns)|orthonormalize|restore|replace_factors"),
  "optimizer": ("#bcaee0", r"adamw.*|square_sums|add_up|clip_factor"),
  "all_reduce": ("#f4978e", r"all_reduce"),
  "reduce_scatter": ("#fdbe6f", r"reduce_scatter"),
  "all_gather": ("#a1d99b", r"all_gather"),
  "broadcast": ("#e7cb94", r"broadcast"),
  "all_to_all": ("#c49c94", r"all_to_all"),
  "send_receive": ("#e7969c", r"send_receive"),
  "send": ("#9edae5", r"send"),
  "receive": ("#c7e9c0", r"receive"),
  "other": ("#cccccc", r".*")}
LEFT, WIDTH, ROW, BOX = 172, 1150, 24, 19  # pixels
DRAWN = ("rank", "stream", "kind", "stage", "layer", "micro_batch", "ring_step", "start", "end")
MIDDLE = 'text-anchor="middle"'


def fail(message):
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


def kind_of(name):
  return next(kind for kind, (_, names) in KINDS.items() if re.fullmatch(names, name))


def read_trace(path):
  """The ranges of each step, with start and end in ms. stage: of a pipeline, else None."""
  try:
    events = json.loads(Path(path).read_bytes())["traceEvents"]
    streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    stage_of = {rank: re.search(r", stage (\d+)", name) for rank, name in names.items()}
    steps = collections.defaultdict(list)
    for e in events:
      if e["ph"] == "X" and "step" in e["args"]:
        steps[e["args"]["step"]].append({
          "rank": e["pid"], "stream": streams[e["pid"], e["tid"]], "name": e["name"], "kind": kind_of(e["name"]),
          "stage": stage_of[e["pid"]] and int(stage_of[e["pid"]][1]), "layer": e["args"].get("layer"),
          "micro_batch": e["args"].get("micro-batch"), "work": e["args"].get("work"), "chunk": e["args"].get("chunk"),
          "start": e["ts"] / 1e3, "end": (e["ts"] + e["dur"]) / 1e3})
  except OSError as error:
    fail(f"{path}: {error.strerror}: give a file that train_gpt --trace wrote")
  except (ValueError, KeyError, TypeError):
    fail(f"{path}: not a trace: give a file that train_gpt --trace wrote")
  return steps or fail(f"{path}: no step in it: give the trace of a run that trains")


def choose_step(path, steps, step):
  """The number of the step to draw."""
  if step is None:
    step = min(steps, key=lambda step: max(r["end"] for r in steps[step]) - min(r["start"] for r in steps[step]))
  if step not in steps:
    fail(f"{path}: no step {step}: it has {min(steps)} to {max(steps)}")
  print(f"{path}: step {step}")
  return step


def of_ranks(path, ranges, ranks):
  """The ranges of some ranks; time 0 is when the first of all ranks begins the step."""
  begin = min(r["start"] for r in ranges)
  known = {r["rank"] for r in ranges}
  for rank in ranks or []:
    if rank not in known:
      fail(f"{path}: no rank {rank}: it has 0 to {max(known)}")
  return [{**r, "start": r["start"] - begin, "end": r["end"] - begin} for r in ranges if r["rank"] in (ranks or known)]


def of_first_ranks(path, steps):
  """The steps, but only the first rank of each pipeline stage."""
  first = {}
  for r in sorted((r for ranges in steps.values() for r in ranges), key=lambda r: r["rank"]):
    first.setdefault(r["stage"], r["rank"])
  if None in first:
    fail(f"{path}: no pipeline: give the trace of a run with --pp")
  return {number: [r for r in ranges if r["rank"] in first.values()] for number, ranges in steps.items()}


def number_ring_steps(ranges):
  """Gives each attention its `ring_step`, if it is one of several of its layer, micro-batch and direction."""
  attention = collections.defaultdict(list)
  for r in sorted(ranges, key=lambda r: r["start"]):
    if r["kind"] == "attention":
      attention[r["rank"], r["micro_batch"], r["layer"], r["work"], r["name"]].append(r)
  for steps in attention.values():
    for number, r in enumerate(steps):
      r["ring_step"] = number if len(steps) > 1 else None
  return ranges


def is_collective(box):
  return KINDS[box["kind"]][1] == box["kind"]


def join(ranges, gap):
  """The boxes of a row: ranges with less than `gap` ms between them that do the same are one."""
  boxes = []
  for r in sorted(ranges, key=lambda r: r["start"]):
    same = boxes and all(boxes[-1].get(key) == r.get(key) for key in ("kind", "layer", "micro_batch", "ring_step"))
    if same and not is_collective(r) and r["start"] - boxes[-1]["end"] < gap:
      boxes[-1]["end"] = r["end"]
    else:
      boxes.append({key: r.get(key) for key in DRAWN})
  return boxes


def draw_box(box, y, scale):
  x, width = LEFT + box["start"] * scale, (box["end"] - box["start"]) * scale
  layer = [] if box["layer"] is None else [f"layer {box['layer']}", str(box["layer"])]
  labels = layer or [box["kind"]] * is_collective(box)
  if box["ring_step"] is not None:
    labels = [f"step {box['ring_step']}", f"s{box['ring_step']}"]
  label = next((label for label in labels if len(label) * LETTER < width), "")
  hint = ", ".join([box["kind"], *layer[:1], f"{box['end'] - box['start']:.2f} ms"])
  return (f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.4):.1f}" height="{BOX}" fill="{KINDS[box["kind"]][0]}">'
          f"<title>{escape(hint)}</title></rect>" + (text(x + width / 2, y + 14, label, MIDDLE) if label else ""))


def draw_micro_steps(ranges, y, scale):
  """Brackets over the first rank's micro-steps. In a pipeline micro-batches take turns."""
  if any(r["stage"] is not None for r in ranges):
    return
  computed = [r for r in ranges if r["rank"] == min(r["rank"] for r in ranges) and r["stream"] == "compute"]
  micro_batches = {r["micro_batch"] for r in computed}
  numbers = sorted(micro_batches - {None})
  for micro_batch in [*numbers, *micro_batches & {None}]:
    inside = [r for r in computed if r["micro_batch"] == micro_batch]
    start, end = (LEFT + time * scale for time in (min(r["start"] for r in inside), max(r["end"] for r in inside)))
    words = "update" if micro_batch is None else f"micro-step {numbers.index(micro_batch) + 1}"
    yield f'<path d="M{start:.1f} {y + 21}v-4H{end:.1f}v4" fill="none" stroke="#888"/>'
    yield text((start + end) / 2, y + 13, words, MIDDLE + ' fill="#555"')


def pixels_per_ms(panels):
  return WIDTH / max(r["end"] for _, ranges in panels for r in ranges)


def rows_of(ranges):
  """The ranges of each stream of each rank."""
  rows = {(r["rank"], r["stream"]) for r in ranges}
  for row in sorted(rows, key=lambda row: (row[0], row[1] != "compute", row[1])):
    yield row, [r for r in ranges if (r["rank"], r["stream"]) == row]


def joined(panels):
  gap = 1 / pixels_per_ms(panels)
  return [(title, [box for _, of_row in rows_of(ranges) for box in join(of_row, gap)]) for title, ranges in panels]


def draw(panels):
  """panels: the title and the boxes of each file."""
  scale = pixels_per_ms(panels)
  parts, x, y = [], LEFT, 34
  for kind in [kind for kind in KINDS if any(box["kind"] == kind for _, boxes in panels for box in boxes)]:
    parts += [f'<rect x="{x:.1f}" y="9" width="14" height="14" fill="{KINDS[kind][0]}"/>', text(x + 19, 20, kind)]
    x += 41 + len(kind) * LETTER
  for title, boxes in panels:
    parts += [text(8, y + 14, title, 'font-weight="bold" font-size="13"'), *draw_micro_steps(boxes, y, scale)]
    for (rank, stream), of_row in rows_of(boxes):
      y += ROW
      parts.append(text(LEFT - 8, y + 14, f"rank {rank} {stream}", 'text-anchor="end"'))
      parts += [draw_box(box, y, scale) for box in of_row]
    y += ROW + 8
  longest = WIDTH / scale
  tick = svg.tick(longest, 12)
  for ms in [number * tick for number in range(int(longest / tick) + 1)]:
    parts.insert(0, f'<path d="M{LEFT + ms * scale:.1f} 34V{y}" stroke="#e4e4e4"/>')
    parts.append(text(LEFT + ms * scale, y + 14, f"{ms:g}", MIDDLE))
  parts.append(text(LEFT - 8, y + 14, "ms", 'text-anchor="end"'))
  return svg.document(LEFT + WIDTH + 20, y + 24, "rect{stroke:white;stroke-width:.6}", parts)


def rounded(value):
  """Times in whole microseconds."""
  if isinstance(value, dict):
    return {key: rounded(inner) for key, inner in value.items() if key != "kernels"}
  if isinstance(value, (list, tuple)):
    return [rounded(inner) for inner in value]
  return round(value, 3) if isinstance(value, float) else value


def write_record(path, panels, of_stages):
  """A line for each panel. A box of a stream is a list of the values that DRAWN names."""
  if not of_stages:
    panels = [(title, [[box[key] for key in DRAWN] for box in boxes]) for title, boxes in panels]
  lines = ",\n".join(json.dumps(panel, separators=(",", ":"), ensure_ascii=False) for panel in panels)
  svg.write("--record", path, f'{{"stages":{json.dumps(of_stages)},"panels":[\n{lines}]}}\n')


def read_record(path):
  """Whether it is of stages, and the panels."""
  try:
    record = json.loads(Path(path).read_bytes())
    of_stages, panels = record["stages"], record["panels"]
    return of_stages, panels if of_stages else [(title, [dict(zip(DRAWN, box)) for box in boxes]) for title, boxes in panels]
  except OSError as error:
    fail(f"{path}: {error.strerror}: give a file that --record wrote")
  except (ValueError, KeyError, TypeError):
    fail(f"{path}: not a record: give a file that --record wrote")


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("files", metavar="FILE[=TITLE]", nargs="*")
  parser.add_argument("--step", type=int, metavar="N", help="default: the shortest of each file")
  parser.add_argument("--ranks", metavar="R,R,...", help="default: all")
  parser.add_argument("--stages", action="store_true", help="of a pipeline: what each stage does when")
  parser.add_argument("--record", metavar="FILE", help="also write the boxes, as JSON")
  parser.add_argument("--recorded", metavar="FILE", help="draw these boxes again, in the place of traces")
  parser.add_argument("-o", "--output", default="timeline.svg", help="default %(default)s")
  arguments = parser.parse_args()
  if arguments.ranks and not re.fullmatch(r"\d+(,\d+)*", arguments.ranks):
    fail(f"--ranks {arguments.ranks}: give numbers with commas between them")
  if bool(arguments.files) == bool(arguments.recorded):
    parser.error("give traces, or --recorded FILE")
  ranks = arguments.ranks and [int(rank) for rank in arguments.ranks.split(",")]
  panels = []
  for path, _, title in (file.partition("=") for file in arguments.files):
    steps = read_trace(path)
    step = choose_step(path, steps, arguments.step)
    if arguments.stages:
      panels += stages.pictures(title or path, of_first_ranks(path, steps), step)
    else:
      panels.append((title or path, number_ring_steps(of_ranks(path, steps[step], ranks))))
  of_stages = arguments.stages
  if arguments.recorded:
    of_stages, panels = read_record(arguments.recorded)
  elif not of_stages:
    panels = joined(panels)
  if arguments.record:
    panels = rounded(panels)
    write_record(arguments.record, panels, of_stages)
  svg.write("--output", arguments.output, schedule.draw(panels, "ms") if of_stages else draw(panels))
  print(f"wrote {arguments.output}")


if __name__ == "__main__":
  main()
