#!/usr/bin/env python3
"""Draws pipeline schedules, one below the other, as an SVG: a step as the simulator plays it.

A row is a stage of the pipeline. A box is work on the micro-batch whose number it has, white is idle. Where a stage has
several chunks of the layers, the boxes of later chunks are darker. All schedules have the same time scale. Times are
given for a whole stage, in any unit; --weight is the part of --backward that gradients of weights take.

The program that plays is dev/schedule.cpp. Needs only Python. Exit code: 0 drawn, 1 a wrong schedule, 2 bad
input.

  make build/host/schedule
  python3 dev/schedule.py --schedule 1f1b zb --stages 4 --micro-batches 8 --message 0.2 -o schedules.svg
"""
import argparse
import json
import subprocess
import sys
from html import escape
from pathlib import Path

import svg
from svg import LETTER, text

PROGRAM = Path(__file__).resolve().parent.parent / "build/host/schedule"
CHUNKED = {"interleaved"}  # only these have more than one chunk a stage
COLORS = {  # of a stage's first chunk; later ones come closer to the second
  "forward": ((178, 209, 240), (62, 124, 190)), "backward": ((178, 222, 174), (66, 148, 76)),
  "input": ((150, 215, 212), (40, 140, 138)), "weight": ((250, 214, 146), (222, 146, 30))}
NAMES = {"forward": "forward", "backward": "backward", "input": "backward, inputs", "weight": "backward, weights"}
FORMULAS = {  # of the bubble: p stages, v chunks, A micro-batches, F, B = I + W
  "gpipe": ("(p−1)(F+B)", lambda p, v, A, F, I, W: (p - 1) * (F + I + W)),
  "1f1b": ("(p−1)(F+B)", lambda p, v, A, F, I, W: (p - 1) * (F + I + W)),
  "interleaved": ("(p−1)(F+B)/v", lambda p, v, A, F, I, W: (p - 1) * (F + I + W) / v),
  "zb": ("(p−1)(F+I) − (min(A,p)−1)·min(F,I,W)",
         lambda p, v, A, F, I, W: (p - 1) * (F + I) - (min(A, p) - 1) * min(F, I, W))}
LEFT, RIGHT, WIDTH, ROW, BOX, LINE = 60, 96, 1080, 22, 20, 3  # pixels


def fail(message, code=2):
  print(f"error: {message}", file=sys.stderr)
  sys.exit(code)


def play(schedule, arguments):
  """The step of a schedule, as the program prints it."""
  chunks = arguments.chunks if schedule in CHUNKED else "1"
  command = [arguments.program, "--schedule", schedule, "--chunks", chunks]
  for option in ("stages", "micro_batches", "forward", "backward", "weight", "message"):
    command += ["--" + option.replace("_", "-"), getattr(arguments, option)]
  try:
    done = subprocess.run(command, capture_output=True, text=True)
  except OSError as error:
    fail(f"{arguments.program}: {error.strerror}: make build/host/schedule builds it")
  if done.returncode:
    fail(done.stderr.strip().removeprefix("error: "), done.returncode)
  return json.loads(done.stdout)


def number(value):
  return f"{value:.4g}"


def color(work, chunk):
  share = 1 - 0.55 ** chunk
  return "#%02x%02x%02x" % tuple(round(light + share * (dark - light)) for light, dark in zip(*COLORS[work]))


def describe(step):
  """The line above the rows: the bubble, and the value of its formula where one is known."""
  idle, words = min(stage["idle"] for stage in step["stages"]), step["schedule"]
  if step["chunks"] > 1:
    words += f", {step['chunks']} chunks a stage"
  if "words" in step:
    return words, step["words"]
  rest = f"a step of {number(step['end'])}, bubble {number(idle)} ({100 * idle / step['end']:.0f} %)"
  if step["schedule"] in FORMULAS:
    formula, compute = FORMULAS[step["schedule"]]
    value = compute(len(step["stages"]), step["chunks"], step["micro_batches"], step["forward"],
                    step["backward"] - step["weight"], step["weight"])
    rest += f"; {formula} = {number(value)}" + " without messages" * (step["message"] > 0)
  return words, rest


def row_height(step):
  return ROW + 2 * LINE * any("messages" in stage for stage in step["stages"])


def draw_step(step, y, scale):
  """A row for each stage; boxes of one colour are one path. Messages that are known lie below their sender's row."""
  for stage_number, stage in enumerate(step["stages"]):
    paths, labels, top = {}, [], y + stage_number * row_height(step)
    for message in stage.get("messages", []):
      x, width = LEFT + message["begin"] * scale, (message["end"] - message["begin"]) * scale
      path = paths.setdefault(color(message["work"], 1), [])
      path.append(f"M{x:.1f} {top + BOX + (0 if message['work'] == 'forward' else LINE)}h{width:.1f}v{LINE}h-{width:.1f}z")
    for action in stage["actions"]:
      x, width = LEFT + action["begin"] * scale, (action["end"] - action["begin"]) * scale
      path = paths.setdefault(color(action["work"], action["chunk"]), [])
      path.append(f"M{x:.1f} {top}h{width:.1f}v{BOX}h-{width:.1f}z")
      label = str(action["micro_batch"])
      if len(label) * LETTER < width:
        labels.append(f'<text x="{x + width / 2:.1f}" y="{top + 14}">{label}</text>')
    yield text(LEFT - 8, top + 14, f"stage {stage_number}", 'text-anchor="end" fill="#555"')
    slots = f"{stage['slots']} slot{'s' * (stage['slots'] > 1)}" + f" of 1/{step['chunks']}" * (step["chunks"] > 1)
    yield text(LEFT + step["end"] * scale + 8, top + 14, slots, 'fill="#555"')
    yield from (f'<path fill="{fill}" d="{"".join(boxes)}"/>' for fill, boxes in paths.items())
    yield '<g text-anchor="middle">' + "".join(labels) + "</g>"


def draw_legend(steps, y):
  x = LEFT
  stages = [stage for step in steps for stage in step["stages"]]
  seen = {(action["work"], action["chunk"]) for stage in stages for action in stage["actions"]}
  for work in COLORS:
    for chunk in sorted(chunk for of_work, chunk in seen if of_work == work):
      yield f'<path fill="{color(work, chunk)}" d="M{x:.1f} {y}h14v14h-14z"/>'
      x += 16
    if any(of_work == work for of_work, _ in seen):
      yield text(x + 4, y + 11, NAMES[work])
      x += 24 + len(NAMES[work]) * LETTER
  if any(chunk > 0 for _, chunk in seen):
    yield text(x, y + 11, "(darker: a later chunk)", 'fill="#555"')


def draw(steps, unit=""):
  longest = max(step["end"] for step in steps)
  scale = (WIDTH - RIGHT) / longest  # pixels a unit of time
  parts, y = list(draw_legend(steps, 10)), 44
  for step in steps:
    name, rest = describe(step)
    height = len(step["stages"]) * row_height(step)
    parts.append(f'<text x="{LEFT}" y="{y + 2}" font-size="13"><tspan font-weight="bold">{escape(name)}</tspan>'
                 f'<tspan dx="12" font-size="11" fill="#555">{escape(rest)}</tspan></text>')
    parts += draw_step(step, y + 10, scale)
    y += height + 34
  tick = svg.tick(longest, 20)
  y -= 8
  for time in (count * tick for count in range(int(longest / tick + 1e-9) + 1)):
    parts.append(text(LEFT + time * scale, y, number(time), 'text-anchor="middle" fill="#555"'))
  if unit:
    parts.append(text(LEFT - 8, y, unit, 'text-anchor="end" fill="#555"'))
  return svg.document(LEFT + WIDTH + 8, y + 10, "path{stroke:white}", parts)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.error = fail
  parser.add_argument("--schedule", nargs="+", default=["gpipe", "1f1b", "interleaved", "zb"], metavar="NAME",
                      help="default: gpipe 1f1b interleaved zb")
  for option, default, what in (
      ("stages", "4", "stages of the pipeline"), ("chunks", "2", "chunks of layers a stage, with interleaved"),
      ("micro-batches", "8", "micro-batches of a step"), ("forward", "1", "a stage's forward"),
      ("backward", "2", "a stage's backward"), ("weight", "1", "the part of backward for the gradients of weights"),
      ("message", "0", "a message")):
    parser.add_argument("--" + option, default=default, metavar="N", help=f"{what}; default {default}")
  parser.add_argument("--program", default=PROGRAM, metavar="FILE", help="what plays schedules; default %(default)s")
  parser.add_argument("-o", "--output", default="schedules.svg", metavar="FILE", help="default %(default)s")
  arguments = parser.parse_args()
  steps = [play(schedule, arguments) for schedule in arguments.schedule]
  if not max(step["end"] for step in steps):
    fail("--forward 0 --backward 0: give one of them some time")
  svg.write("--output", arguments.output, draw(steps))
  print(f"wrote {arguments.output}")


if __name__ == "__main__":
  main()
