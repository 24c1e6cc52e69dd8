#!/usr/bin/env python3
"""Opens the page of dev/dashboard.py in headless Chromium, and compares what it draws with the files.

Usage: make test-dashboard
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser
from make_run import write_run

DASHBOARD = Path(__file__).resolve().parents[2] / "dev" / "dashboard.py"
failures = 0


def check(what, holds):
  global failures
  failures += not holds
  print("ok    " if holds else "FAILED", what, flush=True)


def pairs(run, key, by="step"):
  """Of the lines that have the key. (The bill is in every line, the page draws that of steps.)"""
  rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  return [(row[by], row[key]) for row in rows if key in row and ("loss" in row or key.startswith("val"))]


def points(browser, plot, trace=0):
  data = f"document.getElementById('{plot}').data[{trace}]"
  return list(map(tuple, browser.value(f"{data}.x.map((x, i) => [x, {data}.y[i]])")))


def draws(browser, count, trace=0, seconds=30):
  """Does this trace of the losses come to have so many points?"""
  return browser.wait(f"document.getElementById('loss').data[{trace}].x.length === {count}", seconds)


def append(run, text):
  with open(run / "metrics.jsonl", "a") as file:
    file.write(text)


def test_curves(browser, run):
  check("the page appears", draws(browser, 300))
  for plot, trace, key in (("loss", 0, "loss"), ("loss", 2, "val_loss"), ("loss", 3, "val_loss_code"), ("norm", 0, "grad_norm"),
                           ("lr", 0, "lr"), ("rate", 0, "tokens_per_s"), ("mfu", 0, "mfu"), ("goodput", 0, "goodput")):
    expected = pairs(run, key)
    check(f"the {len(expected)} points of {key} are the file's", points(browser, plot, trace) == expected)
  for axis in ("tokens", "hours", "cost"):
    browser.value(f"document.querySelector('#axes [value={axis}]').click()")
    check(f"losses over {axis}", points(browser, "loss") == pairs(run, "loss", axis))
  browser.value("document.querySelector('#axes [value=steps]').click()")
  seconds = browser.value("[].concat(...document.getElementById('times').data.map(part => part.y)).reduce((a, b) => a + b)")
  check("where time goes adds up to the hours", abs(seconds - 3600 * pairs(run, "hours")[-1][1]) < 0.01 * seconds)
  check("and no line lacks a part of it", browser.value("document.getElementById('times').data.every(part => part.name !== 'other')"))
  check("each column is full", browser.value("document.getElementById('times').data[0].y.every(seconds => seconds > 0)"))
  check("a row of each rank", browser.value("document.getElementById('ranks').data[0].z.length") == 8)
  text = browser.value("document.getElementById('cards').textContent")
  check("figures say how far it is", "of 2,000: 15 %" in text and "running" in text)


def test_growth(browser, run, made_up):
  lines, _ = made_up.lines(300, 301)
  append(run, lines[:-9])
  check("half a line is not drawn", not draws(browser, 301, seconds=5))
  append(run, lines[-9:])
  check("a line that is added appears by itself", draws(browser, 301) and points(browser, "loss") == pairs(run, "loss"))
  rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
  with open(run / "metrics.jsonl", "r+") as file:  # as a rollback to step 200, and four other steps after it
    file.truncate(sum(len(row.encode()) for row in rows if json.loads(row)["step"] <= 200))
  append(run, json.dumps({"step": 200, "rolled_back_from": 301, "reason": "loss <b>9.1</b>"}) + "\n" + made_up.lines(200, 204)[0])
  check("a rollback takes its steps back", draws(browser, 204) and points(browser, "loss") == pairs(run, "loss"))
  check("and what came after them", browser.value("document.getElementById('samples').offsetParent === null"))  # the sample
  check("and is an incident, as text", browser.wait("document.getElementById('incidents').textContent.includes('loss <b>9.1</b>')"))


def test_second_run(browser, runs):
  write_run(runs / "second", 1050, ranks=1, seed=2, steps=1050)
  check("a second run joins", browser.wait("document.querySelectorAll('#cards section').length === 2"))
  run = runs / "second"
  check("its points are the file's", browser.wait("document.getElementById('loss').data.some(one => one.x.length === 1050)")
        and any(points(browser, "loss", i) == pairs(run, "loss") for i in range(browser.value("document.getElementById('loss').data.length"))))
  check("it is finished", browser.value("document.querySelector('#cards section:nth-child(2) .finished') !== null"))
  before = browser.value("document.getElementById('loss').data.length")
  browser.value("document.querySelector('#cards button').click()")
  check("its name switches a run off", browser.value("document.getElementById('loss').data.length") < before)
  browser.value("document.querySelector('#cards button').click()")
  check("and on", browser.value("document.getElementById('loss').data.length") == before)
  browser.value("{ const s = document.getElementById('chosen'); s.value = s.options[1].value; s.onchange(); }")
  text = browser.value("document.getElementById('samples').textContent")
  check("a sample that looks like HTML is text", "<script>document.title = 'broken'</script>" in text
        and browser.value("document.querySelectorAll('#samples img, #samples script').length") == 0
        and browser.value("document.title") != "broken")


def test_looks(browser, url):
  def brightness():
    return browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)")
  check("light", brightness() > 600)
  browser.value("document.getElementById('theme').click()")
  check("its switch makes it dark", brightness() < 150)
  browser.open(url, dark=True)
  check("dark where the system is", browser.wait("!!document.querySelector('#loss .trace')") and brightness() < 150)
  for width in (360, 390):
    browser.open(url, width=width, height=800)
    browser.wait("!!document.querySelector('#loss .trace')")
    check(f"{width} pixels wide: nothing to scroll sideways", browser.value("document.documentElement.scrollWidth") == width)
    check("one column", browser.value("new Set([...document.querySelectorAll('article:not([hidden])')]"
                                      ".map(one => one.offsetLeft)).size") == 1)
    check("and fingers hit its buttons", browser.value("Math.min(...[...document.querySelectorAll('header button, select')]"
                                                       ".filter(one => one.offsetParent).map(one => one.offsetHeight))") >= 44)


def main():
  with tempfile.TemporaryDirectory() as folder:
    runs = Path(folder) / "runs"
    made_up = write_run(runs / "first", 300)
    browser = Browser()
    server = subprocess.Popen([sys.executable, DASHBOARD, runs, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
      url = server.stdout.readline().split()[0]
      browser.open(url)
      test_curves(browser, runs / "first")
      test_growth(browser, runs / "first", made_up)
      test_second_run(browser, runs)
      test_looks(browser, url)
      check(f"nothing was refused, and no error: {browser.problems}", not browser.problems)
    finally:
      server.terminate()
      browser.close()
  sys.exit(f"test-dashboard: {failures} checks failed" if failures else 0)


if __name__ == "__main__":
  main()
