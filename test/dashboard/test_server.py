#!/usr/bin/env python3
"""Tests what dev/dashboard.py reads, thins, serves, prints and exports. It needs no browser and no plotly.

Usage: python3 test/dashboard/test_server.py        (make test calls it)
"""
import csv
import gzip
import http.client
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from make_run import write_run

DASHBOARD = Path(__file__).resolve().parents[2] / "dev" / "dashboard.py"
sys.path.insert(0, str(DASHBOARD.parent / "dashboard"))
from runs import Curve, Run, Tail  # noqa: E402  after the path

failures = 0


def check(what, holds):
  global failures
  failures += not holds
  if not holds:
    print("FAILED", what, flush=True)


def test_thinning():
  values = [random.gauss(0, 1) for _ in range(123_457)]
  values[77_777], values[5], values[9] = 99.0, -99.0, None
  steps = list(range(1, len(values) + 1))
  whole, parts = Curve(1, 2000), Curve(1, 2000)
  whole.extend(1, steps, values)
  at, copy, seen = 0, [], 0
  for serial in range(1, 1 << 30):
    if at >= len(values):
      break
    end = at + random.choice((1, 2, 7, 100, 5000))
    parts.extend(serial, steps[at:end], values[at:end])
    first, added = parts.since(seen)
    copy[first:] = added
    at, seen = end, serial
  sent = whole.since(0)[1]
  check("parts make the same buckets as the whole", sent == parts.since(0)[1])
  check("and what a page has taken of them is all", copy == sent)
  points = sum((len(bucket) - 2) // 2 for bucket in sent)
  check(f"1,000 to 2,000 points: {points}", 1000 <= points <= 2000)
  ends = {tuple(bucket[i:i + 2]) for bucket in sent for i in range(2, len(bucket), 2)}
  check("spikes stay, with their steps", {(77_778, 99.0), (6, -99.0)} <= ends)
  known = [value for value in values if value is not None]
  check("the mean stays", abs(sum(b[0] * b[1] for b in sent) / sum(b[0] for b in sent) - sum(known) / len(known)) < 1e-6)
  short = Curve(1, 2000)
  short.extend(1, steps[:2000], values[:2000])
  check("2,000 points are the file's, gaps too", [b[2:] for b in short.since(0)[1]] == [list(p) for p in zip(steps, values[:2000])])


def test_tail(folder):
  file = folder / "file"
  file.write_bytes(b"one\ntwo\nthr")
  tail = Tail(file)
  check("whole lines", tail.read() == ([b"one", b"two"], False))
  check("nothing new", tail.read() == ([], False))
  with open(file, "ab") as stream:
    stream.write(b"ee\nfour\n")
  check("the rest of a line, and one more", tail.read() == ([b"three", b"four"], False))
  file.write_bytes(b"one\nTWO\nthree\nfour\nfive\n")
  check("another file is noticed, though it is longer", tail.read() == ([], True))
  tail = Tail(file)
  check("line by line of a file that is long", tail.read(4)[0] + tail.read(4)[0] == [b"one", b"TWO"])
  os.truncate(file, 4)
  check("a file that was cut", tail.read() == ([], True))
  (folder / "link").symlink_to(file)
  os.mkfifo(folder / "pipe")
  check("links and pipes are not read", not Tail(folder / "link").read()[0] and not Tail(folder / "pipe").read()[0])


def test_bad_lines(folder):
  good = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}, {"step": 3, "loss": "x", "ranks": [1, {"rank": 0, "a": "b", "c": 1}]},
          {"step": 4, "lost_s": 7, "time_ms": [], "hosts": {}, "val_loss": {}, "sample": 5}]
  bad = ["", "nonsense", "[]", "1,2", '{"step": "1"}', '{"step": 1e999, "loss": 1}', '{"loss": 1}', "[" * 100_000, "\ud83d\x00\x1b"]
  (folder / "metrics.jsonl").write_bytes("\n".join([*map(json.dumps, good), *bad, '{"step": 5, "loss": 1e999}', ""]).encode(errors="replace"))
  (folder / "monitor.jsonl").write_text("{}\nnull\n")
  (folder / "plan.json").write_text("[1]")
  run = Run(folder)
  run.read(1)
  check("bad lines and values are left out", run.since(0)["curves"]["loss"][1] ==
        [[1, 2.5, 1, 2.5], [0, None, 2, None], [0, None, 3, None], [0, None, 5, None]])
  json.dumps(run.since(0), allow_nan=False)


def start(*arguments):
  server = subprocess.Popen([sys.executable, DASHBOARD, *arguments, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
  return server, int(server.stdout.readline().split()[0].split(":")[2].rstrip("/"))


def get(port, url, host=None, method="GET"):
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
  connection.request(method, url, headers={"Host": host or f"127.0.0.1:{port}"})
  answer = connection.getresponse()
  body = answer.read()
  return answer.status, gzip.decompress(body) if answer.headers["Content-Encoding"] == "gzip" else body, answer.headers


def test_server(folder):
  write_run(folder / "runs" / "one", 30)
  (folder / "elsewhere").mkdir()
  write_run(folder / "elsewhere" / "secret", 30)
  (folder / "runs" / "linked").symlink_to(folder / "elsewhere" / "secret")
  server, port = start(folder / "runs")
  try:
    status, body, headers = get(port, "/")
    check("the page, which may load nothing from elsewhere", status == 200 and b"page.js" in body and b"http" not in body
          and headers["Content-Security-Policy"].startswith("default-src 'none'"))
    first = json.loads(get(port, "/data")[1])
    check("one run, not the one that a link leads to", [Path(run["name"]).name for run in first["runs"]] == ["one"])
    check("with its curves", len(first["runs"][0]["curves"]["loss"][1]) == 30)
    again = json.loads(get(port, "/data?" + first["since"])[1])
    check("nothing twice", not again["runs"][0]["curves"] and not again["runs"][0]["events"])
    check("of another server all", len(json.loads(get(port, "/data?0000-9")[1])["runs"][0]["curves"]) == len(first["runs"][0]["curves"]))
    write_run(folder / "runs" / "two", 5)
    check("a second run joins", len(json.loads(get(port, "/data?" + again["since"])[1])["runs"]) == 2)
    for url in ("/../runs.py", "/runs.py", "//etc/passwd", "/page.html", "/data/../page.js", "/runs/one/metrics.jsonl", "/%2e%2e/README.md"):
      check(f"no {url}", get(port, url)[0] == 404)
    check("no other name of the machine", get(port, "/data", host=f"evil.example:{port}")[0] == 403)
    check("localhost through ssh", get(port, "/data", host="localhost:9999")[0] == 200)
    for method in ("POST", "PUT", "DELETE"):
      check(f"no {method}", get(port, "/data", method=method)[0] == 501)
    with socket.socket() as other:
      check("only on 127.0.0.1", other.connect_ex(("127.0.0.2", port)) != 0)
    code, text = called("runs", "--port", str(port), cwd=folder)
    check("a port in use is one line", code == 1 and text.count("\n") == text.startswith("note: ") + 1 and f"error: --port {port}" in text)
  finally:
    server.terminate()
    server.wait()


def called(*arguments, cwd, **environment):
  done = subprocess.run([sys.executable, DASHBOARD, *arguments], cwd=cwd, env={**os.environ, **environment}, timeout=60,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  return done.returncode, done.stdout.decode()


def test_commands(folder):
  write_run(folder / "runs" / "one", 300)
  with open(folder / "runs" / "one" / "metrics.jsonl", "a") as file:
    file.write('{"step": 300, "sample": "\\u001b[2Jred\\u0007"}\n')
  code, text = called("runs", "--once", cwd=folder, COLUMNS="90", PYTHONIOENCODING="utf-8")
  check("--once has figures, curves and shares", code == 0 and all(part in text for part in (
      "runs/one: running", "step 300 (of 2,000: 15 %)", "goodput", "█", "compute ", "lost.evaluation", "at step 300")))
  check("--once fits the terminal, and does not command it", max(map(len, text.splitlines())) <= 90 and "\x1b" not in text and "\a" not in text)
  code, text = called("runs", "--once", cwd=folder, PYTHONIOENCODING="ascii")
  check("--once in ASCII", code == 0 and text.isascii() and "#" in text)
  code, _ = called("runs", "--export", "csv", cwd=folder)
  rows = list(csv.DictReader(open(folder / "runs" / "one" / "metrics.csv")))
  metrics = [json.loads(line) for line in open(folder / "runs" / "one" / "metrics.jsonl")]
  check("--export csv: a row of each step", code == 0 and [int(row["step"]) for row in rows] == list(range(1, 301)))
  check("--export csv: its numbers", all(float(rows[row["step"] - 1][key]) == row[key] for row in metrics
                                         for key in ("loss", "val_loss", "grad_norm") if key in row)
        and float(rows[0]["time_ms.exposed.tp"]) == metrics[0]["time_ms"]["exposed"]["tp"])
  code, text = called("runs", "--export", "tensorboard", cwd=folder)
  if importlib.util.find_spec("tensorboard"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    called("runs", "--export", "tensorboard", cwd=folder)
    events = EventAccumulator(str(folder / "runs" / "one" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    check("--export tensorboard, twice, is read back", len(losses) == 300 and all(
        abs(value - metrics_loss) < 1e-6 * metrics_loss for (_, value), metrics_loss in zip(losses, (m["loss"] for m in metrics if "loss" in m))))
  else:
    check("--export tensorboard says what is missing", code == 1 and "pip install tensorboard" in text and text.count("\n") == 1)
  (folder / "empty").mkdir()
  write_run(folder / "full", 3)
  (folder / "full" / "metrics.csv").mkdir()  # which stands in the way
  for arguments, code, part in ((["empty"], 1, "no run here"), (["nowhere", "--once"], 1, "no run here"), (["runs", "--port", "70000"], 2, "70000"),
                                (["runs", "--export", "xlsx"], 2, "xlsx"), (["full", "--export", "csv"], 1, "metrics.csv")):
    result, text = called(*arguments, cwd=folder)
    check(f"{arguments}: {text}", result == code and part in text and "Traceback" not in text and (code == 2 or text.count("\n") == 1))


def main():
  random.seed(1)
  test_thinning()
  for test in (test_tail, test_bad_lines, test_server, test_commands):
    with tempfile.TemporaryDirectory() as folder:
      test(Path(folder))
  sys.exit(f"{failures} checks failed" if failures else 0)


if __name__ == "__main__":
  main()
