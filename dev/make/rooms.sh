#!/usr/bin/env bash
# Prints lists of rooms as C++. With files room.cpp those that have options (gpt/room.h); with files hook.cuh and command.cuh
# those that take part in training (gpt/step_hook.h), or do something else instead (gpt/command.h).
#
#   dev/make/rooms.sh extensions/fp8/room.cpp runtime/guard/room.cpp ...
#   dev/make/rooms.sh extensions/delay/hook.cuh extensions/lora/command.cuh ...
files=$(for file; do echo "$(basename "$(dirname "$file")") $file"; done | LC_ALL=C sort | cut -d' ' -f2)
# the rooms of the files of this name
rooms_of() { for file in $files; do case $file in */"$1") basename "$(dirname "$file")" ;; esac; done; }

if [ -n "$(rooms_of room.cpp)" ]; then
  echo '#include "gpt/room.h"'
  for room in $(rooms_of room.cpp); do echo "extern Room ${room}_room;"; done
  echo 'const std::vector<const Room*>& rooms() {'
  echo "  static const std::vector<const Room*> list = {$(for room in $(rooms_of room.cpp); do echo -n "&${room}_room, "; done)};"
  echo '  return list;'
  echo '}'
  exit
fi
echo '#include "gpt/command.h"'
echo '#include "gpt/step_hook.h"'
for file in $files; do echo "#include \"$file\""; done
echo 'std::vector<std::unique_ptr<StepHook>> step_hooks(TrainingRun& run) {'
echo '  std::vector<std::unique_ptr<StepHook>> hooks;'
for room in $(rooms_of hook.cuh); do echo "  if (auto hook = ${room}_hook(run)) hooks.push_back(std::move(hook));"; done
echo '  return hooks;'
echo '}'
echo 'JobWork command_of(const Options& options) {'
for room in $(rooms_of command.cuh); do echo "  if (const JobWork work = ${room}_command(options)) return work;"; done
echo '  return nullptr;'
echo '}'
