#!/usr/bin/env python3
"""How far do ten steps of AdamW drift if gradients are a little off? In float64, with numpy.

Trains the models of test/reference/, whose losses and norms PyTorch has computed, as they are, and several times with
noise that is added to each gradient before clipping: of each tensor a given share of its norm. Prints the largest
difference of a loss and of a norm, relative, over all steps and seeds: test/README.md, "Curves", explains why.

Usage: python3 dev/curve_drift.py [--seeds 10]
"""
import argparse
import json
import math
import struct
from pathlib import Path

import numpy as np


def safetensors(path):
  data = path.read_bytes()
  size = struct.unpack("<Q", data[:8])[0]
  header = json.loads(data[8:8 + size])
  header.pop("__metadata__", None)
  return {name: np.frombuffer(data, "<f4", count=math.prod(entry["shape"]), offset=8 + size + entry["data_offsets"][0])
          .astype(float).reshape(entry["shape"]) for name, entry in header.items()}


def layernorm(x, weight, bias):
  centred = x - x.mean(-1, keepdims=True)
  rstd = 1 / np.sqrt((centred ** 2).mean(-1, keepdims=True) + 1e-5)
  unit = centred * rstd

  def backward(dout):
    d = dout * weight
    return (rstd * (d - d.mean(-1, keepdims=True) - unit * (d * unit).mean(-1, keepdims=True)),
            (dout * unit).sum((0, 1)), dout.sum((0, 1)))
  return unit * weight + bias, backward


def gelu(x):
  tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))
  slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh ** 2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x ** 2)
  return 0.5 * x * (1 + tanh), slope


def attention(qkv, heads):
  B, T, width = qkv.shape
  q, k, v = qkv.reshape(B, T, 3, heads, width // 3 // heads).transpose(2, 0, 3, 1, 4)  # each (B, heads, T, HS)
  scale = 1 / math.sqrt(q.shape[-1])
  scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) * scale, -np.inf)
  p = np.exp(scores - scores.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)

  def backward(dout):
    d = dout.reshape(B, T, heads, -1).transpose(0, 2, 1, 3)
    dp = d @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    all_three = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d])
    return all_three.transpose(1, 3, 0, 2, 4).reshape(B, T, width)
  return (p @ v).transpose(0, 2, 1, 3).reshape(B, T, -1), backward


def loss_and_gradients(w, tokens, layers, heads):
  """tokens (B, T + 1)"""
  g = {}
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  x, backwards = w["wte.weight"][inputs] + w["wpe.weight"][:inputs.shape[1]], []

  def linear(name, x):
    def backward(dout):
      g[name + ".weight"] = np.einsum("bti,bto->io", x, dout)
      g[name + ".bias"] = dout.sum((0, 1))
      return dout @ w[name + ".weight"].T
    return x @ w[name + ".weight"] + w[name + ".bias"], backward

  def norm(name, x):
    out, back = layernorm(x, w[name + ".weight"], w[name + ".bias"])

    def backward(dout):
      dx, g[name + ".weight"], g[name + ".bias"] = back(dout)
      return dx
    return out, backward

  for layer in range(layers):
    h = f"h.{layer}."
    a, norm1 = norm(h + "ln_1", x)
    a, qkv = linear(h + "attn.c_attn", a)
    a, attend = attention(a, heads)
    a, projection = linear(h + "attn.c_proj", a)
    x = x + a
    b, norm2 = norm(h + "ln_2", x)
    b, up = linear(h + "mlp.c_fc", b)
    b, slope = gelu(b)
    b, down = linear(h + "mlp.c_proj", b)
    x = x + b
    backwards.append((norm1, qkv, attend, projection, norm2, up, slope, down))
  x, final = norm("ln_f", x)
  logits = x @ w["wte.weight"].T
  logits -= logits.max(-1, keepdims=True)
  p = np.exp(logits)
  p /= p.sum(-1, keepdims=True)
  at = (*np.indices(targets.shape), targets)
  loss = -np.log(p[at]).mean()
  p[at] -= 1
  p /= targets.size
  g["wte.weight"] = np.einsum("btv,btc->vc", p, x)
  d = final(p @ w["wte.weight"])
  for norm1, qkv, attend, projection, norm2, up, slope, down in reversed(backwards):
    d = d + norm2(up(down(d) * slope))
    d = d + norm1(qkv(attend(projection(d))))
  np.add.at(g["wte.weight"], inputs, d)
  g["wpe.weight"] = np.zeros_like(w["wpe.weight"])
  g["wpe.weight"][:inputs.shape[1]] = d.sum(0)
  return loss, g


def train(folder, share, random):
  settings = json.loads((folder / "reference.json").read_text())
  s = type("Settings", (), settings)
  w = {name.removeprefix("transformer."): value for name, value in safetensors(folder / "model.safetensors").items()}
  tokens = safetensors(folder / "reference.safetensors")["tokens"].astype(int).reshape(s.steps, s.B, s.T + 1)
  m, v = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
  losses, norms = [], []
  for step in range(s.steps):
    loss, g = loss_and_gradients(w, tokens[step], s.L, s.NH)
    for name in g:
      noise = random.standard_normal(g[name].shape)
      g[name] = g[name] + share * np.linalg.norm(g[name]) / math.sqrt(noise.size) * noise
    norm = math.sqrt(sum((gradient ** 2).sum() for gradient in g.values()))
    clip = min(1, s.grad_clip / (norm + 1e-6))
    past = (step - s.warmup) / (s.steps - s.warmup)
    cosine = s.min_lr + (s.lr - s.min_lr) * 0.5 * (1 + math.cos(math.pi * past))
    lr = s.lr * (step + 1) / s.warmup if step < s.warmup else cosine
    for name, gradient in g.items():
      m[name] = s.beta1 * m[name] + (1 - s.beta1) * clip * gradient
      v[name] = s.beta2 * v[name] + (1 - s.beta2) * (clip * gradient) ** 2
      if w[name].ndim == 2:
        w[name] = w[name] * (1 - lr * s.weight_decay)
      update = m[name] / (1 - s.beta1 ** (step + 1)) / (np.sqrt(v[name] / (1 - s.beta2 ** (step + 1))) + s.eps)
      w[name] = w[name] - lr * update
    losses.append(loss)
    norms.append(norm)
  return np.array(losses), np.array(norms)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--seeds", type=int, default=10)
  seeds = parser.parse_args().seeds
  print("| model | noise, of a gradient's norm | losses off by | norms |\n|---|--:|--:|--:|")
  for name in ("tiny", "odd"):
    folder = Path("test/reference") / name
    reference = safetensors(folder / "reference.safetensors")
    wanted = train(folder, 0, np.random.default_rng(0))
    off = [np.abs(found / reference[key] - 1).max() for found, key in zip(wanted, ("losses", "norms"))]
    print(f"| {name} | none: beside PyTorch's, as floats | {off[0]:.1e} | {off[1]:.1e} |")
    for share in (5e-8, 1e-6, 5e-6, 5e-5):
      runs = [train(folder, share, np.random.default_rng(seed)) for seed in range(seeds)]
      off = [max(np.abs(run[i] / wanted[i] - 1).max() for run in runs) for i in range(2)]
      print(f"| {name} | {share:.0e} | {off[0]:.1e} | {off[1]:.1e} |", flush=True)


if __name__ == "__main__":
  main()
