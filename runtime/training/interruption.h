// Requests to stop early: SIGTERM, SIGINT, SIGHUP (the terminal was closed; nohup makes the program ignore it), SIGUSR1
// (Slurm's warning), or --max-hours. The program finishes the step, writes a checkpoint, and ends with exit code 75:
// start it again with --resume. A second SIGINT ends it at once.
//
// A signal may reach only one rank. The sums of the next step tell the other ranks (parallel/step_sums.cuh), and all
// stop after the same step.
#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string>

#include <unistd.h>

constexpr int interrupted_exit_code = 75;  // EX_TEMPFAIL of sysexits.h: try again

inline std::atomic<int> interrupting_signal = 0;

inline void note_interruption(int signal) {
  if (signal == SIGINT && interrupting_signal.exchange(signal) == SIGINT) _exit(128 + SIGINT);
  interrupting_signal = signal;
}

class Interruption {
 public:
  // max_hours: the longest time that this process runs; 0: no limit
  explicit Interruption(double max_hours) : max_hours_(max_hours) { handle_signals(note_interruption); }
  ~Interruption() { handle_signals(SIG_DFL); }
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  bool asked() const { return interrupting_signal != 0 || time_is_up(); }

  // Why this rank stops.
  std::string reason() const {
    if (const int signal = interrupting_signal) return std::string("SIG") + sigabbrev_np(signal);
    return time_is_up() ? "--max-hours" : "another rank was asked to stop";
  }

 private:
  static void handle_signals(void (*handler)(int)) {
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) std::signal(signal, handler);
    if (std::signal(SIGHUP, handler) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  }

  bool time_is_up() const {
    const std::chrono::duration<double, std::ratio<3600>> hours = std::chrono::steady_clock::now() - start_;
    return max_hours_ > 0 && hours.count() >= max_hours_;
  }

  double max_hours_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
