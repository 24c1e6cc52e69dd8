#!/usr/bin/env python3
"""Takes a screenshot of dev/dashboard/README.md in headless Chromium, of two recorded runs: dev/pictures/runs.

Usage: make pictures; or python3 test/dashboard/screenshots.py --picture light -o light.png
"""
import argparse
import subprocess
import sys
from pathlib import Path

from browser import Browser

DEV = Path(__file__).resolve().parents[2] / "dev"
# Width, height, dark, and which element it is scrolled to
PICTURES = {"light": (1280, 1060, False, "axes"), "dark": (1280, 1290, True, "detail"), "phone": (390, 844, False, "axes")}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--picture", choices=PICTURES, required=True)
  parser.add_argument("-o", "--output", required=True, metavar="FILE")
  arguments = parser.parse_args()
  width, height, dark, place = PICTURES[arguments.picture]
  server = subprocess.Popen([sys.executable, DEV / "dashboard.py", "runs", "--port", "0"], stdout=subprocess.PIPE, text=True,
                            cwd=DEV / "pictures")
  browser = Browser()
  try:
    browser.open(server.stdout.readline().split()[0], width, height, dark, scale=1)
    if not browser.wait("!!document.querySelector('#disk .trace') && document.title !== 'gpt.cu'"):
      sys.exit("error: the page does not appear")
    browser.value("{ const s = document.querySelector('#ranks').parentNode.querySelector('select');"
                  "s.value = 'work_ms'; s.onchange(); }")
    browser.value(f"scrollTo(0, document.getElementById('{place}').offsetTop - 60)")
    browser.wait("false", 2)  # lets it draw
    browser.screenshot(arguments.output)
  finally:
    server.terminate()
    browser.close()


if __name__ == "__main__":
  main()
