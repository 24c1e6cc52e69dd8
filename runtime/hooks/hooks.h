// Commands that a run calls: --after-checkpoint, --stop-when and --on-end (dev/cluster/hooks.md has some).
//
// Rank 0 forks a helper before it starts MPI and CUDA. The helper runs the commands, so that they cost training
// nothing, and outlives the training process: if that is killed, the helper still finishes the last upload and calls
// --on-end. The two share a page of memory, HookState. A pipe that only rank 0 holds open tells the helper when rank 0
// has ended.
//
// A hook is run by /bin/sh in a process group of its own, without input. Its environment has GPT_OUT, GPT_STEP and
// GPT_CHECKPOINT (the folder of the newest checkpoint, or of the one to upload), and at the end GPT_REASON (done,
// stopped, time, error, killed), GPT_EXIT_CODE and GPT_UPLOADED (1 if --after-checkpoint has succeeded for the last
// checkpoint, and for the one that OUT/best names if there is one, else 0).
#pragma once

#include <atomic>
#include <climits>
#include <csignal>
#include <cstddef>
#include <mutex>

#include <sys/types.h>

#include "gpt/process_hook.h"
#include "runtime/hooks/options.h"

struct HookState {
  // Written by rank 0
  char out[PATH_MAX] = "";                // the run's folder
  std::atomic<bool> has_begun = false;    // from now on hooks are called
  std::atomic<bool> has_folder = false;   // rank 0 has locked it
  std::atomic<bool> trains = false;       // from now on --stop-when is asked
  std::atomic<size_t> newest = 0;         // step of the newest checkpoint; 0: there is none
  std::atomic<size_t> best = 0;           // step of the best one (--keep-best); 0: there is none
  std::atomic<const char*> reason = "killed";  // unless rank 0 says how it ends
  std::atomic<int> exit_code = 128 + SIGKILL;
  // Written by the helper
  std::atomic<size_t> uploading = 0;  // step of the checkpoint that must stay, as it is being uploaded; 0: none
  std::atomic<bool> asks_to_stop = false;
  std::atomic<size_t> failures = 0;
};

// Each rank has one, if the command line asks for any; only rank 0 forks a helper. Without a helper the calls do nothing,
// except end().
class Hooks : public ProcessHook {
 public:
  explicit Hooks(const HookOptions& options) : options_(options) {}
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

  // Forks the helper. From now on --on-end is called, however this process ends.
  void start(int argc, char** argv) override;
  void has_folder() override { if (state_) state_->has_folder = true; }
  // The checkpoint that is being uploaded must stay.
  size_t checkpoint(size_t step, size_t best) override;

  // Has --stop-when succeeded? It is asked from the first call on: a start that waits for the run before must not take
  // its answer away.
  bool asks_to_stop() {
    if (state_) state_->trains = true;
    return state_ && state_->asks_to_stop;
  }
  // The number of failures of hooks. Prints a message if the helper is gone.
  size_t failures();

  // Tells the helper that this run ends, and waits until its hooks have been run. Meanwhile SIGTERM, SIGHUP and SIGUSR1
  // have no effect, as the end is under way. After a mistake of the command line (exit code 2) --on-end is not called.
  // Only the first call counts; another thread's call waits, too.
  void end(const char* reason, int exit_code) override;

  // Seconds that end() takes at most: for the upload, for --on-end, and for ending commands that still run.
  double longest_wait() const override { return longest_wait("error"); }
  double longest_wait(const char* reason) const { return 2 * options_.limit(reason) + 30; }

  // Why the run was stopped, for GPT_REASON: "stopped" or "time".
  const char* stop_reason = "stopped";

 private:
  void fork_helper();
  bool helper_has_ended();

  HookOptions options_;
  HookState* state_ = nullptr;     // shared with the helper
  std::atomic<pid_t> helper_ = 0;  // 0: there is none, or it has ended
  int helper_status_ = 0;          // how it has ended
  int pipe_ = -1;                  // its end tells the helper that this process has ended
  std::atomic<bool> is_ending_ = false;
  std::once_flag ended_;
};
