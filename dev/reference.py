#!/usr/bin/env python3
"""Writes test/reference/: the correct results of two small GPT-2 models, from plain PyTorch modules in float64.

It shares no code with gpt.cu nor with transformers, so a mistake would have to be made twice to stay unnoticed.
Each folder test/reference/MODEL/ holds
  model.safetensors, config.json   initial weights, a folder that Hugging Face's GPT2LMHeadModel loads
  reference.json                   sizes and hyperparameters
  reference.safetensors            all F32; NAME is the tensor's full name in model.safetensors:
    tokens (steps, B, T+1)         token ids; row b of step s is sample s*B + b of one stream of tokens
    logits (B, T, V), grad.NAME    of the first batch with the initial weights, gradients before clipping
    losses, norms, lrs (steps)     mean loss, global gradient norm before clipping, learning rate of each step
    final.NAME                     weights after all the steps of AdamW

Usage: python3 dev/reference.py [--output test/reference]
"""
import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

# Everything is computed in float64 and rounded to float32 once, when written: the reference is as exact as
# float32 can be, and a test measures the error of gpt.cu alone.
torch.set_default_dtype(torch.float64)

# Almost no size of "odd" is a multiple of a warp, a tile or a 16-byte pack: its head size is 17. Its last 5
# positions are never used: their gradient is exactly zero.
MODELS = {
  "tiny": dict(V=256, T=32, B=2, L=2, C=64, NH=4, positions=32),
  "odd": dict(V=211, T=48, B=3, L=2, C=51, NH=3, positions=53),
}
# grad_clip lies between the smallest and the largest norm of both models: some steps are clipped, some not.
TRAINING = dict(lr=3e-3, min_lr=3e-4, warmup=3, steps=10, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
                grad_clip=1.75)


class Linear(nn.Module):
  """y = x W + b with W stored (in, out), as GPT-2's checkpoints have it; nn.Linear stores (out, in)."""

  def __init__(self, inputs, outputs):
    super().__init__()
    self.weight = nn.Parameter(torch.empty(inputs, outputs))
    self.bias = nn.Parameter(torch.empty(outputs))

  def forward(self, x):
    return x @ self.weight + self.bias


class Attention(nn.Module):
  def __init__(self, C, NH):
    super().__init__()
    self.heads = NH
    self.c_attn = Linear(C, 3 * C)
    self.c_proj = Linear(C, C)

  def forward(self, x):
    B, T, C = x.shape
    # (B, T, 3C) -> three tensors (B, NH, T, HS)
    query, key, value = self.c_attn(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(-1, -2) / math.sqrt(C // self.heads)  # (B, NH, T, T)
    future = torch.ones(T, T, dtype=torch.bool).triu(diagonal=1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return self.c_proj((weights @ value).transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
  def __init__(self, C):
    super().__init__()
    self.c_fc = Linear(C, 4 * C)
    self.c_proj = Linear(4 * C, C)

  def forward(self, x):
    x = self.c_fc(x)
    gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return self.c_proj(gelu)


class Block(nn.Module):
  def __init__(self, C, NH):
    super().__init__()
    self.ln_1 = nn.LayerNorm(C, eps=1e-5)
    self.attn = Attention(C, NH)
    self.ln_2 = nn.LayerNorm(C, eps=1e-5)
    self.mlp = MLP(C)

  def forward(self, x):
    x = x + self.attn(self.ln_1(x))
    return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
  """Module names are Hugging Face's, so that named_parameters() gives the names of the checkpoint."""

  def __init__(self, size):
    super().__init__()
    C = size["C"]
    self.transformer = nn.ModuleDict(dict(
      wte=nn.Embedding(size["V"], C),
      wpe=nn.Embedding(size["positions"], C),
      h=nn.ModuleList(Block(C, size["NH"]) for _ in range(size["L"])),
      ln_f=nn.LayerNorm(C, eps=1e-5),
    ))

  def forward(self, tokens):  # (B, T) -> logits (B, T, V)
    part = self.transformer
    x = part.wte(tokens) + part.wpe(torch.arange(tokens.shape[1]))
    for block in part.h:
      x = block(x)
    return part.ln_f(x) @ part.wte.weight.T

  @torch.no_grad()
  def initialize(self):
    """Weights far larger than GPT-2's normal(0, 0.02), and biases that are not zero, so that every term of
    every gradient matters; rounded to float32, as in the checkpoint."""
    for name, parameter in self.named_parameters():
      mean = 1.0 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) else 0.0
      parameter.copy_(parameter.normal_(mean, 0.1).float())


def learning_rate(step, lr, min_lr, warmup, steps, **_):
  if step < warmup:
    return lr * (step + 1) / warmup
  progress = (step - warmup) / (steps - warmup)
  return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * progress))


def draw_tokens(V, T, B, steps):
  """(steps, B, T+1): sample i is tokens [i*T, i*T + T] of one stream, as in training (design, section 4).
  Squaring makes small ids frequent: repeated tokens must add up in the embedding's gradient."""
  stream = (V * torch.rand(steps * B * T + 1) ** 2).long()
  return stream.unfold(0, T + 1, T).view(steps, B, T + 1)


def train(model, batches, training):
  """Trains in place; returns tensors of reference.safetensors."""
  names, parameters = zip(*model.named_parameters())
  optimizer = torch.optim.AdamW(
    [dict(params=[p for p in parameters if p.dim() == 2], weight_decay=training["weight_decay"]),
     dict(params=[p for p in parameters if p.dim() != 2], weight_decay=0.0)],
    betas=(training["beta1"], training["beta2"]), eps=training["eps"])
  result, losses, norms, lrs = {}, [], [], []
  for step, batch in enumerate(batches):
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = model(inputs)
    loss = -logits.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).mean()
    gradients = torch.autograd.grad(loss, parameters)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    if step == 0:
      result["logits"] = logits.detach()
      result |= {f"grad.{name}": g.clone() for name, g in zip(names, gradients)}
    clip = min(1.0, training["grad_clip"] / (norm + 1e-6))
    for parameter, gradient in zip(parameters, gradients):
      parameter.grad = gradient * clip
    for group in optimizer.param_groups:
      group["lr"] = learning_rate(step, **training)
    optimizer.step()
    losses.append(loss.item())
    norms.append(norm)
    lrs.append(learning_rate(step, **training))
  result |= dict(losses=torch.tensor(losses), norms=torch.tensor(norms), lrs=torch.tensor(lrs))
  return result | {f"final.{name}": p.detach() for name, p in zip(names, parameters)}


def save(path, tensors):
  save_file({name: t.float().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})


def hugging_face_config(size):
  return dict(
    architectures=["GPT2LMHeadModel"], model_type="gpt2", torch_dtype="float32", tie_word_embeddings=True,
    vocab_size=size["V"], n_positions=size["positions"], n_ctx=size["positions"], n_embd=size["C"],
    n_layer=size["L"], n_head=size["NH"], n_inner=None, activation_function="gelu_new",
    layer_norm_epsilon=1e-5, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
    eos_token_id=None)


def write_reference(name, size, folder):
  torch.manual_seed(1337)
  folder.mkdir(parents=True, exist_ok=True)
  model = GPT2(size)
  model.initialize()
  save(folder / "model.safetensors", model.state_dict())
  tokens = draw_tokens(size["V"], size["T"], size["B"], TRAINING["steps"])
  result = train(model, tokens, TRAINING)
  save(folder / "reference.safetensors", dict(tokens=tokens) | result)
  for file, content in ("config.json", hugging_face_config(size)), ("reference.json", size | TRAINING):
    (folder / file).write_text(json.dumps(content, indent=2) + "\n")
  for key in "losses", "norms", "lrs":
    print(f"{name:5} {key:6}", " ".join(f"{value:.6f}" for value in result[key].tolist()))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--output", type=Path, default=Path("test/reference"), help="default %(default)s")
  output = parser.parse_args().output
  torch.set_num_threads(1)  # sums in one order: the same files on every run
  for name, size in MODELS.items():
    write_reference(name, size, output / name)


if __name__ == "__main__":
  main()
