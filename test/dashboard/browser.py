"""Drives headless Chromium by its DevTools protocol, over pipes: JSON objects that end with a zero byte."""
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time


class Browser:
  def __init__(self):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
      sys.exit("error: chromium is not here: apt-get install chromium")
    self.folder = tempfile.TemporaryDirectory(prefix="dashboard_", ignore_cleanup_errors=True)
    to_browser, self.write = os.pipe()
    self.read, from_browser = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               "--remote-debugging-pipe", f"--user-data-dir={self.folder.name}", "about:blank"]

    def give_pipes():  # Chromium reads from 3 and writes to 4
      reading, writing = os.dup(to_browser), os.dup(from_browser)
      os.dup2(reading, 3)
      os.dup2(writing, 4)
    self.process = subprocess.Popen([program, *options], preexec_fn=give_pipes, close_fds=False, stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(from_browser)
    self.rest, self.number, self.session, self.problems = b"", 0, None, []
    page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
    self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log"):
      self.call(f"{domain}.enable")

  def receive(self):
    while b"\0" not in self.rest:
      more = os.read(self.read, 1 << 20)
      if not more:
        sys.exit("error: Chromium has ended")
      self.rest += more
    message, _, self.rest = self.rest.partition(b"\0")
    return json.loads(message)

  def call(self, method, **parameters):
    self.number += 1
    message = {"id": self.number, "method": method, "params": parameters}
    if self.session:
      message["sessionId"] = self.session
    os.write(self.write, json.dumps(message).encode() + b"\0")
    while (answer := self.receive()).get("id") != self.number:
      self.note(answer)
    if "error" in answer:
      raise RuntimeError(f"{method}: {answer['error']}")
    return answer["result"]

  def note(self, event):
    """Keeps errors of the page, and what its policy has refused."""
    parameters = event.get("params", {})
    if event.get("method") == "Runtime.exceptionThrown":
      self.problems.append(parameters["exceptionDetails"].get("exception", {}).get("description", "exception"))
    if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
      self.problems.append(parameters["entry"]["text"])

  def open(self, url, width=1440, height=1000, dark=False, scale=1):
    self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600)
    self.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
    self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
    self.call("Page.navigate", url=url)

  def value(self, expression):
    result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
    if "exceptionDetails" in result:
      raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
    return result["result"].get("value")

  def wait(self, expression, seconds=30):
    """Until it is true; returns its value, or None after so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
      try:
        if value := self.value(expression):
          return value
      except RuntimeError:  # the page is still loading
        pass
      time.sleep(0.1)
    return None

  def screenshot(self, file, whole=False):
    data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
    with open(file, "wb") as picture:
      picture.write(base64.b64decode(data))

  def close(self):
    self.call("Browser.close")
    self.process.wait(10)
    self.folder.cleanup()
