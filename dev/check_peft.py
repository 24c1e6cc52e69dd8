#!/usr/bin/env python3
"""Checks LoRA (--lora-rank) against Hugging Face's peft.

  logits CHECKPOINT LOGITS   peft loads the adapters that gpt.cu has saved, onto the base model that they name, and
                             computes the logits in LOGITS (build/cpu/logits CHECKPOINT LOGITS). --whole FOLDER: the same
                             for the folder of --merge
  reference FOLDER           writes a reference for test/lora/test_lora.cu to FOLDER: adapters of test/reference/tiny as peft
                             saves them (rank 4, B random, too), the gradients of a first step, and the losses of 20
                             steps of torch.optim.AdamW from B = 0
  curve BASE RUN             trains with peft from the adapters of RUN/step_00000001, with its moments, on the tokens of
                             a text, and compares losses with RUN/metrics.jsonl

Exit code 0 if all is within --tolerance, 1 if not.
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel
from transformers.utils import logging

MODULES = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def base_model(folder):
  return GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def short_name(name):
  """The name in files that peft writes: without the adapter's name."""
  return name.replace(".default", "")


def adapters_of(model):
  return {short_name(name): p for name, p in model.named_parameters() if "lora_" in name}


def loss_of(model, tokens):
  """Mean cross-entropy of tokens (B, T+1)."""
  logits = model(tokens[:, :-1]).logits
  return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def agree(what, difference, tolerance):
  same = difference <= tolerance  # false for NaN
  print(f"{what}: {difference:.3e} {'<=' if same else 'NOT <='} {tolerance:g}")
  return same


def check_logits(arguments):
  tensors = load_file(arguments.logits)
  tokens, ours = tensors["tokens"].long(), tensors["logits"]
  config = json.loads((arguments.checkpoint / "adapter_config.json").read_text())
  base = base_model(config["base_model_name_or_path"])
  with torch.no_grad():
    plain = base(tokens).logits
    model = PeftModel.from_pretrained(base, arguments.checkpoint).eval()
    theirs = model(tokens).logits
    good = agree("largest difference of a logit from peft's", (ours - theirs).abs().max().item(), arguments.tolerance)
    print(f"the adapters change logits by up to {(plain - theirs).abs().max().item():.3g}; the largest is {theirs.abs().max().item():.3g}")
    if arguments.whole:
      whole = base_model(arguments.whole)(tokens).logits
      good &= agree("the merged folder's", (whole - theirs).abs().max().item(), arguments.tolerance)
  return good


def write_reference(arguments):
  torch.manual_seed(39)
  tiny = Path(__file__).parent.parent / "test/reference/tiny"
  settings = json.loads((tiny / "reference.json").read_text())
  tokens = load_file(tiny / "reference.safetensors")["tokens"]
  steps = tokens.reshape(-1, settings["B"], settings["T"] + 1).long()
  config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=MODULES, fan_in_fan_out=True, task_type="CAUSAL_LM")
  model = get_peft_model(base_model(tiny), config).eval()
  adapters = adapters_of(model)
  optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
  start = {name: p.detach().clone() for name, p in adapters.items()}
  losses, norms = [], []
  for step in range(20):
    optimizer.zero_grad()
    loss = loss_of(model, steps[step % len(steps)])
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0).item())
    losses.append(loss.item())
    optimizer.step()
  # The adapters that are stored: A as it was drawn, B random, so that A has a gradient.
  with torch.no_grad():
    for name, p in adapters.items():
      p.copy_(torch.randn_like(p) * 0.05 if "lora_B" in name else start[name])
  model.save_pretrained(arguments.folder)
  optimizer.zero_grad()
  loss = loss_of(model, steps[0])
  loss.backward()
  with torch.no_grad():
    logits = model(steps[0][:, :-1]).logits
  save_file({**{f"gradient.{name}": p.grad for name, p in adapters.items()}, "logits": logits[0]},
            arguments.folder / "reference.safetensors")
  (arguments.folder / "README.md").unlink(missing_ok=True)
  saved = arguments.folder / "adapter_config.json"
  config = {key: value for key, value in json.loads(saved.read_text()).items() if value}
  config["base_model_name_or_path"] = "test/reference/tiny"
  saved.write_text(json.dumps(config, indent=2) + "\n")
  (arguments.folder / "reference.json").write_text(json.dumps(
    {"rank": 4, "alpha": 8, "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0,
     "loss": loss.item(), "losses": losses, "norms": norms}, indent=1) + "\n")
  return True


def check_curve(arguments):
  lines = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
  ours = {line["step"]: line for line in lines if "loss" in line}
  first = arguments.run / "step_00000001"
  trainer = json.loads((first / "trainer.json").read_text())
  o = trainer["arithmetic"]
  text = np.concatenate([np.fromfile(file, dtype=np.uint8) for file in sorted(arguments.text)])
  model = PeftModel.from_pretrained(base_model(arguments.base), first, is_trainable=True).eval()
  adapters = adapters_of(model)
  optimizer = torch.optim.AdamW(adapters.values(), lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], weight_decay=o["weight_decay"])
  moments = load_file(first / "optimizer.safetensors")
  for name, p in adapters.items():
    optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": moments["m." + name].clone(), "exp_avg_sq": moments["v." + name].clone()}
  T, batch, worst = o["seq_len"], o["global_batch"], 0
  for step in range(2, max(ours) + 1):
    samples = [(step - 1) * batch + b for b in range(batch)]
    tokens = torch.tensor(np.stack([text[s * T:s * T + T + 1] for s in samples]).astype(np.int64))
    for group in optimizer.param_groups:
      group["lr"] = ours[step]["lr"]
    optimizer.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(adapters.values(), o["grad_clip"])
    optimizer.step()
    worst = max(worst, abs(loss.item() / ours[step]["loss"] - 1))
  return agree(f"largest relative difference of the losses of steps 2 to {max(ours)}", worst, arguments.tolerance)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  commands = parser.add_subparsers(required=True)
  logits = commands.add_parser("logits")
  logits.add_argument("checkpoint", type=Path)
  logits.add_argument("logits", type=Path)
  logits.add_argument("--whole", type=Path)
  logits.add_argument("--tolerance", type=float, default=1e-4)
  logits.set_defaults(work=check_logits)
  reference = commands.add_parser("reference")
  reference.add_argument("folder", type=Path)
  reference.set_defaults(work=write_reference)
  curve = commands.add_parser("curve")
  curve.add_argument("base", type=Path)
  curve.add_argument("run", type=Path)
  curve.add_argument("text", type=Path, nargs="+", help="the files of --train, bytes as tokens")
  curve.add_argument("--tolerance", type=float, default=1e-5)
  curve.set_defaults(work=check_curve)
  arguments = parser.parse_args()
  logging.set_verbosity_error()
  logging.disable_progress_bar()
  sys.exit(0 if arguments.work(arguments) else 1)


if __name__ == "__main__":
  main()
