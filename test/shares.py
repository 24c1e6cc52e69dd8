#!/usr/bin/env python3
"""Compares which share of their bounds errors took with the table of test/tolerances.md.

    make test; python3 test/shares.py build/cpu/shares

The files are what programs write through GPT_SHARES (bounds.h), which test/run.sh sets. Prints the largest share of each
row of the table, and the table's: `!` is larger than that, `-` was not run. Last come quantities that are in no row. With
--check the exit code is 1 if there is a `!` or such a quantity. Without files it only checks that each row below is in
the table.
"""
import re
import sys
from pathlib import Path

# A program, the beginning of a row's quantity, and which comparisons it has: the first that fits "test case: quantity".
ROWS = r"""
test_matmul | sums as tensor cores make them | ^the bounds hold
test_matmul | fp32 products | ^fp32 products|<float>
test_matmul | those that add to D | that adds
test_matmul | 16-bit products |
test_cublaslt | products and codes |
test_hopper | products |
test_attention | parts of the keys, merged | merged by their lse.*: out
test_attention | lse, out, dqkv in fp32 | <float>|lse$
test_attention | out, dqkv in 16 bits |
test_decode_attention | out, also merged |
test_ring | lse, out, dqkv of all ranks in fp32 | <float>|lse$
test_ring | out, dqkv in 16 bits |
test_context_parallel | out, dqkv of a ring |
test_cross_entropy | losses and gradients of logits up to | ^cross-entropy of finite
test_cross_entropy | losses, total | losses|total
test_cross_entropy | gradient at the target | <float>: at_targets
test_cross_entropy | gradient in fp32 | <float>
test_cross_entropy | gradients in 16 bits |
test_vocabulary_cross_entropy | losses and gradients of logits up to | ^a loss of finite
test_vocabulary_cross_entropy | losses, total | losses|total
test_vocabulary_cross_entropy | gradient; at the target | <float>
test_vocabulary_cross_entropy | gradients in 16 bits |
test_gelu | out, gradient in fp32 | <float>
test_gelu | the same in 16 bits |
test_layernorm | statistics, out | <float>|mean|rstd|dweight|dbias
test_layernorm | out, dsum in 16 bits |
test_adamw | bf16 weights without masters | without masters.*weights
test_adamw | moments in bf16 | ^bf16 moments follow
test_adamw | mean of moments | ^bf16 moments are
test_adamw | mean of stochastic updates | ^updates far below
test_adamw | weights, moments |
test_column_sum | sums |
test_norm | norm |
test_statistics | sum |
test_random | quantile, weights | : (out|as_double)
test_random | moments |
test_model | gradients and loss in eight bits | other codes$
test_model | gradients in eight bits | eight bits.*: gradients
test_model | loss in eight bits | eight bits.*: loss
test_model | key third | key third
test_model | logits in fp32 | <float>: logits
test_model | logits in 16 bits | : logits
test_model | gradients in fp32 | <float>: gradients
test_model | gradients in 16 bits | : gradients
test_model | ten steps: losses | ^ten steps.*: (losses|norms)
test_model | ten steps: weights | ^ten steps.*: weights
test_model | loss |
test_fp8 | codes of tiles | codes of tiles
test_fp8 | codes | : codes
test_fp8 | products of tiles | product of tiles
test_fp8 | products in eight bits |
test_fp8_meshes | gradients of a first step | same codes
test_fp8_meshes | where they are not | other codes
test_fp8_meshes | losses, norms |
test_quantize | codes | : codes
test_quantize | mean of 200 messages | : mean
test_compression | mean of what was applied | ^what is applied.*: mean
test_compression | all that was applied | ^what is applied
test_compression | norm, losses |
test_low_rank | what all directions | left out
test_low_rank | dot products | orthonormal|span|two directions
test_low_rank | P and Q |
test_powersgd | what is no matrix | as they are
test_powersgd | sums, errors | ^ranks get
test_powersgd | all that was applied | ^what is applied
test_powersgd | losses with other | learned: loss$
test_powersgd | norms with other |
test_lora | logits, loss, gradients | ^adapters
test_lora | 20 steps | ^20 steps
test_lora | losses of 20 steps | ^16 bits
test_lora_meshes | losses in bf16 | ^16 bits
test_lora_meshes | losses, norms |
test_second_block | slopes | slope
test_second_block | the rest |
test_zero | gradients summed | sent in fp32
test_zero | gradients sent | sent in bf16
test_zero | norm | : norm$
test_zero | the same, gradients sent | ^gradients that travel
test_zero | curves in fp16 | ^fp16
test_zero | weights rounded | share of weights
test_zero | curves in bf16 | <__nv_bfloat16>
test_zero | curves in fp32 |
test_collectives | sums of any numbers |
test_islands | means over islands | ^an outer step is
test_islands | means of changes | ^changes as codes
test_islands | weights | : weights
test_islands | losses, norms |
test_tensor_parallel | losses and norms in fp32 | ^losses and norms
test_tensor_parallel | logits | : logits
test_tensor_parallel | gradients | : (gradients|norm)$
test_tensor_parallel | key third | key third
test_tensor_parallel | losses, norms in bf16 | ^bf16
test_tensor_parallel | weights rounded | share of weights
test_tensor_parallel | activations | activations|kv cache
test_meshes | losses of long samples | long samples
test_meshes | activations | activations|kv cache
test_meshes | losses, norms in bf16 | ^bf16
test_meshes | the rest |
test_delay | curves in fp32 |
test_offload | curves in fp32 |
test_mesh_resume | curves in fp32 | fp32
test_mesh_resume | losses in bf16 |
test_program | learning rates | : lr$
test_program | fp16 with updates | val_loss
test_program | losses, norms, weights |
test_cudnn | out, dqkv |
"""


def table():
  """{(program, quantity): largest share, or None} of test/tolerances.md."""
  rows = {}
  lines = (Path(__file__).parent / "tolerances.md").read_text().splitlines()
  begin = next(i for i, line in enumerate(lines) if line.startswith("| test | quantity | bound |"))
  for line in lines[begin + 2:]:
    if not line.startswith("|"):
      break
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    shares = [float(share) for share in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", re.sub(r"in \d+ bits", "", cells[-1]))]
    for program in cells[0].split("; "):
      rows[program, cells[1]] = max(shares) if shares else None
  return rows


def main():
  check = "--check" in sys.argv
  files = [name for name in sys.argv[1:] if name != "--check"]
  rows, patterns, problems = table(), [], []
  for line in ROWS.strip().splitlines():
    program, begin, pattern = (word.strip() for word in line.split(" |", 2))
    found = [row for row in rows if row == (program, begin)]
    found = found or [row for row in rows if row[0] == program and row[1].startswith(begin)]
    if len(found) != 1:
      sys.exit(f"error: {len(found)} rows of test/tolerances.md are {program}, {begin}: mend the table, or test/shares.py")
    patterns.append((program, re.compile(pattern), found[0]))
  largest = {}
  for name in files:
    for line in Path(name).read_text().splitlines():
      program, quantity, share = line.split("\t")
      row = next((row for of, pattern, row in patterns if of == program and pattern.search(quantity)), None)
      if row is None and not program.startswith("ladder_"):
        problems.append(f"in no row: {program}, {quantity}")
      if row is not None:
        largest[row] = max(float(share), largest.get(row, 0))
  for _, _, row in patterns if files else []:
    share, known = largest.get(row), rows[row]
    mark = "-" if share is None else "!" if float(f"{share:.2g}") > (known or 0) else " "  # the table has two digits
    if mark == "!":
      problems.append(f"larger than the table's: {row[0]}, {row[1]}: {share:.3g}, and not {known}")
    numbers = ["" if number is None else f"{number:.2g}" for number in (share, known)]
    print(f"{mark} {row[0]:30} {row[1][:60]:60} {numbers[0]:>8} {numbers[1]:>8}")
  for problem in sorted(set(problems)):
    print(problem)
  return 1 if check and problems else 0


if __name__ == "__main__":
  sys.exit(main())
