// The clock by which everything in the program is timed.
#pragma once

#include <chrono>

using Clock = std::chrono::steady_clock;

// Seconds on a clock that never jumps, from an arbitrary start.
inline double steady_seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

inline double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
