// --trace, --trace-tensors and --profile: the order of kernels on the device, their results, and their times.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gpt/base/files.h"
#include "gpt/job.cuh"
#include "runtime/reports/ceilings.h"
#include "runtime/reports/options.h"
#include "runtime/reports/report.h"
#include "runtime/traces/options.h"
#include "runtime/traces/tensor_log.cuh"
#include "runtime/traces/trace_file.h"

class Tracing {
 public:
  // To be constructed before the model, because it names the streams. Collective.
  explicit Tracing(Job& job) : job_(job), files_(job.options.of<TraceFiles>()) {
    const Options& o = job.options;
    const std::string& ceilings = o.of<ReportOptions>().ceilings;
    if (!ceilings.empty()) ceilings_ = load_ceilings(ceilings, o.dtype, job.device);
    refuse_to_replace("--trace ", files_.timeline, "{\"traceEvents\"");
    refuse_to_replace("--trace-tensors ", files_.tensors, "{\"rank\"");
    Profiler& profiler = Profiler::instance();
    profiler.trace = !files_.timeline.empty();
    if (profiler.trace && job.is_first()) TraceFile::remove_parts(files_.timeline, job.ranks.size());
    profiler.origin = std::stoll(job.ranks.all_gather(std::to_string(wall_clock()))[0]);
    profiler.name_stream(job.stream, "compute");
    if (profiler.trace) {
      trace_.emplace(files_.timeline, job.ranks.rank());
      trace_->append(process_event(job.ranks.rank(), o.mesh.pp > 1 ? job.mesh.place().pp : -1));
    }
    if (!files_.tensors.empty()) tensor_log_.emplace(files_.tensors, job.ranks.rank(), o);
  }

  bool wanted() const { return trace_ || tensor_log_; }

  // Writes the trace since the last call: one step, or the work after it. Waits for the device.
  void take() {
    if (trace_) trace_->append(trace_events(Profiler::instance().take_timeline(), job_.ranks.rank()));
    if (tensor_log_) tensor_log_->flush();
    Profiler::instance().context.step = -1;
  }

  // Merges the timelines of all ranks into one file. Collective.
  void finish() {
    if (!trace_) return;
    take();  // the work after the last step
    trace_->merge(job_.ranks.gather(trace_->summary()));
    job_.ranks.barrier(Ranks::for_slow_disks);
  }

  // Prints means over `steps` steps. Returns them.
  std::vector<KernelTotal> print_profile_of(size_t steps) const {
    std::vector<KernelTotal> totals;
    for (const auto& [_, total] : Profiler::instance().collect()) totals.push_back(total);
    print_profile(totals, steps, ceilings_);
    for (KernelTotal& total : totals) total.milliseconds /= double(steps);
    return totals;
  }

 private:
  // A typing mistake must not overwrite data: `--trace text` instead of `--train text`.
  static void refuse_to_replace(const char* option, const std::string& file, std::string_view beginning) {
    if (holds_something_else(file, beginning))
      usage_error(option, excerpt(file), ": there is a file of that name, which no such run has written: choose another");
  }

  Job& job_;
  const TraceFiles& files_;
  std::optional<TensorLog> tensor_log_;
  std::optional<TraceFile> trace_;
  std::optional<Ceilings> ceilings_;   // of this device
};
