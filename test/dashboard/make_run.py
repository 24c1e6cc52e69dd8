#!/usr/bin/env python3
"""Writes the files of a made-up run, as a run of train_gpt leaves them: for tests of dev/dashboard.py.

Usage: python3 test/dashboard/make_run.py FOLDER [--steps 1200] [--of 2000] [--ranks 8] [--seed 1] [--log-every 10]
"""
import argparse
import json
import math
import random
import time
from pathlib import Path

TEXTS = [
    "template<typename _T_t, tyname _Tr>\n  st_ret __re(__n ten_ _T__p) { re;\n  }\n",
    "template<typename _Tp, typename _Alloc>\n  struct __is_move_iterator<_Tp>\n  : public __not_<_Tp>\n  { };\n",
    "template<typename _InputIterator>\n  constexpr _InputIterator\n  find_if(_InputIterator __first, _InputIterator __last)\n"
    "  {\n    while (__first != __last && !*__first)\n      ++__first;\n    return __first;\n  }\n",
    "// <img src=x onerror=\"document.title='broken'\"> & <script>document.title = 'broken'</script>\ntemplate<typename _Tp>\n",
]
GB = 1e9
CATEGORIES = {"weights": 3.1, "gradients": 1.6, "optimizer": 6.2, "checkpoint buffer": 0.3, "activations": 38.4, "workspace": 1.6,
              "tensor parallel": 2.4, "batches": 0.02}


def significant(value, digits=9):
  """With as many digits as the program writes."""
  if isinstance(value, dict):
    return {key: significant(inner, digits) for key, inner in value.items()}
  if isinstance(value, list):
    return [significant(inner, digits) for inner in value]
  return float(f"{value:.{digits}g}") if isinstance(value, float) else value


class MadeUp:
  """The lines of a run, step by step, as eight H100s would train GPT-2's largest model."""

  def __init__(self, ranks=8, steps=2000, seed=1, log_every=10):
    self.ranks, self.steps, self.log_every = ranks, steps, log_every
    self.random = random.Random(seed)
    self.seconds, self.setup = 41.0, 41.0
    self.lost = dict(checkpoints=0.0, evaluation=0.0, data=0.0, rollbacks=0.0, restarts=0.0, setup=41.0, samples=0.0)
    self.good, self.drift, self.begin = 0.0, 0.0, time.time()

  def bill(self):
    hours = self.seconds / 3600
    return {"hours": hours, "goodput": self.good / self.seconds, "lost_s": dict(self.lost), "restarts": 0,
            "device_hours": hours * self.ranks, "cost": hours * self.ranks * 2.49}

  def loss(self, step):
    self.drift = 0.97 * self.drift + self.random.gauss(0, 0.006)
    spike = 0.5 * math.exp(-(step - 640) / 12) if step >= 640 else 0
    return 2.9 + 6.3 * math.exp(-step / 55) + 1.7 * math.exp(-step / 420) + self.drift + spike \
        + self.random.gauss(0, 0.035)

  def lr(self, step):
    warm = min(1, step / 100)
    return 6e-4 * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * max(0, step - 100) / (self.steps - 100))))

  def step(self, step):
    noise = self.random.gauss(0, 1)
    slow = 1.25 if 820 <= step < 900 else 1.0  # one card gets hot
    exposed = {"data": 52 + 9 * abs(noise), "tp": 74 + 5 * self.random.random()} if self.ranks > 1 else {}
    data = 0.4 + (60 if self.random.random() < 0.01 else 0)
    split = {"compute": (1240 + 5 * noise) * slow, "exposed": exposed, "bubble": 0.0, "data": data}
    ms = split["compute"] + sum(exposed.values()) + data
    self.seconds += ms / 1e3
    self.good += ms / 1e3
    self.lost["data"] += data / 1e3
    tokens = 524288
    row = {"step": step, "loss": self.loss(step), "grad_norm": 0.4 + 3 * math.exp(-step / 60) + 0.06 * abs(self.random.gauss(0, 1))
           + (2.2 * math.exp(-(step - 640) / 6) if step >= 640 else 0), "lr": self.lr(step),
           "tokens": tokens * step, "step_ms": ms, "tokens_per_s": tokens / ms * 1e3, "flops_per_s": 9.9e9 * tokens / ms * 1e3,
           "mfu": 9.9e9 * tokens / ms * 1e3 / (989e12 * max(1, self.ranks)), "time_ms": split}
    if self.ranks > 1:
      row |= {"comm_bytes": {"all_reduce": 3100000000}, "comm_ms": 340 + noise, "comm_exposed_ms": sum(exposed.values())}
      if step % self.log_every == 0:
        row["ranks"] = [{"comm_bytes": {"all_reduce": 3100000000}, "comm_ms": 340 + self.random.gauss(0, 2),
                         "comm_exposed_ms": (8 if slow > 1 and rank == 5 else 126 * (3.4 if slow > 1 else 1)) + self.random.gauss(0, 7)}
                        for rank in range(self.ranks)]
    return row | self.bill()

  def around(self, step):
    """The lines that follow that of a step."""
    if step % 100 == 0 or step == self.steps:
      self.seconds += 4.2
      self.lost["evaluation"] += 4.2
      mean = 2.93 + 6.3 * math.exp(-step / 55) + 1.7 * math.exp(-step / 420) + self.random.gauss(0, 0.01)
      yield {"step": step, "val_loss": mean, "val_loss_code": mean - 0.6 + self.random.gauss(0, 0.02)} | self.bill()
    if step % 250 == 0:
      self.seconds += 2.5
      self.lost["samples"] += 2.5
      yield {"step": step, "sample": TEXTS[(step // 250 - 1) % len(TEXTS)]} | self.bill()
    if step % 500 == 0:
      self.seconds += 6.1
      self.lost["checkpoints"] += 6.1
    if step == 500:
      self.lost["rollbacks"] += 19
      self.seconds += 19
      yield {"step": step, "rolled_back_from": 527, "samples_left_out": [256000, 270000],
             "reason": "loss 7.31 is far above the mean 3.55 of the last 100 steps"} | self.bill()
    if step == 640:
      yield {"step": step, "incident": "gradient norm 2.61 is far above the mean 0.45 of the last 100 steps"} | self.bill()

  def look(self, step):
    def gpu(rank):
      hot = rank == 5 and 820 <= step < 900
      gauss = self.random.gauss
      return {"utilisation": 0.97 + 0.01 * gauss(0, 1) - (0.12 if hot else 0), "memory_bytes": 57.1 * GB if step else 1.2 * GB,
              "memory_total_bytes": 85.5 * GB, "power_w": (480 if hot else 655) + gauss(0, 9), "power_limit_w": 700,
              "temperature_c": (88 if hot else 61 + rank % 4 * 2) + gauss(0, 1), "sm_mhz": (1290 if hot else 1755) + gauss(0, 9),
              "memory_mhz": 2619, "throttled": ["thermal"] if hot else [],
              "pcie_bytes_per_s": {"in": 2.1 * GB, "out": 1.3 * GB}, "nvlink_bytes_per_s": {"in": 88 * GB, "out": 88 * GB},
              "ecc_corrected": 0, "ecc_uncorrected": 0}
    names = [f"node{host + 1}" for host in range(max(1, self.ranks // 4))]
    hosts = [{"host": name, "cpu": min(1, abs(0.14 + 0.03 * self.random.gauss(0, 1) + (0.4 if step % 500 < 8 else 0))),
              "memory_bytes": (96 + 4 * i + step / 400) * GB, "memory_total_bytes": 1081 * GB, "swap_bytes": 0, "swap_bytes_per_s": 0,
              "network_bytes_per_s": {"in": (9 + self.random.random()) * GB, "out": (9 + self.random.random()) * GB},
              "disk_bytes_per_s": {"read": 4.2e6 + 1e6 * self.random.random(), "write": 2.6 * GB if step % 500 < 8 and step > 8 else 3e4}}
             for i, name in enumerate(names)]
    return {"time": self.begin + self.seconds, "step": step, "hosts": hosts, "ranks": [
        {"rank": rank, "host": names[rank * len(names) // self.ranks], "step_ms": 1370 * (1.25 if 820 <= step < 900 else 1)
         + self.random.gauss(0, 4), "gpu": gpu(rank)} for rank in range(self.ranks)]}

  def monitor(self, step):
    if step % 20 == 0:
      yield self.look(step)
    if step == 820 and self.ranks > 5:
      yield {"time": self.begin + self.seconds, "step": step,
             "warning": "rank 5 (node2): GPU at 88 °C, clocks lowered by thermal; its steps take 25 % longer"}

  def plan(self):
    ranks = [{"rank": rank, "layers": "1 to 48", "memory": {name: int(size * GB) for name, size in CATEGORIES.items()},
              "total": int(sum(CATEGORIES.values()) * GB), "host": {"snapshot": int(2.3 * GB)}} for rank in range(self.ranks)]
    return {"device": {"name": "NVIDIA H100 80GB HBM3", "bytes": int(84.9 * GB), "reserve": int(1.07 * GB), "here": True},
            "fits": True, "ranks": ranks, "steps": self.steps}

  def lines(self, begin, end):
    """Metrics and monitor of steps begin + 1 to end, as text."""
    metrics, monitor = [], []
    for step in range(begin + 1, end + 1):
      metrics += [self.step(step), *self.around(step)]
      monitor += self.monitor(step)
    return ["".join(json.dumps(significant(row, digits)) + "\n" for row in rows) for rows, digits in ((metrics, 9), (monitor, 6))]


def write_run(folder, done, **options):
  """Writes the files of a run that has done so many steps. Returns what writes its next lines."""
  made_up, folder = MadeUp(**options), Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  metrics, monitor = made_up.lines(0, done)
  (folder / "metrics.jsonl").write_text(metrics)
  (folder / "monitor.jsonl").write_text(json.dumps(significant(made_up.look(0), 6)) + "\n" + monitor)
  (folder / "plan.json").write_text(json.dumps(made_up.plan()))
  return made_up


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=Path)
  parser.add_argument("--steps", type=int, default=1200, help="that are done")
  parser.add_argument("--of", type=int, default=2000, help="steps of the run")
  for name, default in (("--ranks", 8), ("--seed", 1), ("--log-every", 10)):
    parser.add_argument(name, type=int, default=default)
  a = parser.parse_args()
  write_run(a.folder, a.steps, steps=a.of, ranks=a.ranks, seed=a.seed, log_every=a.log_every)


if __name__ == "__main__":
  main()
