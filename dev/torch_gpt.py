#!/usr/bin/env python3
"""GPT-2's training step in PyTorch, in one of several ways. bench_torch.py starts it for each way in a process of its
own, so that memory, compiled code or a failure of one way does not change the next.

The only argument is a JSON object, bench_torch.py's Job; the only line printed on stdout is one, too:
  {"setup": [...], "times": [milliseconds of each step], "losses": [...]}
Losses are taken in a job that starts from given weights, times in all others.
"""
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

# Each of these variables can limit a CPU library to older instructions. They must be removed before torch is imported.
CRIPPLING = ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
             "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


def cpu_info(field):
  lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
  return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "unknown")


def free_the_blas(job):
  """Gives PyTorch the fastest matrix product this CPU can run; returns a note on the change.

  MKL, inside PyTorch's x86 wheels, uses AVX-512 on Intel's processors only: on AMD's its fp32 products run at
  half speed. A preloaded library can replace the function with which MKL asks for the processor, so Python is
  started again with it."""
  amd = cpu_info("vendor_id") == "AuthenticAMD"
  held_back = job.device == "cpu" and amd and "avx512f" in cpu_info("flags")
  preload = os.environ.pop("BENCH_TORCH_PRELOAD", None)
  notes = []
  if preload:
    os.environ["LD_PRELOAD"] = os.environ["LD_PRELOAD"].replace(preload, "").strip()
    Path(preload).unlink()
    notes.append("MKL told that this CPU is Intel's, so that it uses AVX-512")
  elif held_back and not job.plain_mkl and shutil.which("cc"):
    start_again_with_mkl_freed()
  elif held_back:
    cure = "" if job.plain_mkl else ": install a C compiler"
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


job = SimpleNamespace(**json.loads(sys.argv[1]))
blas_note = free_the_blas(job)

import torch  # noqa: E402  after the environment has been cleaned
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402


# ---- the model

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
  def __init__(self, shape, vocabulary, positions, explicit):
    super().__init__()
    layers, heads, channels = shape
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


def load_weights(model, folder):
  """From a Hugging Face GPT-2 folder, where linear layers are (in, out)."""
  from safetensors.torch import load_file
  stored = load_file(Path(folder) / "model.safetensors")
  names = {"token": "wte", "position": "wpe", "norm": "ln_f"}
  parts = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "projection": "attn.c_proj", "up": "mlp.c_fc",
           "down": "mlp.c_proj"}
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      module, kind = name.rsplit(".", 1)
      if module.startswith("blocks."):
        _, layer, part = module.split(".")
        module = f"h.{layer}.{parts[part]}"
      else:
        part, module = module, names[module]
      tensor = stored[f"transformer.{module}.{kind}"]
      linear = kind == "weight" and part in ("qkv", "projection", "up", "down")
      parameter.copy_(tensor.T if linear else tensor)


def make_model():
  padded = (job.vocab + 127) // 128 * 128  # an even matrix product, as trainers choose it
  if job.init:
    positions = json.loads((Path(job.init) / "config.json").read_text())["n_positions"]
    model = GPT2(job.shape, job.vocab, positions, job.attention == "explicit")
    load_weights(model, job.init)
  else:
    model = GPT2(job.shape, padded, max(1024, job.seq_len), job.attention == "explicit")
  dtype = torch.bfloat16 if job.weights == "bf16" else torch.float32
  return model.to(job.device, dtype)


# ---- the step

def make_optimizer(parameters):
  return torch.optim.AdamW(
    [dict(params=[p for p in parameters if p.dim() == 2], weight_decay=WEIGHT_DECAY),
     dict(params=[p for p in parameters if p.dim() != 2], weight_decay=0.0)],
    lr=job.lr, betas=BETAS, fused=job.adamw == "fused", foreach=job.adamw == "foreach")


def batches():
  """Inputs and targets (B, T) of each step: the samples that train_gpt takes, in its order."""
  words = torch.frombuffer(bytearray(Path(job.data).read_bytes()[1024:]), dtype=torch.int16)
  tokens = words.to(job.device, torch.int64) & 0xffff
  samples = tokens.unfold(0, job.seq_len + 1, job.seq_len)  # (samples, T + 1), overlapping by one
  numbers = torch.arange(job.batch, device=job.device)
  while True:
    rows = samples[numbers % len(samples)]
    numbers += job.batch
    yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def attention_kernel():
  backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": getattr(SDPBackend, "CUDNN_ATTENTION", None)}
  if job.attention not in backends:
    return contextlib.nullcontext
  if backends[job.attention] is None:
    raise RuntimeError("this PyTorch has no attention by cuDNN: 2.5 has")
  return lambda: sdpa_kernel(backends[job.attention])


def make_step():
  """One training step as a function without arguments, which returns the loss."""
  model = make_model()
  parameters = list(model.parameters())
  optimizer = make_optimizer(parameters)
  forward = model if job.compile == "none" else torch.compile(model, mode=job.compile)
  kernel, data = attention_kernel(), batches()
  precision = torch.autocast(job.device, torch.bfloat16, enabled=job.weights == "autocast")
  steps = 0

  def step():
    nonlocal steps
    for group in optimizer.param_groups:
      group["lr"] = job.lr * min(1, (steps + 1) / max(1, job.lr_warmup))
    steps += 1
    inputs, targets = next(data)
    with kernel(), precision:
      loss = forward(inputs, targets)
    loss.backward()
    if job.grad_clip > 0:
      nn.utils.clip_grad_norm_(parameters, job.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()

  return step


# ---- arguments

def time_on_cpu(step):
  start = time.perf_counter()
  step()
  return (time.perf_counter() - start) * 1e3


def time_steps(step):
  """Milliseconds of each step. On the GPU events mark the ends of steps, so that the host may run ahead."""
  for _ in range(job.warmup):
    step()
  if job.device == "cpu":
    return [time_on_cpu(step) for _ in range(job.steps)]
  torch.cuda.synchronize()
  events = [torch.cuda.Event(enable_timing=True) for _ in range(job.steps + 1)]
  events[0].record()
  for event in events[1:]:
    step()
    event.record()
  torch.cuda.synchronize()
  return [before.elapsed_time(after) for before, after in zip(events, events[1:])]


def setup():
  """Lines with everything that the results depend on."""
  libraries = [line.strip(" -") for line in torch.__config__.show().splitlines()
               if any(word in line for word in ("Library Version", "MKL-DNN", "CPU capability"))]
  settings = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("OMP_", "KMP_", "GOMP_"))]
  lines = [f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}",
           f"BLAS: {'; '.join([*libraries, blas_note])}",
           f"CPU:  {cpu_info('model name')}, {os.cpu_count()} cores; "
           + ", ".join([f"{torch.get_num_threads()} threads", *settings])]
  if job.device == "cuda":
    lines.append(f"GPU:  {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, "
                 f"cuDNN {torch.backends.cudnn.version()}")
  return lines


def main():
  if job.device == "cuda" and not torch.cuda.is_available():
    raise RuntimeError("PyTorch finds no CUDA device: use --device cpu, or its CUDA wheel")
  torch.set_num_threads(job.threads)
  step = make_step()
  result = {"setup": setup(), "times": [], "losses": []}
  if job.init:
    result["losses"] = [float(step()) for _ in range(job.steps)]
  else:
    result["times"] = time_steps(step)
  print(json.dumps(result))


if __name__ == "__main__":
  main()
