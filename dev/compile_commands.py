"""Turns what `make -n` prints into compile_commands.json, for clangd and other editors' helpers: make compile_commands.json

The CPU device compiles filtered copies of .cu files (cpu/filter.cpp) with g++, but editors show the originals. These
get the flags of the copies, so an editor understands everything in them except kernel<<<...>>> itself. Sources of the host's
code that are compiled as one text (dev/make/host.mk) get its flags, too.
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
    if source.startswith("build/host/"):
        with open(source) as text:
            originals = [words[1].strip('"') for words in map(str.split, text) if words[0] == "#include" and words[1].endswith('.cpp"')]
    else:
        originals = [source.split("/src/", 1)[1] if source.startswith("build/") else source]
    for original in originals:
        commands.append({"directory": os.getcwd(), "file": original, "arguments": [*arguments[:-1], original]})
json.dump(commands, sys.stdout, indent=1)
