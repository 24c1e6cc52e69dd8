// What --out may be when a run starts, and which checkpoint the run continues from:
//
//   a fresh run      a folder that holds a run (metrics or checkpoints) needs --overwrite, which removes
//                    these and nothing else; a folder that holds anything else is simply used
//   --resume         the newest checkpoint in --out; none there: the run starts afresh
//   --resume DIR     a checkpoint, or the newest one of a run; none there: an error. Going back to an earlier
//                    checkpoint of --out sets the later ones aside, as step_00000200.abandoned
#pragma once

#include <sys/file.h>

#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>

#include "runtime/checkpoint.h"
#include "runtime/error.h"
#include "runtime/files.h"

struct RunStart {
  bool overwrite = false;
  bool resume = false;
  std::filesystem::path resume_from = {};  // with resume; empty: from --out
};

// One run at a time writes to a folder. The lock is on the folder itself, and the kernel takes it back when the process
// ends, however it ends. (Some network file systems have no locks.)
class RunFolderLock {
 public:
  // Waits for a run that is on its way out: one that was killed, or told to stop before this one was started.
  explicit RunFolderLock(const std::filesystem::path& out, double patience_s = 60) : folder_(out, O_RDONLY | O_DIRECTORY) {
    for (double waited = 0; flock(folder_.descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; waited += 0.1) {
      if (waited == 0) std::printf("waiting for the run that still writes to %s\n", out.c_str()), std::fflush(stdout);
      if (waited >= patience_s)
        fail("--out ", out, ": another run writes to it: let it end, or choose another --out");
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }

 private:
  File folder_;
};

inline std::filesystem::path metrics_path(const std::filesystem::path& out) { return out / "metrics.jsonl"; }

inline bool holds_run(const std::filesystem::path& out) {
  return std::filesystem::exists(metrics_path(out)) || newest_checkpoint(out);
}

// A checkpoint folder itself, or a run folder's newest checkpoint.
inline std::optional<Checkpoint> find_checkpoint(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / "trainer.json")) return newest_checkpoint(folder);
  return Checkpoint{load_trainer(folder)["step"], folder};
}

// Creates the folder if need be, and learns now rather than after hours whether it can be written to.
inline void make_writable(const std::filesystem::path& out) {
  std::error_code error;
  std::filesystem::create_directories(out, error);
  if (error) fail("--out ", out, ": cannot create the folder: ", error.message(), ": choose another --out");
  if (!std::filesystem::is_directory(out)) fail("--out ", out, ": is no folder: choose another --out");
  std::filesystem::path probe = out / ".write_probe";
  try {
    write_file(probe, std::string(4096, ' '));
  } catch (const std::exception& problem) {
    std::filesystem::remove(probe, error);
    fail("--out ", problem.what(), ": free space, or choose another --out");
  }
  std::filesystem::remove(probe);
}

inline void remove_run(const std::filesystem::path& out) {
  for (const Checkpoint& checkpoint : list_checkpoints(out)) remove_checkpoint(checkpoint.folder);
  std::filesystem::remove(metrics_path(out));
}

// What a run does after going back must neither be pruned in favour of its old future nor resumed from there.
inline void set_aside_later(const std::filesystem::path& out, size_t step) {
  for (const Checkpoint& checkpoint : list_checkpoints(out)) {
    if (checkpoint.step <= step) continue;
    std::filesystem::path aside = checkpoint.folder.string() + ".abandoned";
    std::filesystem::remove_all(aside);
    std::filesystem::rename(checkpoint.folder, aside);
  }
}

inline bool lies_in(const std::filesystem::path& folder, const std::filesystem::path& out) {
  return std::filesystem::weakly_canonical(folder / "..") == std::filesystem::weakly_canonical(out);
}

// Does the run go on where the one in --out stopped?
inline bool continues(const std::filesystem::path& out, const RunStart& start,
                      const std::optional<Checkpoint>& checkpoint) {
  return start.resume && (start.resume_from.empty() || lies_in(checkpoint->folder, out));
}

// The checkpoint to start from, if any; nothing is changed yet. `out` empty: nothing will be written.
inline std::optional<Checkpoint> choose_checkpoint(const std::filesystem::path& out, const RunStart& start) {
  const std::filesystem::path& from = start.resume_from;
  std::optional<Checkpoint> checkpoint;
  if (start.resume) checkpoint = find_checkpoint(from.empty() ? out : from);
  if (!from.empty() && !checkpoint) {
    fail("--resume ", from, ": holds no checkpoint: give a run's folder or one of its step_ folders");
  }
  if (out.empty()) return checkpoint;
  const bool goes_on = continues(out, start, checkpoint);
  if (goes_on && start.overwrite) {
    fail("--resume continues the run in ", out, ", --overwrite deletes it: give one of them");
  }
  if (!goes_on && !start.overwrite && holds_run(out)) {
    fail("--out ", out,
         ": holds a run: continue it with --resume, replace it with --overwrite, or choose another --out");
  }
  return checkpoint;
}

// `found`, or the newest before it that is whole. damage(folder): what is wrong with a checkpoint; empty: nothing.
template <class Damage>
Checkpoint whole_checkpoint(Checkpoint found, const RunStart& start, Damage damage) {
  const std::filesystem::path run = found.folder.parent_path();
  std::vector<Checkpoint> others = list_checkpoints(run);
  for (std::string problem; !(problem = damage(found.folder)).empty(); found = others.back()) {
    if (found.folder == start.resume_from) fail("--resume ", problem, ": name another checkpoint");
    std::printf("skipping checkpoint %s: %s\n", found.folder.c_str(), problem.c_str());
    std::erase_if(others, [&](const Checkpoint& checkpoint) { return checkpoint.step >= found.step; });
    if (others.empty())
      fail("--resume: no checkpoint in ", run, " is whole: start afresh with --overwrite, or from weights with --init");
  }
  return found;
}

// Makes the folder this run's, and the lock its lock if it isn't yet. Comes last of all preparations: a mistake found
// later would have cost the old run.
inline void claim_run_folder(const std::filesystem::path& out, const RunStart& start,
                             const std::optional<Checkpoint>& checkpoint, std::optional<RunFolderLock>& lock) {
  make_writable(out);
  if (!lock) {
    lock.emplace(out);
    choose_checkpoint(out, start);  // another run may have made the folder meanwhile
  }
  if (start.overwrite) remove_run(out);
  if (checkpoint && continues(out, start, checkpoint)) set_aside_later(out, checkpoint->step);
}
