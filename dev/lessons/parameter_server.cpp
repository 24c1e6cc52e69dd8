// Lesson: a parameter server, and workers that push and pull when they like.
//
//   mpirun -np 4 build/host/parameter_server README.md
//   mpirun -np 4 build/host/parameter_server README.md --slow 5 [--wait]
//
// Rank 0 is the server. It holds the weights, and counts their updates. A worker
//
//   pulls      the weights, which have seen v updates
//   computes   a gradient on a batch of its own
//   pushes     it; the server applies it at once: w −= lr·g, to weights that have seen v + s updates by then
//
// s is the staleness of the gradient: the number of updates by others while the worker computed. Nobody waits for anybody,
// so a slow worker slows no other one down, but its gradients are old when they arrive (Dean et al., "Large Scale
// Distributed Deep Networks", 2012). W workers of the same speed see s = W − 1 on average: between two pushes of a worker
// each other one pushes once.
//
// With --wait the server answers all workers at the same time, when each has pushed, and applies their mean. Then every
// staleness is 0, a step lasts as long as the slowest worker's, and one of its updates uses W gradients; --steps counts
// gradients in both cases, so that the two can be compared.
#include <vector>

#include "dev/lessons/lesson.h"

namespace {

enum Tag : int { pull, push, stop };

using Array = SmallModel::Array;
constexpr int parameters = int(SmallModel::parameters);

// The staleness of gradients when they were applied.
struct Staleness {
  std::vector<int> counts;  // by number of updates
  double sum = 0;

  void add(int updates) {
    if (size_t(updates) >= counts.size()) counts.resize(size_t(updates) + 1);
    ++counts[size_t(updates)], sum += updates;
  }
};

void print_staleness(const std::vector<Staleness>& workers) {
  for (size_t worker = 1; worker < workers.size(); ++worker) {
    const auto& [counts, sum] = workers[worker];
    int pushes = 0;
    for (int count : counts) pushes += count;
    std::printf("worker %zu: %6d gradients, staleness %5.2f on average, %zu at most\n", worker, pushes, pushes ? sum / pushes : 0.0,
                counts.empty() ? size_t(0) : counts.size() - 1);
  }
}

void send_weights(const Array& weights, int worker, Tag tag) {
  MPI_Send(weights.data(), parameters, MPI_FLOAT, worker, tag, MPI_COMM_WORLD);
}

void serve(const lesson::Options& options, bool waits, const lesson::World& world, const SmallModel& model) {
  const int workers = world.size - 1;
  Array weights = SmallModel::initial_weights(0), gradient(parameters), sum(parameters, 0.0f);
  std::vector<int> seen(size_t(world.size), 0);  // by worker: the number of updates when it pulled
  std::vector<Staleness> staleness(static_cast<size_t>(world.size));
  for (int worker = 1; worker <= workers; ++worker) send_weights(weights, worker, pull);

  int updates = 0, waiting = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int gradients = 1; gradients <= options.steps; ++gradients) {
    MPI_Status status;
    MPI_Recv(gradient.data(), parameters, MPI_FLOAT, MPI_ANY_SOURCE, push, MPI_COMM_WORLD, &status);
    const int worker = status.MPI_SOURCE;
    staleness[size_t(worker)].add(updates - seen[size_t(worker)]);
    if (!waits) {
      for (int i = 0; i < parameters; ++i) weights[i] -= options.lr * gradient[i];
      seen[size_t(worker)] = ++updates;
      if (gradients < options.steps) send_weights(weights, worker, pull);
    } else {
      for (int i = 0; i < parameters; ++i) sum[i] += gradient[i];
      if (++waiting == workers) {
        for (int i = 0; i < parameters; ++i) weights[i] -= options.lr * sum[i] / float(workers);
        std::fill(sum.begin(), sum.end(), 0.0f), waiting = 0, ++updates;
        for (int next = 1; next <= workers; ++next) {
          seen[size_t(next)] = updates;
          if (gradients < options.steps) send_weights(weights, next, pull);
        }
      }
    }
    if (gradients % options.report_every == 0)
      std::printf("%7d gradients  loss %.4f  %6.2f s\n", gradients, lesson::measured_loss(model, weights),
                  std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  print_staleness(staleness);
  // The gradients that are still on their way come too late.
  MPI_Status status;
  for (int late = waits ? 0 : workers - 1; late > 0; --late)
    MPI_Recv(gradient.data(), parameters, MPI_FLOAT, MPI_ANY_SOURCE, push, MPI_COMM_WORLD, &status);
  for (int worker = 1; worker <= workers; ++worker) send_weights(weights, worker, stop);
}

void work(const lesson::Options& options, double slow_ms, const lesson::World& world, const SmallModel& model) {
  std::mt19937 places(unsigned(100 + world.rank));
  Array weights(parameters), gradient;
  for (;;) {
    MPI_Status status;
    MPI_Recv(weights.data(), parameters, MPI_FLOAT, 0, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
    if (status.MPI_TAG == stop) return;
    model.loss(weights, options.batch, places, &gradient);
    if (world.rank == 1) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(slow_ms));
    MPI_Send(gradient.data(), parameters, MPI_FLOAT, 0, push, MPI_COMM_WORLD);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const lesson::World world;
  CLI::App app("A parameter server (rank 0) and workers", "parameter_server");
  lesson::Options options{.steps = 10'000};
  bool waits = false;
  double slow_ms = 0;
  lesson::add_options(app, options);
  app.add_flag("--wait", waits, "the server waits for all workers, and applies the mean of their gradients");
  app.add_option("--slow", slow_ms, "milliseconds that worker 1 sleeps for each gradient")->check(CLI::Range(0.0, 10'000.0));
  if (const int code = lesson::parse(app, options, argc, argv, world, 2); code >= 0) return code;
  if (waits) options.steps = (options.steps + world.size - 2) / (world.size - 1) * (world.size - 1);  // whole updates

  const SmallModel model(lesson::text_of(options.text));
  if (world.rank == 0) serve(options, waits, world, model);
  else work(options, slow_ms, world, model);
  return 0;
}
