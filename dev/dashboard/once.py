"""Prints runs in the terminal: key figures, a sparkline of each curve, where the time went, incidents, the last sample."""
import shutil
import sys
import textwrap

from figures import compact, figures, shares_of_time

LABELS = {"loss": "loss", "val_loss": "validation", "grad_norm": "gradient norm", "lr": "learning rate",
          "tokens_per_s": "tokens/s", "mfu": "MFU", "goodput": "goodput"}


def draws_blocks():
  try:
    "▁█".encode(sys.stdout.encoding or "ascii")
    return True
  except (UnicodeEncodeError, LookupError):
    return False


def sparkline(curve, width, levels):
  """The means of neighbouring buckets, as characters of rising height, from the lowest to the highest of them."""
  count = len(curve.buckets)
  cells = min(width, count)
  values = [curve.mean(i * count // cells, (i + 1) * count // cells) for i in range(cells)]
  known = [value for value in values if value is not None]
  low, high = min(known, default=0), max(known, default=0)
  scale = (len(levels) - 1) / (high - low) if high > low else 0
  return "".join(" " if value is None else levels[round((value - low) * scale)] for value in values), low, high


def printable(text):
  """Without characters that could command a terminal."""
  return "".join(c if c.isprintable() else " " for c in text)


def print_run(run, width, levels):
  known = figures(run)
  print(f"{printable(run.name)}: {known['text']}")
  line = ""
  for label, value, note in known["figures"]:
    part = f"{label} {value}" + (f" ({note})" if note else "")
    if line and len(line) + len(part) + 5 > width:
      print(" ", line)
      line = ""
    line += (" | " if line else "") + part
  print(" ", line)
  for name, label in [*LABELS.items(), *((name, name) for name in run.curves if name.startswith("val_loss_"))]:
    if name in run.curves:
      drawn, low, high = sparkline(run.curves[name], max(8, width - 44), levels)
      print(f"  {printable(label):14.14} {drawn} {compact(low)} to {compact(high)}")
  shares = ", ".join(f"{printable(name)} {100 * share:.1f} %" for name, share in shares_of_time(run) if share >= 0.0005)
  print(textwrap.fill(shares, width, initial_indent="  time           ", subsequent_indent=" " * 17))
  for event in run.events[-3:]:
    print(printable(f"  step {event.step}: {event.kind}: {event.text}")[:width])
  for sample in run.samples[-1:]:
    print(f"  sample at step {sample.step}:")
    for line in sample.text.splitlines()[:5]:
      print("   ", printable(line)[:width - 4])


def print_runs(runs):
  width = shutil.get_terminal_size((80, 24)).columns
  levels = "▁▂▃▄▅▆▇█" if draws_blocks() else "_.-~=+*#"
  sys.stdout.reconfigure(errors="replace")
  for run in runs.runs.values():
    print_run(run, width, levels)
