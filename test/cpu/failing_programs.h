// Runs mistakes that the CPU device must find. Each is a small program inside the test program, which starts itself as
// `test_NAME --program MISTAKE` under a schedule, and looks at the exit code and the messages.
#pragma once

#include <string>
#include <vector>

#include "test/cpu/child.h"

enum ExitCode { right = 0, wrong = 3, race = 66 };

#if defined(__SANITIZE_THREAD__)
constexpr bool finds_races = true;
#else
constexpr bool finds_races = false;
#endif

inline Outcome run(const std::string& program, const std::string& schedule = "forward") {
  return run_child(program, "GPT_CPU_SCHEDULE=" + schedule + " OMP_NUM_THREADS=1 TSAN_OPTIONS=history_size=7");
}

inline const std::vector<std::string> schedules = {"forward", "reverse", "random:1", "random:2", "random:3"};
