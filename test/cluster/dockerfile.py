#!/usr/bin/env python3
"""Runs a Dockerfile's target without a container engine, as root: every command, in order, each stage in a root of its own.

    dockerfile.py DOCKERFILE TARGET FOLDER [NAME=VALUE ...]      NAME=VALUE: as docker build --build-arg

The root of the target is then FOLDER/TARGET. An image debian:12 is a new Debian 12, by debootstrap. An image nvidia/cuda, which
no package registry has, is a Debian 12 with NVIDIA's packages of the same toolkit.
"""
import fnmatch
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys

TOOLKIT = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cublas",
           "nvidia-cuda-nvrtc", "nvidia-nvtx")  # of the image's version
KEPT = re.compile("(?i)^(.*_proxy|pip_.*)$")  # how this machine reaches packages; and whom it trusts:
CERTIFICATES = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")


def instructions(text):
    """Pairs of a word and its text, with lines joined and comments left out."""
    text = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


def expanded(text, variables):
    return re.sub(r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], ""), text)


def run(*command, **options):
    subprocess.run(command, check=True, **options)


def base_root(root, image, folder):
    """Fills a root with what the image has; the first Debian is kept for the next stage."""
    debian = os.path.join(folder, "debian-12")
    if not os.path.exists(debian):
        run("debootstrap", "--variant=minbase", "bookworm", debian, stdout=subprocess.DEVNULL)
    run("cp", "-a", debian, root)
    run("cp", "-L", "/etc/resolv.conf", root + "/etc/resolv.conf")
    if os.path.exists(CERTIFICATES):
        shutil.copy(CERTIFICATES, root + "/etc/this-machine.crt")
    for name in ("proc", "dev"):
        run("mount", "--rbind", "/" + name, f"{root}/{name}")
    cuda = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\..*-(devel|runtime)-.*", image)
    if cuda:
        print(f"  {image} is not to be had: Debian 12, with NVIDIA's packages of CUDA {cuda[1]} in its place", flush=True)
        major = cuda[1].split(".")[0]
        target, home = f"{root}/usr/local/lib/cuda-packages", f"/usr/local/lib/cuda-packages/nvidia/cu{major}"
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target,
            *(f"{name}=={cuda[1]}.*" for name in TOOLKIT), f"nvidia-nccl-cu{major}", stderr=subprocess.DEVNULL)
        os.symlink(home, f"{root}/usr/local/cuda")
        os.symlink("lib", f"{root}{home}/lib64")  # where nvcc looks for them
        for part, to in (("include", "usr/include"), ("lib", "usr/lib/x86_64-linux-gnu")):  # where the image has NCCL
            shutil.copytree(f"{target}/nvidia/nccl/{part}", f"{root}/{to}", dirs_exist_ok=True)
        os.symlink("libnccl.so.2", f"{root}/usr/lib/x86_64-linux-gnu/libnccl.so")
    elif image != "debian:12":
        sys.exit(f"dockerfile.py: FROM {image}: only debian:12 and nvidia/cuda are known here")


def copy(sources, target, ignored):
    """COPY: of a folder its content, of a file the file; what matches `ignored` stays away."""
    def is_ignored(path):
        return any(fnmatch.fnmatch(os.path.normpath(path), pattern) for pattern in ignored)

    for source in sources:
        for found in glob.glob(source) or sys.exit(f"dockerfile.py: COPY {source}: it is not there"):
            if os.path.isdir(found):
                shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True, ignore=lambda folder, names: [
                    name for name in names if is_ignored(os.path.join(folder, name))])
            else:
                shutil.copy2(found, target if target.endswith("/") else os.path.join(target, ""))


def build(dockerfile, target, folder, arguments):
    ignored = open(dockerfile + ".dockerignore").read().split()
    lines = instructions(open(dockerfile).read())
    stages = {}   # of a name: its lines
    for word, text in lines:
        if word == "FROM":
            stages[text.split(" AS ")[1]] = [(word, text)]
        elif stages:
            list(stages.values())[-1].append((word, text))
    defaults = dict(shlex.split(text)[0].split("=", 1) for word, text in lines if word == "ARG")
    copied_from = " ".join(text for _, text in stages[target])
    needed = [stage for stage in stages if stage == target or f"--from={stage} " in copied_from]
    for stage in needed:
        root, here = os.path.join(folder, stage), "/"
        variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        for word, text in stages[stage]:
            print(f"  {word} {text}", flush=True)
            if word == "FROM":
                image = expanded(text.split(" AS ")[0], {**defaults, **arguments})
                base_root(root, image, folder)
                if image.startswith("nvidia/cuda"):
                    variables["PATH"] = "/usr/local/cuda/bin:" + variables["PATH"]
            elif word == "ARG":
                name, value = shlex.split(text)[0].split("=", 1)
                variables[name] = arguments.get(name, value)
            elif word == "ENV":
                name, value = text.split("=", 1)
                variables[name] = expanded(value, variables)
            elif word == "WORKDIR":
                here = text
                os.makedirs(root + here, exist_ok=True)
            elif word == "COPY":
                *sources, to = text.split()
                to = root + os.path.join(here, to)
                os.makedirs(to if to.endswith("/") else os.path.dirname(to), exist_ok=True)
                if sources[0].startswith("--from="):
                    other = os.path.join(folder, sources.pop(0)[len("--from="):])
                    copy([other + source for source in sources], to, [])
                else:
                    copy(sources, to, ignored)
            elif word == "RUN":
                kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
                if os.path.exists(root + "/etc/this-machine.crt"):
                    kept.update(SSL_CERT_FILE="/etc/this-machine.crt", PIP_CERT="/etc/this-machine.crt")
                run("chroot", root, "/bin/sh", "-c", f"cd {here} && {text}", stdin=subprocess.DEVNULL,
                    env={**kept, **variables, "HOME": "/root"})
            elif word != "CMD":
                sys.exit(f"dockerfile.py: {word} is not known here")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    build(sys.argv[1], sys.argv[2], os.path.abspath(sys.argv[3]), dict(argument.split("=", 1) for argument in sys.argv[4:]))
