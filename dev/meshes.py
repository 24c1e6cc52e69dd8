#!/usr/bin/env python3
"""The choices of --mesh auto for GPT-3's sizes on 8 to 1,024 GPUs: a Markdown table (runtime/planner/meshes.md).

    python3 dev/meshes.py [DEVICE] [./train_gpt]     DEVICE: a100-80 (unless given) or h100, as in runtime/planner/clusters
"""
import json
import subprocess
import sys

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "a100-80"
PROGRAM = sys.argv[2] if len(sys.argv) > 2 else "./train_gpt"
GPUS = [8, 16, 32, 64, 128, 256, 512, 1024]
# Samples of 2,048 tokens: the batches that GPT-3 was trained with, to a power of two (arXiv:2005.14165, table 2.1)
BATCHES = {"125m": 256, "350m": 256, "760m": 256, "1.3b": 512, "2.7b": 512, "6.7b": 1024, "13b": 1024, "175b": 1536}


def cell(model, gpus):
    """The fastest mesh: its degrees above 1, options that save memory, MFU and the memory of a GPU."""
    command = [PROGRAM, "--plan", "--json", "--mesh", "auto", "--model", f"gpt3-{model}", "--dtype", "bf16",
               "--cluster", f"400x8x{DEVICE}", "--ranks", str(gpus), "--global-batch", str(BATCHES[model])]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if not found["fastest"]:
        return "–"
    best = found["fastest"][0]
    words = best["command"].split("--global-batch")[1].split()
    options = dict(zip(words[1::2], words[2::2]))
    degrees = [f"{name} {options[f'--{name}']}" for name in ("tp", "cp", "pp") if f"--{name}" in options]
    split = 1
    for name in ("tp", "cp", "pp"):
        split *= int(options.get(f"--{name}", 1))
    if gpus > split:
        degrees.append(f"dp {gpus // split}")
    saved = [f"ZeRO {options['--zero']}"] if "--zero" in options else []
    saved += [options["--recompute"]] if "--recompute" in options else []
    if options.get("--pp-schedule", "1f1b") != "1f1b":
        saved.append(options["--pp-schedule"])
    return f"{' · '.join(degrees)}{', ' if saved else ''}{', '.join(saved)}: {100 * best['mfu']:.0f} %, {best['memory'] / 2**30:.0f} GiB"


print("| | " + " | ".join(f"{gpus:,}" for gpus in GPUS) + " |")
print("|---" * (len(GPUS) + 1) + "|")
for name in BATCHES:
    print(f"| {name} | " + " | ".join(cell(name, gpus) for gpus in GPUS) + " |", flush=True)
