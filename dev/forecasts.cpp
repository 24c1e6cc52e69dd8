// Prints the planner's forecasts beside what was published. In the root folder of the repository:
//
//   make build/host/forecasts && build/host/forecasts
#include <cstdio>
#include <string>

#include "dev/published_runs.h"
#include "processes/error.h"

namespace {

void print_published() {
  std::printf("| run | mesh tp · dp · pp | published | forecast | error | products | attention | memory, update | tp exposed | dp exposed | bubble |\n");
  std::printf("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
  for (const PublishedRun& run : published_runs()) {
    const Forecast f = forecast(run.step, load_cluster("data/clusters/" + run.cluster + ".json"));
    const auto share = [&](double time) { return 100 * time / f.seconds; };
    const MeshShape& mesh = run.step.mesh;
    std::printf("| %s | %d · %d · %d | %g %s | %.4g | %+.1f %% | %.1f %% | %.1f %% | %.1f %% | %.1f %% | %.1f %% | %.1f %% |\n", run.name.c_str(),
                mesh.tp, mesh.dp, mesh.pp, run.rate, run.counts_tokens ? "k tokens/s" : "TFLOP/s", run.forecast_rate(),
                100 * run.error(), share(f.products), share(f.attention), share(f.memory + f.update), share(f.tp.exposed),
                share(f.dp.exposed), share(f.bubble));
  }
}

}  // namespace

int main() {
  const std::string problem = attempt(print_published);
  if (!problem.empty()) print_error(problem);
  return problem.empty() ? 0 : 1;
}
