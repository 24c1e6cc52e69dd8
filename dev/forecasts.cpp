// Prints the planner's forecasts beside what was published, and beside what this machine needs:
//
//   make build/host/forecasts && build/host/forecasts
//   build/cpu/ceilings > ceilings.json && build/host/forecasts ceilings.json
//
// In the root folder of the repository. The second one prints forecasts for the CPU device: a line for each run of
// dev/results/2026-11-22-planner.md.
#include <cstdio>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "dev/published_runs.h"
#include "processes/error.h"
#include "runtime/files.h"

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

struct CpuRun {
  const char* options;
  ModelShape shape;
  int seq_len, micro_batch, global_batch;
  MeshShape mesh;
};
// Options besides --train README.md --steps 6
const std::vector<CpuRun> cpu_runs = {
    {"--model d4 --seq-len 256", {4, 4, 256, 256, 256}, 256, 4, 4, {}},
    {"--layers 4 --heads 8 --channels 512 --vocab 8192 --seq-len 128", {4, 8, 512, 8192, 128}, 128, 4, 4, {}},
    {"--model gpt2 --vocab 50257 --seq-len 64", {12, 12, 768, 50257, 1024}, 64, 4, 4, {}},
    {"--model d4 --seq-len 256, 2 ranks", {4, 4, 256, 256, 256}, 256, 4, 8, {1, 1, 2, 1}},
    {"--model d4 --seq-len 256 --tp 2, 2 ranks", {4, 4, 256, 256, 256}, 256, 4, 4, {2, 1, 1, 1}},
    {"--model d4 --seq-len 256 --pp 2 --global-batch 16, 2 ranks", {4, 4, 256, 256, 256}, 256, 4, 16, {1, 1, 1, 2}}};

// A core for each rank, as with OMP_NUM_THREADS=1: measure the ceilings so too.
void print_for_this_machine(const char* path) {
  const Ceilings ceilings = load_ceilings(path, "fp32", read_json_object(path).value("device", ""));
  std::printf("| options | forecast, ms | products | attention | memory, update | communication | bubble |\n|---|--:|--:|--:|--:|--:|--:|\n");
  for (const CpuRun& run : cpu_runs) {
    const Cluster one_core = cluster_of(ceilings, 1);
    Cluster cluster = one_core;
    cluster.devices_per_host = run.mesh.ranks();
    PlannedStep step;
    step.shape = run.shape, step.mesh = run.mesh, step.dtype = "fp32";
    step.seq_len = run.seq_len, step.micro_batch = run.micro_batch, step.global_batch = run.global_batch;
    const Forecast f = forecast(step, cluster);
    std::printf("| `%s` | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f |\n", run.options, 1e3 * f.seconds, 1e3 * f.products,
                1e3 * f.attention, 1e3 * (f.memory + f.update), 1e3 * (f.tp.exposed + f.dp.exposed), 1e3 * f.bubble);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string problem = attempt([&] { argc > 1 ? print_for_this_machine(argv[1]) : print_published(); });
  if (!problem.empty()) print_error(problem);
  return problem.empty() ? 0 : 1;
}
