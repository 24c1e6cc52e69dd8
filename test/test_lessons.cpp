// dev/lessons: the small model against finite differences; what both programs print must follow from their rules.
#include <cmath>
#include <cstdlib>
#include <regex>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "dev/lessons/small_model.h"
#include "test/workplace.h"

namespace {

const std::string lesson = "OMPI_MCA_mpi_yield_when_idle=1 " + mpirun() + " ";

std::string program(const std::string& name) { return " " + built_for_host(name) + " "; }

// All numbers of the lines that match.
std::vector<std::vector<double>> numbers(const std::string& text, const std::string& line) {
  std::vector<std::vector<double>> found;
  const std::regex pattern("(?:^|\n)" + line);
  for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end; ++match) {
    found.emplace_back();
    for (size_t group = 1; group < match->size(); ++group) found.back().push_back(std::stod((*match)[group]));
  }
  return found;
}

}  // namespace

// A central difference of width 2h is off by h²/6 of the third derivative and by the loss's rounding over h: with h = 0.02,
// losses near 5 and weights near 1 some 1e-4 and 5·6e-8/0.02 = 2e-5.
TEST_CASE("the small model's gradient is that of its loss") {
  const SmallModel model(some_text(2000));
  SmallModel::Array weights = SmallModel::initial_weights(3), gradient;
  std::mt19937 places(5);
  const auto loss = [&] {
    std::mt19937 same(5);
    return double(model.loss(weights, 4, same));
  };
  CHECK(model.loss(weights, 4, places, &gradient) == float(loss()));
  for (const size_t begin : {SmallModel::embedding + 'l' * SmallModel::channels, SmallModel::W1, SmallModel::b1, SmallModel::W2, SmallModel::b2 + '1'})
    for (size_t i = begin; i < begin + 10; ++i) {
      const float kept = weights[i];
      weights[i] = kept + 0.02f;
      const double above = loss();
      weights[i] = kept - 0.02f;
      const double below = loss();
      weights[i] = kept;
      CHECK(std::abs((above - below) / 0.04 - double(gradient[i])) < 2e-4);
    }
}

TEST_CASE("the parameter server: every gradient is counted, W workers cannot be less stale than W - 1 on average" *
          doctest::skip(!mpirun_found)) {
  const Workplace shell;
  const std::string out = shell.output(lesson + "3" + program("parameter_server") + "text --steps 200");
  const auto losses = numbers(out, R"( +(\d+) gradients  loss (\S+) +\S+ s)"), workers = numbers(out, R"(worker (\d): +(\d+) gradients, staleness +(\S+) on average, (\d+) at most)");
  REQUIRE(losses.size() == 10);
  REQUIRE(workers.size() == 2);
  CHECK(losses[9][1] < losses[0][1]);
  CHECK(workers[0][1] + workers[1][1] == 200);
  // Each update makes the gradient of the other worker, which is under way all the time, one older.
  CHECK((workers[0][1] * workers[0][2] + workers[1][1] * workers[1][2]) / 200 == doctest::Approx(1).epsilon(0.02));
  const std::string waiting = shell.output(lesson + "3" + program("parameter_server") + "text --steps 199 --wait --slow 1");
  for (const auto& worker : numbers(waiting, R"(worker (\d): +(\d+) gradients, staleness +(\S+) on average, (\d+) at most)"))
    CHECK(worker == std::vector<double>{worker[0], 100, 0, 0});
}

TEST_CASE("top-k: with all numbers it is dense; with few it needs feedback; bytes" * doctest::skip(!mpirun_found)) {
  const Workplace shell;
  const std::string all = shell.output(lesson + "2" + program("top_k") + "text --steps 20 --keep 1");
  for (const auto& line : numbers(all, R"(\d+ +(\d\.\d+) +(\d\.\d+) +(\d\.\d+))")) {
    CHECK(std::abs(line[0] - line[1]) < 2e-3);  // other roundings
    CHECK(line[1] == line[2]);
  }
  const std::string few = shell.output(lesson + "3" + program("top_k") + "text --steps 150 --keep 0.01");
  const auto lines = numbers(few, R"((\d+) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+))");
  REQUIRE(lines.size() == 10);
  const auto& last = lines.back();
  CHECK(last[1] < last[3] + 0.05);
  CHECK(last[3] + 0.1 < last[2]);
  CHECK(numbers(few, R"(bytes of a rank +(\d+) +(\d+) +(\d+))") ==
        std::vector<std::vector<double>>{{std::round(4.0 / 3 * 4 * SmallModel::parameters), 2 * 8 * 145, 2 * 8 * 145}});
  CHECK(SmallModel::parameters == 14528);  // 145 is 1 % of it
}

TEST_CASE("lessons refuse what they can't do" * doctest::skip(!mpirun_found)) {
  const Workplace shell;
  CHECK(contains(shell(lesson + "1" + program("parameter_server") + "text").error, "needs at least 2 ranks"));
  CHECK(contains(shell(lesson + "2" + program("top_k") + "nowhere").error, "File does not exist: nowhere"));
  CHECK(contains(shell(lesson + "2" + program("top_k") + "text --keep 2").error, "--keep"));
  shell.output("echo short > short");
  CHECK(contains(shell(lesson + "2" + program("top_k") + "short").error, "are too few to learn from"));
}
