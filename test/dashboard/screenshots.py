#!/usr/bin/env python3
"""Takes the screenshots of dev/dashboard/README.md in headless Chromium, of two made-up runs.

Usage: make dashboard-screenshots
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser
from make_run import write_run

DASHBOARD = Path(__file__).resolve().parents[2] / "dev" / "dashboard.py"
# Name, width, height, dark, and which element it is scrolled to
PICTURES = (("light", 1280, 1060, False, "cards"), ("dark", 1280, 1060, True, "detail"), ("phone", 390, 844, False, "cards"))


def main():
  with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    write_run("runs/gpt2-xl", 1200, level=0.12, seed=3)
    write_run("runs/gpt2-xl-longer-warmup", 860)
    server = subprocess.Popen([sys.executable, DASHBOARD, "runs", "--port", "0"], stdout=subprocess.PIPE, text=True)
    browser = Browser()
    try:
      url = server.stdout.readline().split()[0]
      for name, width, height, dark, place in PICTURES:
        browser.open(url, width, height, dark, scale=1)
        if not browser.wait("!!document.querySelector('#disk .trace') && document.title !== 'gpt.cu'"):
          sys.exit("error: the page does not appear")
        browser.value("{ const s = document.querySelector('#ranks').parentNode.querySelector('select');"
                      "s.value = 'gpu.temperature_c'; s.onchange(); }")
        browser.value("{ const s = document.getElementById('chosen'); s.value = s.options[0].value; s.onchange(); }")
        browser.value(f"scrollTo(0, document.getElementById('{place}').offsetTop - 60)")
        browser.wait("false", 1)  # lets it draw
        browser.screenshot(DASHBOARD.parent / "dashboard" / f"{name}.png")
    finally:
      server.terminate()
      browser.close()


if __name__ == "__main__":
  main()
