// Requests to stop early: SIGTERM, SIGINT, SIGHUP (the terminal was closed; nohup makes the program ignore it), or SIGUSR1
// (Slurm's warning). The program finishes the step, writes a checkpoint, and ends with exit code 75:
// start it again with --resume. A second SIGINT ends it at once.
//
// A signal may reach only one rank. The sums of the next step tell the other ranks (gpt/step_sums.cuh), and all
// stop after the same step.
//
// Before the run folder is changed there is nothing to save: a signal ends the job where it is, also with exit code 75.
// A thread of its own waits for that, as the one that trains may be in any library.
//
// The handler runs on a stack of its own. The kernel puts some kilobytes of registers below the stack pointer of the code
// that it interrupts, and products that oneDNN generates at run time may keep their operands there: without it, a
// signal in the middle of a product damaged the heap.
#pragma once

#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <unistd.h>

#include "gpt/base/process.h"

constexpr int interrupted_exit_code = 75;  // EX_TEMPFAIL of sysexits.h: try again

inline std::atomic<int> interrupting_signal = 0;
inline std::atomic<bool> heeds_signals = true;  // false: they end this process as they end any program

alignas(16) inline char signal_stack[1 << 16];  // of the thread that trains, which is the one that gets signals

inline void note_interruption(int signal) {
  if (!heeds_signals) return std::signal(signal, SIG_DFL), void(std::raise(signal));
  if (signal == SIGINT && interrupting_signal.exchange(signal) == SIGINT) _exit(128 + SIGINT);
  interrupting_signal = signal;
}

class Interruption {
 public:
  Interruption() { handle_signals(); }

  // From now on a signal ends the job by `end`, which is given the signal's name, until end_watch(). Starts a thread. To be
  // called again when another way to end is right.
  void watch(std::function<void(const std::string& signal)> end) {
    const std::lock_guard lock(mutex_);
    end_ = std::move(end);
    if (watch_.joinable()) return;
    watch_ = std::jthread([this](const std::stop_token& over) {
      for (; !over.stop_requested(); usleep(5000)) {
        const std::lock_guard its_lock(mutex_);
        if (interrupting_signal != 0) end_(reason());
      }
    });
  }
  void end_watch() { watch_ = {}; }

  // From now on a step and a checkpoint come before the end.
  void begin_training() {
    end_watch();
    handle_signals();  // the ranks may have had SIGTERM
  }

  // The signal that asks this rank to stop; empty: none has.
  std::string reason() const {
    const int signal = interrupting_signal;
    return signal ? std::string("SIG") + sigabbrev_np(signal) : "";
  }

 private:
  static void handle_signals() {
    const stack_t stack = {.ss_sp = signal_stack, .ss_flags = 0, .ss_size = sizeof signal_stack};
    sigaltstack(&stack, nullptr);
    struct sigaction wanted = {}, before = {};
    wanted.sa_handler = note_interruption, wanted.sa_flags = SA_ONSTACK | SA_RESTART;
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &wanted, nullptr);
    sigaction(SIGHUP, &wanted, &before);
    if (before.sa_handler == SIG_IGN) sigaction(SIGHUP, &before, nullptr);
  }

  std::mutex mutex_;  // of end_
  std::function<void(const std::string&)> end_;
  std::jthread watch_;
};
