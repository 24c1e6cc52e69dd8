"""Turns what `make -n` prints into compile_commands.json, for clangd and other editors' helpers: make compile_commands.json

The CPU device compiles filtered copies of .cu files (cpu/filter.cpp) with g++, but editors show the originals. These
get the flags of the copies, so an editor understands everything in them except kernel<<<...>>> itself.
"""
import json
import os
import shlex
import sys

commands = []
for line in sys.stdin:
    if not line.startswith("g++ ") or " -c " not in line:
        continue
    arguments = shlex.split(line)
    source = arguments[-1]
    original = source.split("/src/", 1)[1] if source.startswith("build/") else source
    arguments[-1] = original
    commands.append({"directory": os.getcwd(), "file": original, "arguments": arguments})
json.dump(commands, sys.stdout, indent=1)
