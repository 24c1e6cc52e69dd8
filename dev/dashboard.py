#!/usr/bin/env python3
"""Shows runs while they train, on a page that follows their files, or once in the terminal.

RUN is the folder of a run, or a folder of runs: then those that come later join by themselves. dashboard/README.md
explains the page, and how to reach it from another machine.

Usage: python3 dev/dashboard.py runs [--port 8642]
       python3 dev/dashboard.py runs --once
       python3 dev/dashboard.py runs/cpp --export csv
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

# Nothing comes from elsewhere, nor goes there. (plotly sets styles, and its pictures are data:)
POLICY = ("default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache",
           "Cross-Origin-Resource-Policy": "same-origin", "Content-Encoding": "gzip"}


def read_files():
  """All that the server hands out beside the data, packed: content and type by URL."""
  files = {"/": PARTS / "page.html", "/page.js": PARTS / "page.js", "/page.css": PARTS / "page.css"}
  if plotly := importlib.util.find_spec("plotly"):
    files["/plotly.js"] = Path(plotly.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
  else:
    print("note: plotly is not installed, so the page shows no curves: python3 -m pip install plotly", file=sys.stderr)
  kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
  return {url: (gzip.compress(path.read_bytes(), 6), kinds[path.suffix]) for url, path in files.items()}


class Server(ThreadingHTTPServer):
  daemon_threads = True

  def __init__(self, port, runs):
    super().__init__(("127.0.0.1", port), Request)
    self.runs, self.files, self.lock, self.name = runs, read_files(), threading.Lock(), secrets.token_hex(4)

  def data(self, query):
    """The changes since `query`, which is the page's last answer: the name of this server, and a serial number."""
    name, _, serial = query.partition("-")
    since = int(serial) if name == self.name and serial.isdecimal() and len(serial) < 20 else -1
    with self.lock:
      more = self.runs.read(seconds=0.5)
      news = [{**run.since(since), **figures(run)} for run in self.runs.runs.values()]
      answer = {"since": f"{self.name}-{self.runs.serial}", "more": more, "runs": news}
    return gzip.compress(json.dumps(answer, separators=(",", ":")).encode(), 1), "application/json"


class Request(BaseHTTPRequestHandler):
  protocol_version, timeout = "HTTP/1.1", 60

  def do_GET(self):
    # A page from elsewhere may give its name this address (DNS rebinding), but then the browser sends that name. The
    # port may be any: ssh may forward any port.
    if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
      return self.send_error(403, "open it as 127.0.0.1 or localhost")
    url, _, query = self.path.partition("?")
    if url != "/data" and url not in self.server.files:
      return self.send_error(404)
    packed, kind = self.server.data(query) if url == "/data" else self.server.files[url]
    self.send_response(200)
    length = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(packed))}
    for name, value in {**HEADERS, **length}.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(packed)

  def log_message(self, *_):
    pass


def serve(port, runs):
  try:
    server = Server(port, runs)
  except OSError as error:
    sys.exit(f"error: --port {port}: {error.strerror}: give another one")
  port = server.server_address[1]
  print(f"http://127.0.0.1:{port}/ (from elsewhere: ssh -L {port}:127.0.0.1:{port} HOST); Ctrl-C ends it", flush=True)
  try:
    server.serve_forever()
  except KeyboardInterrupt:
    pass


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or of runs")
  parser.add_argument("--port", type=int, default=8642, help="of 127.0.0.1; 0: any that is free (default: %(default)s)")
  parser.add_argument("--once", action="store_true", help="print the same in the terminal, and stop")
  parser.add_argument("--export", choices=("csv", "tensorboard"), help="write RUN/metrics.csv or RUN/tensorboard")
  arguments = parser.parse_args()
  if not 0 <= arguments.port < 65536:
    parser.error(f"--port {arguments.port}: give one from 0 to 65535")
  runs = Runs(arguments.runs)
  if not runs.runs:
    sys.exit(f"error: {' '.join(map(str, arguments.runs))}: no run here: give a run's --out folder, or one above it")
  if not arguments.once and not arguments.export:
    return serve(arguments.port, runs)
  runs.read()
  if arguments.once:
    print_runs(runs.runs.values())
  else:
    export(runs.runs.values(), arguments.export)


if __name__ == "__main__":
  main()
