// A test case that has nothing to test here says so: if (ranks < 4) return skip("needs four ranks");
#pragma once

#include <string>

inline std::string skip_reason;  // of the case that runs
inline void skip(const std::string& reason) { skip_reason = reason; }
