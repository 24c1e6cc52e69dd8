// Pipeline schedules (extensions/pipeline/pipeline.h), played in a simulator: every schedule ends, is as fast and keeps as many
// micro-batches as its formulas say. A schedule that is added to `pipeline_schedules` is tested too.
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <sys/wait.h>

#include <doctest/doctest.h>

#include "dev/pipeline_simulator.h"
#include "runtime/traces/trace_file.h"
#include "test/bounds.h"
#include "test/build_folder.h"
#include "test/temporary_folder.h"

namespace {

struct Pipeline {
  std::string schedule;
  int stages, chunks, micro_batches;
};

std::vector<Actions> lists_of(const Pipeline& pipeline) {
  std::vector<Actions> lists;
  for (int stage = 0; stage < pipeline.stages; ++stage)
    lists.push_back(
        make_schedule(pipeline.schedule, {pipeline.stages, stage, pipeline.chunks}, pipeline.micro_batches));
  return lists;
}

void for_pipelines(const std::function<void(const Pipeline&)>& work) {
  for (const auto& [schedule, _] : pipeline_schedules)
    for (int p = 1; p <= 8; ++p)
      for (int v = 1; v <= (schedule == "interleaved" ? 4 : 1); ++v)
        for (int micro_batches : std::set<int>{1, p - 1, p, p + 1, 2 * p, 4 * p}) {
          if (micro_batches < 1 || (schedule == "interleaved" && micro_batches % p != 0)) continue;
          CAPTURE(schedule);
          CAPTURE(p);
          CAPTURE(v);
          CAPTURE(micro_batches);
          work({schedule, p, v, micro_batches});
        }
}

// Costs of a whole stage. The last ones are used in the pictures.
const std::vector<ChunkCosts> stage_costs = [] {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> cost(0.2, 2);
  std::vector<ChunkCosts> costs(8);
  for (ChunkCosts& c : costs) c = {cost(random), cost(random), cost(random)};
  costs.push_back({1, 1, 1});
  return costs;
}();

PipelineCosts equal_costs(const Pipeline& pipeline, const ChunkCosts& stage, double message = 0) {
  const double v = pipeline.chunks;
  const ChunkCosts chunk = {stage.forward / v, stage.input / v, stage.weight / v};
  return {std::vector<ChunkCosts>(size_t(pipeline.stages * pipeline.chunks), chunk), message};
}

// By the table in extensions/pipeline/pipeline.h; empty for schedules that it doesn't have.
std::optional<double> bubble_by_formula(const Pipeline& pipeline, const ChunkCosts& stage) {
  const auto& [schedule, p, v, A] = pipeline;
  const auto& [F, I, W] = stage;
  if (schedule == "gpipe" || schedule == "1f1b") return (p - 1) * (F + I + W);
  if (schedule == "interleaved") return (p - 1) * (F + I + W) / v;
  if (schedule == "zb") return (p - 1) * (F + I) - (std::min(A, p) - 1) * std::min({F, I, W});
  return {};
}

std::optional<int> slots_by_formula(const Pipeline& pipeline, int r) {
  const auto& [schedule, p, v, A] = pipeline;
  if (p == 1 && v == 1) return 1;
  if (schedule == "gpipe") return A;
  if (schedule == "1f1b") return std::min(A, p - r);
  if (schedule == "interleaved") return std::min(v * A, 2 * (p - 1 - r) + (v - 1) * p + 1);
  if (schedule == "zb") return std::min(A, p);
  return {};
}

// "F0 F1 B0 ..."
std::string text(const Actions& actions, const Stage& stage) {
  std::string text;
  for (const Action& a : actions) text += (text.empty() ? "" : " ") + name_of(a, stage);
  return text;
}

// The first mistake in the lists of a pipeline with one chunk a stage; empty: there is none.
std::string problem_of(const std::vector<Actions>& lists, int micro_batches) {
  const int stages = int(lists.size());
  for (int stage = 0; stage < stages; ++stage) {
    const std::string mistake = mistake_in(lists[size_t(stage)], {stages, stage}, micro_batches);
    if (!mistake.empty()) return mistake;
  }
  return play(lists, 1, {std::vector<ChunkCosts>(lists.size(), {1, 1, 1})}).problem;
}

}  // namespace

TEST_CASE("a stage does each work once, in a possible order, and backward in the order of micro-batches") {
  for_pipelines([](const Pipeline& pipeline) {
    const std::vector<Actions> lists = lists_of(pipeline);
    for (int r = 0; r < pipeline.stages; ++r)
      CHECK(mistake_in(lists[size_t(r)], {pipeline.stages, r, pipeline.chunks}, pipeline.micro_batches) == "");
  });
}

TEST_CASE("every schedule ends, with the bubble of its formula") {
  for_pipelines([](const Pipeline& pipeline) {
    const std::vector<Actions> lists = lists_of(pipeline);
    for (const ChunkCosts& costs : stage_costs) {
      CAPTURE(costs.forward);
      CAPTURE(costs.input);
      CAPTURE(costs.weight);
      const PlayedStep step = play(lists, pipeline.chunks, equal_costs(pipeline, costs));
      REQUIRE(step.problem == "");
      const std::optional<double> bubble = bubble_by_formula(pipeline, costs);
      if (!bubble) continue;
      for (double idle : step.idle) CHECK(std::abs(idle - *bubble) <= 1e-9 * step.end);  // it may be 0
    }
  });
}

TEST_CASE("every stage keeps as many micro-batches as its formula says") {
  for_pipelines([](const Pipeline& pipeline) {
    const std::vector<Actions> lists = lists_of(pipeline);
    for (int r = 0; r < pipeline.stages; ++r)
      if (const std::optional<int> slots = slots_by_formula(pipeline, r)) CHECK(slots_of(lists[size_t(r)]) == *slots);
  });
}

TEST_CASE("every schedule ends if messages take time and chunks do not take the same") {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> cost(0.2, 2);
  for_pipelines([&](const Pipeline& pipeline) {
    PipelineCosts costs = equal_costs(pipeline, {1, 1, 1}, cost(random));
    for (ChunkCosts& chunk : costs.chunks) chunk = {cost(random), cost(random), cost(random)};
    const std::vector<Actions> lists = lists_of(pipeline);
    const PlayedStep step = play(lists, pipeline.chunks, costs);
    CHECK(step.problem == "");
    costs.message = 0;
    CHECK(play(lists, pipeline.chunks, costs).end <= step.end);
  });
}

TEST_CASE("validation: forwards of any number of micro-batches in any chunks end, in order and with nothing kept") {
  for (int p = 1; p <= 8; ++p)
    for (int v = 1; v <= 4; ++v)
      for (int micro_batches = 1; micro_batches <= 2 * p + 1; ++micro_batches) {
        CAPTURE(p);
        CAPTURE(v);
        CAPTURE(micro_batches);
        std::vector<Actions> lists;
        for (int r = 0; r < p; ++r) lists.push_back(forwards({p, r, v}, micro_batches));
        const PipelineCosts costs = equal_costs({"", p, v, micro_batches}, {1, 1, 1});
        const PlayedStep step = play(lists, v, costs);
        CHECK(step.problem == "");
        if (micro_batches % p == 0) CHECK(step.end == about(micro_batches + (p - 1.0) / v));
        for (const Actions& actions : lists) {
          std::vector<int> next(static_cast<size_t>(v));
          for (const Action& a : actions) {
            CHECK(a.work == Work::forward);
            CHECK(a.slot == 0);
            CHECK(a.micro_batch == next[size_t(a.chunk)]++);
          }
          CHECK(next == std::vector<int>(size_t(v), micro_batches));
        }
      }
}

TEST_CASE("schedules by hand") {
  const auto schedule = [](const char* kind, const Stage& stage, int micro_batches) {
    return text(make_schedule(kind, stage, micro_batches), stage);
  };
  CHECK(schedule("gpipe", {2, 0}, 3) == "F0 F1 F2 B0 B1 B2");
  CHECK(schedule("1f1b", {3, 0}, 4) == "F0 F1 F2 B0 F3 B1 B2 B3");
  CHECK(schedule("1f1b", {3, 1}, 4) == "F0 F1 B0 F2 B1 F3 B2 B3");
  CHECK(schedule("1f1b", {3, 2}, 4) == "F0 B0 F1 B1 F2 B2 F3 B3");
  CHECK(schedule("1f1b", {3, 0}, 1) == "F0 B0");
  CHECK(schedule("zb", {2, 0}, 3) == "F0 F1 I0 W0 F2 I1 W1 I2 W2");
  CHECK(schedule("zb", {2, 1}, 3) == "F0 I0 F1 I1 W0 F2 I2 W1 W2");
  CHECK(schedule("interleaved", {2, 1, 2}, 2) ==
        "F0 of chunk 0 F1 of chunk 0 F0 of chunk 1 B0 of chunk 1 "
        "F1 of chunk 1 B1 of chunk 1 B0 of chunk 0 B1 of chunk 0");
  for (const auto& [kind, _] : pipeline_schedules) CHECK(schedule(kind.c_str(), {}, 3) == "F0 B0 F1 B1 F2 B2");
  CHECK(slots_of({}) == 0);
}

TEST_CASE("messages by hand") {
  using enum Message;
  const auto messages = [](const Actions& actions) {
    std::vector<std::vector<Message>> all;
    for (const Action& a : actions) all.push_back({a.receives, a.sends, a.next_receives});
    return all;
  };
  using Expected = std::vector<std::vector<Message>>;
  CHECK(messages(make_schedule("1f1b", {}, 1)) == Expected{{none, none, none}, {none, none, none}});
  CHECK(messages(make_schedule("1f1b", {2, 0}, 3)) == Expected{{none, activation, none},      // F0
                                                               {none, activation, gradient},  // F1
                                                               {gradient, none, none},        // B0
                                                               {none, activation, gradient},  // F2
                                                               {gradient, none, gradient},    // B1
                                                               {gradient, none, none}});      // B2
  CHECK(messages(make_schedule("zb", {2, 0}, 2))[3] == std::vector{none, none, gradient});    // W0, before I1
  // What depends on an action is not posted together with it: here the next one has its micro-batch
  CHECK(messages(make_schedule("1f1b", {2, 0}, 1)) == Expected{{none, activation, none}, {gradient, none, none}});
  CHECK(messages(make_schedule("1f1b", {2, 1}, 1)) == Expected{{activation, none, none}, {none, gradient, none}});
  CHECK(messages(make_schedule("zb", {3, 1}, 1)) ==
        Expected{{activation, activation, none}, {gradient, gradient, none}, {none, none, none}});
  // ... and here the other stage does all its forwards before it sends the first gradient.
  CHECK(messages(make_schedule("gpipe", {2, 0}, 2)) == Expected{{none, activation, none}, {none, activation, none},
                                                                {gradient, none, gradient}, {gradient, none, none}});
  const Actions of_two_chunks = make_schedule("interleaved", {2, 0, 2}, 2);
  CHECK(name_of(of_two_chunks[2], {2, 0, 2}) == "F0 of chunk 1");
  CHECK(messages(of_two_chunks)[2] == std::vector{activation, activation, activation});
  CHECK(messages(forwards({2, 0, 2}, 1)) == Expected{{none, activation, none}, {activation, activation, none}});
  CHECK(messages(forwards({2, 1}, 2)) == Expected{{activation, none, activation}, {activation, none, none}});
}

// ---- waits for the device: a kernel that is loaded at its first launch, or an allocation, waits until the device is
// idle. A receive that has been posted is work, too.

namespace {

// All schedules and lists of forwards, of p stages.
void for_all_lists(int p, const std::function<void(const Pipeline&, const std::vector<Actions>&)>& work) {
  std::vector<Pipeline> kinds = {{"", p, 1, 0}, {"", p, 2, 0}};
  for (const auto& [schedule, _] : pipeline_schedules)
    for (int chunks : schedule == "interleaved" ? std::set{2, 3} : std::set{1})
      kinds.push_back({schedule, p, chunks, 0});
  for (Pipeline pipeline : kinds)
    for (int A : std::set<int>{1, 2, 3, p - 1, p, p + 1, 2 * p, 4 * p}) {
      if (A < 1 || (pipeline.schedule == "interleaved" && A % p != 0)) continue;
      pipeline.micro_batches = A;
      std::vector<Actions> lists;
      for (int r = 0; r < p && pipeline.schedule.empty(); ++r) lists.push_back(forwards({p, r, pipeline.chunks}, A));
      CAPTURE(pipeline.schedule);
      CAPTURE(p);
      CAPTURE(pipeline.chunks);
      CAPTURE(A);
      work(pipeline, lists.empty() ? lists_of(pipeline) : lists);
    }
}

struct Places {
  int deadly = 0, all = 0;
};

// Is one wait for the device, at this action of this stage, deadly?
bool is_deadly(const std::vector<Actions>& lists, const Pipeline& pipeline, int stage, size_t action) {
  const auto waits = [&](int number, size_t which) { return number == stage && which == action; };
  return play(lists, pipeline.chunks, equal_costs(pipeline, {1, 1, 1}), Lanes::four, waits).problem != "";
}

}  // namespace

TEST_CASE("a wait for the device at any one action stops no step; were every receive posted ahead, 228 would") {
  int places = 0, deadly = 0;
  for (int p = 2; p <= 6; ++p)
    for_all_lists(p, [&](const Pipeline& pipeline, const std::vector<Actions>& lists) {
      const std::set<std::string> counted = {"", "gpipe", "1f1b", "interleaved", "zb"};  // and others may be added
      const bool is_counted = counted.contains(pipeline.schedule);
      std::vector<Actions> all_ahead = lists;
      for (Actions& actions : all_ahead)
        for (size_t i = 0; i + 1 < actions.size(); ++i) actions[i].next_receives = actions[i + 1].receives;
      for (int stage = 0; stage < p; ++stage)
        for (size_t i = 0; i < lists[size_t(stage)].size(); ++i) {
          CHECK(!is_deadly(lists, pipeline, stage, i));
          const bool posts_more = all_ahead[size_t(stage)][i] != lists[size_t(stage)][i];
          places += is_counted;
          deadly += is_counted && posts_more && is_deadly(all_ahead, pipeline, stage, i);
        }
    });
  CHECK(places == 15210);
  CHECK(deadly == 228);
}

TEST_CASE("kernels that are loaded at their first launch, on all stages, stop no step") {
  for (int p = 2; p <= 8; ++p)
    for_all_lists(p, [&](const Pipeline& pipeline, const std::vector<Actions>& lists) {
      for (bool by_chunk : {false, true}) {
        const auto is_first = [&](int stage, size_t number) {
          const Actions& actions = lists[size_t(stage)];
          const Action& action = actions[number];
          return std::none_of(actions.begin(), actions.begin() + long(number), [&](const Action& earlier) {
            return earlier.work == action.work && (!by_chunk || earlier.chunk == action.chunk);
          });
        };
        const PipelineCosts costs = equal_costs(pipeline, {1, 1, 1});
        CHECK(play(lists, pipeline.chunks, costs, Lanes::four, is_first).problem == "");
      }
    });
}

TEST_CASE("what waits for the device is named") {
  std::vector<Actions> lists = lists_of({"1f1b", 2, 1, 1});
  lists[0][0].next_receives = Message::gradient;
  const auto first = [](int stage, size_t action) { return stage == 0 && action == 0; };
  CHECK(play(lists, 1, {std::vector<ChunkCosts>(2, {1, 1, 1})}, Lanes::four, first).problem ==
        "stage 0 waits for its device before F0; stage 1 waits to receive for F0");
}

TEST_CASE("with all messages in one queue gpipe ends, but 1f1b, interleaved and zb wait forever") {
  for_pipelines([](const Pipeline& pipeline) {
    const auto& [schedule, p, v, A] = pipeline;
    if (p == 1 || A == 1 || !std::set<std::string>{"gpipe", "1f1b", "interleaved", "zb"}.contains(schedule)) return;
    const PlayedStep step = play(lists_of(pipeline), v, equal_costs(pipeline, {1, 1, 1}), Lanes::one);
    CHECK((step.problem == "") == (schedule == "gpipe"));
  });
  CHECK(play(lists_of({"1f1b", 2, 1, 4}), 1, {std::vector<ChunkCosts>(2, {1, 1, 1})}, Lanes::one).problem ==
        "stage 0 waits to receive for B0, but first to send after F1; "
        "stage 1 waits to receive for F1, but first to send after B0");
}

TEST_CASE("the simulator's times by hand") {
  // When the forwards of a stage begin; a forward of stage i takes times[i].
  const auto begins = [](const std::vector<double>& times, int micro_batches, double message, Lanes lanes) {
    std::vector<Actions> lists;
    PipelineCosts costs = {{}, message};
    for (size_t i = 0; i < times.size(); ++i) {
      lists.push_back(forwards({int(times.size()), int(i)}, micro_batches));
      costs.chunks.push_back({times[i], 0, 0});
    }
    const PlayedStep step = play(lists, 1, costs, lanes);
    std::vector<std::vector<double>> begins;
    for (const auto& spans : step.spans) {
      begins.emplace_back();
      for (const PlayedStep::Span& span : spans) begins.back().push_back(span.begin);
    }
    return begins;
  };
  using Expected = std::vector<std::vector<double>>;
  // The receive of F1 is posted before F0 computes, so its message travels meanwhile.
  CHECK(begins({1, 1}, 2, 0.5, Lanes::four) == Expected{{0, 1}, {1.5, 2.5}});
  // A slow receiver: F1 is on its way while it computes F0, F2 while it computes F1. The sender has computed F3 by then
  // and waits with it until F2 has left the buffer.
  CHECK(begins({1, 3}, 6, 0.5, Lanes::four) == Expected{{0, 1, 2, 3, 5, 8}, {1.5, 4.5, 7.5, 10.5, 13.5, 16.5}});
  // One queue: stage 1 receives for F1 when it has sent after F0.
  CHECK(begins({1, 1, 1}, 2, 1, Lanes::one)[1] == std::vector<double>{2, 5});
  CHECK(begins({1, 1, 1}, 2, 1, Lanes::four)[1] == std::vector<double>{2, 3});
}

TEST_CASE("mistakes in a schedule are noticed") {
  const Pipeline pipeline = {"1f1b", 3, 1, 4};
  const auto problem_with = [&](const std::function<void(std::vector<Actions>&)>& plant) {
    std::vector<Actions> lists = lists_of(pipeline);
    plant(lists);
    return problem_of(lists, pipeline.micro_batches);
  };
  CHECK(problem_with([](auto&) {}) == "");
  CHECK(problem_with([](auto& lists) { std::swap(lists[2][2], lists[2][3]); }) == "B1 comes too early, or twice");
  CHECK(problem_with([](auto& lists) { std::swap(lists[0][3], lists[0][5]); }) == "B1 is out of order");
  CHECK(problem_with([](auto& lists) { lists[1].pop_back(); }) == "something is left out");
  CHECK(problem_with([](auto& lists) { lists[1].push_back(lists[1].back()); }) == "B3 comes too early, or twice");
  CHECK(problem_with([](auto& lists) { lists[1][3] = lists[1][1]; }) == "F1 comes twice");
  CHECK(problem_with([](auto& lists) { lists[1][0].micro_batch = 4; }) == "F4 does not exist");
  CHECK(problem_with([](auto& lists) { lists[0][1].slot = 0; }) == "F1 takes slot 0, which F0 has");
  CHECK(problem_with([](auto& lists) { lists[0][3].slot = 1; }) == "B0 looks in slot 1, not in its forward's slot");
  // What is possible on each stage, but not on all together
  CHECK(problem_with([](auto& lists) {
          std::swap(lists[1][0], lists[1][1]);
        }) == "stage 1 receives for F1 what stage 0 sends after F0");
  CHECK(problem_with([](auto& lists) {
          lists[1][5].sends = Message::none;
        }).ends_with("stage 2 waits to receive for F3"));
  CHECK(problem_with([](auto& lists) {
          lists[1] = make_schedule("gpipe", {3, 1}, 4);
        }).find("stage 1 waits to receive for F3") != std::string::npos);
  CHECK(problem_with([](auto& lists) {
          lists[0].back().receives = Message::none;
        }) == "stage 1 sends after B3 what nobody receives");
  // The right micro-batch for another chunk
  std::vector<Actions> lists = {forwards({2, 0, 2}, 1), forwards({2, 1, 2}, 1)};
  std::swap(lists[1][0], lists[1][1]);
  CHECK(play(lists, 2, {std::vector<ChunkCosts>(4, {1, 1, 1})}).problem ==
        "stage 1 receives for F0 of chunk 1 what stage 0 sends after F0 of chunk 0");
}

TEST_CASE("backwards of gpipe in the order of the last micro-batch first would end, but sum up gradients otherwise") {
  std::vector<Actions> lists = lists_of({"gpipe", 3, 1, 4});
  for (Actions& actions : lists) std::reverse(actions.begin() + 4, actions.end());
  CHECK(play(lists, 1, {std::vector<ChunkCosts>(3, {1, 1, 1})}).problem == "");
  CHECK(problem_of(lists, 4) == "B3 is out of order");
}

TEST_CASE("what a schedule cannot do is refused") {
  CHECK(error_of([] { make_schedule("2f2b", {2, 0}, 4); }) == "there is no pipeline schedule '2f2b'");
  CHECK(error_of([] { make_schedule("interleaved", {4, 0, 2}, 6); }) ==
        "interleaved: 6 micro-batches are no multiple of 4 stages: choose a multiple");
  CHECK(error_of([] { make_schedule("1f1b", {4, 0, 2}, 8); }) == "1f1b: a stage has one chunk, not 2: choose interleaved, or one");
  CHECK(error_of([] { deal_layers({3, 1, 64, 256, 64}, 4); }) ==
        "3 layers are too few for --pp 4 with --pp-chunks 1: lower one of them");
}

// How long the slowest chunk takes, in layers.
double slowest(const ModelShape& shape, const std::vector<int>& counts) {
  const double head = shape.vocabulary / (12.0 * shape.channels);
  return std::max<double>(*std::max_element(counts.begin(), counts.end()), counts.back() + head);
}

// The slowest chunk of the best of all ways to deal out.
double best(const ModelShape& shape, std::vector<int> counts, int left, int chunks) {
  counts.push_back(left);
  if (chunks == 1) return slowest(shape, counts);
  double least = INFINITY;
  for (int count = 1; count <= left - (chunks - 1); ++count) {
    counts.back() = count;
    least = std::min(least, best(shape, counts, left - count, chunks - 1));
  }
  return least;
}

TEST_CASE("layers are dealt out to all chunks, and no other way has a faster slowest chunk") {
  for (int vocabulary : {1, 129, 400, 1000, 3000, 5000, 20000})
    for (int layers = 1; layers <= 10; ++layers)
      for (int chunks = 1; chunks <= layers; ++chunks) {
        CAPTURE(vocabulary);
        CAPTURE(layers);
        CAPTURE(chunks);
        const ModelShape shape = {layers, 1, 64, vocabulary, 64};
        std::vector<int> counts;
        for (const auto& [first, count] : deal_layers(shape, chunks)) {
          CHECK(first == std::accumulate(counts.begin(), counts.end(), 0));
          CHECK(count >= 1);
          counts.push_back(count);
        }
        CHECK(int(counts.size()) == chunks);
        CHECK(std::accumulate(counts.begin(), counts.end(), 0) == layers);
        CHECK(std::is_sorted(counts.begin(), counts.end() - 1));
        if (chunks > 1) CHECK(counts[counts.size() - 2] - counts[0] <= 1);
        CHECK(slowest(shape, counts) == about(best(shape, {}, layers, chunks)));
      }
}

TEST_CASE("of stages with several chunks the slowest stage is as fast as it can be, then its chunks") {
  for (int vocabulary : {1, 400, 3000, 20000})
    for (int layers : {4, 7, 10, 12})
      for (int stages : {1, 2, 3})
        for (int chunks = 1; stages * chunks <= layers; ++chunks) {
          CAPTURE(vocabulary);
          CAPTURE(layers);
          CAPTURE(stages);
          CAPTURE(chunks);
          const ModelShape shape = {layers, 1, 64, vocabulary, 64};
          const std::vector<Layers> dealt = deal_layers(shape, stages, chunks);
          REQUIRE(int(dealt.size()) == stages * chunks);
          std::vector<int> of_stages(static_cast<size_t>(stages));
          int next = 0;
          for (int i = 0; i < stages * chunks; ++i) {
            CHECK(dealt[size_t(i)].first == next);
            CHECK(dealt[size_t(i)].count >= 1);
            next = dealt[size_t(i)].end();
            of_stages[size_t(i % stages)] += dealt[size_t(i)].count;
          }
          CHECK(next == layers);
          double least = INFINITY;  // of all numbers of layers that the last stage may have
          for (int last = chunks; last <= layers - (stages - 1) * chunks; ++last) {
            const double others = stages > 1 ? std::ceil(double(layers - last) / (stages - 1)) : 0;
            if (stages > 1 || last == layers) least = std::min(least, std::max(others, last + vocabulary / (12.0 * 64)));
          }
          CHECK(slowest(shape, of_stages) == about(least));
          for (int stage = 0; stage + 1 < stages; ++stage)  // without a head
            CHECK(dealt[size_t((chunks - 1) * stages + stage)].count - dealt[size_t(stage)].count <= 1);
        }
}

TEST_CASE("layers of known models") {
  const auto counts = [](const ModelShape& shape, int stages, int chunks = 1) {
    std::vector<int> counts;
    for (const Layers& layers : deal_layers(shape, stages, chunks)) counts.push_back(layers.count);
    return counts;
  };
  CHECK(counts({12, 12, 768, 50257, 1024}, 2, 2) == std::vector{4, 2, 5, 1});
  CHECK(counts({12, 12, 768, 50257, 1024}, 1) == std::vector{12});
  CHECK(counts({12, 12, 768, 50257, 1024}, 2) == std::vector{9, 3});         // the head is 5.5 layers
  CHECK(counts({12, 12, 768, 50257, 1024}, 4) == std::vector{3, 4, 4, 1});
  CHECK(counts({48, 25, 1600, 50257, 1024}, 8) == std::vector{6, 6, 6, 6, 6, 7, 7, 4});  // 2.6 layers
  CHECK(counts({48, 25, 1600, 50257, 1024}, 4, 2) == std::vector{6, 6, 6, 6, 6, 7, 7, 4});
  CHECK(counts({8, 8, 64, 211, 32}, 4) == std::vector{2, 2, 2, 2});          // 0.3 layers
  CHECK(counts({4, 4, 64, 211, 32}, 4) == std::vector{1, 1, 1, 1});
}

// ---- dev/schedule.py

const bool python_found = std::system("python3 --version > /dev/null 2>&1") == 0;

TEST_CASE("schedules are drawn, and bad input is one line" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string picture = (folder / "picture.svg").string(), log = (folder / "log").string();
  const auto code = [&](const std::string& arguments) {
    const std::string command = "python3 dev/schedule.py --program " + built_for_host("schedule") + " " + arguments;
    return WEXITSTATUS(std::system((command + " > '" + log + "' 2>&1").c_str()));
  };
  CHECK(code("-o '" + picture + "'") == 0);
  const std::string text = content_of(picture);
  for (const char* words : {"a step of 33, bubble 9 (27 %); (p−1)(F+B) = 9<", "a step of 28.5, bubble 4.5 (16 %)",
                            "a step of 27, bubble 3 (11 %)", ">stage 3<", ">1 slot<", ">11 slots of 1/2<"})
    CHECK_MESSAGE(text.find(words) != std::string::npos, words);
  for (const char* bad : {"--schedule 2f2b", "--stages 0", "--stages x", "--micro-batches ''", "--message nan",
                          "--weight 3", "--schedule interleaved --micro-batches 6",
                          "--forward 0 --backward 0 --weight 0", "--what", "-o /nowhere/picture.svg",
                          "--program nowhere"}) {
    CAPTURE(bad);
    CHECK(code(bad) == 2);
    const std::string error = content_of(log);
    CAPTURE(error);
    CHECK(error.starts_with("error: "));
    CHECK(std::ranges::count(error, '\n') == 1);
  }
}

// ---- dev/timeline.py --stages

namespace {

// A trace of the actions of all stages. Each action has two kernels; only micro-batch 5's are as fast as `costs` says.
std::string trace_of(const std::vector<Actions>& lists, const ChunkCosts& costs) {
  std::string events;
  for (int stage = 0; stage < int(lists.size()); ++stage) {
    Timeline timeline = {{{0, "compute"}}, {}};
    int64_t clock = 0;
    for (const Action& a : lists[size_t(stage)])
      for (double part : {0.25, 0.75}) {
        const auto duration = int64_t(1e6 * part * costs.of(a.work) * (1 + std::abs(a.micro_batch - 5)));
        const TraceContext context = {.step = 1, .micro_batch = a.micro_batch, .work = name_of(a.work), .chunk = a.chunk};
        timeline.ranges.push_back({"gelu_forward", 0, clock, duration, 0, 0, context});
        clock += duration;
      }
    events += (stage > 0 ? ",\n" : "") + process_event(stage, stage) + ",\n" + trace_events(timeline, stage);
  }
  return "{\"traceEvents\": [" + events + "]}";
}

}  // namespace

TEST_CASE("a trace's bubble follows from its dependencies, whatever the clock says" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const auto drawn = [&](const std::string& trace, const std::string& title) {
    std::ofstream(folder / "trace.json") << trace;
    const std::string in = (folder / "trace.json").string(), out = (folder / "picture.svg").string(), log = (folder / "log").string();
    std::system(("python3 dev/timeline.py --stages '" + in + "=" + title + "' -o '" + out + "' > '" + log + "' 2>&1").c_str());
    return content_of(log);
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    CAPTURE(text);
    CHECK_MESSAGE(text.find(part) != std::string::npos, part);
  };
  const ChunkCosts costs = {1, 1, 1};
  const std::vector<Actions> zb = lists_of({"zb", 4, 1, 8});
  contains(drawn(trace_of(lists_of({"1f1b", 4, 1, 8}), costs), "1f1b"),
           "1f1b: a step of 33.0 ms, bubble 9.0 ms (27.3 %); (p−1)(F+B) = 9.0 ms\n");
  contains(drawn(trace_of(lists_of({"interleaved", 4, 2, 8}), costs), "interleaved"),
           "a step of 57.0 ms, bubble 9.0 ms (15.8 %); (p−1)(F+B)/v = 9.0 ms\n");
  contains(drawn(trace_of(zb, costs), "zb"), "a step of 27.0 ms, bubble 3.0 ms (11.1 %); (p−1)(F+I) − (min(A,p)−1)·min(F,I,W) = 3.0 ms\n");
  // Actions keep the order of the trace: with the gradients of weights last, nothing fills the gaps before.
  std::vector<Actions> later = zb;
  for (Actions& actions : later)
    std::ranges::stable_partition(actions, [](const Action& a) { return a.work != Work::weight; });
  contains(drawn(trace_of(later, costs), "mine"), "mine: a step of 30.0 ms, bubble 6.0 ms (20.0 %)\n");
  contains(drawn(trace_of({zb[0], {}, zb[2], zb[3]}, costs), "cut"), "error: ");
  contains(drawn("{\"traceEvents\": []}", "none"), "error: ");
}
