#!/usr/bin/env bash
# Fills in a template of this folder: train_gpt --plan --recipe NAME runs `recipe.sh NAME`, with the plan in the environment.
# README.md lists the fields.
set -euo pipefail
cd "$(dirname "$0")"
export LC_ALL=C

# Other systems' names of the device; the driver here reports the name of the product. A device that is not in the list gets
# a placeholder that says how to add it.
skypilot=WRITE-ITS-NAME-INTO-runtime/planner/recipes/devices gpu_product=$skypilot gke_accelerator=$skypilot
while IFS='|' read -r name a b c; do
  read -r name <<< "$name"
  if [ "$name" = "$device" ] || [[ $b\  == *[,\ ]"${device// /-}"[,\ ]* ]]; then
    read -r skypilot <<< "$a"; read -r gpu_product <<< "$b"; read -r gke_accelerator <<< "$c"
  fi
done < devices

# A device of this machine, or one that --calibrate measured, may be its CPU.
gpus=true cpus= launcher=torchrun.sh cores=12
if [[ $cluster =~ ^this\ machine$|,\ calibrated$ && $device != NVIDIA* && $skypilot == WRITE* ]]; then
  gpus= cpus=true launcher=mpirun.sh cores=$(($(nproc) > count ? $(nproc) / count : 1))
fi
image=${GPT_IMAGE:-gpt.cu} in_image=${GPT_IMAGE:-} native=
[ -n "$in_image" ] || native=true
hooks=$after_checkpoint$stop_when$on_end

# The command without its launcher and without --overwrite, as the job resumes; in one line of ASCII, which YAML takes as it
# is: bash reads $'\303\244' as these two bytes.
eval "words=($command)"
if [ "${words[0]}" = mpirun ]; then words=("${words[@]:3}"); fi
quoted() { if [[ $1 =~ ^[a-zA-Z0-9_./=,:+-]+$ ]]; then printf %s "$1"; else printf %s "${1@Q}"; fi; }
program=$(quoted "${words[0]}") command=
for word in "${words[@]:1}"; do [ "$word" = --overwrite ] || command+="$(quoted "$word") "; done
command+=--resume
if [[ $checkpoint_every == [0-9]* && " ${words[*]}" != *" --checkpoint-every"* ]]; then
  printf -v steps %.0f "$checkpoint_every"
  command+=" --checkpoint-every $((steps > 1 ? steps : 1))"
fi
# Hooks may hold secrets: the job has them in its environment.
missing=':?is not set: see the top of this file'
if [ -n "$after_checkpoint" ]; then command+=" --after-checkpoint \"\${GPT_AFTER_CHECKPOINT$missing}\""; fi
if [ -n "$stop_when" ]; then command+=" --stop-when \"\${GPT_STOP_WHEN$missing}\""; fi
if [ -n "$on_end" ]; then command+=" --on-end \"\${GPT_ON_END$missing}\""; fi
if [ "$hook_timeout" != 0 ]; then command+=" --hook-timeout $hook_timeout"; fi

text=
while IFS= read -r line; do
  if [[ $line =~ ^\?([a-z_]+)\  ]]; then
    name=${BASH_REMATCH[1]} line=${line#"${BASH_REMATCH[0]}"}
    [ -n "${!name}" ] || continue
  fi
  while [[ $line =~ @([a-z_]+)@ ]]; do  # no field is looked for in a value
    name=${BASH_REMATCH[1]} text+=${line%%"${BASH_REMATCH[0]}"*}${!name} line=${line#*"${BASH_REMATCH[0]}"}
  done
  text+=$line$'\n'
done < "$1"
printf %s "$text"
