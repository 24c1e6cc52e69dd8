#!/usr/bin/env python3
"""Draws the output of dev/bench.py as a roofline: an SVG with the kernels and the device's ceilings, a panel per case.

To the right: FLOPs per byte. Upwards: FLOP/s. The roof is the peak rate of this device, as dev/ceilings.cu measured it:
copied bytes a second times FLOPs per byte on the left, the rate of products on the right. A kernel's area is its share
of the time; its distance below the roof is the possible gain, and the number beside it is its share of the ceiling. A
hollow kernel counts no FLOPs: it is drawn at the left edge, as far below the roof as its bytes a second are below a
copy's.

Usage: make bench                                      which calls it, or, with output from another machine,
       python3 dev/roofline_plot.py bench.log -o roofline.svg
       python3 dev/roofline_plot.py bench.log --bars -o bars.svg     the first case as bars, which can be read on a telephone
Needs only Python. Exit code: 0 drawn, 1 not such a log, 2 the picture can't be written.
"""
import argparse
import math
import re
from html import escape

import svg
from bench_log import read_log
from svg import LETTER, text

KINDS = {"products": ("#4477aa", r"matmul_.*"), "attention": ("#cc6677", r"attention_.*"), "others": ("#ddaa33", r".*")}
LEFT, TOP, WIDTH, HEIGHT, PANEL, MARGIN = 80, 60, 900, 420, 505, 20  # pixels
CAPTION = ("Area: share of the time. Number: share of the ceiling, which is the roof above the kernel.",
           "Hollow: it counts no FLOPs, and is as far below the roof as its bytes a second are below a copy's.")


def with_unit(value, unit):
  prefix, power = next(((p, 10 ** e) for p, e in zip("PTGMk", (15, 12, 9, 6, 3)) if value > 0.9999 * 10 ** e), ("", 1))
  return f"{value / power:.4g} {prefix}{unit}"


class Axis:
  """Pixels of the logarithms of numbers: from a third of the smallest to three times the largest."""

  def __init__(self, values, begin, end):
    self.low, self.high, self.begin, self.end = min(values) / 3, 3 * max(values), begin, end

  def __call__(self, value):
    return self.begin + math.log(value / self.low) / math.log(self.high / self.low) * (self.end - self.begin)

  def decades(self):
    return [10.0 ** e for e in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]


def place(label, circle, taken, top):
  """Where a label begins: the nearest place around its circle that is free."""
  x, y, r = circle
  width, right, bottom = len(label) * LETTER, LEFT + WIDTH, top + HEIGHT
  for far in range(0, 400, 8):
    for angle in range(0, 360, 30):  # first to the right of it
      ax, ay = x + (r + 4 + far) * math.cos(math.radians(angle)), y - (r + 9 + far) * math.sin(math.radians(angle))
      left = ax - width * (1 - math.cos(math.radians(angle))) / 2
      box = left, ay - 7, left + width, ay + 6
      inside = LEFT < box[0] and box[2] < right and top < box[1] and box[3] < bottom
      if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
        taken.append(box)
        return left, ay + 4, far > 8
  return x, y, False


def draw_kernels(kernels, spots, ceiling, taken, top):
  """The largest first, so that small ones are seen upon them."""
  labels = []
  whole = sum(k.measured for k in kernels)
  circles = {k.name: (*spots[k.name], max(3, 45 * math.sqrt(k.measured / whole))) for k in kernels if k.name in spots}
  taken += [(x - r, y - r, x + r, y + r) for x, y, r in circles.values()]
  for k in sorted((k for k in kernels if k.name in circles), key=lambda k: -k.measured):
    x, y, r = circles[k.name]
    color = next(color for color, names in KINDS.values() if re.fullmatch(names, k.name))
    label = f"{k.name} {100 * ceiling(k) / k.measured:.0f} %"
    hint = f"{label} of the ceiling, {k.measured:.3f} ms, {100 * k.measured / whole:.1f} % of the time"
    yield (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="{color if k.flops else "white"}" stroke="{color}" '
           f'fill-opacity=".75"><title>{escape(hint)}</title></circle>')
    left, base, far = place(label, circles[k.name], taken, top)
    if far:
      labels.append(f'<path d="M{x:.1f} {y:.1f}L{left + len(label) * LETTER / 2:.1f} {base - 4:.1f}" stroke="#999"/>')
    labels.append(text(left, base, label, 'class="label"'))
  yield from labels


def draw_panel(ceilings, case, top):
  copy, product = ceilings["copy_bytes_per_s"], ceilings["flops_per_s"][case["case"][1]]
  known = [k for k in case["kernels"] if k.bytes]
  x = Axis([k.flops / k.bytes for k in known if k.flops] + [product / copy], LEFT, LEFT + WIDTH)
  at = {k.name: k.flops / k.bytes or x.low for k in known}
  rates = {k.name: at[k.name] * k.bytes / k.measured * 1e3 for k in known}
  y = Axis([*rates.values(), product, copy * x.low], top + HEIGHT, top)
  title = "{}, {}, B={}, T={}".format(*case["case"]) + f" on {ceilings['device']}: {case['step']:,.2f} ms a step"
  yield text(LEFT, top - 12, title, 'font-weight="bold" font-size="14"')
  for value in x.decades():
    yield f'<path d="M{x(value):.1f} {top}v{HEIGHT}" stroke="#e4e4e4"/>'
    yield text(x(value), top + HEIGHT + 14, f"{value:g}", 'text-anchor="middle" fill="#555"')
  for value in y.decades():
    yield f'<path d="M{LEFT} {y(value):.1f}h{WIDTH}" stroke="#e4e4e4"/>'
    yield text(LEFT - 6, y(value) + 4, with_unit(value, "FLOP/s"), 'text-anchor="end" fill="#555"')
  yield text(LEFT + WIDTH, top + HEIGHT + 32, "FLOPs per byte", 'text-anchor="end" fill="#555"')
  corner, start = (x(product / copy), y(product)), y(copy * x.low)
  yield (f'<path class="roof" d="M{LEFT} {start:.1f}L{corner[0]:.1f} {corner[1]:.1f}H{LEFT + WIDTH}" fill="none" '
         'stroke="#222" stroke-width="1.5"/>')
  slope = math.degrees(math.atan2(corner[1] - start, corner[0] - LEFT))
  yield text(12, -6, "copies " + with_unit(copy, "B/s"), f'transform="translate({LEFT} {start:.1f}) rotate({slope:.1f})"')
  missing = ", ".join(k.name for k in case["kernels"] if k not in known)
  if missing:
    yield text(LEFT, top + HEIGHT + 32, f"Not drawn, as the table's digits show no bytes of it: {missing}", 'fill="#555"')
  spots = {name: (x(at[name]), y(rate)) for name, rate in rates.items()}
  taken = [(LEFT + WIDTH - 160, corner[1] - 16, LEFT + WIDTH, corner[1] + 2), (LEFT, start - 60, LEFT + 110, start)]
  yield from draw_kernels(case["kernels"], spots, lambda k: 1e3 * max(k.bytes / copy, k.flops / product), taken, top)
  yield text(LEFT + WIDTH, corner[1] - 6, "products " + with_unit(product, "FLOP/s"), 'text-anchor="end" class="halo"')


def draw(ceilings, cases):
  parts, x = [], LEFT
  for kind, (color, _) in KINDS.items():
    parts += [f'<circle cx="{x + 6}" cy="16" r="6" fill="{color}"/>', text(x + 17, 20, kind)]
    x += 36 + len(kind) * LETTER
  for number, case in enumerate(cases):
    parts += draw_panel(ceilings, case, TOP + number * PANEL)
  bottom = TOP + len(cases) * PANEL - 30
  parts += [text(LEFT, bottom + 14 * line, words, 'fill="#555"') for line, words in enumerate(CAPTION)]
  return svg.document(LEFT + WIDTH + MARGIN, bottom + 26, ".label,.halo{paint-order:stroke;stroke:white;stroke-width:3px}", parts)


def draw_bars(ceilings, case):
  """A bar for each kernel that takes a two-hundredth of the time: how long it takes, and (dark) would take at its ceiling."""
  copy, product = ceilings["copy_bytes_per_s"], ceilings["flops_per_s"][case["case"][1]]
  whole = sum(k.measured for k in case["kernels"])
  kernels = sorted((k for k in case["kernels"] if k.measured > whole / 200), key=lambda k: -k.measured)
  left, width, row, top = 204, 170, 24, 66
  parts = [text(10, 22, f"A step of {case['case'][0]} on one {ceilings['device']}: {case['step']:.1f} ms", 'font-weight="bold"'),
           text(10, 44, "ms by kernel; dark: what the card's ceiling allows", 'fill="#555"')]
  for number, k in enumerate(kernels):
    color = next(color for color, names in KINDS.values() if re.fullmatch(names, k.name))
    best, y = 1e3 * max(k.bytes / copy, k.flops / product), top + number * row
    scale = width / kernels[0].measured
    parts += [text(left - 6, y + 11, k.name, 'text-anchor="end"'),
              f'<rect x="{left}" y="{y}" width="{k.measured * scale:.1f}" height="15" fill="{color}" fill-opacity=".4"/>',
              f'<rect x="{left}" y="{y}" width="{min(best, k.measured) * scale:.1f}" height="15" fill="{color}"/>',
              text(left + k.measured * scale + 6, y + 11, f"{k.measured:.1f} ms, {100 * best / k.measured:.0f} %")]
  return svg.document(left + width + 108, top + len(kernels) * row + 6, "text{font-size:13px}", parts)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("log", help="what dev/bench.py printed")
  parser.add_argument("-o", "--output", default="roofline.svg", help="default %(default)s")
  parser.add_argument("--bars", action="store_true", help="the kernels of the first case as bars")
  arguments = parser.parse_args()
  ceilings, cases = read_log(arguments.log)
  svg.write("--output", arguments.output, draw_bars(ceilings, cases[0]) if arguments.bars else draw(ceilings, cases))
  print(f"wrote {arguments.output}")


if __name__ == "__main__":
  main()
