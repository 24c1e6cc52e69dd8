// Which files --out may hold when a run starts, and which checkpoint the run continues from:
//
//   a new run        a folder that holds a run (metrics or checkpoints) needs --overwrite, which removes
//                    these, the run's plan.json and monitor.jsonl, its link `best` (of --keep-best), and nothing else; a
//                    folder that holds anything else is simply used.
//                    --overwrite --init with one of these checkpoints is refused: it would delete the
//                    weights that the run starts from
//   --resume         continues from the newest checkpoint in --out; if there is none, the run starts afresh
//   --resume DIR     continues from a checkpoint, or from the newest one of a run; if there is none, it fails. If it
//                    goes back to an earlier checkpoint of --out, the later ones are renamed to
//                    step_00000200.abandoned
//
// With several ranks the folder is the one that rank 0 sees (runtime/checkpoints/shared_checkpoint.h).
#pragma once

#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "gpt/base/files.h"
#include "gpt/checkpoint.h"

// Complete checkpoints of a run, oldest first; none if the folder does not exist.
std::vector<Checkpoint> list_checkpoints(const std::filesystem::path& out);

std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& out);

// Removes the folders that an interrupted save or removal left behind.
void remove_partial_checkpoints(const std::filesystem::path& out);

// Renames the checkpoint before it removes it, because a checkpoint that is half removed must not look complete.
void remove_checkpoint(const std::filesystem::path& folder);

// Removes all checkpoints except the newest `keep` (0: all) and those whose step is a multiple of `keep_every` (0: no
// others), and those of the steps `spared`.
void prune_checkpoints(const std::filesystem::path& out, size_t keep, size_t keep_every, const std::vector<size_t>& spared = {});

struct StartOptions {
  bool overwrite = false;
  bool resume = false;
  std::filesystem::path resume_from = {};  // the folder to resume from; empty: --out
  std::filesystem::path init = {};         // weights that must outlive --overwrite
  const char* option = "--resume";         // the option that messages name
  std::FILE* notes = stdout;               // where it is said that a checkpoint is skipped
};

// Makes sure that only one run at a time writes to a folder. The lock is on the folder itself, and the operating system
// releases it when the process ends, in whatever way. (Some network file systems have no locks.)
class RunFolderLock {
 public:
  // Creates the folder if it does not exist, and checks that it can be written to. Waits for another run that is just
  // ending, because it was killed or was told to stop.
  explicit RunFolderLock(const std::filesystem::path& out, double patience_s = 200);
  // Removes the folder if this object created it and it is still empty.
  ~RunFolderLock();
  RunFolderLock(const RunFolderLock&) = delete;
  RunFolderLock& operator=(const RunFolderLock&) = delete;

 private:
  std::filesystem::path out_;
  bool created_;
  std::optional<File> folder_;
};

std::filesystem::path metrics_path(const std::filesystem::path& out);

std::filesystem::path monitor_path(const std::filesystem::path& out);  // load of devices and hosts (runtime/monitor/monitor.h)

std::filesystem::path plan_path(const std::filesystem::path& out);  // memory of each rank (runtime/planner/plan.h)

// The step of the checkpoint that the link OUT/best names, the one of the lowest val_loss; 0: there is no
// link, or no such checkpoint.
size_t linked_best(const std::filesystem::path& out);

// Makes OUT/best name the checkpoint of this step, without a moment in which it names none.
void link_best(const std::filesystem::path& out, size_t step);

bool holds_run(const std::filesystem::path& out);

// `folder` itself if it is a checkpoint; the newest checkpoint if it is a run's folder.
std::optional<Checkpoint> find_checkpoint(const std::filesystem::path& folder);

// Does this run continue the run in --out?
bool continues(const std::filesystem::path& out, const StartOptions& start,
               const std::optional<Checkpoint>& checkpoint);

// The checkpoint to start from, if any; nothing is changed yet. `out` empty: nothing will be written.
std::optional<Checkpoint> choose_checkpoint(const std::filesystem::path& out, const StartOptions& start);

// The checkpoints of the same run that are older than `found`, oldest first, then `found` itself.
std::vector<Checkpoint> with_earlier(const Checkpoint& found);

// Makes the locked folder this run's, and removes an old run if --overwrite says so. To be called after all other
// preparations: if one of them failed after this, the old run would be lost for nothing.
void claim_run_folder(const std::filesystem::path& out, const StartOptions& start, const std::optional<Checkpoint>& checkpoint);
