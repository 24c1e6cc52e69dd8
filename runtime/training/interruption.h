// Requests to stop early: SIGTERM, SIGINT, SIGHUP (the terminal was closed; nohup makes the program ignore it), SIGUSR1
// (Slurm's warning), or --max-hours. The program finishes the step, writes a checkpoint, and ends with exit code 75:
// start it again with --resume. A second SIGINT ends it at once.
//
// A signal may reach only one rank. The sums of the next step tell the other ranks (parallel/step_sums.cuh), and all
// stop after the same step.
//
// The handler runs on a stack of its own. The kernel puts some kilobytes of registers below the stack pointer of the code
// that it interrupts, and products that oneDNN generates at run time may keep their operands there: without it, a
// signal in the middle of a product damaged the heap.
#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string>

#include <unistd.h>

constexpr int interrupted_exit_code = 75;  // EX_TEMPFAIL of sysexits.h: try again

inline std::atomic<int> interrupting_signal = 0;

alignas(16) inline char signal_stack[1 << 16];  // of the thread that trains, which is the one that gets signals

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
    const stack_t stack = {.ss_sp = signal_stack, .ss_flags = 0, .ss_size = sizeof signal_stack};
    sigaltstack(&stack, nullptr);
    struct sigaction action = {}, before = {};
    action.sa_handler = handler, action.sa_flags = SA_ONSTACK | SA_RESTART;
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
    sigaction(SIGHUP, &action, &before);
    if (before.sa_handler == SIG_IGN) sigaction(SIGHUP, &before, nullptr);
  }

  bool time_is_up() const {
    const std::chrono::duration<double, std::ratio<3600>> hours = std::chrono::steady_clock::now() - start_;
    return max_hours_ > 0 && hours.count() >= max_hours_;
  }

  double max_hours_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
