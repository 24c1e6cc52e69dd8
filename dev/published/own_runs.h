// Steps that gpt.cu itself has taken on a GPU (h200.csv; dev/results/2026-11-26-h200.md says how they were run), and their
// forecasts (runtime/planner/forecast.h). Milliseconds are those of the last line of each run: the median of all steps but the
// first ones.
#pragma once

#include "dev/published/runs.h"

struct OwnRun {
  std::string job;
  StepOptions step = {};
  double measured = 0;     // seconds
  bool is_unseen = false;  // decided before any number was fitted: runtime/planner/forecast.md
};

// Stated before any number was fitted to these rows.
inline constexpr double own_bound = 0.08;

inline std::vector<OwnRun> load_own_runs(const std::filesystem::path& path = "dev/published/h200.csv") {
  std::vector<OwnRun> runs;
  for_each_row(path, [&](const auto& text) {
    OwnRun run;
    StepOptions& s = run.step;
    run.job = text();
    for (int* size : {&s.shape.layers, &s.shape.heads, &s.shape.channels, &s.shape.vocabulary, &s.seq_len, &s.micro_batch, &s.global_batch})
      *size = std::stoi(text());
    s.shape.positions = s.seq_len;
    s.dtype = text(), s.attention = text(), s.fp8 = text() == "1", s.stochastic_rounding = text() == "1";
    if (s.stochastic_rounding) s.moments = "bf16";
    s.offload = text();
    run.is_unseen = text() == "1", run.measured = 1e-3 * std::stod(text());
    runs.push_back(run);
  });
  return runs;
}

// The share by which the step took longer than its forecast.
inline double error_of(const OwnRun& run, const Cluster& cluster) { return run.measured / forecast(run.step, cluster).seconds - 1; }
