#!/usr/bin/env python3
"""Names the first operation whose result differs between two runs.

Each run is a file that `train_gpt --trace-tensors FILE` wrote (FILE.rank1, FILE.rank2, ... are found beside it), or a
folder of such files. Bits are compared by default. --rtol compares sums and absolute maxima instead, for runs on two
devices, in two dtypes or on two meshes.

If both runs have the same mesh, each rank is compared with the same rank of the other run. On different meshes an
output is found by step, micro-batch, layer and operation; if several ranks have it, the first is taken. These are left
out: sums over several micro-batches, where another mesh or ZeRO stage adds up other ones; outputs of another size; and
outputs that belong to no micro-batch, such as the optimizer's, unless all calls of the operation have the same sizes in
both runs (with other sizes they are about other shards).

Tensor-parallel ranks have parts of an output, in pieces of rows: counts and sums are added up, and the largest absolute
maximum is taken (--rtol is needed). If every rank has the whole output, each rank's is compared. Terms of a sum over
the ranks are left out, and so are operands in eight bits, because each part has its own scale.

Runs with another --cp or --cp-method have other rows on each rank, and gradients that are sums over other rows: they are
refused. Ulysses' attention is left out where --tp differs: which heads a rank has follows from both.

Each stage of a pipeline has its own layers. Up to the first update its results have one rank's bits. There are two
exceptions: the gradient of the tied embedding, which the first and the last stage add up (it is left out), and results
that depend on the norm. The first difference of a pipeline is the first in the order in which one rank computes.

Exit code: 0 the same, 1 different, 2 nothing to compare.

  python3 dev/compare.py good.jsonl bad.jsonl
  python3 dev/compare.py cpu.jsonl gpu.jsonl --rtol 1e-4
"""
import argparse
import collections
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

FORMAT = {  # keys and types of a line; the first line of a file has the keys of HEADER
  "step": (int, type(None)), "micro_batch": (int, type(None)), "layer": (int, type(None)), "piece": (int, type(None)),
  "op": str, "output": int, "accumulated": bool, "partial": bool, "count": int, "dtype": str,
  "sum": (float, int, type(None)), "absmax": (float, int, type(None)), "checksum": str}
HEADER = {"rank": int, "ranks": int, "data_parallel": int, "tensor_parallel": int, "pieces": int,
          "context_parallel": int, "context_method": str, "pipeline": int, "chunks": int, "zero": int, "micro_batch": int}
SPLIT = ("tensor_parallel", "pieces")  # keys by which layers' outputs are split
STAGES = ("pipeline", "chunks")
MESH = ("ranks", "data_parallel", "context_parallel", *SPLIT, *STAGES)
EARLIER = 3  # operations shown before the first difference
# Tensor parallelism changes three things. SAME: operations that write the same under another name. LOGITS: outputs of
# the head, whose rows are padded with zeros to the number of columns that the mesh needs. TERMS: outputs that are terms
# of a sum over ranks, although their lines do not say so (LayerNorm's gradients are sums over a rank's own rows,
# statistics are sums over its own words; casts may convert such terms).
SAME = {"vocabulary_cross_entropy": "cross_entropy"}
# A library computes two operations in one call: its outputs, and the operations that have them elsewhere.
FUSED = {("matmul_gelu_forward", 0): ("gelu_forward", 0), ("matmul_gelu_forward", 1): ("matmul_forward", 0),
         ("matmul_gelu_gradient", 0): ("gelu_backward", 0),
         ("matmul_bias_gradient", 0): ("matmul_weight_gradient", 0), ("matmul_bias_gradient", 1): ("column_sum", 0)}
LOGITS = {("matmul_forward", 0), ("cross_entropy", 1)}  # outside of layers
TERMS = {("layernorm_backward", 1), ("layernorm_backward", 2), ("vocabulary_statistics", 0), ("cast", 0),
         ("accumulate", 0)}
# The gradient of wte, outside of layers: both ends of a pipeline add it up.
TIED = ("matmul_weight_gradient", 0)
# Operations that Ulysses does on some of the heads.
OF_HEADS = {"all_to_all", "attention_backward", "attention_forward", "join_runs", "split_heads", "split_runs"}
# Operands in eight bits, whose scales belong to the rows and the part of a weight that a rank multiplies.
OF_SCALES = {"cast_fp8", "cast_transpose_fp8"}
# Messages from other stages. They are posted while another micro-batch may be computed, and logged under that one.
FROM_STAGES = {"receive"}
# Operations that each mesh does in its own way. (Maxima have launches of their own where other ranks wrote the tensor; codes tell.)
OF_MESH = {"all_gather", "all_reduce", "broadcast", "fp8_maximum", "reduce_scatter", "square_sums"}


class Line(NamedTuple):
  key: tuple  # step, micro_batch, layer, op, output, and the number of this call among the same ones on this rank
  order: tuple  # in which a run's lines are compared: step, position within it, rank; of pipelines: see in_pipeline()
  rank: int
  sizes: list  # counts of all lines of this step, micro-batch, layer, op and output
  fields: dict
  parts: tuple = ()  # if this is the sum of several ranks' lines: these

  def by_rank(self):
    return self.parts or (self,)

  def counts(self):
    return [line.fields["count"] for line in self.by_rank()]

  def counts_of_calls(self):
    return list(zip(*(line.sizes for line in self.by_rank())))

  def output(self):
    return self.fields["op"], self.fields["output"]

  def are_logits(self):
    return self.fields["layer"] is None and self.output() in LOGITS


class Run(NamedTuple):
  name: str
  header: dict  # rank 0's
  ranks: list  # of each rank, its lines

  def first_groups(self):
    """Every key's line on the first group of tensor-parallel ranks that has it: the sum of its ranks' lines. If several
    stages have it, as they have the embedding, it is taken from the first one, which has wpe, too."""
    found = {}
    groups = range(0, len(self.ranks), self.header["tensor_parallel"])
    for first in reversed(groups):
      group = collections.defaultdict(list)
      for lines in self.ranks[first:first + self.header["tensor_parallel"]]:
        for line in lines:
          group[line.key].append(line)
      found.update((key, add_up(lines)._replace(parts=tuple(lines))) for key, lines in group.items())
    return found


def add_up(lines):
  """Parts of one output as one line."""
  def total(key, add):
    values = [line.fields[key] for line in lines]
    return None if None in values else add(values)
  sums = {"count": total("count", sum), "sum": total("sum", sum), "absmax": total("absmax", max),
          "checksum": total("checksum", " ".join)}
  return lines[0]._replace(fields={**lines[0].fields, **sums})


def fail(message):
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


# ---- reading

def read_objects(path):
  """The JSON objects of a file, each with its line number."""
  try:
    *lines, rest = path.read_bytes().split(b"\n")
  except OSError as error:
    fail(f"{path}: {error.strerror}: give a file of --trace-tensors, or a folder of them")
  if rest:
    print(f"note: {path}: line {len(lines) + 1} is unfinished, left out", file=sys.stderr)
  for number, text in enumerate(lines, start=1):
    wanted = HEADER if number == 1 else FORMAT
    try:
      fields = json.loads(text)
      valid = all(isinstance(fields[key], kind) for key, kind in wanted.items())
    except (ValueError, TypeError, KeyError):
      valid = False
    if not valid:
      shown = text[:60].decode(errors="replace")
      fail(f"{path}:{number}: not a line of --trace-tensors: {shown!r}: give the file that a run wrote")
    yield fields


def in_pipeline(line, is_backward):
  """The place of a line in the order of one rank: step, micro-batch, pass, layer."""
  step, position, rank = line.order
  micro_batch, layer, op = line.key[1:4]
  depth = layer if layer is not None else -1 if op.startswith("embedding") else math.inf
  return (step, math.inf if micro_batch is None else micro_batch, is_backward, -depth if is_backward else depth, position,
          rank)


def read_rank(path):
  """Header and lines of one file."""
  objects = read_objects(path)
  header = next(objects, None)
  if header is None:
    fail(f"{path}: empty: give the file that a run wrote")
  lines, sizes, in_step, in_backward = {}, collections.defaultdict(list), collections.Counter(), set()
  for fields in objects:
    where = tuple(fields[key] for key in ("step", "micro_batch", "layer"))
    if fields["op"] == "matmul_gelu_gradient":  # counts as a call of this, too, whose output is never in memory
      sizes[(*where, "matmul_input_gradient", 0)].append(0)
    operation = SAME.get(fields["op"], fields["op"]), fields["output"]
    fields["op"], fields["output"] = FUSED.get(operation, operation)
    place = (*where, fields["op"], fields["output"])
    if not fields["piece"] or not sizes[place]:  # no piece, or the first
      sizes[place].append(0)
    sizes[place][-1] += fields["count"]
    step = fields["step"] or 0
    in_step[step] += 1
    order = (step, in_step[step], header["rank"])
    calls = len(sizes[(*place[:-1], 0)])  # not each of them writes the last output (residual_layernorm_forward)
    line = Line((*place, calls), order, header["rank"], sizes[place], fields)
    if header["pipeline"] > 1:
      if any(word in fields["op"] for word in ("backward", "gradient")):
        in_backward.add(place[:2])
      line = line._replace(order=in_pipeline(line, place[:2] in in_backward))
    lines[line.key] = add_up([lines[line.key], line]) if line.key in lines else line
  return header, list(lines.values())


def read_run(name):
  path = Path(name)
  if path.is_dir():
    files = sorted(file for file in path.iterdir() if file.is_file())
  else:
    files = [path] + sorted(path.parent.glob(path.name + ".rank*"))
  if not files:
    fail(f"{path}: an empty folder: give files of --trace-tensors")
  read = sorted((read_rank(file) for file in files), key=lambda rank: rank[0]["rank"])
  header = read[0][0]
  if [rank["rank"] for rank, _ in read] != list(range(header["ranks"])):
    found = ", ".join(str(rank["rank"]) for rank, _ in read)
    fail(f"{path}: files of rank {found} where one of each of {header['ranks']} ranks is needed")
  return Run(name, header, [lines for _, lines in read])


# ---- comparing

def differ(header_a, header_b, *keys):
  return any(header_a[key] != header_b[key] for key in keys)


def pairs(a, b):
  """Returns (line of a, line of b or None) in order, and the number of lines that only b has."""
  if not differ(a.header, b.header, *MESH):
    lines_a = {(line.rank, line.key): line for lines in a.ranks for line in lines}
    lines_b = {(line.rank, line.key): line for lines in b.ranks for line in lines}
  else:
    lines_a, lines_b = a.first_groups(), b.first_groups()
  ordered = sorted(lines_a.items(), key=lambda item: item[1].order)
  only_b = sum(key not in lines_a for key in lines_b)
  return [(line, lines_b.get(key)) for key, line in ordered], only_b


def same_size(counts_a, counts_b):
  """Do these counts, by tensor-parallel rank, belong to the same output: to its parts, or to all of it on each rank?"""
  return sum(counts_a) == sum(counts_b) or {*counts_a} == {*counts_b} == {counts_a[0]}


def why_not(a, b, headers):
  """Says why two lines can't be compared; None: they can."""
  if b is None:
    return "in A alone"
  if a.fields["micro_batch"] is not None and differ(*headers, "micro_batch"):
    return "of other samples"
  if a.fields["op"] in OF_MESH and differ(*headers, *MESH, "zero"):
    return "that depend on the mesh"
  if a.fields["op"] in FROM_STAGES:
    return "from other stages"
  if differ(*headers, *SPLIT):
    if a.fields["partial"] or b.fields["partial"] or a.output() in TERMS:
      return "terms of sums over ranks"
  if a.fields["op"] in OF_HEADS and headers[0]["context_method"] == "ulysses" and differ(*headers, "tensor_parallel"):
    return "of other heads"
  if a.fields["op"] in OF_SCALES and differ(*headers, *SPLIT):
    return "of other scales"
  if not same_size(a.counts(), b.counts()) and not a.are_logits():
    return "of other sizes"
  if a.fields["micro_batch"] is None:
    calls = a.counts_of_calls(), b.counts_of_calls()
    fewer = len(calls[0]) != len(calls[1]) and not differ(*headers, "pipeline")  # the first stage updates no final norm
    if fewer or not all(map(same_size, *calls)):
      return "of other sizes"
  sums = [line.fields["accumulated"] for line in (a, b)]
  if sums[0] != sums[1] or (any(sums) and differ(*headers, "data_parallel")):
    return "sums over other micro-batches"
  if any(sums) and a.output() == TIED and a.fields["layer"] is None and differ(*headers, "pipeline"):
    return "sums of the tied embedding"
  return None


def views(a, b):
  """The pairs to compare for two lines: the sums of the ranks' parts, or each rank's line if each has the whole."""
  if a.fields["count"] == b.fields["count"] or a.are_logits():
    return [(a, b)]
  return [(part, b.by_rank()[0]) for part in a.by_rank()] + [(a.by_rank()[0], part) for part in b.by_rank()]


def close(a, b, scale, rtol):
  if a is None or b is None:  # not finite
    return a is b
  return abs(a - b) <= rtol * max(abs(a), abs(b), scale)


def same(a, b, rtol):
  if rtol is None:
    return a["checksum"] == b["checksum"]
  # A sum may cancel: the tolerance is relative to the sum of `count` elements with random signs.
  scale = max(a["absmax"] or 0, b["absmax"] or 0) * math.sqrt(a["count"])
  return close(a["sum"], b["sum"], scale, rtol) and close(a["absmax"], b["absmax"], 0, rtol)


# ---- reporting

def place(line):
  step, micro_batch, layer, op, output, time = line.key
  words = [f"step {step}" if step is not None else "before the first step"]
  words += [f"micro-batch {micro_batch}"] if micro_batch is not None else []
  words += [f"layer {layer}"] if layer is not None else []
  nth = f", call {time} of it" if time > 1 else ""
  return f"{', '.join(words)}: {op}{nth}, output {output} ({line.fields['count']} {line.fields['dtype']})"


def show_values(name, line):
  shown = ["not finite" if line.fields[key] is None else f"{line.fields[key]:.9g}" for key in ("sum", "absmax")]
  ranks = f"ranks {line.rank} to {line.parts[-1].rank}" if len(line.parts) > 1 else f"rank {line.rank}"
  print(f"  {name}, {ranks}:  sum {shown[0]}, absolute maximum {shown[1]}, "
        f"checksum {line.fields['checksum']}")


def tensor_parallel(run):
  ranks, pieces = run.header["tensor_parallel"], run.header["pieces"]
  return f"tensor-parallel {ranks} in {pieces} pieces, " if ranks > 1 else ""


def pipeline(run):
  stages, chunks = run.header["pipeline"], run.header["chunks"]
  return f"pipeline {stages}{f' of {chunks} chunks' if chunks > 1 else ''}, " if stages > 1 else ""


def show_run(letter, run):
  lines = sum(len(rank) for rank in run.ranks)
  steps = {line.key[0] for rank in run.ranks for line in rank} - {None}
  context = run.header["context_parallel"]
  context = f"context-parallel {context}, " if context > 1 else ""
  print(f"{letter}: {run.name}: ranks {run.header['ranks']}, {tensor_parallel(run)}{context}{pipeline(run)}data-parallel "
        f"{run.header['data_parallel']}, micro-batch {run.header['micro_batch']}, steps {len(steps)}, outputs {lines}")


def show_first_difference(a, view, before):
  print(f"They first differ at {place(a)}")
  for name, line in zip("AB", view):
    show_values(name, line)
  earlier = [(line, verdict) for line, verdict in before if line.rank == a.rank][-EARLIER:]
  print(f"Before it on rank {a.rank} of A:" if earlier else f"It is the first of rank {a.rank} of A.")
  for line, verdict in earlier:
    print(f"  {place(line)}: {verdict}")


def compare(run_a, run_b, rtol):
  """Prints the report; returns the exit code."""
  compared, only_b = pairs(run_a, run_b)
  headers = run_a.header, run_b.header
  if differ(*headers, "context_parallel", "context_method"):
    fail("the runs split samples differently, --cp {context_parallel} ({context_method}) and ".format(**headers[0]) +
         "{context_parallel} ({context_method}): outputs of other rows have nothing in common, ".format(**headers[1]) +
         "give runs of the same --cp and --cp-method")
  if rtol is None and differ(*headers, *SPLIT):
    fail("the runs split layers or rows differently: checksums of parts have nothing in common, give --rtol")
  verdicts, counts, first = [], collections.Counter(), None
  for a, b in compared:
    verdict = why_not(a, b, headers)
    if verdict is None and rtol is None and a.fields["dtype"] != b.fields["dtype"]:
      fail(f"{place(a)} is of {b.fields['dtype']} in B: two dtypes have no bits in common, give --rtol")
    if verdict is None:
      other = next((view for view in views(a, b) if not same(view[0].fields, view[1].fields, rtol)), None)
      verdict = "differs" if other else "agrees"
      if other and first is None:
        first = a, other, len(verdicts)
    verdicts.append((a, verdict))
    counts[verdict] += 1
  if not counts["agrees"] and not counts["differs"]:
    fail(f"{run_a.name} and {run_b.name} have no output of the same place and size: are they runs of the same job?")
  if first:
    agreed = sum(verdict == "agrees" for _, verdict in verdicts[:first[2]])
    show_first_difference(first[0], first[1], verdicts[:first[2]])
    print(f"{agreed} outputs agree up to there; from there on {counts['differs']} differ, "
          f"{counts['agrees'] - agreed} agree.")
  else:
    print(f"They are the same: {counts['agrees']} outputs agree{'' if rtol is None else f' within {rtol:g}'}.")
  left_out = [(counts[verdict], verdict) for verdict in counts if verdict not in ("agrees", "differs")]
  left_out += [(only_b, "in B alone")] if only_b else []
  if left_out:
    print("Not compared: " + ", ".join(f"{count} {reason}" for count, reason in left_out) + ".")
  return 1 if first else 0


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("run_a", metavar="RUN_A")
  parser.add_argument("run_b", metavar="RUN_B")
  parser.add_argument("--rtol", type=float, help="relative tolerance of sums and absolute maxima (default: bitwise)")
  arguments = parser.parse_args()
  if arguments.rtol is not None and not 0 <= arguments.rtol < 1:
    fail(f"--rtol {arguments.rtol:g}: give a number from 0 to below 1")
  runs = read_run(arguments.run_a), read_run(arguments.run_b)
  for letter, run in zip("AB", runs):
    show_run(letter, run)
  sys.exit(compare(*runs, arguments.rtol))


if __name__ == "__main__":
  main()
