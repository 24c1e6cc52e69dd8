// For tests of many ranks: processes made by fork(), what they printed, and how and when they ended.
#pragma once

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <functional>
#include <iostream>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "gpt/base/clock.h"
#include "test/temporary_folder.h"

struct Outcome {
  int code;  // or minus the signal that ended it
  std::string printed;
  double seconds;
};

class Processes {
 public:
  // An exception that `body` does not catch is printed as main() would, and the process ends with 1.
  Processes(int size, const std::function<void(int)>& body) : start_(steady_seconds()) {
    std::fflush(nullptr);  // else children print it once more
    std::cout.flush();
    for (int rank = 0; rank < size; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) run(rank, body);
      pids_.push_back(pid);
    }
  }

  pid_t pid(int rank) const { return pids_[size_t(rank)]; }
  void signal(int number) const {
    for (pid_t pid : pids_) kill(pid, number);
  }

  // Waits until all ranks have ended or stopped (code -SIGSTOP). Processes that have not, `seconds` after the start, are
  // killed (code -SIGKILL).
  std::vector<Outcome> wait(double seconds = 20) {
    std::vector<Outcome> outcomes(pids_.size(), {-SIGKILL, "", INFINITY});
    for (size_t left = pids_.size(); left > 0 && steady_seconds() < start_ + seconds; usleep(2000))
      for (size_t rank = 0; rank < pids_.size(); ++rank) {
        int status;
        Outcome& outcome = outcomes[rank];
        if (outcome.seconds < INFINITY || waitpid(pids_[rank], &status, WNOHANG | WUNTRACED) <= 0) continue;
        outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : WIFSTOPPED(status) ? -SIGSTOP : -WTERMSIG(status);
        outcome.seconds = steady_seconds() - start_;
        --left;
      }
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (outcomes[rank].seconds == INFINITY || outcomes[rank].code == -SIGSTOP) {
        kill(pids_[rank], SIGKILL);
        waitpid(pids_[rank], nullptr, 0);
      }
      outcomes[rank].printed = content_of(folder_ / std::to_string(rank));
    }
    return outcomes;
  }

 private:
  [[noreturn]] void run(int rank, const std::function<void(int)>& body) const {
    const int file = open((folder_ / std::to_string(rank)).c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    int code = 0;
    try {
      body(rank);
    } catch (const std::exception& error) {
      dprintf(STDERR_FILENO, "train_gpt: %s\n", error.what());
      code = 1;
    }
    _exit(code);
  }

  TemporaryFolder folder_;
  std::vector<pid_t> pids_;
  double start_;
};

// For the message of a failing test.
inline std::string describe(const std::vector<Outcome>& outcomes) {
  std::string text;
  for (size_t rank = 0; rank < outcomes.size(); ++rank)
    text += "\n[" + std::to_string(rank) + "] code " + std::to_string(outcomes[rank].code) + " after " +
            std::to_string(outcomes[rank].seconds) + " s: " + outcomes[rank].printed;
  return text;
}

inline long lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }
