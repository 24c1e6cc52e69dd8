// Training steps that others have published (runs.csv), and their forecasts (runtime/planner/forecast.h). test/planner/test_planner.cpp
// compares the two, dev/forecasts.cpp prints them. runtime/planner/forecast.md says which numbers were fitted, and to which half.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "dev/published/megatron_kernels.h"
#include "gpt/base/error.h"

struct PublishedRun {
  std::string source, name, cluster, program, unit;
  StepOptions step = {};
  double published = 0;    // in `unit`: TFLOP/s of a GPU, tokens/s of a GPU, or s of a step
  bool is_unseen = false;  // no number was fitted to it, nor could it have been
};

// FLOPs of a step as Megatron-LM counts them: 2104.04473 includes recomputation, later tables do not
inline double megatron_flops(const StepOptions& step) {
  const double T = step.seq_len, L = step.shape.layers, C = step.shape.channels, V = step.shape.vocabulary;
  const double passes = step.recompute == "block" ? 4 : 3;
  return step.global_batch * T * (passes * L * (24 * C * C + 4 * C * T) + 6 * C * V);
}

// TFLOP/s that attention with FlashAttention's first version reaches, forward and backward together; this was MosaicML's
// (the bars "Triton" of an A100, and "FlashAttention" of an H100, in the figures of github.com/Dao-AILab/flash-attention)
inline constexpr AttentionRates triton_on_a100 = {{{{59, 75, 79, 76, 79, 80}, {50, 61, 68, 74, 78, 80}}},
                                                  {{{59, 75, 79, 76, 79, 80}, {50, 61, 68, 74, 78, 80}}}};
inline constexpr AttentionRates flash_1_on_h100 = {{{{104, 123, 136, 138, 149, 156}, {98, 109, 108, 126, 135, 137}}},
                                                   {{{104, 123, 136, 138, 149, 156}, {98, 109, 108, 126, 135, 137}}}};

// The cluster that a run was on, with the rates of the attention that it used.
inline const Cluster& cluster_of(const PublishedRun& run) {
  static std::map<std::string, Cluster> known;
  const std::string key = run.cluster + ' ' + run.program;
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const std::filesystem::path own = "dev/published/" + run.cluster + ".json";
  Cluster c = load_cluster(std::filesystem::exists(own) ? own : std::filesystem::path("runtime/planner/clusters/" + run.cluster + ".json"));
  if (run.program.starts_with("mpt")) c.device.library = (c.device.name == "H100" ? flash_1_on_h100 : triton_on_a100) * 1e12;
  return known[key] = c;
}

// Transformer Engine's layers, whose weights FSDP gathers in bf16
struct TransformerEngineKernels : Kernels {
  using Kernels::Kernels;
  double gathered_bytes() const override { return w_; }
};

inline Forecast forecast(const PublishedRun& run) {
  const Cluster& c = cluster_of(run);
  StepOptions wide = run.step;
  wide.fp8 = false;
  if (run.step.fp8) return forecast(run.step, c, Kernels(wide, c), TransformerEngineKernels(run.step, c));
  if (!run.program.starts_with("megatron-20")) return forecast(run.step, c);
  return forecast(run.step, c, MegatronKernels(run.step, c, run.program == "megatron-2021" ? 2021 : 2022));
}

// The forecast in the unit of the published number.
inline double forecast_rate(const PublishedRun& run, const Forecast& f) {
  if (run.unit == "s") return f.seconds;
  return (run.unit == "tokens/s" ? f.tokens_per_s : megatron_flops(run.step) / f.seconds / 1e12) / run.step.mesh.ranks();
}

// The share by which the step took longer than its forecast: 0.1 means that the forecast was too fast by a tenth.
inline double error_of(const PublishedRun& run) {
  const double forecasted = forecast_rate(run, forecast(run));
  return (run.unit == "s" ? run.published / forecasted : forecasted / run.published) - 1;
}

// Half of each source that has eight rows or more may be used to fit; the others only count. Drawn once, by a fixed seed.
inline void draw_halves(std::vector<PublishedRun>& runs) {
  std::map<std::string, std::vector<PublishedRun*>> sources;
  for (PublishedRun& run : runs) sources[run.source].push_back(&run);
  std::mt19937 random(20261123);
  for (auto& [_, rows] : sources) {
    if (rows.size() >= 8)
      for (size_t i = rows.size() - 1; i > 0; --i) std::swap(rows[i], rows[random() % (i + 1)]);
    for (size_t i = rows.size() >= 8 ? rows.size() / 2 : 0; i < rows.size(); ++i) rows[i]->is_unseen = true;
  }
}

// Calls read(text) with each row of a table in CSV; text() is the row's next field.
template <class Read>
void for_each_row(const std::filesystem::path& path, Read read) {
  std::ifstream file(path);
  if (!file) fail(path, " cannot be read: start in the root folder of the repository");
  std::string line;
  std::getline(file, line);  // titles
  while (std::getline(file, line)) {
    std::istringstream words(line);
    read([&] {
      std::string word;
      std::getline(words, word, ',');
      return word;
    });
  }
}

inline std::vector<PublishedRun> load_published_runs(const std::filesystem::path& path = "dev/published/runs.csv") {
  std::vector<PublishedRun> runs;
  for_each_row(path, [&](const auto& text) {
    const auto number = [&] { return std::stoi(text()); };
    PublishedRun run;
    StepOptions& s = run.step;
    for (std::string* name : {&run.source, &run.name, &run.cluster, &run.program}) *name = text();
    for (int* size : {&s.shape.layers, &s.shape.heads, &s.shape.channels, &s.shape.vocabulary, &s.seq_len, &s.mesh.tp, &s.mesh.pp,
                      &s.mesh.dp, &s.micro_batch, &s.global_batch, &s.zero})
      *size = number();
    s.shape.positions = s.seq_len;
    s.recompute = text(), s.pp_chunks = number(), s.attention = "cudnn";  // (none of them has gpt.cu's own kernels)
    run.unit = text(), run.published = std::stod(text());
    if (s.pp_chunks > 1) s.pp_schedule = "interleaved";
    s.tp_pieces = 2, s.sms.margin = 0;  // their rows travel while others are multiplied, and products keep all multiprocessors
    s.fp8 = run.program == "mpt-fp8", s.fp8_keep = 0;  // all linear layers of its blocks
    s.dtype = run.program.starts_with("megatron-20") ? "fp16" : "bf16";
    if (run.program != "megatron-core" && run.program != "llm.c") s.reduce_dtype = "bf16";
    runs.push_back(run);
  });
  draw_halves(runs);
  return runs;
}

inline const std::vector<PublishedRun>& published_runs() {
  static const std::vector<PublishedRun> runs = load_published_runs();
  return runs;
}

// ---- errors, of one source or of more

// One bound for all sources. It was fixed before any error was known.
inline constexpr double bound = 0.15;

struct Errors {
  std::vector<double> all;  // in order

  // Interpolated: 0.5 is the median, 0 and 1 are the ends.
  double at(double share) const {
    const double place = share * double(all.size() - 1);
    const size_t before = std::min(size_t(place), all.size() - 1), after = std::min(before + 1, all.size() - 1);
    return std::lerp(all[before], all[after], place - double(before));
  }
  size_t within(double most) const {
    return size_t(std::ranges::count_if(all, [&](double error) { return std::abs(error) <= most; }));
  }
};

template <class Belongs>
Errors errors_where(Belongs belongs) {
  Errors errors;
  for (const PublishedRun& run : published_runs())
    if (belongs(run)) errors.all.push_back(error_of(run));
  std::ranges::sort(errors.all);
  return errors;
}
inline Errors errors_of(const std::string& source) { return errors_where([&](const PublishedRun& run) { return run.source == source; }); }
inline Errors errors_of(const std::string& source, bool is_unseen) {
  return errors_where([&](const PublishedRun& run) { return run.source == source && run.is_unseen == is_unseen; });
}

// Errors of unseen runs on this GPU ("": on any), of programs that compute as gpt.cu does: a margin is made of them
// (runtime/planner/cluster.cpp).
inline Errors errors_on(const std::string& device) {
  return errors_where([&](const PublishedRun& run) {
    return run.is_unseen && !run.program.starts_with("megatron-20") && cluster_of(run).device.name.starts_with(device);
  });
}

// The names of all sources, in the order of the file.
inline std::vector<std::string> sources() {
  std::vector<std::string> names;
  for (const PublishedRun& run : published_runs())
    if (std::ranges::find(names, run.source) == names.end()) names.push_back(run.source);
  return names;
}
