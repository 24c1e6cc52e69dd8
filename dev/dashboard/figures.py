"""The key figures of a run, as text: for the page and for the terminal."""
from runs import number


def span(seconds):
  for length, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
    if seconds >= length:
      return f"{seconds // length:.0f} {unit} {seconds % length // part:.0f} {smaller}"
  return f"{max(0, seconds):.0f} s"


def compact(value):
  for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
    if abs(value) >= size:
      return f"{value / size:.4g}{unit}"
  return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def lately(run, name, share=50):
  """The mean of the last fiftieth of a curve, or None."""
  curve = run.curves.get(name)
  return curve and curve.mean(-max(1, len(curve.buckets) // share))


def trend(run):
  """How the mean loss of the last tenth of the run differs from that of the tenth before it."""
  buckets = run.curves["loss"].buckets
  tenth = len(buckets) // 10 or len(buckets) // 2
  now, before = (run.curves["loss"].mean(begin, end) for begin, end in ((-tenth, None), (-2 * tenth, -tenth)))
  if not tenth or now is None or before is None or not (buckets[-1].low and buckets[-tenth].low):
    return ""
  return f"{now - before:+.3g} in {buckets[-1].low[1] - buckets[-tenth].low[1] + 1:,} steps"


def pace(run):
  """Seconds and cost of a step in the last quarter of the run, with all that lies between steps."""
  points = [b.high for b in run.curves["hours"].buckets if b.high] if "hours" in run.curves else []
  if not points:
    return 0, 0
  (end, last), (begin, first) = points[-1], points[len(points) * 3 // 4 - 1 if len(points) > 1 else 0]
  seconds = 3600 * (end - begin) / max(1, last - first) if last > first else (run.last.get("step_ms") or 0) / 1e3
  cost, hours = number(run.bill.get("cost")), number(run.bill.get("hours"))
  return seconds, seconds * cost / hours / 3600 if cost and hours else 0


def state_of(run, steps, seconds):
  """By what the files hold, and how old they are."""
  age = run.metrics.age()
  if age is None or not run.last:
    return "starting", "no step yet"
  if steps and run.last["step"] >= steps:
    return "finished", "finished"
  return ("stalled", f"no line for {span(age)}") if age > max(60, 10 * seconds) else ("running", "running")


def percent(share):
  return f"{100 * share:.1f} %"


def figures(run):
  """State, its text, the share that is done or None, and [label, value, note] of each figure that is known."""
  step, steps = run.last.get("step", 0), number(run.last.get("steps")) or 0
  seconds, step_cost = pace(run)
  state, text = state_of(run, steps, seconds)
  share = step / steps if steps else None
  found = [["step", f"{step:,}", f"of {steps:,}: {100 * share:.0f} %" if steps else ""]]
  if (loss := lately(run, "loss")) is not None:
    found.append(["loss", f"{loss:.4f}", trend(run)])
  if (value := lately(run, "val_loss", 1 << 30)) is not None:
    best = min(b.low for b in run.curves["val_loss"].buckets if b.low)
    found.append(["validation", f"{value:.4f}", f"best {best[0]:.4f} at step {best[1]:,}"])
  if (rate := lately(run, "tokens_per_s")) is not None:
    found.append(["tokens/s", compact(rate), f"{compact(run.last.get('tokens') or 0)} so far"])
  if (mfu := lately(run, "mfu")) is not None:
    found.append(["MFU", percent(mfu), f"{(run.last.get('step_ms') or 0):,.4g} ms a step"])
  hours, cost = number(run.bill.get("hours")), number(run.bill.get("cost"))
  if (goodput := number(run.bill.get("goodput"))) is not None:
    found.append(["goodput", percent(goodput), f"{run.bill.get('restarts', 0)} restarts"])
  if hours is not None:
    left = seconds * (steps - step)
    found.append(["left" if steps > step else "time", span(left if steps > step else 3600 * hours),
                  f"{span(3600 * hours)} so far" if steps > step else ""])
  if cost is not None:
    found.append(["cost", f"${cost:,.2f}", f"${cost + step_cost * (steps - step):,.2f} at the end" if steps > step else ""])
  return {"state": state, "text": text, "share": share, "figures": found}


def shares_of_time(run):
  """Names and shares of what the time went into, the largest first; "other" is what no line accounts for."""
  sums = {}
  for column in run.times.columns:
    for name, seconds in column.cells.items():
      sums[name] = sums.get(name, 0) + seconds
  wall = sums.pop("wall", 0)
  sums["other"] = max(0, wall - sum(sums.values()))
  whole = sum(sums.values())
  return sorted(((name, seconds / whole) for name, seconds in sums.items() if seconds > 0), key=lambda pair: -pair[1])
