// In the copies of the sources that remove_barriers.sh and remove_events.sh build, the lines in question are numbered, and
// GPT_REMOVED_LINE leaves one of them out: what is built once can be tried without each.
#pragma once

#include <cstdlib>

inline const int removed_line = std::getenv("GPT_REMOVED_LINE") ? std::atoi(std::getenv("GPT_REMOVED_LINE")) : 0;
