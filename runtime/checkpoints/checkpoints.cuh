// The checkpoints of a run: writes them while training goes on, and loads one again for a rollback.
#pragma once

#include <memory>
#include <vector>

#include "runtime/checkpoints/checkpoint_writer.h"
#include "runtime/checkpoints/options.h"
#include "runtime/checkpoints/run_folder.h"
#include "runtime/checkpoints/state.cuh"
#include "runtime/reports/bill.h"
#include "runtime/reports/report.h"

class Checkpoints {
 public:
  // newest: the checkpoint that the run starts from, if any; tokenizer_folder: the folder that may hold the weights'
  // tokenizer. Allocates the memory for snapshots. Without --out no checkpoint is written. All calls are collective.
  Checkpoints(TrainingState& state, Bill& bill, const std::optional<Checkpoint>& newest,
              const std::filesystem::path& tokenizer_folder)
      : state_(state), bill_(bill), newest_(newest), tokenizer_folder_(tokenizer_folder),
        writer_(state.job.options.out, size_t(state.job.options.of<CheckpointFiles>().shard_size * 1e9), {state.job.ranks, state.job.mesh.shape().tp}, snapshot(state.job)) {
    state.job.ranks.all_gather("", Ranks::for_slow_disks);  // no rank takes memory before all ranks have measured how much is free
    if (!state.job.options.out.empty()) writer_.reserve(written_blocks(state.model, RankGroup::chunk_bytes_for(state.job.ranks.size())), saved_states(state.job.options, state.job.mesh));
    state.job.ranks.before_end([this](const auto& all_are_there) { return writer_.finish_alone(120, all_are_there); });
  }
  ~Checkpoints() { state_.job.ranks.before_end({}); }
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  size_t snapshot_bytes() const { return writer_.snapshot_bytes(); }

  // Says whether the best checkpoint is elsewhere, and for which ranks training will wait while a checkpoint is written. To be
  // called when the run folder exists.
  void describe() {
    const Options& o = state_.job.options;
    if (o.out.empty()) return;
    const auto& [loss, step, since] = state_.best;
    if (state_.misses_best())
      std::printf("best      so far val_loss %.4f after step %zu, whose checkpoint is not in %s: bring %s there, too; else OUT/best "
                  "waits for a lower one\n", loss, step, o.out.c_str(), checkpoint_name(step).c_str());
    for (const std::string& reason : writer_.find_slow_ranks()) std::printf("saving    %s\n", reason.c_str());
  }

  // Is there a checkpoint to go back to? Waits for the one under way, because the speed of the disk must not change the
  // training.
  bool can_roll_back() {
    complete();
    return newest_.has_value();
  }

  // Has this rank written its part of the checkpoint under way?
  bool is_written() const { return writer_.under_way() && writer_.is_written(); }

  // Takes a snapshot, which is written while training goes on. If the disk fails, that is an error if the checkpoint is
  // `needed`; otherwise the run says so and goes on without it.
  void save(bool needed) {
    complete();
    const AddTime timer(bill_.lost.checkpoints);
    needed_ = needed;
    const std::string problem = writer_.begin(state_.progress.step, content_of(state_, tokenizer_folder_));
    if (!problem.empty()) report_unsaved(problem);
  }

  // Waits until the checkpoint under way, if any, is complete and has its final name.
  void complete() {
    if (!writer_.under_way()) return;
    const Options& o = state_.job.options;
    const Clock::time_point begin = Clock::now();
    const std::string problem = writer_.complete();
    if (problem.empty()) {
      newest_ = Checkpoint{writer_.step(), o.out / std::filesystem::path(checkpoint_name(writer_.step()))};
      tokenizer_folder_ = newest_->folder;  // the folder used so far may be pruned
      link_best();
      std::vector<size_t> spared = {best_};
      for (const auto& hook : state_.job.hooks) spared.push_back(hook->checkpoint(newest_->step, best_));
      writer_.prune(o.keep, o.of<CheckpointFiles>().keep_every, spared);
    } else {
      report_unsaved(problem);
    }
    if (is_ready(state_.model.stream())) bill_.lost.checkpoints += seconds_since(begin);  // else a step went on meanwhile
  }

  // Loads the newest checkpoint; can_roll_back() must have said that there is one. Training then goes on with the
  // samples that follow step `from`, which went wrong. Gradients that wait there (--delay) may be the cause.
  Rollback roll_back(size_t from, const std::string& reason) {
    state_.guard.count_rollback();
    const size_t global_batch = size_t(state_.job.options.global_batch), left_out_before = state_.progress.samples_left_out;
    load_checkpoint(state_, *newest_, false);
    state_.copies.release();
    Progress& progress = state_.progress;
    const size_t first = progress.first_sample(global_batch), next = from * global_batch + left_out_before;
    progress.samples_left_out += next - first;
    return {progress.step, from, first, next - 1, reason};
  }

 private:
  // Returns a function that allocates memory for snapshots, pinned where possible, or returns null if there is too
  // little.
  static Allocate snapshot(Job& job) {
    return [&job, room = host_memory_room(job.ranks.neighbours())](size_t floats) {
      const auto memory = take_host_memory(floats * sizeof(float), room);
      if (!memory) return std::shared_ptr<float[]>();
      if (!memory->is_pinned())
        print_error("rank " + std::to_string(job.ranks.rank()) + " (" + job.ranks.host(job.ranks.rank()) + ") has no " +
                    bytes_text(floats * sizeof(float)) + " of pinned memory: checkpoints go through pageable memory, slower");
      return std::shared_ptr<float[]>(memory, static_cast<float*>(memory->data()));
    };
  }

  // On rank 0: links OUT/best to the checkpoint of the best validation, if that is complete.
  void link_best() {
    const Options& o = state_.job.options;
    if (best_ == 0) best_ = linked_best(o.out);
    const std::filesystem::path folder = o.out / std::filesystem::path(checkpoint_name(state_.best.step));
    if (!o.of<CheckpointFiles>().keep_best || !state_.job.is_first() || state_.best.step == best_ || !std::filesystem::exists(folder)) return;
    best_ = state_.best.step;
    const std::string problem = attempt([&] { ::link_best(o.out, best_); });
    if (!problem.empty() && !std::exchange(is_unlinked_, true))
      print_error("training goes on without a link to the best checkpoint, which is kept: " + one_line(problem));
  }

  void report_unsaved(const std::string& problem) const {
    if (needed_) fail(problem, ": check the folder and its space, and go on with --resume");
    if (state_.job.is_first())
      print_error("the checkpoint of step " + std::to_string(writer_.step()) + " could not be written, training goes on: " +
                  one_line(problem) + ": check the folder and its space");
  }

  TrainingState& state_;
  Bill& bill_;
  std::optional<Checkpoint> newest_;
  std::filesystem::path tokenizer_folder_;
  CheckpointWriter writer_;
  bool needed_ = false;  // the checkpoint under way
  size_t best_ = 0;           // on rank 0: step of the best checkpoint, which is not pruned; 0: there is none
  bool is_unlinked_ = false;  // it has been said that there is no link to it
};
