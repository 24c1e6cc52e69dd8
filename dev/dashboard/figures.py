"""The key figures of a run, as text: for the page and for the terminal."""
import time

from runs import number


def span(seconds):
  for length, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
    if seconds >= length:
      return f"{int(seconds // length)}{unit}{int(seconds % length // part):02d}{smaller}"
  return f"{max(0, seconds):.0f}s"


def compact(value):
  for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
    if abs(value) >= size:
      return f"{value / size:.4g}{unit}"
  return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def trend(buckets, loss):
  """How the mean loss of the last tenth of the run differs from that of the tenth before it."""
  tenth = len(buckets) // 10 or len(buckets) // 2
  now, before = (loss.mean(begin, end) for begin, end in ((-tenth, None), (-2 * tenth, -tenth)))
  if not tenth or now is None or before is None:
    return ""
  return f"{now - before:+.2g} in {buckets[-1].low[1] - buckets[-tenth].low[1] + 1:,} steps"


def pace(run):
  """Seconds and cost of a step in the last quarter of the run, with all that lies between steps."""
  points = [bucket.high for bucket in run.curves["hours"].buckets if bucket.count] if "hours" in run.curves else []
  (begin, first), (end, last) = (points[len(points) * 3 // 4 - 1], points[-1]) if len(points) > 1 else ((0, 0), (0, 0))
  seconds = 3600 * (end - begin) / (last - first) if last > first else (number(run.last.get("step_ms")) or 0) / 1e3
  cost, hours = number(run.bill.get("cost")), number(run.bill.get("hours"))
  return seconds, seconds * cost / hours / 3600 if cost and hours else 0


def figures(run):
  """State, its text, the share that is done or None, and [label, value, note] of each figure that is known."""
  step, steps = run.last.get("step", 0), number((run.plan or {}).get("steps")) or 0
  left, (seconds, step_cost) = max(0, steps - step), pace(run)
  changed = run.files[0].changed
  age = time.time() - changed if changed else 0
  state, text = ("running", "running") if run.last else ("starting", "no step yet")
  if steps and not left:
    state, text = "finished", "finished"
  elif age > max(60, 10 * seconds):
    state, text = "stalled", f"no line for {span(age)}"
  lately = {name: curve.mean(-max(1, len(curve.buckets) // 50)) for name, curve in run.curves.items()}
  bill = {name: number(run.bill.get(name)) for name in ("goodput", "hours", "cost", "restarts")}
  found = [("step", step, ",", f"of {steps:,}: {100 * step / steps:.0f} %" if steps else "")]
  if "loss" in lately:
    found.append(("loss", lately["loss"], ".4f", trend(run.curves["loss"].buckets, run.curves["loss"])))
  if "val_loss" in lately:
    best = min((bucket.low for bucket in run.curves["val_loss"].buckets if bucket.count), default=None)
    best = f"best {best[0]:.4f} at {best[1]:,}" if best else ""
    found.append(("validation", run.curves["val_loss"].mean(-1), ".4f", best))
  found += [("tokens/s", lately.get("tokens_per_s"), ",.0f", compact(number(run.last.get("tokens")) or 0) + " so far"),
            ("MFU", lately.get("mfu"), ".1%", f"{number(run.last.get('step_ms')) or 0:,.4g} ms a step"),
            ("goodput", bill["goodput"], ".1%", f"{bill['restarts'] or 0} restarts"),
            ("left" if left else "time", bill["hours"] and (left * seconds or bill["hours"] * 3600), "span",
             f"{span(3600 * (bill['hours'] or 0))} so far" if left else ""),
            ("cost", bill["cost"], "$", f"${(bill['cost'] or 0) + step_cost * left:,.2f} at the end" if left else "")]
  texts = {"span": span, "$": lambda value: f"${value:,.2f}"}
  return {"state": state, "text": text, "share": step / steps if steps else None,
          "figures": [(label, texts[style](value) if style in texts else format(value, style).replace("%", " %"), note)
                      for label, value, style, note in found if value is not None]}


def shares_of_time(run):
  """How the time was spent, as names and shares, the largest first; "other" is the rest."""
  spent = {name[5:]: curve.buckets[-1].high[0] for name, curve in run.curves.items() if name.startswith("time ")}
  wall = spent.pop("wall", 0)
  spent["other"] = max(0, wall - sum(spent.values()))
  whole = sum(spent.values()) or 1
  return sorted(((name, seconds / whole) for name, seconds in spent.items()), key=lambda pair: -pair[1])
