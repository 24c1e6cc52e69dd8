#!/usr/bin/env bash
# Prints lists of rooms as C++. With files room.cpp those that have options (gpt/room.h); with files model.cuh those that take part
# in a model's computations (gpt/model_room.cuh), with files store.cuh those that take part in a parameter store
# (gpt/store_room.cuh); with files hook.cuh and command.cuh those that take part in training (gpt/step_hook.h) or in a process
# (gpt/process_hook.h), or do something before it or instead (gpt/command.h).
#
#   dev/make/rooms.sh extensions/fp8/room.cpp runtime/guard/room.cpp ...
#   dev/make/rooms.sh --model extensions/fp8/model.cuh ...
#   dev/make/rooms.sh --store extensions/fp8/store.cuh ...
#   dev/make/rooms.sh extensions/delay/hook.cuh extensions/lora/command.cuh ...
case ${1:-} in --*) part=${1#--}; shift ;; esac  # as there may be no file
files=$(for file; do echo "$(basename "$(dirname "$file")") $file"; done | LC_ALL=C sort | cut -d' ' -f2)
# the rooms whose files have something of this name
rooms_with() {
  for file in $files; do
    room=$(basename "$(dirname "$file")")
    if grep -q "\b${room}_$1\b" "$file"; then echo "$room"; fi
  done
}

with_options=$(rooms_with room)
if [ -n "$with_options" ]; then
  echo '#include "gpt/room.h"'
  for room in $with_options; do echo "extern Room ${room}_room;"; done
  echo 'const std::vector<const Room*>& rooms() {'
  echo "  static const std::vector<const Room*> list = {$(for room in $with_options; do echo -n "&${room}_room, "; done)};"
  echo '  return list;'
  echo '}'
  exit
fi
if [ -n "${part:-}" ]; then
  echo '#pragma once'
  printf '#include "%s"\n' gpt/${part}_room.cuh $files
  echo 'template <class Float>'
fi
case ${part:-} in
  model)
    echo 'std::vector<ModelRoom> model_rooms([[maybe_unused]] ModelParts<Float>& parts) {'
    echo '  std::vector<ModelRoom> rooms;'
    for room in $(rooms_with model); do echo "  if (auto room = ${room}_model(parts)) rooms.push_back(std::move(*room));"; done
    echo '  return rooms;'
    echo '}'
    exit ;;
  store)
    echo 'void plug_in_rooms([[maybe_unused]] StoreParts<Float>& parts) {'
    for room in $(rooms_with store); do echo "  ${room}_store(parts);"; done
    echo '}'
    exit ;;
esac
printf '#include "%s"\n' gpt/command.h gpt/process_hook.h gpt/step_hook.h $files
echo 'std::vector<std::unique_ptr<StepHook>> step_hooks([[maybe_unused]] TrainingRun& run) {'
echo '  std::vector<std::unique_ptr<StepHook>> hooks;'
for room in $(rooms_with hook); do echo "  if (auto hook = ${room}_hook(run)) hooks.push_back(std::move(hook));"; done
echo '  return hooks;'
echo '}'
echo 'ProcessHooks process_hooks([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {'
echo '  ProcessHooks hooks;'
for room in $(rooms_with process_hook); do echo "  if (auto hook = ${room}_process_hook(argc, argv)) hooks.push_back(std::move(hook));"; done
echo '  return hooks;'
echo '}'
echo 'bool is_done_without_devices([[maybe_unused]] Options& options, [[maybe_unused]] Ranks& ranks) {'
for room in $(rooms_with without_devices); do echo "  if (${room}_without_devices(options, ranks)) return true;"; done
echo '  return false;'
echo '}'
echo 'void before_mesh([[maybe_unused]] Options& options, [[maybe_unused]] Ranks& ranks, [[maybe_unused]] int device) {'
for room in $(rooms_with before_mesh); do echo "  ${room}_before_mesh(options, ranks, device);"; done
echo '}'
echo 'void before_groups([[maybe_unused]] Options& options, [[maybe_unused]] Ranks& ranks) {'
for room in $(rooms_with before_groups); do echo "  ${room}_before_groups(options, ranks);"; done
echo '}'
echo 'JobWork command_of([[maybe_unused]] const Options& options) {'
for room in $(rooms_with command); do echo "  if (const JobWork work = ${room}_command(options)) return work;"; done
echo '  return nullptr;'
echo '}'
