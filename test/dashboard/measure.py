#!/usr/bin/env python3
"""Measures how dev/dashboard.py reads a run of a million steps, for dev/results.

Usage: python3 test/dashboard/measure.py [--steps 1000000]
"""
import argparse
import gzip
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_run import MadeUp

DASHBOARD = Path(__file__).resolve().parents[2] / "dev" / "dashboard.py"


class Server:
  def __init__(self, folder):
    self.process = subprocess.Popen([sys.executable, DASHBOARD, folder, "--port", "0"], stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, text=True)
    self.port = int(self.process.stdout.readline().split()[0].split(":")[2].rstrip("/"))

  def get(self, since=""):
    """The answer, its bytes as they travel, and the seconds by the clock and of the processor."""
    begin, cpu = time.monotonic(), self.cpu()
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
    connection.request("GET", "/data?" + since)
    packed = connection.getresponse().read()
    return json.loads(gzip.decompress(packed)), len(packed), time.monotonic() - begin, self.cpu() - cpu

  def cpu(self):
    fields = Path(f"/proc/{self.process.pid}/stat").read_text().split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

  def peak_mib(self):
    status = Path(f"/proc/{self.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=1_000_000)
  steps = parser.parse_args().steps
  with tempfile.TemporaryDirectory() as name:
    folder, made_up = Path(name), MadeUp(steps=2 * steps, log_every=100)
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "monitor.jsonl", "w") as monitor:
      for begin in range(0, steps, 1000):
        for file, text in zip((metrics, monitor), made_up.lines(begin, begin + 1000)):
          file.write(text)
    sizes = [(folder / name).stat().st_size / 1e6 for name in ("metrics.jsonl", "monitor.jsonl")]
    print(f"{steps:,} steps of 8 ranks: {sizes[0]:.0f} MB of metrics, {sizes[1]:.0f} MB of monitor")
    server = Server(folder)
    begin = time.monotonic()
    answer, packed, seconds, cpu = server.get()
    print(f"first answer: {seconds:.2f} s, {cpu:.2f} s of CPU, {packed / 1e3:.0f} kB")
    while answer["more"]:
      answer = server.get(answer["since"])[0]
    print(f"all is read: {time.monotonic() - begin:.0f} s, {server.cpu():.0f} s of CPU, peak memory {server.peak_mib():.0f} MiB")
    answer, packed, seconds, cpu = server.get()
    curves = answer["runs"][0]["curves"]
    most = max(sum((len(bucket) - 2) // 2 for bucket in buckets) for _, buckets in curves.values())
    print(f"a page opened now: {seconds:.2f} s, {cpu:.2f} s of CPU, {packed / 1e3:.0f} kB, {len(curves)} curves of at most {most} points")
    seconds = []
    for step in range(steps, steps + 20):
      with open(folder / "metrics.jsonl", "a") as file:
        file.write(made_up.lines(step, step + 1)[0])
      answer, packed, one, _ = server.get(answer["since"])
      seconds.append(one)
    print(f"a line more: {1e3 * sorted(seconds)[10]:.0f} ms (median of 20), {packed} bytes")
    server.process.terminate()


if __name__ == "__main__":
  main()
