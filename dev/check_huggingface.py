#!/usr/bin/env python3
"""Checks that Hugging Face's transformers loads a checkpoint and computes the same logits.

CHECKPOINT is a folder with model.safetensors and config.json. LOGITS is a safetensors file with `tokens`
(B, T) and `logits` (B, T, V), both F32, computed by gpt.cu with that checkpoint.

Usage: python3 dev/check_huggingface.py out/step_00000100 logits.safetensors
Exit code 0 if the largest absolute difference is within --tolerance, 1 if not.
"""
import argparse
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel
from transformers.utils import logging


def load_model(folder):
  if not (folder / "config.json").is_file():
    sys.exit(f"error: {folder}: no config.json there: give a checkpoint's folder, such as out/step_00000100")
  try:
    model, report = GPT2LMHeadModel.from_pretrained(
      folder, dtype=torch.float32, local_files_only=True, ignore_mismatched_sizes=True,
      output_loading_info=True)
  except (OSError, ValueError, RuntimeError, SafetensorError) as error:
    sys.exit(f"error: {folder}: transformers cannot load it: {error}")
  # transformers fills a tensor that is missing or has a wrong shape with random numbers: check its list of these.
  for problem, names in report.items():
    if names:
      sys.exit(f"error: {folder}: {len(names)} {problem.replace('_', ' ')}, such as {min(names)}")
  return model.eval()


def load_logits(file, config):
  """Token ids (B, T) and logits (B, T, V)."""
  try:
    tensors = load_file(file)
  except (OSError, SafetensorError) as error:
    sys.exit(f"error: {file}: {error}: give a safetensors file with tokens and logits")
  for name in "tokens", "logits":
    if name not in tensors:
      sys.exit(f"error: {file}: no tensor {name!r} among {sorted(tensors)}")
  tokens, logits = tensors["tokens"].long(), tensors["logits"]
  if tokens.dim() != 2 or logits.shape != (*tokens.shape, config.vocab_size):
    sys.exit(f"error: {file}: tokens {list(tokens.shape)}, logits {list(logits.shape)}: must be (B, T) and "
             f"(B, T, V) with the checkpoint's V = {config.vocab_size}")
  if tokens.min() < 0 or tokens.max() >= config.vocab_size or tokens.shape[1] > config.n_positions:
    sys.exit(f"error: {file}: token ids {tokens.min()} to {tokens.max()}, T = {tokens.shape[1]}: the "
             f"checkpoint has {config.vocab_size} tokens and {config.n_positions} positions")
  return tokens, logits


def describe(name, logits):
  print(f"{name:13} mean {logits.mean():.6f}  std {logits.std():.6f}  min {logits.min():.6f}  "
        f"max {logits.max():.6f}")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("checkpoint", type=Path, help="folder with model.safetensors and config.json")
  parser.add_argument("logits", type=Path, help="safetensors file with tokens (B, T) and logits (B, T, V)")
  parser.add_argument("--tolerance", type=float, default=1e-4, help="default %(default)s")
  arguments = parser.parse_args()
  logging.set_verbosity_error()
  logging.disable_progress_bar()

  model = load_model(arguments.checkpoint)
  tokens, ours = load_logits(arguments.logits, model.config)
  with torch.no_grad():
    theirs = model(tokens).logits
  describe("gpt.cu", ours)
  describe("transformers", theirs)
  difference = (ours - theirs).abs().max().item()
  agree = difference <= arguments.tolerance  # false for NaN
  print(f"max abs difference {difference:.3e} {'<=' if agree else 'NOT <='} {arguments.tolerance:g}: "
        f"{'same model' if agree else 'DIFFERENT'}")
  sys.exit(0 if agree else 1)


if __name__ == "__main__":
  main()
