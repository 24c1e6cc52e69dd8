"""Turns the output of `make -n` into compile_commands.json, for clangd and others: make compile_commands.json

The CPU device compiles filtered copies of .cu files (cpu/filter.cpp) with g++, but editors show the originals. These
get the flags of the copies, so an editor understands everything in them except kernel<<<...>>> itself. Sources that
are compiled as one text (dev/make/host.mk) get its flags, too.
"""
import json
import os
import re
import shlex
import sys

commands = {}
for line in sys.stdin:
    if not line.startswith("g++ ") or " -c " not in line:
        continue
    arguments = shlex.split(line)
    source = arguments[-1]
    if "/src/" in source:
        originals = [source.split("/src/", 1)[1]]
    elif source.startswith("build/"):
        with open(source) as text:
            originals = re.findall(r'^#include "(.*\.(?:cpp|cu))"$', text.read(), re.MULTILINE)
    else:
        originals = [source]
    for original in originals:
        commands[original] = {"directory": os.getcwd(), "file": original, "arguments": [*arguments[:-1], original]}
json.dump(list(commands.values()), sys.stdout, indent=1)
