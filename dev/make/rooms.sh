#!/usr/bin/env bash
# Prints the list of rooms as C++ (gpt/room.h).
#
#   dev/make/rooms.sh extensions/fp8/room.cpp runtime/guard/room.cpp ...
names=$(for file; do basename "$(dirname "$file")"; done | LC_ALL=C sort)
echo '#include "gpt/room.h"'
for name in $names; do echo "extern Room ${name}_room;"; done
echo 'const std::vector<const Room*>& rooms() {'
echo "  static const std::vector<const Room*> list = {$(for name in $names; do echo -n "&${name}_room, "; done)};"
echo '  return list;'
echo '}'
