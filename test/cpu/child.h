// A test's own executable as a child process, with another environment: for mistakes that end a program, and for switches
// that are read once. `TEST --program NAME` runs one small program instead of the tests.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include <doctest/doctest.h>

struct Outcome {
  int code;  // as the shell has it: 128 + signal for a crash
  std::string output;

  bool mentions(const std::string& text) const { return output.find(text) != std::string::npos; }
};

inline Outcome run_command(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  Outcome outcome;
  for (char text[256]; fgets(text, sizeof text, pipe);) outcome.output += text;
  const int status = pclose(pipe);
  outcome.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return outcome;
}

// environment: VARIABLE=VALUE, separated by spaces
inline Outcome run_child(const std::string& program, const std::string& environment) {
  const std::string executable = std::filesystem::read_symlink("/proc/self/exe").string();
  return run_command("ulimit -c 0; " + environment + " timeout 60 '" + executable + "' --program " + program);
}
