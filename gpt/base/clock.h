// The clock by which everything in the program is timed.
#pragma once

#include <chrono>

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
