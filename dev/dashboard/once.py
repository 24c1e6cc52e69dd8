"""Prints runs in the terminal: key figures, a sparkline of each curve, how the time was spent, incidents, a sample."""
import shutil
import sys
import textwrap

from figures import compact, figures, shares_of_time


def sparkline(curve, width, levels):
  """Means of neighbouring buckets, as characters of rising height, and the lowest and highest of these means."""
  cells = min(width, len(curve.buckets))
  values = [curve.mean(i * len(curve.buckets) // cells, (i + 1) * len(curve.buckets) // cells) for i in range(cells)]
  known = [value for value in values if value is not None] or [0]
  low, scale = min(known), (len(levels) - 1) / (max(known) - min(known) or 1)
  drawn = "".join(" " if value is None else levels[round((value - low) * scale)] for value in values)
  return f"{drawn} {compact(low)} to {compact(max(known))}"


def printable(text):
  """Without characters that could command a terminal."""
  return "".join(c if c.isprintable() else " " for c in text)


def print_run(run, width, levels):
  known, line = figures(run), " "
  print(f"{printable(run.name)}: {known['text']}")
  for label, value, note in known["figures"]:
    part = f" {label} {value}" + (f" ({note})" if note else "")
    if len(line) + len(part) > width:
      print(line.rstrip())
      line = " "
    line += part + "  "
  print(line.rstrip())
  for name, curve in run.curves.items():
    if " " not in name and name not in ("tokens", "hours", "cost"):
      print(f"  {printable(name):14.14}", sparkline(curve, max(8, width - 40), levels))
  shares = ", ".join(f"{printable(name)} {100 * share:.1f} %" for name, share in shares_of_time(run) if share >= 0.0005)
  print(textwrap.fill(shares, width, initial_indent="  time           ", subsequent_indent=" " * 17))
  for event in [event for event in run.events if event.kind != "sample"][-3:]:
    print(printable(f"  step {event.step}: {event.kind}: {event.text}")[:width])
  for sample in [event for event in run.events if event.kind == "sample"][-1:]:
    lines = [printable(line)[:width - 4] for line in sample.text.splitlines()[:5]]
    print(f"  sample at step {sample.step}:", *lines, sep="\n    ")


def print_runs(runs):
  sys.stdout.reconfigure(errors="replace")
  levels = "▁▂▃▄▅▆▇█" if "utf" in sys.stdout.encoding.lower() else "_.-~=+*#"
  for run in runs:
    print_run(run, shutil.get_terminal_size((80, 24)).columns, levels)
