// Runs mistakes that the CPU device must find. Each is a small program inside the test program, which starts itself as
// `test_NAME --program MISTAKE` under a schedule, and looks at the exit code and the messages.
#pragma once

#include <sys/wait.h>

#include <filesystem>
#include <string>
#include <vector>

#include <doctest/doctest.h>

enum ExitCode { right = 0, wrong = 3 };

struct Outcome {
  int code;  // as the shell has it: 128 + signal for a crash
  std::string output;

  bool mentions(const std::string& text) const { return output.find(text) != std::string::npos; }
};

inline Outcome run(const std::string& program, const std::string& schedule = "forward") {
  const std::string executable = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string environment = "GPT_CPU_SCHEDULE=" + schedule + " OMP_NUM_THREADS=1 TSAN_OPTIONS=history_size=7";
  const std::string command =
      "ulimit -c 0; " + environment + " timeout 60 '" + executable + "' --program " + program + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Outcome outcome;
  for (char text[256]; fgets(text, sizeof text, pipe);) outcome.output += text;
  const int status = pclose(pipe);
  outcome.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return outcome;
}

inline const std::vector<std::string> schedules = {"forward", "reverse", "random:1", "random:2", "random:3"};
