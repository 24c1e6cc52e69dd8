// The start of a run: the folder that it writes to, the checkpoint that it continues, and the folder of its weights. Until claim()
// it changes no file of an earlier run; the constructor creates the folder, if it is not there, and a lock in it.
#pragma once

#include <filesystem>
#include <optional>

#include <nlohmann/json.hpp>

#include "gpt/agreement.h"
#include "gpt/batches.cuh"
#include "gpt/job.cuh"
#include "runtime/checkpoints/run_folder.h"
#include "runtime/checkpoints/shared_checkpoint.h"
#include "runtime/reports/bill.h"

class StartOfRun {
 public:
  // Collective.
  StartOfRun(Job& job, const Datasets& data)
      : job_(job), start_{job.options.overwrite, job.options.resume, job.options.resume_from, job.options.init},
        lock_(lock_of(job)), checkpoint_(agreed_checkpoint(data)), copies_({job.ranks}, job.options.out),
        weights_(checkpoint_ ? copies_.folder_of(checkpoint_->folder) : std::filesystem::path(job.options.init)) {}

  const std::optional<Checkpoint>& checkpoint() const { return checkpoint_; }
  // Ranks that don't share rank 0's disk read its checkpoint from a copy.
  CheckpointCopies& copies() { return copies_; }
  // The folder of the weights to start from; empty: there are none.
  const std::filesystem::path& weights() const { return weights_; }
  // The folder that may hold the weights' tokenizer.
  std::filesystem::path tokenizer() const { return weights_.empty() ? std::filesystem::path(job_.options.out) : weights_; }
  // Does this rank write to the run folder? Rank 0 does: while it lives, no other run writes there.
  bool writes() const { return lock_.has_value(); }

  // Makes the run folder this run's. steps: done before this start. Collective.
  void claim(Bill& bill, size_t steps) {
    const std::string& out = job_.options.out;
    job_.ranks.all_gather("", Ranks::for_slow_disks);  // wait until all ranks have read the run folder, before rank 0 changes it
    if (checkpoint_ && continues(out, start_, checkpoint_)) bill.restore(metrics_path(out), steps);
    if (lock_) claim_run_folder(out, start_, checkpoint_);
  }

 private:
  static std::optional<RunFolderLock> lock_of(const Job& job) {
    if (!job.is_first() || job.options.out.empty()) return {};
    return std::optional<RunFolderLock>(std::in_place, job.options.out);
  }
  // Tells the hooks of the folder, requires that all ranks see the same data, and chooses the checkpoint to continue. Collective.
  std::optional<Checkpoint> agreed_checkpoint(const Datasets& data) const {
    if (lock_)
      for (const auto& hook : job_.hooks) hook->has_folder();
    require_agreement(job_.ranks, "data", {data.identity.train.text(), nlohmann::json(data.identity.val).dump()}, "all ranks must see the same files",
                      Ranks::for_slow_disks);  // rank 0 may have waited for the folder's lock
    return choose_shared_checkpoint(job_.options.out, start_, {job_.ranks});
  }

  Job& job_;
  const StartOptions start_;
  std::optional<RunFolderLock> lock_;
  const std::optional<Checkpoint> checkpoint_;
  CheckpointCopies copies_;
  const std::filesystem::path weights_;
};
