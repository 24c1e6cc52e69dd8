#!/usr/bin/env python3
"""Keeps of a run what the page of dev/dashboard.py shows, small enough for this repository: dev/pictures/runs.

    python3 dev/pictures/thin_run.py runs/one-rank dev/pictures/runs/one-rank

Of five steps the line of the last one stays, and of a step before a sample or a validation. time_ms is the sum since the line
before, so that what the time went into still adds up. Of two looks of the monitor one stays, and every warning, sample and validation. Numbers keep five digits.
"""
import argparse
import json
from pathlib import Path

STEPS, LOOKS, DIGITS = 5, 2, 5
SHOWN = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_s", "time_ms", "comm_exposed_ms", "ranks",
         "hours", "goodput", "lost_s", "sample", "incident", "reason", "left_out", "rolled_back_from")
SHOWN_OF_RANKS = ("rank", "comm_ms", "comm_exposed_ms", "step_ms", "work_ms", "cpu", "waits_for", "host")


def short(value):
  if isinstance(value, dict):
    return {key: short(inner) for key, inner in value.items()}
  if isinstance(value, list):
    return [short(inner) for inner in value]
  return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def total(parts):
  """The sums of numbers with the same names in objects."""
  return {key: total([part[key] for part in parts]) if isinstance(value, dict) else sum(part[key] for part in parts)
          for key, value in parts[0].items()}


def of_ranks(row):
  return row | {"ranks": [{key: rank[key] for key in SHOWN_OF_RANKS if key in rank} for rank in row["ranks"]]} if "ranks" in row else row


def thin_metrics(rows):
  times = []
  for row, following in zip(rows, [*rows[1:], {}]):
    if "loss" in row:
      times.append(row["time_ms"])
      if row["step"] % STEPS and "loss" in following:
        continue
      row, times = row | {"time_ms": total(times)}, []
    row = of_ranks({key: row[key] for key in SHOWN if key in row})
    yield row | {"lost_s": {name: seconds for name, seconds in row["lost_s"].items() if seconds}}


def thin_monitor(rows):
  looks = 0
  for row in rows:
    looks += "ranks" in row
    if "ranks" not in row or looks % LOOKS == 1:
      yield of_ranks(row) | {"time": round(row["time"])}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("run", type=Path)
  parser.add_argument("folder", type=Path, help="of what is kept")
  arguments = parser.parse_args()
  arguments.folder.mkdir(parents=True, exist_ok=True)
  for name, thin in ("metrics.jsonl", thin_metrics), ("monitor.jsonl", thin_monitor):
    rows = [json.loads(line) for line in (arguments.run / name).read_text().splitlines()]
    lines = [json.dumps(short(row), separators=(",", ":"), ensure_ascii=False) for row in thin(rows)]
    (arguments.folder / name).write_text("\n".join(lines) + "\n")
  plan = json.loads((arguments.run / "plan.json").read_text())
  ranks = [{key: rank[key] for key in ("rank", "memory", "total")} for rank in plan["ranks"]]
  plan = {"device": plan["device"], "steps": plan["steps"], "ranks": ranks}
  (arguments.folder / "plan.json").write_text(json.dumps(plan, separators=(",", ":")) + "\n")


if __name__ == "__main__":
  main()
