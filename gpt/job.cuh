// The objects that every part of a training job needs: its options, its ranks, its device.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "gpt/base/clock.h"
#include "gpt/interruption.h"
#include "gpt/mesh.cuh"
#include "gpt/options.h"
#include "gpt/process_hook.h"

// The work of this rank in a step.
inline Actions actions_of(const StepOptions& o, const Mesh& mesh) {
  return actions_of_step(o.pp_schedule, mesh.stage(o.pp_chunks), o.micro_steps(o.batch_rank(mesh.place())));
}

struct Job {
  Options options;
  Ranks& ranks;
  Mesh& mesh;
  cudaStream_t stream;  // all of the model's work is on it
  std::string device;   // name of this rank's device
  const ProcessHooks& hooks;
  Interruption& interruption;

  bool is_first() const { return ranks.rank() == 0; }
  bool is_alone() const { return ranks.size() == 1; }
  Actions actions() const { return actions_of(options, mesh); }
};

// How far the job has come.
struct Progress {
  size_t step = 0;              // updates launched on the device, in this start and in earlier ones
  size_t samples_left_out = 0;  // training samples that rollbacks have skipped

  // The number of the first training sample of the next step.
  size_t first_sample(size_t global_batch) const { return step * global_batch + samples_left_out; }
};

inline double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + long(values.size() / 2));
  return values[values.size() / 2];
}

// Adds the time from its construction to its destruction to `seconds`.
class AddTime {
 public:
  explicit AddTime(double& seconds) : seconds_(seconds) {}
  ~AddTime() { seconds_ += seconds_since(start_); }
  AddTime(const AddTime&) = delete;
  AddTime& operator=(const AddTime&) = delete;

 private:
  double& seconds_;
  Clock::time_point start_ = Clock::now();
};

// Returns the result of work(), and adds the time that work() takes to `seconds`.
template <class Work>
auto timed(double& seconds, Work work) {
  const AddTime timer(seconds);
  return work();
}
