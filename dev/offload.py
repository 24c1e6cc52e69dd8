#!/usr/bin/env python3
"""Models that --offload makes possible on one card, by the planner: Markdown tables (dev/results/2026-11-25-offload.md).

    python3 dev/offload.py [./train_gpt]

The first table has, for each card and each way to keep the state, the largest of GPT-3's shapes that one card trains in
bf16, with the mesh search's choice of --micro-batch and --recompute, at GPT-3's own batch. The second has steps of
fewer samples: how much of them PCIe takes.
"""
import json
import os
import subprocess
import sys
import tempfile

PROGRAM = sys.argv[1] if len(sys.argv) > 1 else "./train_gpt"
# Cards, and the host memory for each in a workstation or a server, GiB: assumed.
RTX_4080 = {"name": "RTX 4080", "fp32_tflops": 48.7, "bf16_tflops": 97.5, "memory_tb_per_s": 0.717, "memory_gib": 15.6}
CARDS = {"H200": ("H200", 256), "H100": ("H100", 256), "24 GB: RTX 4090": ("RTX 4090", 128), "16 GB: RTX 4080": (RTX_4080, 64)}
WAYS = ["", "--moments bf16", "--offload optimizer", "--offload optimizer --moments bf16", "--offload optimizer,activations",
        "--offload optimizer,activations --moments bf16", "--offload gradients,optimizer",
        "--offload gradients,optimizer,activations --moments bf16"]
# Samples of 2,048 tokens: the batches that GPT-3 was trained with, to a power of two (arXiv:2005.14165, table 2.1)
BATCHES = {"125m": 256, "350m": 256, "760m": 256, "1.3b": 512, "2.7b": 512, "6.7b": 1024, "13b": 1024, "175b": 1536}


def plan(cluster, options):
    """The planner's answer; None if it refuses the options."""
    command = [PROGRAM, "--plan", "--json", "--cluster", cluster, "--ranks", "1", "--dtype", "bf16", *options]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)}: {ran.stderr}")
    return json.loads(ran.stdout)


def fastest(cluster, model, samples, way):
    """The fastest that fits, and its bytes of host memory; None: nothing fits."""
    options = ["--model", f"gpt3-{model}", "--global-batch", str(samples), *way.split()]
    found = plan(cluster, [*options, "--mesh", "auto"])["fastest"]
    if not found:
        return None
    chosen = found[0]["command"].split("--global-batch")[1].split()[1:]
    chosen = chosen[:chosen.index("--steps")] if "--steps" in chosen else chosen
    kept = {"--moments": "fp32", "--offload": "none"} | dict(zip(way.split()[::2], way.split()[1::2]))
    chosen = [word for pair in zip(chosen[::2], chosen[1::2]) if pair[0] not in kept for word in pair]
    whole = plan(cluster, [*options, *chosen])
    host = sum(bytes for name, bytes in whole["ranks"][0]["host"].items() if name in ("optimizer", "activations", "gradients"))
    return found[0] | {"options": " ".join(chosen), "host": host}


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def gib(bytes):
    return f"{bytes / 2**30:.1f}"


def waits(found):
    """The share of the step that waits for PCIe, %."""
    return f"{100 * found['time']['offload']['exposed'] / found['step_ms']:.0f}"


with tempfile.TemporaryDirectory() as folder:
    clusters = {}
    for name, (device, host_gib) in CARDS.items():
        clusters[name] = os.path.join(folder, f"{len(clusters)}.json")
        with open(clusters[name], "w", encoding="utf-8") as file:
            json.dump({"name": name, "device": device, "devices_per_host": 1, "hosts": 1}, file)
    row("card", "", "largest shape", "chosen", "GiB of the card", "GiB of the host", "s a step", "tokens/s", "MFU %", "waits for PCIe %")
    row(*["---"] * 4, *["--:"] * 6)
    largest = {}
    for name in CARDS:
        for way in WAYS:
            for model in reversed(BATCHES):
                found = fastest(clusters[name], model, BATCHES[model], way)
                if found and found["host"] <= CARDS[name][1] * 2**30:
                    break
            largest[name, way] = model
            row(name, f"`{way}`" if way else "all on the card", model, f"`{found['options']}`", gib(found["memory"]), gib(found["host"]),
                f"{found['step_ms'] / 1e3:.1f}", f"{found['tokens_per_s']:,.0f}", f"{100 * found['mfu']:.0f}", waits(found))
    print()
    samples = [1, 4, 16, 64, 256]
    row("card", "shape", *(f"{count * 2048:,} tokens a step" for count in samples))
    row("---", "---", *["--:"] * len(samples))
    for name in CARDS:
        model = largest[name, "--offload optimizer"]
        cells = [fastest(clusters[name], model, count, "--offload optimizer") for count in samples]
        row(name, model, *(f"{found['tokens_per_s']:,.0f} tokens/s, {waits(found)} %" if found else "–" for found in cells))
