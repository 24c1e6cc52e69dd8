#!/usr/bin/env python3
"""Draws the terminal of a recorded `make train`, with the curve of its losses, as an SVG for README.

    script -q -T timing -c 'stty cols 58; make train' typescript
    python3 dev/pictures/terminal.py --record typescript timing runs/cpp > dev/pictures/train.txt
    python3 dev/pictures/terminal.py dev/pictures/train.txt -o dev/pictures/train.svg

The first two commands record a run: a line of train.txt begins with the seconds since the first step, then comes the
terminal's text, or "loss STEP VALUE" for points of the curve. Lines with # at the top say on which machine. The third
command draws it; a test demands that this script makes the same picture from train.txt. Lines of the terminal are cut at
its right edge, and left out where "..." stands. Needs only Python.
"""
import argparse
import json
import re
import sys
from html import escape
from pathlib import Path

COLUMNS, LETTER, LINE, EDGE = 58, 7.85, 18, 14  # characters, pixels
WIDTH = round(COLUMNS * LETTER + 2 * EDGE)
CURVE = 120                                     # pixels: the height of the curve
BLOCKS = "▁▂▃▄▅▆▇█"


def record(typescript, timing, run):
  """Prints the content of train.txt, without the lines with #."""
  chunks, at, clock = [], 0, 0.0
  data = Path(typescript).read_bytes()
  at = data.index(b"\n") + 1 if data.startswith(b"Script started") else 0
  for line in Path(timing).read_text().splitlines():
    seconds, count = line.split()[-2:]
    clock += float(seconds)
    chunks.append((clock, data[at:at + int(count)]))
    at += int(count)
  lines, rest = [], b""
  for clock, chunk in chunks:
    rest += chunk
    while (found := re.search(rb"\r?\n|\r\x1b\[K", rest)):
      text, rest = rest[:found.start()].decode("utf-8", "replace"), rest[found.end():]
      if text:
        lines.append((clock, re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)))
  begin = next((clock for clock, text in lines if text.startswith("steps ")), 0)
  for i, (clock, text) in enumerate(lines):
    if not (text.startswith("[") and i + 1 < len(lines) and lines[i + 1][1].startswith("[")):  # of bars the last one
      print(f"{clock - begin:.1f} {text}")
  losses = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
  losses = [(line["step"], line["loss"]) for line in losses if line.get("loss") is not None]
  each = max(1, len(losses) // 150)
  for i in range(0, len(losses) - each + 1, each):
    print(f"loss {losses[i + each - 1][0]} {sum(loss for _, loss in losses[i:i + each]) / each:.4f}")


def chosen(lines):
  """Of the terminal's lines those that the picture shows: (text, kind)."""
  shown, bar, last_step, samples = [("$ make train", "typed")], None, None, []
  wanted = ("model ", "device ", "data ", "steps ")
  for i, (clock, text) in enumerate(lines):
    if text.startswith("---"):
      if samples and samples[-1]["open"]:
        samples[-1]["open"] = False
      else:
        samples.append({"clock": clock, "step": last_step, "bar": bar, "text": [], "open": True})
    elif samples and samples[-1]["open"]:
      samples[-1]["text"].append(text)
    elif text.startswith("["):
      bar = text
    elif text.startswith("step ") and "val_loss" not in text:
      last_step = text
    elif text.startswith(wanted):
      shown.append((text, "plain"))
  last = next((text for _, text in reversed(lines) if text.startswith("step ") and "val_loss" in text), None)
  picked = [samples[i] for i in sorted({0, len(samples) // 2, len(samples) - 1})] if samples else []
  for sample in picked:
    shown.append(("...", "faint"))
    if sample["step"]:
      shown.append((sample["step"], "step"))
    shown += [(text, "sample") for text in sample["text"][:5]]
    if sample["bar"]:
      shown.append((sample["bar"], "bar"))
  if last:
    shown += [("...", "faint"), (last, "step")]
  return shown


def drawn(line, kind, y):
  """A line of the terminal; blocks of a curve become boxes, as not every font has them."""
  line = line.expandtabs(4)
  if len(line) > COLUMNS:
    line = line[:COLUMNS - 1] + "…"
  parts, letters = [], "".join(" " if c in BLOCKS else c for c in line)
  parts.append(f'<text x="{EDGE}" y="{y}" class="{kind}" textLength="{len(letters.rstrip()) * LETTER:.1f}" '
               f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(letters.rstrip())}</text>' if letters.strip() else "")
  for column, c in enumerate(line):
    if c in BLOCKS:
      height = (BLOCKS.index(c) + 1) * 1.7
      parts.append(f'<rect x="{EDGE + column * LETTER:.1f}" y="{y + 2 - height:.1f}" width="{LETTER - 1:.1f}" height="{height:.1f}" class="curve"/>')
  return [part for part in parts if part]


def curve(points, top):
  """The losses of the run, from the first step to the last."""
  left, right = EDGE + 30, WIDTH - EDGE
  steps, losses = points[-1][0], [loss for _, loss in points]
  low, high = int(min(losses)), int(max(losses)) + 1
  place = lambda step, loss: (left + (right - left) * step / steps, top + CURVE * (high - loss) / (high - low))
  parts = [f'<text x="{left}" y="{top - 8}" class="faint">loss of {steps:,} steps</text>']
  for loss in range(low, high + 1):
    y = place(0, loss)[1]
    parts += [f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>',
              f'<text x="{left - 8}" y="{y + 4:.1f}" class="faint" text-anchor="end">{loss}</text>']
  path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
  return parts + [f'<polyline points="{path}" class="line"/>']


def picture(text):
  lines, points = [], []
  for line in text.splitlines():
    if line.startswith("loss "):
      points.append((int(line.split()[1]), float(line.split()[2])))
    elif line and not line.startswith("#"):
      clock, _, shown = line.partition(" ")
      lines.append((float(clock), shown))
  if not points:
    sys.exit("error: no line of this file begins with loss: record it with --record")
  parts, y = [], EDGE + 34
  for line, kind in chosen(lines):
    parts += drawn(line, kind, y)
    y += LINE
  parts += curve(points, y + 24)
  height = y + 24 + CURVE + EDGE
  style = ("text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee9}"
           ".typed{fill:#ffffff;font-weight:bold}.faint{fill:#8b97a8}.step{fill:#9ecbff}.sample{fill:#a8e6a1}.bar{fill:#e6c07b}"
           ".curve{fill:#e6c07b}.grid{stroke:#39424e}.line{fill:none;stroke:#e6c07b;stroke-width:2}")
  lights = "".join(f'<circle cx="{EDGE + 6 + 18 * i}" cy="16" r="5" fill="{color}"/>' for i, color in enumerate(("#e06c75", "#e6c07b", "#98c379")))
  return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
                    f"<style>{style}</style>", f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#1b2129" stroke="#4c566a"/>', lights,
                    *parts, "</svg>\n"])


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--record", nargs=3, metavar=("TYPESCRIPT", "TIMING", "RUN"), help="print what a run's terminal showed")
  parser.add_argument("recorded", nargs="?", help="what --record printed")
  parser.add_argument("-o", "--output", default="terminal.svg", help="default terminal.svg")
  options = parser.parse_args()
  if options.record:
    record(*options.record)
  elif options.recorded:
    Path(options.output).write_text(picture(Path(options.recorded).read_text()))
  else:
    parser.error("give a recorded run, or --record")


if __name__ == "__main__":
  main()
