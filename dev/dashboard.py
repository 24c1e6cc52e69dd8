#!/usr/bin/env python3
"""Shows runs while they train, on a page that follows their files, or once in the terminal.

RUN is the folder of a run, or a folder of runs: then those that come later join by themselves. dashboard/README.md says
what the page shows, and how to reach it from another machine.

Usage: python dev/dashboard.py runs [--port 8642]
       python dev/dashboard.py runs --once
       python dev/dashboard.py runs/cpp --export csv
"""
import argparse
import gzip
import importlib.util
import json
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PARTS = Path(__file__).resolve().parent / "dashboard"
sys.path.insert(0, str(PARTS))
from export import export  # noqa: E402  after the path
from figures import figures  # noqa: E402
from once import print_runs  # noqa: E402
from runs import Runs  # noqa: E402

# Nothing comes from elsewhere. (plotly sets styles of its own; its pictures are data:)
POLICY = ("default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def read_files():
  """All that the server hands out beside the data: content and type by URL."""
  files = {"/": (PARTS / "page.html", "text/html"), "/page.js": (PARTS / "page.js", "text/javascript"),
           "/page.css": (PARTS / "page.css", "text/css")}
  plotly = importlib.util.find_spec("plotly")
  if plotly:
    files["/plotly.js"] = Path(plotly.submodule_search_locations[0]) / "package_data" / "plotly.min.js", "text/javascript"
  else:
    print("note: plotly is not installed, the page shows figures and texts only: python3 -m pip install plotly", file=sys.stderr)
  return {url: (gzip.compress(path.read_bytes(), 6), kind) for url, (path, kind) in files.items()}


class Server(ThreadingHTTPServer):
  daemon_threads = True

  def __init__(self, port, runs):
    super().__init__(("127.0.0.1", port), Request)
    self.runs, self.files, self.lock, self.name = runs, read_files(), threading.Lock(), secrets.token_hex(4)

  def data(self, query):
    """What is new since `query`, which is what the page was told last: the name of this server, and a serial number."""
    name, _, serial = query.partition("-")
    since = int(serial) if name == self.name and serial.isdecimal() else -1
    with self.lock:
      more = self.runs.read(seconds=0.5)
      runs = [{**run.since(since), **figures(run)} for run in self.runs.runs.values()]
      answer = {"since": f"{self.name}-{self.runs.serial}", "fresh": since < 0, "more": more, "runs": runs}
      return json.dumps(answer, separators=(",", ":")).encode()


class Request(BaseHTTPRequestHandler):
  protocol_version, timeout = "HTTP/1.1", 60

  def do_GET(self):
    # A page from elsewhere may give its name this address (DNS rebinding), but then the browser sends that name. The port
    # may be any: ssh forwards what it was told.
    if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
      return self.answer(403, b"open it as 127.0.0.1 or localhost", "text/plain")
    url, _, query = self.path.partition("?")
    if url == "/data":
      return self.answer(200, gzip.compress(self.server.data(query), 1), "application/json", packed=True)
    content, kind = self.server.files.get(url, (None, None))
    if content is None:
      return self.answer(404, b"not here", "text/plain")
    return self.answer(200, content, kind, packed=True)

  def answer(self, code, content, kind, packed=False):
    if packed and "gzip" not in self.headers.get("Accept-Encoding", ""):
      content, packed = gzip.decompress(content), False
    self.send_response(code)
    headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(content), "Content-Security-Policy": POLICY,
               "Cache-Control": "max-age=3600" if self.path == "/plotly.js" else "no-store", "X-Content-Type-Options": "nosniff",
               "Cross-Origin-Resource-Policy": "same-origin", **({"Content-Encoding": "gzip"} if packed else {})}
    for name, value in headers.items():
      self.send_header(name, str(value))
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, *_):
    pass


def serve(port, runs):
  try:
    server = Server(port, runs)
  except OSError as error:
    sys.exit(f"error: --port {port}: {error.strerror}: give another one")
  port = server.server_address[1]
  print(f"http://127.0.0.1:{port}/ (from another machine: ssh -L {port}:127.0.0.1:{port} HOST); Ctrl-C ends it", flush=True)
  try:
    server.serve_forever()
  except KeyboardInterrupt:
    pass


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or of runs")
  parser.add_argument("--port", type=int, default=8642, help="of 127.0.0.1; 0: any that is free (default: %(default)s)")
  parser.add_argument("--once", action="store_true", help="print the same in the terminal, and stop")
  parser.add_argument("--export", choices=("csv", "tensorboard"), help="write RUN/metrics.csv or RUN/tensorboard, and stop")
  parser.add_argument("--output", metavar="DIR", type=Path, help="--export into this folder instead: DIR/NAME.csv or DIR/NAME")
  arguments = parser.parse_args()
  if not 0 <= arguments.port < 65536:
    parser.error(f"--port {arguments.port}: give one from 0 to 65535")
  if arguments.output and not arguments.export:
    parser.error("--output is of --export: give csv or tensorboard")
  runs = Runs(arguments.runs)
  if not runs.runs:
    sys.exit(f"error: {' '.join(map(str, arguments.runs))}: no run here: give the --out folder of a run, or a folder of such")
  if not arguments.once and not arguments.export:
    return serve(arguments.port, runs)
  runs.read()
  if arguments.output:
    arguments.output.mkdir(parents=True, exist_ok=True)
  print_runs(runs) if arguments.once else export(runs, arguments.export, arguments.output)


if __name__ == "__main__":
  main()
