// A test case that has nothing to test here, or cannot go on, says so: if (ranks < 4) return skip("needs four ranks");
// It counts as skipped, unless a check has failed before.
#pragma once

#include <string>

inline std::string skip_reason;  // of the case that runs
inline void skip(const std::string& reason) { skip_reason = reason; }
