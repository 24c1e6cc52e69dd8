// What --out may be when a run starts, and which checkpoint the run continues from:
//
//   a fresh run      a folder that holds a run (metrics or checkpoints) needs --overwrite, which removes
//                    these and nothing else; a folder that holds anything else is simply used. --overwrite --init
//                    with one of these checkpoints is refused: it would delete what the run starts from
//   --resume         the newest checkpoint in --out; none there: the run starts afresh
//   --resume DIR     a checkpoint, or the newest one of a run; none there: an error. Going back to an earlier
//                    checkpoint of --out sets the later ones aside, as step_00000200.abandoned
//
// With several ranks the folder is the one that rank 0 sees (runtime/shared_checkpoint.h).
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/checkpoint.h"
#include "runtime/files.h"

struct RunStart {
  bool overwrite = false;
  bool resume = false;
  std::filesystem::path resume_from = {};  // with resume; empty: from --out
  std::filesystem::path init = {};         // weights that must outlive --overwrite
};

// One run at a time writes to a folder. The lock is on the folder itself, and the kernel takes it back when the process
// ends, however it ends. (Some network file systems have no locks.)
class RunFolderLock {
 public:
  // Makes the folder if need be, and sees that it can be written to. Waits for a run that is on its way out: one that was
  // killed, or told to stop before this one was started.
  explicit RunFolderLock(const std::filesystem::path& out, double patience_s = 60);
  // Removes the folder if nothing has come into it.
  ~RunFolderLock();
  RunFolderLock(const RunFolderLock&) = delete;
  RunFolderLock& operator=(const RunFolderLock&) = delete;

 private:
  bool is_in_place() const;

  std::filesystem::path out_;
  bool created_;
  std::optional<File> folder_;
};

std::filesystem::path metrics_path(const std::filesystem::path& out);

bool holds_run(const std::filesystem::path& out);

// A checkpoint folder itself, or a run folder's newest checkpoint.
std::optional<Checkpoint> find_checkpoint(const std::filesystem::path& folder);

// Does the run go on where the one in --out stopped?
bool continues(const std::filesystem::path& out, const RunStart& start,
               const std::optional<Checkpoint>& checkpoint);

// The checkpoint to start from, if any; nothing is changed yet. `out` empty: nothing will be written.
std::optional<Checkpoint> choose_checkpoint(const std::filesystem::path& out, const RunStart& start);

// Those of its run that come before it, oldest first, then itself.
std::vector<Checkpoint> with_earlier(const Checkpoint& found);

// The newest of them that is whole. damage(folder): what is wrong with a checkpoint; empty: nothing.
Checkpoint whole_checkpoint(std::vector<Checkpoint> candidates, const RunStart& start,
                            const std::function<std::string(const std::filesystem::path&)>& damage);

// Makes the locked folder this run's. Comes last of all preparations: a mistake found later would have cost the old run.
void claim_run_folder(const std::filesystem::path& out, const RunStart& start, const std::optional<Checkpoint>& checkpoint);
