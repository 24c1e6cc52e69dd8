// Checkpoints of a run: written while training goes on, and gone back to.
#pragma once

#include <memory>

#include "runtime/bill.h"
#include "runtime/checkpoint_writer.h"
#include "runtime/report.h"
#include "training/state.cuh"

class Checkpoints {
 public:
  // newest: the one that the run goes on from, if any; tokenizer_folder: where a tokenizer may be that belongs to the
  // weights. Takes the memory for snapshots. Without --out none is written. Collective, as is the rest.
  Checkpoints(TrainingState& state, Bill& bill, const std::optional<Checkpoint>& newest,
              const std::filesystem::path& tokenizer_folder)
      : state_(state), bill_(bill), newest_(newest), tokenizer_folder_(tokenizer_folder),
        writer_(state.job.options.out, size_t(state.job.options.shard_size * 1e9), state.job.ranks, snapshot(state.job)) {
    state.job.ranks.all_gather("");  // all know how much room there is, none has taken it
    if (!state.job.options.out.empty())
      writer_.reserve(checkpoint_slices(state.model.store().shards().slices_of_rank()));
    state.job.control.before_end([this](const auto& all_are_there) { return writer_.finish_alone(120, all_are_there); });
  }
  ~Checkpoints() { state_.job.control.before_end({}); }
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  size_t snapshot_bytes() const { return writer_.snapshot_bytes(); }

  // When the run folder is there: says for which ranks training will wait.
  void describe() {
    if (state_.job.options.out.empty()) return;
    for (const std::string& reason : writer_.find_slow_ranks()) std::printf("saving    %s\n", reason.c_str());
  }

  // Is there one to go back to? Waits for the one under way: how fast the disk is must not decide what is trained.
  bool can_roll_back() {
    complete();
    return newest_.has_value();
  }

  // Has this rank written its part of the one under way?
  bool is_written() const { return writer_.under_way() && writer_.is_written(); }

  // Takes a snapshot, which is written while training goes on. Disks may fail: where `needed` that is an error, elsewhere
  // the run can do without.
  void save(bool needed) {
    complete();
    const AddTime timer(bill_.lost.checkpoints);
    needed_ = needed;
    const std::string problem = writer_.begin(state_.progress.step, content_of(state_, tokenizer_folder_));
    if (!problem.empty()) report_unsaved(problem);
  }

  // Waits until the checkpoint under way, if any, has got its name.
  void complete() {
    if (!writer_.under_way()) return;
    const Options& o = state_.job.options;
    const AddTime timer(bill_.lost.checkpoints);
    const std::string problem = writer_.complete();
    if (problem.empty()) {
      newest_ = Checkpoint{writer_.step(), o.out / std::filesystem::path(checkpoint_name(writer_.step()))};
      tokenizer_folder_ = newest_->folder;  // the one before may be pruned
      writer_.prune(o.keep, o.keep_every);
    } else {
      report_unsaved(problem);
    }
  }

  // To the newest one, where there is one, and on with the samples that follow step `from`, which went wrong.
  Rollback roll_back(size_t from, const std::string& reason) {
    state_.guard.count_rollback();
    const size_t global_batch = size_t(state_.job.options.global_batch), left_out_before = state_.progress.samples_left_out;
    load_checkpoint(state_, *newest_);
    state_.copies.release();
    Progress& progress = state_.progress;
    const size_t first = progress.first_sample(global_batch), next = from * global_batch + left_out_before;
    progress.samples_left_out += next - first;
    return {progress.step, from, first, next - 1, reason};
  }

 private:
  // Memory for snapshots, pinned if that can be had; null: there is not so much.
  static Allocate snapshot(Job& job) {
    return [&job, room = host_memory_room(job.ranks.neighbours())](size_t floats) {
      const auto memory = take_host_memory(floats * sizeof(float), room);
      if (!memory) return std::shared_ptr<float[]>();
      if (!memory->is_pinned())
        print_error("rank " + std::to_string(job.control.rank()) + " (" + job.control.host(job.control.rank()) + ") has no " +
                    bytes_text(floats * sizeof(float)) + " of pinned memory: checkpoints go through pageable memory, slower");
      return std::shared_ptr<float[]>(memory, static_cast<float*>(memory->data()));
    };
  }

  void report_unsaved(const std::string& problem) const {
    if (needed_) fail(problem);
    if (state_.job.is_first())
      print_error("the checkpoint of step " + std::to_string(writer_.step()) + " could not be written, training goes on: " +
                  one_line(problem));
  }

  TrainingState& state_;
  Bill& bill_;
  std::optional<Checkpoint> newest_;
  std::filesystem::path tokenizer_folder_;
  CheckpointWriter writer_;
  bool needed_ = false;  // the one under way
};
