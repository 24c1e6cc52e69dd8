"""data/tokenize.py with packages that stand in for tiktoken and tqdm: a byte is a token. Needs numpy."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).resolve().parents[2] / "data/tokenize.py"
STAND_INS = {
    # As tiktoken does: it panics, which is no Exception, at a million characters of white space before a word.
    "tiktoken/__init__.py": """
import os, signal
class PanicException(BaseException):
  __module__ = "pyo3_runtime"  # which can't be imported, and so not sent to another process
class Encoding:
  def encode_ordinary(self, text):
    if "die" in text: os.kill(os.getpid(), signal.SIGKILL)
    if " " * 999_999 in text.rstrip() or "panic" in text: raise PanicException("deep")
    return list(text.encode())
def get_encoding(name): return Encoding()
""",
    "tiktoken/load.py": "def data_gym_to_mergeable_bpe_ranks(*files): return {}",
    "tiktoken_ext/openai_public.py": "r50k_pat_str = ''",
    "tqdm.py": """
class tqdm:
  def __init__(self, *_, **__): pass
  def __enter__(self): return self
  def __exit__(self, *_): pass
  def update(self, *_): pass
"""}
END = 50256


class Tokenize(unittest.TestCase):
  def setUp(self):
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    self.folder = Path(temporary.name)
    for name, text in STAND_INS.items():
      self.put("packages/" + name, text)

  def put(self, name, content):
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

  def run_script(self, *arguments, script=SCRIPT):
    environment = {**os.environ, "PYTHONPATH": str(self.folder / "packages")}
    return subprocess.run([sys.executable, script, "--processes", "1", *arguments], cwd=self.folder, env=environment,
                          capture_output=True, text=True, timeout=120)

  def tokens(self, *arguments):
    done = self.run_script("--output", "shards/x", *arguments)
    self.assertEqual((done.returncode, done.stderr), (0, ""))
    path = self.folder / "shards/x_train_000001.bin"
    tokens = np.fromfile(path, "<u2")[512:].tolist()
    path.unlink()
    return tokens

  def refuses(self, arguments, *parts, output="shards/x"):
    done = self.run_script("--output", output, *arguments)
    self.assertNotEqual(done.returncode, 0)
    self.assertNotIn("Traceback", done.stderr)
    for part in parts:
      self.assertIn(part, done.stderr.splitlines()[-1])
    self.assertEqual(list(self.folder.glob("shards/*")), [])

  def test_behind_a_symbolic_link(self):
    (self.folder / "link").symlink_to(SCRIPT.parents[1])
    self.assertEqual(self.run_script("--help", script=self.folder / "link/data/tokenize.py").returncode, 0)

  def test_long_white_space_is_cut_and_a_panic_names_its_place(self):
    for blanks in (999_998, 999_999, 2_500_000):
      text = "a" + " " * blanks + "b"
      self.put("w.jsonl", json.dumps({"text": "first"}) + "\n" + json.dumps({"text": text}) + "\n")
      self.assertEqual(self.tokens("w.jsonl"), [END, *b"first", END, *text.encode()])
    self.put("w.jsonl", '{"text": "first"}\n{"text": "panic"}\n')
    self.refuses(["w.jsonl"], "error: w.jsonl:2: tiktoken can't encode it (deep)", "leave it out")

  def test_a_process_that_dies_gets_a_cure_that_is_one(self):
    self.put("a.txt", "die")
    self.refuses(["a.txt"], "a process died", "give it more, or shorter documents")
    self.refuses(["--processes", "2", "a.txt"], "a process died", "lower --processes 2")

  def test_rows_without_text(self):
    self.put("n.jsonl", '{"text": "a"}\n{"text": null}\n{"other": 1}\n{"text": "b"}\n')
    self.refuses(["n.jsonl"], "n.jsonl:2: field 'text' is null: leave such rows out with --skip-missing")
    self.assertEqual(self.tokens("--skip-missing", "n.jsonl"), [END, *b"a", END, *b"b"])
    self.put("n.jsonl", '{"text": 1}\n')
    self.refuses(["--skip-missing", "n.jsonl"], "n.jsonl:1: no text in field 'text' (found: text)")

  def test_kinds_of_files(self):
    for name in ("a.jsonl", "a.JSONL", "a.ndjson"):
      self.put(name, '{"text": "a"}\n')
      self.assertEqual(self.tokens(name), [END, *b"a"])
    self.put("a.json", "{}")
    self.refuses(["a.json"], "a.json: give JSON as one object a line")
    self.put("a.txt", b"\xef\xbb\xbfab")
    self.assertEqual(self.tokens("a.txt"), [END, *b"ab"])

  def test_no_text_and_no_name(self):
    self.put("a.txt", "")
    self.refuses(["a.txt"], "there is no text in the input")
    self.put("a.txt", "text")
    self.refuses(["a.txt"], "--output shards/: is a folder", "shards/text", output="shards/")


if __name__ == "__main__":
  unittest.main()
