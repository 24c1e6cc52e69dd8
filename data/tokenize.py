#!/usr/bin/env python3
"""Turns text into token shards for ./train_gpt, with GPT-2's encoding.

Input, one or the other:
  text files            each file is one document
  *.jsonl, *.ndjson     each line is one document, in the field named by --field
  --dataset NAME        a Hugging Face dataset, streamed: nothing but the shards is stored

Output: shards in llm.c's format (data/README.md). Each document is preceded by <|endoftext|> (50256), and all
form one stream of tokens in the order of the input. Its first --val-tokens become PREFIX_val_000000.bin, the
rest PREFIX_train_000001.bin, PREFIX_train_000002.bin, ... of --shard-tokens each. A document may be cut
between two shards. Shards get their names when all are complete: after an error or an interruption there are
none.

Usage: python3 data/tokenize.py --output data/shakespeare --val-tokens 32768 shakespeare.txt
       python3 data/tokenize.py --output data/edu --val-tokens 10_000_000 \
         --dataset HuggingFaceFW/fineweb-edu --config sample-10BT
"""
import os
import sys

# Python searches this file's folder first, where this file would hide the standard library's module tokenize.
# Python follows symbolic links before it does.
here = os.path.dirname(os.path.realpath(__file__))
sys.path = [folder for folder in sys.path if os.path.realpath(folder) != here]

import argparse  # noqa: E402
import glob  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
from collections import deque  # noqa: E402
from concurrent.futures import ProcessPoolExecutor  # noqa: E402
from concurrent.futures.process import BrokenProcessPool  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import tiktoken  # noqa: E402
from tiktoken.load import data_gym_to_mergeable_bpe_ranks  # noqa: E402
from tiktoken_ext.openai_public import r50k_pat_str  # noqa: E402
from tqdm import tqdm  # noqa: E402

END_OF_TEXT = 50256
MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
JSON_LINES = (".jsonl", ".ndjson")
MOST_BLANKS = 990_000  # in a row
BLOCK_CHARACTERS = 1 << 20  # work handed to a process at a time


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="text, .jsonl or .ndjson files")
  parser.add_argument("--dataset", help="Hugging Face dataset, instead of files")
  parser.add_argument("--config", help="the dataset's configuration, such as sample-10BT")
  parser.add_argument("--split", default="train", help="of the dataset (default %(default)s)")
  parser.add_argument("--field", default="text", help="of JSONL and datasets (default %(default)s)")
  parser.add_argument("--skip-missing", action="store_true", help="leave out rows whose field is null or not there")
  parser.add_argument("--bpe", metavar="DIR", type=Path,
                      help="folder with tokenizer.json, or vocab.json and merges.txt, or encoder.json "
                           "and vocab.bpe, used instead of tiktoken's download")
  parser.add_argument("--output", metavar="PREFIX", required=True, help="start of shard names")
  parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="default %(default)s")
  parser.add_argument("--val-tokens", type=int, default=0, help="for validation (default %(default)s)")
  parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default %(default)s")
  arguments = parser.parse_args()
  if bool(arguments.files) == bool(arguments.dataset):
    parser.error("give either files or --dataset NAME")
  if arguments.output.endswith("/"):
    parser.error(f"--output {arguments.output}: is a folder: add the start of the shards' names, such as {arguments.output}text")
  arguments.output = Path(arguments.output)
  if arguments.processes < 1:
    parser.error(f"--processes {arguments.processes}: must be at least 1")
  for option, value, least in (("--shard-tokens", arguments.shard_tokens, 1),
                               ("--val-tokens", arguments.val_tokens, 0)):
    if not least <= value < 2**31:
      parser.error(f"{option} {value}: must be {least} to 2,147,483,647, for the header's int32")
  return arguments


# ---- GPT-2's encoding

def load_encoding(folder):
  if folder is None:
    try:
      return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
      sys.exit(f"error: tiktoken cannot download its encoding ({type(error).__name__}): pass --bpe DIR")
  if (folder / "tokenizer.json").is_file():  # transformers reads it first, too
    with tempfile.TemporaryDirectory() as temporary:
      return load_encoding(split_tokenizer(folder / "tokenizer.json", Path(temporary)))
  for merges, vocabulary in (("merges.txt", "vocab.json"), ("vocab.bpe", "encoder.json")):
    if (folder / merges).is_file() and (folder / vocabulary).is_file():
      break
  else:
    sys.exit(f"error: --bpe {folder}: needs tokenizer.json, or vocab.json and merges.txt, or encoder.json and vocab.bpe")
  os.environ["TIKTOKEN_CACHE_DIR"] = ""  # its cache would go by the file's name, whatever the file now holds
  try:
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / merges), str(folder / vocabulary))
  except (AssertionError, KeyError, ValueError) as error:
    sys.exit(f"error: --bpe {folder}: {merges} and {vocabulary} do not match ({error!r}): get both anew")
  if len(ranks) != END_OF_TEXT:
    sys.exit(f"error: --bpe {folder}: {len(ranks)} tokens: GPT-2 has {END_OF_TEXT}, and <|endoftext|>: give its own files")
  return tiktoken.Encoding("gpt2-from-files", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                           special_tokens={"<|endoftext|>": END_OF_TEXT})


def split_tokenizer(path, folder):
  """Writes what today's transformers saves in one file as the two files of old, into that folder."""
  try:
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model, pre_tokenizer = tokenizer["model"], tokenizer["pre_tokenizer"]
    if (model["type"], pre_tokenizer["type"]) != ("BPE", "ByteLevel") or tokenizer.get("normalizer"):
      raise ValueError("other parts than its BPE of bytes")
    if pre_tokenizer.get("add_prefix_space") or not pre_tokenizer.get("use_regex", True):
      raise ValueError("words are divided otherwise")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
  except (KeyError, TypeError, ValueError) as error:
    sys.exit(f"error: --bpe: {path} is no tokenizer of GPT-2's kind ({error!r}): give one")
  (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
  return folder


def start_worker(shared_encoding):
  global encoding  # one a process
  encoding = shared_encoding
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
  signal.signal(signal.SIGTERM, signal.SIG_DFL)


def encode_block(documents):
  """The tokens of (place, text) documents in one uint16 array. Text that looks like a special token is encoded as
  text."""
  return np.concatenate([np.array([END_OF_TEXT, *encode(*document)], dtype="<u2") for document in documents])


def encode(place, text):
  try:
    return [token for part in parts_of(text) for token in encoding.encode_ordinary(part)]
  except BaseException as error:  # a panic of tiktoken is no Exception, and can't be sent to another process
    if type(error).__name__ != "PanicException":
      raise
    raise ValueError(f"{place}: tiktoken can't encode it ({' '.join(str(error).split())[:200]}): leave it out") from None


def parts_of(text):
  """tiktoken's regular expressions give up at 999,999 characters of white space before a word. So longer white space is
  cut."""
  ends = []
  if len(text) > MOST_BLANKS:
    for run in re.finditer(r"\s\s+", text):
      ends += range(run.start() + MOST_BLANKS, run.end(), MOST_BLANKS)
  return [text[begin:end] for begin, end in zip([0, *ends], [*ends, None])]


def encode_in_order(documents, shared_encoding, processes):
  """Token arrays in the order of the documents, with a bounded number of blocks in flight: the input may be
  larger than memory. Processes are spawned: a fork would copy the locks of a dataset's download threads."""
  context = multiprocessing.get_context("spawn")
  with ProcessPoolExecutor(processes, context, start_worker, (shared_encoding,)) as pool:
    pending = deque()
    for block in blocks(documents):
      pending.append(pool.submit(encode_block, block))
      if len(pending) > 3 * processes:
        yield pending.popleft().result()
    while pending:
      yield pending.popleft().result()


def blocks(documents):
  block, characters = [], 0
  for document in documents:
    block.append(document)
    characters += len(document[1]) + 1
    if characters >= BLOCK_CHARACTERS:
      yield block
      block, characters = [], 0
  if block:
    yield block


# ---- documents

def read_documents(arguments):
  """(place, text) of each document, while a progress bar runs."""
  if arguments.dataset:
    with tqdm(unit=" documents", unit_scale=True, disable=None) as progress:
      for place, row in read_dataset(arguments):
        if (text := text_of(row, arguments, place)) is not None:
          yield place, text
        progress.update()
    return
  try:
    size = sum(file.stat().st_size for file in arguments.files)
    with tqdm(total=size, unit="B", unit_scale=True, disable=None) as progress:
      for file in arguments.files:
        is_json = file.suffix.lower() in JSON_LINES
        for place, data in read_file(file, is_json):
          if (text := decode(place, data, is_json, arguments)) is not None:
            yield place, text
          progress.update(len(data))
  except OSError as error:
    sys.exit(f"error: {error.filename}: {error.strerror}: give readable text or .jsonl files")


def read_file(file, is_json):
  """(place, bytes) of each line that is not blank in a file of JSON lines, whose place is "FILE:LINE"; of any other
  file as a whole."""
  if file.suffix.lower() == ".json":
    sys.exit(f"error: {file}: give JSON as one object a line, in a .jsonl file; or name the file .txt if its syntax is the text")
  if not is_json:
    yield str(file), file.read_bytes()
    return
  with file.open("rb") as lines:
    for line_number, line in enumerate(lines, start=1):
      if line.strip():
        yield f"{file}:{line_number}", line


def decode(place, data, is_json, arguments):
  """The text; None: the row is left out."""
  try:
    return text_of(json.loads(data), arguments, place) if is_json else data.decode("utf-8-sig")  # without the mark
  except UnicodeDecodeError as error:
    sys.exit(f"error: {place}: not UTF-8 at byte {error.start}: convert it first")
  except (ValueError, RecursionError) as error:
    sys.exit(f"error: {place}: not JSON ({error}): a .jsonl file holds one JSON object a line")


def text_of(row, arguments, place):
  field = arguments.field
  if isinstance(row, dict) and isinstance(row.get(field), str):
    return row[field]
  if isinstance(row, dict) and row.get(field) is None and (arguments.skip_missing or field in row):
    if not arguments.skip_missing:
      sys.exit(f"error: {place}: field {field!r} is null: leave such rows out with --skip-missing")
    return None
  found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
  sys.exit(f"error: {place}: no text in field {field!r} (found: {found}): choose another with --field")


def read_dataset(arguments):
  try:
    import datasets
  except ImportError:
    sys.exit("error: --dataset needs the Python package datasets: pip install datasets")
  name = arguments.dataset
  try:
    rows = datasets.load_dataset(name, arguments.config, split=arguments.split, streaming=True)
    for number, row in enumerate(rows):
      yield f"{name} row {number}", row
  except (OSError, ValueError) as error:  # not found, unknown configuration or split, network
    sys.exit(f"error: --dataset {name}: {' '.join(str(error).split())}: check its name, --config and --split")


# ---- shards

class ShardWriter:
  """Cuts one stream of tokens into shards. They are written under temporary names and renamed together by
  publish(): a glob finds all of them or none."""

  def __init__(self, prefix, val_tokens, shard_tokens):
    self.prefix, self.val_tokens, self.shard_tokens = prefix, val_tokens, shard_tokens
    self.shards = {}  # final path -> tokens
    self.file, self.room = None, 0
    pattern = glob.escape(str(prefix))
    if existing := glob.glob(f"{pattern}_train_*.bin") + glob.glob(f"{pattern}_val_*.bin"):
      sys.exit(f"error: --output {prefix}: {min(existing)} is there already: delete these shards or choose "
               "another prefix")
    prefix.parent.mkdir(parents=True, exist_ok=True)

  def write(self, tokens):
    while len(tokens) > 0:
      if self.room == 0:
        self.start_shard()
      part, tokens = tokens[:self.room], tokens[self.room:]
      self.file.write(part.tobytes())
      self.shards[self.path] += len(part)
      self.room -= len(part)

  def start_shard(self):
    self.finish_shard()
    is_val = not self.shards and self.val_tokens > 0
    number = len(self.shards) + (self.val_tokens == 0)  # 0 is kept for validation
    self.path = Path(f"{self.prefix}_{'val' if is_val else 'train'}_{number:06}.bin")
    self.shards[self.path] = 0
    self.room = self.val_tokens if is_val else self.shard_tokens
    self.file = temporary(self.path).open("wb")
    self.file.write(bytes(4 * HEADER_INTS))

  def finish_shard(self):
    if self.file is None:
      return
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, self.shards[self.path]
    self.file.seek(0)
    self.file.write(header.tobytes())
    self.file.flush()
    os.fsync(self.file.fileno())
    self.file.close()
    self.file = None

  def publish(self):
    self.finish_shard()
    for path in self.shards:
      temporary(path).rename(path)

  def discard(self):
    """Removes what publish() has not renamed."""
    if self.file is not None:
      try:
        self.file.close()
      except OSError:  # the disk is full: what is in the buffer cannot be written now, either
        pass
    for path in self.shards:
      temporary(path).unlink(missing_ok=True)


def temporary(path):
  return path.with_name(path.name + ".tmp")


def write_shards(arguments, documents, shared_encoding):
  writer = ShardWriter(arguments.output, arguments.val_tokens, arguments.shard_tokens)
  try:
    has_text = False
    for tokens in encode_in_order(documents, shared_encoding, arguments.processes):
      has_text = has_text or bool((tokens != END_OF_TEXT).any())
      writer.write(tokens)
    if not has_text:
      sys.exit("error: there is no text in the input: give other files")
    total = sum(writer.shards.values())
    if total <= arguments.val_tokens:
      sys.exit(f"error: of the input's {total} tokens --val-tokens {arguments.val_tokens} leaves none: "
               "lower it or give more text")
    writer.publish()
  finally:
    writer.discard()
  return writer.shards


def interrupt(*_):
  raise KeyboardInterrupt


def main():
  arguments = parse_arguments()
  signal.signal(signal.SIGTERM, interrupt)
  shared_encoding = load_encoding(arguments.bpe)
  try:
    shards = write_shards(arguments, read_documents(arguments), shared_encoding)
  except OSError as error:
    sys.exit(f"error: --output {arguments.output}: {error.strerror or error}: check the folder and its space; nothing was written")
  except BrokenProcessPool:
    cure = f"lower --processes {arguments.processes}" if arguments.processes > 1 else "give it more, or shorter documents"
    sys.exit(f"error: a process died, perhaps for want of memory: {cure}")
  except ValueError as error:  # of encode()
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit("interrupted: nothing was written")
  for path, tokens in shards.items():
    print(f"{path}  {tokens:,} tokens")
  print(f"total  {sum(shards.values()):,} tokens")


if __name__ == "__main__":
  main()
