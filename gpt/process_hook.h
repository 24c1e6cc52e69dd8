// How a room takes part in a process from its start to its end. A folder of extensions/ or runtime/ with a file hook.cuh may have
// a function in it, called NAME_process_hook, which takes the command line and returns the room's ProcessHook, or null if it is
// not asked for; dev/make/rooms.sh writes the list. All ranks have the same hooks.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

class ProcessHook {
 public:
  virtual ~ProcessHook() = default;

  // On rank 0, while the process has one thread, and no MPI or CUDA.
  virtual void start(int argc, char** argv) = 0;
  // This run has locked its folder.
  virtual void has_folder() = 0;
  // A checkpoint is complete. best: step of the best one so far; 0: there is none. Returns the step of a checkpoint that must
  // stay; 0: none.
  virtual size_t checkpoint(size_t step, size_t best) = 0;
  // The process ends. reason: "done", "stopped" or "error". May be called by any thread, and more than once.
  virtual void end(const char* reason, int exit_code) = 0;
  // Seconds that end() takes at most after an error.
  virtual double longest_wait() const = 0;
};

using ProcessHooks = std::vector<std::unique_ptr<ProcessHook>>;
ProcessHooks process_hooks(int argc, char** argv);
