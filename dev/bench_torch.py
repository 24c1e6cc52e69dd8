#!/usr/bin/env python3
"""Times one GPT-2 training step in PyTorch: the peer that gpt.cu's speed is stated against.

A step is forward, backward, gradient norm with clipping, and AdamW, on random tokens. Every way PyTorch
offers (attention x AdamW implementation) is timed, and the fastest one is the number to compare with. bf16
means autocast with float32 weights, as nanoGPT trains; fp32 means fp32 (no TF32).

Usage: python dev/bench_torch.py --batch 4 --seq-len 64 --threads 2
       python dev/bench_torch.py --device cuda --dtype bf16 --batch 32 --seq-len 1024 --compile
"""
import argparse
import contextlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# layers, heads, channels
MODELS = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280),
          "gpt2-xl": (48, 25, 1600)}
# Any of these can hold a CPU library to older instructions, and must be gone before torch is imported.
CRIPPLING = ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
             "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("--model", choices=MODELS, default="gpt2")
  parser.add_argument("--vocab", type=int, default=50304, help="50,257 padded to a multiple of 128")
  parser.add_argument("--batch", type=int, default=4, help="sequences")
  parser.add_argument("--seq-len", type=int, default=64, help="tokens")
  parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads, at best one a core")
  parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
  parser.add_argument("--steps", type=int, default=10, help="timed steps of each variant")
  parser.add_argument("--warmup", type=int, default=2, help="steps before timing starts")
  parser.add_argument("--grad-clip", type=float, default=1.0, help="0: no gradient norm either")
  parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
  parser.add_argument("--attention", choices=("explicit", "sdpa", "flash", "cudnn", "all"), default="all",
                      help="sdpa: PyTorch chooses; flash, cudnn: CUDA only")
  parser.add_argument("--compile", action="store_true", help="torch.compile the model")
  parser.add_argument("--plain-mkl", action="store_true", help="leave MKL with AVX2 on AMD's processors")
  arguments = parser.parse_args()
  if arguments.device == "cpu" and arguments.attention in ("flash", "cudnn"):
    parser.error(f"--attention {arguments.attention} needs --device cuda: on the CPU use explicit or sdpa")
  return arguments


def cpu_info(field):
  lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
  return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "unknown")


def free_the_blas(arguments):
  """Gives PyTorch the fastest matrix product this CPU can run; returns a note on what was done.

  MKL, inside PyTorch's x86 wheels, uses AVX-512 on Intel's processors only: on AMD's its fp32 products run at
  half speed. The function by which it asks can be replaced by a preloaded library: Python starts again."""
  amd = cpu_info("vendor_id") == "AuthenticAMD"
  held_back = arguments.device == "cpu" and amd and "avx512f" in cpu_info("flags")
  preload = os.environ.pop("BENCH_TORCH_PRELOAD", None)
  notes = []
  if preload:
    os.environ["LD_PRELOAD"] = os.environ["LD_PRELOAD"].replace(preload, "").strip()
    Path(preload).unlink()
    notes.append("MKL told that this CPU is Intel's, so that it uses AVX-512")
  elif held_back and not arguments.plain_mkl and shutil.which("cc"):
    start_again_with_mkl_freed()
  elif held_back:
    cure = "" if arguments.plain_mkl else ": install a C compiler"
    notes.append("MKL left with AVX2 on an AMD CPU" + cure)
  notes += [f"{name} unset" for name in CRIPPLING if os.environ.pop(name, None) is not None]
  return ", ".join(notes) or "no setting changed"


def start_again_with_mkl_freed():
  handle, library = tempfile.mkstemp(suffix=".so")
  os.close(handle)
  source = "int mkl_serv_intel_cpu_true(void) { return 1; }"
  compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
  subprocess.run(compiler, input=source, text=True, check=True)
  preload = f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()
  os.execve(sys.executable, [sys.executable, *sys.argv],
            os.environ | {"LD_PRELOAD": preload, "BENCH_TORCH_PRELOAD": library})


arguments = parse_arguments()
blas_note = free_the_blas(arguments)

import torch  # noqa: E402  after the environment has been cleaned
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402


class Block(nn.Module):
  def __init__(self, channels, heads, explicit):
    super().__init__()
    self.heads, self.explicit = heads, explicit
    self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
    self.qkv, self.projection = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
    self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

  def attention(self, x):
    B, T, C = x.shape
    # three tensors (B, NH, T, HS)
    query, key, value = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
    if self.explicit:
      scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
      future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
      y = scores.masked_fill(future, -math.inf).softmax(-1) @ value
    else:
      y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return self.projection(y.transpose(1, 2).reshape(B, T, C))

  def forward(self, x):
    x = x + self.attention(self.norm1(x))
    return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
  def __init__(self, model, vocabulary, positions, explicit):
    super().__init__()
    layers, heads, channels = MODELS[model]
    self.token = nn.Embedding(vocabulary, channels)  # also the head
    self.position = nn.Embedding(positions, channels)
    self.blocks = nn.ModuleList(Block(channels, heads, explicit) for _ in range(layers))
    self.norm = nn.LayerNorm(channels)
    for embedding in self.token, self.position:
      nn.init.normal_(embedding.weight, std=0.02)

  def forward(self, inputs, targets):
    x = self.token(inputs) + self.position.weight[:inputs.shape[1]]
    for block in self.blocks:
      x = block(x)
    logits = F.linear(self.norm(x), self.token.weight)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_step(attention, adamw):
  """One training step as a function without arguments."""
  model = GPT2(arguments.model, arguments.vocab, max(1024, arguments.seq_len), attention == "explicit")
  model = model.to(arguments.device)
  parameters = list(model.parameters())
  optimizer = torch.optim.AdamW(
    [dict(params=[p for p in parameters if p.dim() == 2], weight_decay=0.1),
     dict(params=[p for p in parameters if p.dim() != 2], weight_decay=0.0)],
    lr=1e-4, betas=(0.9, 0.95), fused=adamw == "fused", foreach=adamw == "foreach")
  forward = torch.compile(model) if arguments.compile else model
  backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
  precision = torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.dtype == "bf16")

  def step():
    tokens = torch.randint(50257, (arguments.batch, arguments.seq_len + 1), device=arguments.device)
    kernel = sdpa_kernel(backends[attention]) if attention in backends else contextlib.nullcontext()
    with kernel, precision:
      loss = forward(tokens[:, :-1], tokens[:, 1:].contiguous())
    loss.backward()
    if arguments.grad_clip > 0:
      nn.utils.clip_grad_norm_(parameters, arguments.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

  return step


def time_on_cpu(step):
  start = time.perf_counter()
  step()
  return (time.perf_counter() - start) * 1e3


def time_steps(step):
  """Milliseconds of each step. On the GPU events mark the ends of steps, so that the host may run ahead."""
  for _ in range(arguments.warmup):
    step()
  if arguments.device == "cpu":
    return [time_on_cpu(step) for _ in range(arguments.steps)]
  events = [torch.cuda.Event(enable_timing=True) for _ in range(arguments.steps + 1)]
  events[0].record()
  for event in events[1:]:
    step()
    event.record()
  torch.cuda.synchronize()
  return [before.elapsed_time(after) for before, after in zip(events, events[1:])]


def print_setup():
  print(f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}")
  libraries = [line.strip(" -") for line in torch.__config__.show().splitlines()
               if any(word in line for word in ("Library Version", "MKL-DNN", "CPU capability"))]
  print("BLAS:", "\n      ".join([*libraries, blas_note]))
  if arguments.device == "cuda":
    print(f"GPU:  {torch.cuda.get_device_name()}, CUDA {torch.version.cuda},",
          f"cuDNN {torch.backends.cudnn.version()}")
  settings = [f"{name}={value}" for name, value in os.environ.items()
              if name.startswith(("OMP_", "KMP_", "GOMP_"))]
  print(f"CPU:  {cpu_info('model name')}, {os.cpu_count()} cores;", ", ".join(
    [f"{torch.get_num_threads()} threads", *settings]))
  print(f"step: {arguments.model}, V={arguments.vocab} B={arguments.batch} T={arguments.seq_len}",
        f"{arguments.dtype}, grad clip {arguments.grad_clip:g},",
        "compiled," if arguments.compile else "eager,",
        f"{arguments.steps} steps timed after {arguments.warmup}", flush=True)


def main():
  if arguments.device == "cuda" and not torch.cuda.is_available():
    sys.exit("error: --device cuda: PyTorch finds no CUDA device: use --device cpu, or its CUDA wheel")
  torch.set_num_threads(arguments.threads)
  print_setup()
  attentions = [arguments.attention]
  if arguments.attention == "all":
    attentions = ["explicit", "sdpa"] if arguments.device == "cpu" else ["flash", "cudnn"]
  results = {}
  for variant in [(attention, adamw) for attention in attentions for adamw in ("fused", "foreach")]:
    times = time_steps(make_step(*variant))
    results[variant] = (min(times), statistics.median(times))
  fastest = min(results, key=results.get)
  print(f"{'attention':10} {'AdamW':8} {'min ms':>9} {'median ms':>10} {'tokens/s (median)':>18}")
  for variant, (minimum, median) in results.items():
    rate = arguments.batch * arguments.seq_len / median * 1e3
    print(f"{variant[0]:10} {variant[1]:8} {minimum:9.1f} {median:10.1f} {rate:18,.0f}"
          + ("  <- fastest" if variant == fastest else ""))


if __name__ == "__main__":
  main()
