// Prints the planner's forecasts beside the published results. In the root folder of the repository:
//
//   make build/host/forecasts && build/host/forecasts
//
// First a line for each source, then the margins that follow, then gpt.cu's own steps on an H200, then all rows. An error is how
// much longer than its forecast a step took.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "dev/published/own_runs.h"
#include "dev/published/runs.h"

namespace {

std::string text_of(const Errors& errors) {
  char text[100] = "";
  if (!errors.all.empty())
    std::snprintf(text, sizeof text, "%zu: median %+.1f, %+.1f to %+.1f %%", errors.all.size(), 100 * errors.at(0.5), 100 * errors.at(0), 100 * errors.at(1));
  return text;
}

void print_sources() {
  std::printf("| source | rows | within %.0f %% | rows that numbers may be fitted to | unseen rows |\n|---|--:|--:|---|---|\n", 100 * bound);
  for (const std::string& source : sources()) {
    const Errors all = errors_of(source);
    std::printf("| %s | %zu | %zu | %s | %s |\n", source.c_str(), all.all.size(), all.within(bound),
                text_of(errors_of(source, false)).c_str(), text_of(errors_of(source, true)).c_str());
  }
}

void print_margins() {
  std::printf("\n| GPU | unseen rows of programs like gpt.cu | nine of ten | margin that is printed |\n|---|---|--:|---|\n");
  for (const auto& [device, cluster] : {std::pair("A100", "8xa100-80"), {"H100", "8xh100"}}) {
    const Errors errors = errors_on(device);
    std::printf("| %s | %s | %+.1f to %+.1f %% | %s |\n", device, text_of(errors).c_str(), 100 * errors.at(0.05),
                100 * errors.at(0.95), find_cluster(cluster).device.margin.text().c_str());
  }
}

void print_own_runs() {
  const Cluster h200 = load_cluster("runtime/planner/clusters/8xh200.json");
  std::printf("\n| job | B, T, samples | attention | measured, ms | forecast | error, %% | unseen | products, %% of the step | attention | memory, update |\n");
  std::printf("|---|---|---|--:|--:|--:|---|--:|--:|--:|\n");
  for (const OwnRun& run : load_own_runs()) {
    const Forecast f = forecast(run.step, h200);
    const auto share = [&](double time) { return 100 * time / f.seconds; };
    std::printf("| %s | %d, %d, %d | %s | %.4g | %.4g | %+.1f | %s | %.1f | %.1f | %.1f |\n", run.job.c_str(), run.step.micro_batch,
                run.step.seq_len, run.step.global_batch, run.step.attention.c_str(), 1e3 * run.measured, 1e3 * f.seconds,
                100 * error_of(run, h200), run.is_unseen ? "yes" : "", share(f.products), share(f.attention), share(f.memory + f.update));
  }
}

void print_rows() {
  std::printf("\n| source | run | T | tp · dp · pp | published | forecast | error, %% | unseen | products, %% of the step | attention | memory, update | tp exposed | dp exposed | bubble |\n");
  std::printf("|---|---|--:|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|\n");
  for (const PublishedRun& run : published_runs()) {
    const Forecast f = forecast(run);
    const auto share = [&](double time) { return 100 * time / f.seconds; };
    const MeshShape& mesh = run.step.mesh;
    std::printf("| %s | %s | %d | %d · %d · %d | %g %s | %.4g | %+.1f | %s | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n", run.source.c_str(),
                run.name.c_str(), run.step.seq_len, mesh.tp, mesh.dp, mesh.pp, run.published, run.unit.c_str(), forecast_rate(run, f),
                100 * error_of(run), run.is_unseen ? "yes" : "", share(f.products), share(f.attention), share(f.memory + f.update),
                share(f.tp.exposed), share(f.dp.exposed), share(f.bubble));
  }
}

}  // namespace

int main() {
  const std::string problem = attempt([] { print_sources(), print_margins(), print_own_runs(), print_rows(); });
  if (!problem.empty()) print_error(problem);
  return problem.empty() ? 0 : 1;
}
