// Lesson: ranks send only the largest numbers of their gradients; is the rest lost, or sent later?
//
//   mpirun -np 4 build/host/top_k README.md --keep 0.01
//
// Each rank computes a gradient g on a batch of its own, and all apply the same update, w −= lr · mean. Three ways to get
// there, which start with the same weights and see the same batches:
//
//   dense      all numbers travel: a ring sends 2 (N−1)/N · 4 bytes for each parameter
//   top-k      the k numbers of g that are furthest from zero travel, with their places: 8 k bytes, to each of N−1 ranks.
//              The other numbers are lost. A parameter whose gradient is small, but has the same sign in every step,
// never
//              moves
//   feedback   the same for e + g, and the numbers not sent are the next step's residual e. So each number is sent at
//              last, only later ("Error Feedback Fixes SignSGD and other Gradient Compression Schemes", Karimireddy et al., 2019,
//              arXiv:1901.09847, algorithm 2, with top-k as in Stich et al., 2018, arXiv:1809.07599)
#include <algorithm>
#include <numeric>
#include <vector>

#include "dev/lessons/lesson.h"

namespace {

using Array = SmallModel::Array;
constexpr size_t parameters = SmallModel::parameters;

enum class Way { dense, top_k, feedback };
constexpr const char* names[] = {"dense", "top-k", "feedback"};

// A number of a gradient, as it travels.
struct Entry {
  int place;
  float value;
};
static_assert(sizeof(Entry) == 8);

// The mean of all ranks' gradients.
void average(Array& gradient, const lesson::World& world) {
  MPI_Allreduce(MPI_IN_PLACE, gradient.data(), int(parameters), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  for (float& value : gradient) value /= float(world.size);
}

// Takes the k entries of `gradient` that are furthest from zero out of it: they become zero there.
std::vector<Entry> take_largest(Array& gradient, int k) {
  std::vector<int> places(parameters);
  std::iota(places.begin(), places.end(), 0);
  const auto is_larger = [&](int one, int other) { return std::abs(gradient[size_t(one)]) > std::abs(gradient[size_t(other)]); };
  std::nth_element(places.begin(), places.begin() + (k - 1), places.end(), is_larger);
  std::vector<Entry> taken;
  for (int i = 0; i < k; ++i) taken.push_back({places[size_t(i)], std::exchange(gradient[size_t(places[size_t(i)])], 0.0f)});
  return taken;
}

// The mean of all ranks' entries. Ranks add them in the same order, so that their weights stay the same.
void average(Array& gradient, const std::vector<Entry>& mine, const lesson::World& world) {
  std::vector<Entry> all(mine.size() * size_t(world.size));
  const int bytes = int(mine.size() * sizeof(Entry));
  MPI_Allgather(mine.data(), bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, MPI_COMM_WORLD);
  gradient.assign(parameters, 0.0f);
  for (const auto& [place, value] : all) gradient[size_t(place)] += value / float(world.size);
}

// Trains in one way. Returns the losses after each --report-every steps.
std::vector<float> losses(Way way, const lesson::Options& options, int k, const lesson::World& world, const SmallModel& model) {
  std::mt19937 places(unsigned(100 + world.rank));
  Array weights = SmallModel::initial_weights(0), gradient, left(parameters, 0.0f);
  std::vector<float> losses;
  for (int step = 1; step <= options.steps; ++step) {
    model.loss(weights, options.batch, places, &gradient);
    if (way == Way::feedback)
      for (size_t i = 0; i < parameters; ++i) gradient[i] += left[i];
    if (way == Way::dense) {
      average(gradient, world);
    } else {
      const std::vector<Entry> largest = take_largest(gradient, k);
      left = gradient;  // without feedback nobody looks at it
      average(gradient, largest, world);
    }
    for (size_t i = 0; i < parameters; ++i) weights[i] -= options.lr * gradient[i];
    if (step % options.report_every == 0) losses.push_back(lesson::measured_loss(model, weights));
  }
  return losses;
}

}  // namespace

int main(int argc, char** argv) {
  const lesson::World world;
  CLI::App app("Gradients of which only the largest numbers travel", "top_k");
  lesson::Options options{.steps = 3000};
  double keep = 0.01;
  lesson::add_options(app, options);
  app.add_option("--keep", keep, "share of the numbers that travel")->check(CLI::Range(1e-4, 1.0))->capture_default_str();
  if (const int code = lesson::parse(app, options, argc, argv, world, 1); code >= 0) return code;

  const SmallModel model(lesson::text_of(options.text));
  const int k = std::max(1, int(std::lround(keep * double(parameters))));
  std::vector<std::vector<float>> ways;
  for (const Way way : {Way::dense, Way::top_k, Way::feedback}) ways.push_back(losses(way, options, k, world, model));
  if (world.rank != 0) return 0;

  std::printf("%-16s", "steps");
  for (const char* name : names) std::printf("%10s", name);
  for (size_t line = 0; line < ways[0].size(); ++line) {
    std::printf("\n%-16d", int(line + 1) * options.report_every);
    for (const std::vector<float>& way : ways) std::printf("%10.4f", way[line]);
  }
  const double others = world.size - 1, sparse = others * 8 * k;
  std::printf("\n%-16s%10.0f%10.0f%10.0f\n", "bytes of a rank", 2 * others / world.size * 4 * double(parameters), sparse, sparse);
  return 0;
}
