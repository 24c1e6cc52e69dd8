#!/usr/bin/env python3
"""Writes test/reference/fp8/: the correct results of a step with --fp8, by PyTorch in float64 (dev/reference.py).

Matrices are quantised where gpt.cu casts them, and everything that gpt.cu keeps in bf16 is rounded there, too: so both
work on the same codes, except for numbers near the middle of two. The folder holds the same files as those of
dev/reference.py for its models, of one step only, and
  e4m3.grad.NAME                 gradients of the block in eight bits, with --fp8-gradients e4m3 (grad.NAME: e5m2)
  tiles.grad.NAME                and with --fp8-scale tiles
  plain.grad.NAME                its gradients with the same roundings to bf16 alone, which must be further away
  FORMAT.values (256)            the value of each code of e4m3 or e5m2, by PyTorch's float8_e4m3fn and float8_e5m2
  FORMAT.numbers, FORMAT.codes   numbers, on and beside ties among them, and the codes that PyTorch makes of them

Usage: python3 dev/reference_fp8.py [--output test/reference/fp8]
"""
import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional

import reference

SIZE = dict(V=64, T=16, B=2, L=3, C=32, NH=2, positions=16)
KEPT = 1  # blocks at each end that stay in bf16
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rounded(x):
  return x.float().bfloat16().double()


class Stored(torch.autograd.Function):
  """A tensor that is kept in bf16, and whose gradient is, too."""

  @staticmethod
  def forward(_, x):
    return rounded(x)

  @staticmethod
  def backward(_, gradient):
    return rounded(gradient)


def stored(x):
  return Stored.apply(x)


def quantised(x, kind, dim=None):
  """The values of x's codes, in float as gpt.cu computes them, with one scale for all of x; or for each tile of it,
  which is all numbers along `dim`, as no matrix here has more than 128."""
  x, largest = x.float(), torch.finfo(TYPES[kind]).max
  maximum = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
  codes = (x * (largest / maximum)).clamp(-largest, largest).to(TYPES[kind])
  return codes.double() * (maximum / largest).double()


class EightBits(torch.autograd.Function):
  @staticmethod
  def forward(context, x, weight, bias, kind, tiles):
    weight = quantised(weight, "e4m3")  # one block of 128 x 128, too
    context.save_for_backward(x, weight)
    context.kind, context.tiles = kind, tiles
    return quantised(x, "e4m3", -1 if tiles else None) @ weight + bias

  @staticmethod
  def backward(context, gradient):
    x, weight = context.saved_tensors
    along = lambda dim: dim if context.tiles else None  # noqa: E731  the dimension along which a product adds up
    rows, gradients = x.flatten(0, 1), gradient.flatten(0, 1)
    of_weight = quantised(rows, "e4m3", along(0)).T @ quantised(gradients, context.kind, along(0))
    return quantised(gradient, context.kind, along(-1)) @ weight.T, of_weight, gradient.sum((0, 1)), None, None


class Model(reference.GPT2):
  """The same modules, whose tensors are kept in bf16. kind: of gradients in eight bits; None: all in bf16. tiles: of
  which each has a scale"""
  kind, tiles = None, False

  def linear(self, layer, x, in_eight_bits):
    weight, bias = (p + (rounded(p) - p).detach() for p in (layer.weight, layer.bias))
    if in_eight_bits and self.kind:
      return stored(EightBits.apply(x, weight, bias, self.kind, self.tiles))
    return stored(x @ weight + bias)

  def norm(self, layer, x):
    weight, bias = (p + (rounded(p) - p).detach() for p in (layer.weight, layer.bias))
    return stored(functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5))

  def attention(self, block, qkv):
    B, T, C = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    query, key, value = qkv.view(B, T, 3, block.attn.heads, C // block.attn.heads).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return stored(out.transpose(1, 2).reshape(B, T, C))

  def forward(self, tokens):
    part = self.transformer
    wte, wpe = (p + (rounded(p) - p).detach() for p in (part.wte.weight, part.wpe.weight))
    x = stored(functional.embedding(tokens, wte) + wpe[:tokens.shape[1]])
    for i, block in enumerate(part.h):
      inside = KEPT <= i < len(part.h) - KEPT
      qkv = self.linear(block.attn.c_attn, self.norm(block.ln_1, x), inside)
      x = stored(x + self.linear(block.attn.c_proj, self.attention(block, qkv), inside))
      up = self.linear(block.mlp.c_fc, self.norm(block.ln_2, x), inside)
      x = stored(x + self.linear(block.mlp.c_proj, stored(functional.gelu(up, approximate="tanh")), inside))
    return stored(self.norm(part.ln_f, x) @ wte.T)


def codes_of(kind):
  """The values of all codes; and numbers with the codes of them."""
  values = torch.arange(256).to(torch.uint8).view(TYPES[kind]).float()
  finite = values[values.isfinite()].unique()  # in order
  middles = (finite[1:] + finite[:-1]) / 2
  beside = [torch.nextafter(middles, middles.new_full((), side)) for side in (-torch.inf, torch.inf)]
  numbers = torch.cat([middles, *beside])
  numbers = numbers[(numbers != 0)]
  return {f"{kind}.values": values, f"{kind}.numbers": numbers, f"{kind}.codes": numbers.to(TYPES[kind]).view(torch.uint8)}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--output", type=Path, default=Path("test/reference/fp8"), help="default %(default)s")
  folder = parser.parse_args().output
  torch.set_num_threads(1)
  torch.manual_seed(1337)
  folder.mkdir(parents=True, exist_ok=True)
  model = Model(SIZE)
  model.initialize()
  reference.save(folder / "model.safetensors", model.state_dict())
  tokens = reference.draw_tokens(SIZE["V"], SIZE["T"], SIZE["B"], 1)
  tensors = dict(tokens=tokens) | codes_of("e4m3") | codes_of("e5m2")
  names, parameters = zip(*model.named_parameters())
  for kind, prefix in ("e5m2", ""), ("e4m3", "e4m3."), ("e5m2", "tiles."), (None, "plain."):
    model.kind, model.tiles = kind, prefix == "tiles."
    logits = model(tokens[0, :, :-1])
    loss = -logits.log_softmax(dim=-1).gather(-1, tokens[0, :, 1:].unsqueeze(-1)).mean()
    gradients = torch.autograd.grad(loss, parameters)
    tensors[prefix + "losses"] = loss.detach().reshape(1)
    tensors |= {f"{prefix}grad.{name}": g for name, g in zip(names, gradients) if not prefix or ".h.1." in name}
    print(prefix, kind, f"loss {loss.item():.6f}")
  reference.save(folder / "reference.safetensors", tensors)
  for file, content in ("config.json", reference.hugging_face_config(SIZE)), ("reference.json", SIZE):
    (folder / file).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
  main()
