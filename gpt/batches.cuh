// From files to passes: the data of a run (open_data); the samples of a step, of which this rank reads its share (gpt/deal.h) and
// sends it to the device (Batches); a step and a validation over them (run_step, validation_losses).
#pragma once

#include <future>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gpt/actions.h"
#include "gpt/batch_buffers.cuh"
#include "gpt/data.h"
#include "gpt/job.cuh"
#include "gpt/step_result.h"

struct Datasets {
  std::unique_ptr<DataCache> cache;  // null: there is none
  std::optional<TokenData> train;
  std::vector<TokenData> validation;  // the sets of --val
  RunData identity;  // numbers of tokens and checksums, to recognise the same data
};

inline Datasets open_data(const Options& o) {
  Datasets data;
  if (o.train.empty()) return data;  // a plan needs none
  for (const Room* room : rooms())
    if (room->data_cache) data.cache = room->data_cache(o);
  data.train.emplace(o.train, data.cache.get());
  data.identity.train = data.train->identity();
  for (const auto& [key, files] : o.val) {
    const TokenData& set = data.validation.emplace_back(files, data.cache.get());
    if (set.is_text() != data.train->is_text())
      usage_error("--train and --val (", key, "): one is text, the other .bin shards; use one kind");
    data.identity.val[key] = concat(set.identity().text(), ", ", o.val_batches, " batches");
  }
  return data;
}

inline void check_enough(const Options& o, const TokenData& data, const std::string& option, size_t samples) {
  if (data.samples(o.seq_len) < samples)
    fail(option, ": ", data.tokens(), " tokens hold ", data.samples(o.seq_len), " samples of ", o.seq_len, ", and ",
         samples, " are needed: give more data, or lower --seq-len, --global-batch or --val-batches");
}

class Batches {
 public:
  // waited: is increased by the seconds for which the device waits for training samples.
  Batches(const Job& job, const Model& model, const Datasets& data, double& waited)
      : options_(job.options), model_(model), waited_(waited), batch_rank_(job.options.batch_rank(job.mesh.place())), deal_(job.options.deal()),
        sent_(size_t(model.options().slots)), buffers_(memory_for(model), job.stream),
        train_(*this, {&data.train.value(), 1}, true, SIZE_MAX) {  // one set, all of it: SampleOrder begins it again
    const size_t validated = options_.val_batches * size_t(options_.global_batch);
    if (!data.validation.empty()) validation_.emplace(*this, data.validation, false, validated);
  }

  // The buffers that a model trains with.
  static BatchMemory memory_for(const Model& model) {
    return {model.options().micro_batch * model.positions().length, model.options().slots + 1};
  }

  // The samples of a global batch. While a micro-batch is computed, threads read the next ones, all at the same time,
  // so that a step does not wait for storage that answers late.
  class Samples {
   public:
    // Takes the first `each` samples of a set (a multiple of the global batch), those of the next set, and after the last
    // set the same again. All sets share the reads ahead, which take as much memory as with one set. Validation takes samples
    // in the order of the data, so that order_ fits all sets.
    Samples(Batches& batches, std::span<const TokenData> sets, bool training, size_t each)
        : batches_(batches), sets_(sets), training_(training), each_(each),
          order_(sets[0].samples(batches.options_.seq_len), training && batches.options_.shuffle, batches.options_.seed) {}

    // The global batch that begins with sample number `first`.
    Samples& at(size_t first) {
      first_ = first;
      return *this;
    }

    // The micro-batch of an action. Forward makes it, backward finds it again. Stages with the embedding or the head
    // read its tokens and send them to the device; the others need only its sizes.
    Batch batch(const Action& action) {
      Batch& sent = batches_.sent_[size_t(action.slot)];
      if (action.work == Work::forward) sent = batches_.load(*this, action);
      TraceContext& context = Profiler::instance().context;
      context.micro_batch = batches_.number_of(action);
      context.work = name_of(action.work);
      context.chunk = action.chunk;
      Batch batch = sent;
      batch.action = action;
      return batch;
    }

   private:
    friend Batches;

    // Inputs and targets, (2,B,T), of this rank's micro-batch in a micro-step. get() fails if they can't be read. (An
    // error in those that are read ahead waits until they are asked for.)
    std::future<std::vector<int>> tokens(int micro_step) {
      for (int i = 0; i < at_once; ++i) {
        const size_t number = first_sample(micro_step + i);
        if (!ahead_.contains(number)) ahead_[number] = std::async([this, number] { return read(number); });
      }
      return std::move(ahead_.extract(first_sample(micro_step)).mapped());
    }
    // The first sample of this rank's micro-batch in a micro-step. Those beyond the last are of the next steps.
    size_t first_sample(int micro_step) const {
      const int own = batches_.deal_.of_rank(batches_.batch_rank_), steps = micro_step / own;
      const int number = batches_.deal_.number(batches_.batch_rank_, micro_step % own);
      const Options& o = batches_.options_;
      return (first_ + size_t(steps) * size_t(o.global_batch) + size_t(number * o.micro_batch)) % (each_ * sets_.size());
    }

    // Samples that are neighbours in the data are read at once.
    std::vector<int> read(size_t number) const {
      const TokenData& data = sets_[number / each_];
      const size_t first = number % each_;
      const size_t B = size_t(batches_.options_.micro_batch), T = size_t(batches_.options_.seq_len);
      std::vector<int> tokens(2 * B * T);
      for (size_t b = 0, count; b < B; b += count) {
        const size_t sample = order_(first + b);
        for (count = 1; b + count < B && order_(first + b + count) == sample + count;) ++count;
        data.read_samples(sample, count, int(T), batches_.model_.tensors().shape().vocabulary, &tokens[b * T],
                           &tokens[(B + b) * T]);
      }
      return tokens;
    }

    static constexpr int at_once = 4;  // micro-batches; a thread for each, whose stack is 8 MB as a rule
    Batches& batches_;
    const std::span<const TokenData> sets_;
    const bool training_;
    const size_t each_;
    const SampleOrder order_;
    size_t first_ = 0;  // number of the global batch's first sample
    std::map<size_t, std::future<std::vector<int>>> ahead_;  // by first sample; declared last: it waits for the threads
  };

  Samples& of_step(const Progress& progress) { return train_.at(progress.first_sample(size_t(options_.global_batch))); }
  // Global batches 0 to val_batches - 1 are the first set's, the next ones the second set's, ...
  Samples& of_validation(size_t number) { return validation_->at(number * size_t(options_.global_batch)); }

  // To be called between two steps after options.shares have changed.
  void deal_anew() {
    deal_ = options_.deal();
    train_.ahead_.clear();
    if (validation_) validation_->ahead_.clear();
  }

  BatchBuffers& buffers() { return buffers_; }
  int micro_steps() const { return options_.micro_steps(batch_rank_); }  // of this rank in a step

 private:
  // The micro-batch's number in the step, counted over all data-parallel ranks.
  int number_of(const Action& action) const { return deal_.number(batch_rank_, action.micro_batch); }

  Batch load(Samples& samples, const Action& action) {
    Batch batch = {.batch_size = options_.micro_batch, .positions = model_.positions()};
    batch.empty = action.micro_batch >= deal_.of_rank(batch_rank_);
    if (!batch.empty && model_.tensors().needs_tokens(action.chunk)) batch = send(samples, action);
    batch.first = action.micro_batch == 0;
    batch.last = action.micro_batch + 1 == micro_steps();
    batch.training = samples.training_;
    batch.loss_weight = float(options_.loss_weight(samples.training_));
    return batch;
  }

  Batch send(Samples& samples, const Action& action) {
    auto read = samples.tokens(action.micro_batch);
    // The device waits from the moment when it has nothing else to do.
    while (read.wait_for(std::chrono::microseconds(200)) == std::future_status::timeout && !is_ready(model_.stream())) {}
    const Clock::time_point begin = Clock::now();
    const std::vector<int> tokens = read.get();
    if (samples.training_) waited_ += seconds_since(begin);
    return buffers_.send(tokens.data(), &tokens[tokens.size() / 2], options_.micro_batch, options_.seq_len, model_.positions());
  }

  const Options& options_;
  const Model& model_;
  double& waited_;
  int batch_rank_;  // this rank's number among the data-parallel ranks of all islands
  Deal deal_;
  std::vector<Batch> sent_;  // by slot
  BatchBuffers buffers_;
  Samples train_;
  std::optional<Samples> validation_;
};

inline AdamW adamw_at(const Options& o, double learning_rate) {
  return {float(learning_rate), float(o.beta1), float(o.beta2), float(o.epsilon), float(o.weight_decay)};
}

// A training step: micro-batches in the order of the actions, then the update by their gradients. The caller has called
// model.begin_sums().
inline void run_step(Model& model, const Actions& actions, Batches::Samples& samples, const AdamW& update, float clip,
                     const StepLimits& limits = {}) {
  for (const Action& action : actions) model.run(samples.batch(action));  // in the order of the schedule
  model.update(update, clip, limits);
}

// The mean losses per token over the first `count` global batches of each set of --val. All ranks get the same.
inline ValidationLosses validation_losses(Model& model, Batches& batches, const Options& o, size_t count) {
  ValidationLosses losses;
  for (const auto& [key, files] : o.val) {
    double sum = 0;
    for (size_t i = 0; i < count; ++i) {
      model.begin_sums();
      Batches::Samples& samples = batches.of_validation(losses.size() * o.val_batches + i);
      for (const Action& action : forwards(model.stage(), batches.micro_steps())) model.run(samples.batch(action));
      sum += model.loss();
    }
    losses.emplace_back(key, sum / double(count));
  }
  Profiler::instance().context.micro_batch = -1;  // the work from here on belongs to no micro-batch
  return losses;
}
