// Steps that the device has been given, and whose results the host has not read yet. The host may be one step ahead: it
// reads the result of a step while the device computes the next step, so the device need not wait for the host.
//
// Votes and results of a step lie in pinned memory, in two buffers that are used in turn.
// Its events are tested by test_zero, test_delay, test_meshes, test_islands.
#pragma once

#include <deque>
#include <optional>
#include <thread>

#include "gpt/job.cuh"
#include "gpt/model.cuh"
#include "gpt/step_result.h"
#include "kernels/device/event.cuh"
#include "kernels/update.h"

// The results of a step that has ended. With islands, votes are counted at outer steps only.
struct FinishedStep {
  StepResult result = {};    // of this rank's island
  StepResult reported = {};  // at an outer step: loss and norm are the mean over islands
  std::optional<StepLimits> limits = {};  // the limits that its update is judged by; none: it had nothing to apply (--delay)
  float judged_loss = 0;    // of the batch whose gradients it has applied
  bool meets = false;       // are all ranks at this step? Between outer steps no island waits for another
  int traffic = 0;          // its number for Mesh::take_traffic()
  double data_seconds = 0;  // how long the device waited for its samples
  bool stop = false;        // at least one rank was asked to stop
  bool saved = false;       // all ranks have written their part of the checkpoint under way, or failed to
  bool asked = false;       // a room of rank 0 has asked for something that all ranks do together (gpt/step_hook.h)
};

class StepsInFlight {
 public:
  // scales_loss: the results name the loss scale, which only fp16 has.
  StepsInFlight(Model& model, Mesh& mesh, bool scales_loss = false)
      : model_(model), mesh_(mesh), scales_loss_(scales_loss), pinned_(pinned_bytes()), told_(static_cast<Told*>(pinned_.data())) {}

  size_t count() const { return started_.size(); }
  static size_t pinned_bytes() { return 2 * sizeof(Told); }

  // To be called before the step's first batch. stop, saved, asks: this rank's votes; timed: are collectives timed?
  void begin(bool stop, bool saved, bool asks = false, bool timed = true) {
    turn_ ^= 1;
    told_[turn_].votes = {.stop = stop ? 1.0f : 0.0f, .saved = saved ? 1.0f : 0.0f, .asks = asks ? 1.0f : 0.0f};
    traffic_ = mesh_.begin_traffic(timed);
    begin_[turn_].record(model_.stream());  // to measure
    model_.begin_sums(&told_[turn_].votes);
  }

  // To be called after the step's update, and after the outer step, if it is_outer. step: number of updates, this one
  // included; limits: as in FinishedStep; data_seconds: how long the device waited for the step's samples.
  void end(size_t step, double learning_rate, const std::optional<StepLimits>& limits, double data_seconds = 0, bool is_outer = false) {
    Told& told = told_[turn_];
    const cudaStream_t stream = model_.stream();
    CUDA_CHECK(cudaMemcpyAsync(&told.sums, model_.step_sums().all(), sizeof told.sums, cudaMemcpyDeviceToHost, stream));
    if (const IslandSums* islands = model_.step_sums().of_islands(); is_outer && islands)
      CUDA_CHECK(cudaMemcpyAsync(&told.islands, islands, sizeof told.islands, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(&told.gradients, model_.trained_store().summary(), sizeof told.gradients, cudaMemcpyDeviceToHost,
                               stream));
    end_[turn_].record(stream);
    mesh_.begin_traffic(false);  // traffic from here to the next begin() belongs to no step
    started_.push_back({turn_, {.result = {.step = step, .learning_rate = learning_rate},
                                .limits = limits,
                                .meets = mesh_.shape().islands == 1 || is_outer,
                                .traffic = traffic_,
                                .data_seconds = data_seconds}});
  }

  // Waits for the oldest step in flight, at most `seconds` seconds. Returns whether it has ended.
  bool ends_within(double seconds) const {
    const Clock::time_point begin = Clock::now();
    while (!is_ready(end_[started_.front().turn])) {
      if (seconds_since(begin) > seconds) return false;
      is_ready(model_.stream());  // the CPU device's streams go on while the host calls
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  // Waits for the oldest step in flight.
  FinishedStep finish() {
    auto [turn, step] = started_.front();
    started_.pop_front();
    CUDA_CHECK(cudaEventSynchronize(end_[turn]));
    const auto& [votes, sums, islands, gradients] = told_[turn];
    StepResult &result = step.result, &reported = step.reported;
    result.loss = sums.loss, result.norm = gradients.norm;
    result.seconds = elapsed_ms(begin_[turn], end_[turn]) / 1e3;
    result.applied = gradients.applied() || !step.limits;
    result.loss_scale = scales_loss_ ? gradients.scale.value : 0;
    reported = result;
    const int count = mesh_.shape().islands;
    const bool is_mean = count > 1 && step.meets;
    if (count > 1) reported.of_islands = is_mean ? count : 1;
    if (is_mean) reported.loss = islands.step.loss / count, reported.norm = islands.norm / float(count);
    step.judged_loss = gradients.loss;
    const StepSums all = count == 1 ? sums : is_mean ? islands.step : StepSums();
    step.stop = all.stop > 0, step.saved = all.saved == float(mesh_.shape().ranks()), step.asked = all.asks > 0;
    return step;
  }

  // Waits for all steps in flight, and drops their results. Returns the seconds that they took.
  double drop() {
    double seconds = 0;
    while (!started_.empty()) seconds += finish().result.seconds;
    return seconds;
  }

 private:
  struct Told {
    StepSums votes, sums;
    IslandSums islands;
    GradientSummary gradients;
  };
  struct Started {
    int turn;
    FinishedStep step;  // as far as it is known at its start
  };

  Model& model_;
  Mesh& mesh_;
  bool scales_loss_;
  HostMemory pinned_;
  Told* told_;
  Event begin_[2] = {Event(cudaEventDefault), Event(cudaEventDefault)};
  Event end_[2] = {Event(cudaEventDefault), Event(cudaEventDefault)};
  int turn_ = 0;     // which of the two buffers the step under way uses: 0, 1, 0, 1, ...
  int traffic_ = 0;  // number of the step's traffic
  std::deque<Started> started_;
};
