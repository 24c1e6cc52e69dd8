// Every mesh that splits the sequence, or has stages, beside one rank: every schedule, both methods. test_tensor_parallel
// has the other meshes, with tp and dp alone.
// For remove_events.sh: 4 ranks, any number*,the gradients*,*few tokens*
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "extensions/generation/generation.cuh"
#include "extensions/pipeline/pipeline.h"
#include "gpt/rehearsal.cuh"
#include "runtime/cache/product_file.h"
#include "runtime/planner/memory.cuh"
#include "test/ranks/formulas.cuh"
#include "test/ranks/recorded_calls.cuh"
#include "test/temporary_folder.h"

namespace {

// Eight layers are enough for eight stages, or for four with two chunks each. Nothing divides the head sizes.
constexpr ModelShape eight_layers = {8, 8, 40, 211, 16}, six_layers = {6, 6, 54, 211, 36};
const std::vector<std::string> schedules = {"1f1b", "interleaved", "zb", "gpipe"};

// Zeros and ones would hide a bias that is added twice.
[[maybe_unused]] const bool all_random = files_with_random_tensors().insert(__FILE__).second;

int rank_count() { return ranks().all.size(); }

// Here at most half of the ranks are data-parallel: half as many samples will do.
[[maybe_unused]] const bool fewer_samples = (usual_global_batch = [] { return rank_count() % 3 ? 16 : 12; }) != nullptr;

const ModelShape& shape_for_ranks() { return rank_count() % 3 ? eight_layers : six_layers; }

// Meshes of all ranks with cp or pp.
std::vector<MeshShape> mesh_shapes(const ModelShape& shape) {
  std::vector<MeshShape> shapes;
  for (int tp = 1; tp <= rank_count(); ++tp)
    for (int cp = 1; tp * cp <= rank_count(); ++cp)
      for (int pp = cp == 1 ? 2 : 1; tp * cp * pp <= rank_count(); ++pp)
        if (rank_count() % (tp * cp * pp) == 0 && shape.heads % tp == 0 && shape.positions % (2 * cp) == 0 && pp <= shape.layers)
          shapes.push_back({.tp = tp, .cp = cp, .dp = rank_count() / (tp * cp * pp), .pp = pp});
  return shapes;
}

// The meshes that have stages.
std::vector<MeshShape> pipelines(const ModelShape& shape) {
  std::vector<MeshShape> shapes = mesh_shapes(shape);
  std::erase_if(shapes, [](const MeshShape& mesh) { return mesh.pp == 1; });
  return shapes;
}

// What runs may differ in, in rotation: schedules, ways to split attention, levels of ZeRO, recomputation, pieces, and
// numbers of micro-batches, as far as the schedule allows them.
ModelOptions options_on(const ModelShape& shape, const Mesh& mesh, int turn) {
  const int stages = mesh.shape().pp, samples = global_batch() / mesh.shape().dp;
  pipeline_schedule = schedules[size_t(turn) % schedules.size()];
  if (stages == 1 || (pipeline_schedule == "interleaved" && shape.layers < 2 * stages)) pipeline_schedule = "1f1b";
  const bool is_zb = pipeline_schedule == "zb", is_interleaved = pipeline_schedule == "interleaved";
  const int micro_batches = stages * (turn / 4 % 2 ? 2 : 4);
  ModelOptions options = {.shape = shape, .micro_batch = samples % micro_batches ? 1 : samples / micro_batches,
                          .recompute = is_zb ? Recompute::none : Recompute(turn % 3),
                          .tp_pieces = 1 + turn % 2, .logit_chunks = turn % 2 ? 3 : 1,
                          .store = {.zero = is_zb ? turn / 4 % 2 : (turn + turn / 4) % 4}};
  if (is_interleaved) options.chunks = std::min(2 + turn / 4 % 3, shape.layers / stages);
  if (is_interleaved && samples / options.micro_batch % stages) options.micro_batch = samples / stages;
  const bool can_share_heads = shape.heads % (mesh.shape().tp * mesh.shape().cp) == 0;
  method_of(options) = can_share_heads ? ContextMethod((turn + turn / 4) % 2) : ContextMethod::ring;
  return options;
}

// Calls work(mesh, turn) with each mesh, `runs` times. With `every` above 1 it takes only every `every`-th mesh, and
// other meshes in the next call.
int calls = 0;
template <class Call>
void for_meshes(const std::vector<MeshShape>& shapes, int runs, Call work, int every = 1) {
  int turn = rank_count(), number = calls++;
  for (const MeshShape& mesh_shape : shapes) {
    if (number++ % every) continue;
    Mesh mesh(ranks().mesh, mesh_shape);
    for (int run = 0; run < runs; ++run, ++turn) {
      CAPTURE(mesh_shape.tp);
      CAPTURE(mesh_shape.cp);
      CAPTURE(mesh_shape.dp);
      CAPTURE(mesh_shape.pp);
      CAPTURE(turn);
      work(mesh, turn);
    }
  }
}

// Eight ranks on few cores take their time. A few of their twenty meshes are enough where ranks only have to agree.
// Half of them are enough where another case tests the other half.
int every_few() { return rank_count() < 6 ? 1 : rank_count() < 8 ? 3 : 7; }
int every_second() { return rank_count() < 6 ? 1 : 2; }

// A pipeline in which each rank is a stage.
struct AllStages : Mesh {
  AllStages() : Mesh(ranks().mesh, {.pp = rank_count()}) {}
};

ModelShape tiny(int layers) {
  return rank_count() % 3 ? ModelShape{layers, 4, 32, 61, 2 * rank_count()} : ModelShape{layers, 3, 24, 61, 2 * rank_count()};
}

}  // namespace

TEST_CASE("losses and norms equal one rank's, on every mesh, under every schedule") {
  size_t steps = all_steps;  // and a validation, on the first mesh
  for_meshes(mesh_shapes(shape_for_ranks()), rank_count() >= 6 ? 1 : 4, [&](Mesh& mesh, int turn) {
    const ModelOptions options = options_on(shape_for_ranks(), mesh, turn);
    const Curve curve = train<float>(options, mesh, std::exchange(steps, some_steps));
    check_fp32_curve(curve, shape_for_ranks());
  }, every_second());
}

// Every activation and every gradient travels as it is, and gradients are added up in the order of micro-batches.
TEST_CASE_TEMPLATE("a pipeline of all ranks has the bits of one rank: the first loss, all gradients but wte's", T, float,
                   __nv_bfloat16) {
  AllStages mesh;
  const ModelShape shape = tiny(rank_count() * 2);
  const std::vector<float> wanted = first_step_of_one_rank<T>(shape, State::gradient);
  const std::vector<float> loss = from_rank_0([&] {
    Mesh alone;
    const std::unique_ptr<Model> one = model_of<T>(shape, alone, 2);
    train_step(*one, alone, 0);
    return std::vector{one->loss()};
  });
  for (const std::string& schedule : schedules) {
    CAPTURE(schedule);
    pipeline_schedule = schedule;
    const int chunks = schedule == "interleaved" ? 2 : 1;
    const std::unique_ptr<Model> model = model_of<T>({.shape = shape, .micro_batch = 2, .chunks = chunks}, mesh);
    train_step(*model, mesh, 0);
    CHECK(model->loss() == loss[0]);
    for (const Slice& slice : model->trained_store().kept_slices()) {
      CAPTURE(slice.tensor->name);
      const std::vector<float> actual = values_of(model->trained_store(), slice, State::gradient);
      const auto expected = wanted.begin() + long(offset_of(model->tensors(), *slice.tensor) + slice.first);
      if (slice.tensor->name != "wte.weight") CHECK(std::equal(actual.begin(), actual.end(), expected));
    }
  }
}

TEST_CASE("any number of micro-batches") {
  const int stages = rank_count();
  AllStages mesh;
  const ModelShape shape = tiny(2 * stages);
  for (int micro_batches : {1, stages - 1, stages, stages + 1, 2 * stages}) {
    CAPTURE(micro_batches);
    chosen_global_batch = micro_batches;
    ModelOptions options = {.shape = shape, .micro_batch = 1};
    Mesh alone;
    Curve wanted;
    if (mesh.place().pp == 0) wanted = train<float>(options, alone, some_steps);
    const std::vector<float> losses = all_values(wanted.losses), norms = all_values(wanted.norms);
    for (const std::string& schedule : schedules) {
      if (schedule == "interleaved" && micro_batches % stages) continue;
      CAPTURE(schedule);
      pipeline_schedule = schedule;
      options.chunks = schedule == "interleaved" ? 2 : 1;
      const Curve curve = train<float>(options, mesh, some_steps);
      CHECK_WITHIN("losses", largest_difference(curve.losses, losses), 1e-5);
      CHECK_WITHIN("norms", largest_difference(curve.norms, norms), 1e-5);
    }
  }
  chosen_global_batch = 0;
}

namespace {

using ActionKey = std::tuple<std::string, int, int>;  // work, micro-batch, chunk

ActionKey key_of(const Action& action) { return {name_of(action.work), action.micro_batch, action.chunk}; }

// How many receives each of the actions posts, as the simulator plays them.
std::map<ActionKey, int> posted_in_simulator(const Actions& actions) {
  std::map<ActionKey, int> posted;
  bool own_is_posted = false;
  for (const Action& action : actions) {
    for (Message message : receives_to_post(action, own_is_posted)) posted[key_of(action)] += message != Message::none;
    own_is_posted = action.next_receives != Message::none;
  }
  return posted;
}

// What a step's actions issue, in this order, or those of a validation.
std::vector<TracedRange> traced(Model& model, Mesh& mesh, const Actions& actions, bool training) {
  Profiler& profiler = Profiler::instance();
  profiler.take_timeline();
  profiler.trace = true;
  MicroBatches batches(model, mesh, 0, training);
  model.begin_sums();
  for (const Action& action : actions) {
    const Batch batch = batches.batch(action);
    profiler.context = {.micro_batch = action.micro_batch, .work = name_of(action.work), .chunk = action.chunk};
    model.run(batch);
  }
  profiler.context = {};
  if (training) model.update({}, 1);
  profiler.trace = false;
  return profiler.take_timeline().ranges;
}

// The same in a trace of the actions. Their receives must come before all else that an action issues.
std::map<ActionKey, int> posted_in_program(Model& model, Mesh& mesh, const Actions& actions) {
  std::map<ActionKey, int> posted;
  std::set<ActionKey> computing;
  for (const TracedRange& range : traced(model, mesh, actions, true)) {
    if (!range.context.work) continue;
    const ActionKey key = {range.context.work, range.context.micro_batch, range.context.chunk};
    if (range.name != std::string("receive")) {
      computing.insert(key);
      continue;
    }
    CHECK(!computing.contains(key));
    ++posted[key];
  }
  for (const Action& action : actions) posted.try_emplace(key_of(action), 0);
  return posted;
}

}  // namespace

TEST_CASE("every action posts the receives that the simulator plays, zero bubble's too, before its work") {
  const int stages = rank_count();
  AllStages mesh;
  for (const std::string& schedule : schedules)
    for (int micro_batches : {1, 2 * stages}) {
      if (schedule == "interleaved" && micro_batches % stages) continue;
      CAPTURE(schedule);
      CAPTURE(micro_batches);
      pipeline_schedule = schedule;
      chosen_global_batch = micro_batches;
      const int chunks = schedule == "interleaved" ? 2 : 1;
      const ModelOptions options = {.shape = tiny(2 * stages), .micro_batch = 1, .chunks = chunks};
      const std::unique_ptr<Model> model = model_of<float>(options, mesh);
      const Actions actions = schedule_of(options, mesh);
      CHECK(posted_in_program(*model, mesh, actions) == posted_in_simulator(actions));
    }
  chosen_global_batch = 0;
}

namespace {

// How many blocks these ranges gather, and how many of these gathers an action waits for before its first block.
std::pair<int, int> gathered(const Model& model, const std::vector<TracedRange>& ranges) {
  int all = 0, late = 0;
  std::set<ActionKey> computing;
  for (const auto& [name, stream, start, duration, bytes, flops, context] : ranges) {
    const bool gathers = name == std::string("all_gather");
    all += gathers && context.layer >= 0;
    if (!context.work || context.layer < 0) continue;
    const ActionKey key = {context.work, context.micro_batch, context.chunk};
    const Layers& chunk = model.tensors().chunks()[size_t(context.chunk)];
    if (!gathers) computing.insert(key);
    else if (context.layer == (context.work == std::string("forward") ? chunk.first : chunk.end() - 1)) late += !computing.contains(key);
  }
  return {all, late};
}

}  // namespace

TEST_CASE("ZeRO 3 gathers the first block of each action during the action before, or the update before") {
  for (int stages = 1; 2 * stages <= rank_count(); ++stages) {
    if (rank_count() % stages) continue;
    Mesh mesh(ranks().mesh, {.dp = rank_count() / stages, .pp = stages});
    for (const std::string& schedule : schedules)
      for (int layers : {1, 2, 3, 4}) {  // of a chunk
        if (schedule == "zb" || (stages == 1 && schedule != "1f1b")) continue;
        CAPTURE(stages);
        CAPTURE(schedule);
        CAPTURE(layers);
        pipeline_schedule = schedule;
        chosen_global_batch = 2 * stages * mesh.shape().dp;
        const int chunks = schedule == "interleaved" ? 2 : 1;
        const ModelOptions options = {.shape = tiny(layers * chunks * stages), .micro_batch = 1, .chunks = chunks, .store = {.zero = 3}};
        const std::unique_ptr<Model> model = model_of<float>(options, mesh);
        train_step(*model, mesh, 0);
        const Actions actions = schedule_of(options, mesh), validation = forwards(model->stage(), 2 * stages);
        const auto [all, late] = gathered(*model, traced(*model, mesh, actions, true));
        CHECK(all >= layers * chunks);
        CHECK(late == 0);
        const auto [in_validation, late_there] = gathered(*model, traced(*model, mesh, validation, false));
        CHECK((in_validation > 0) == (layers * chunks > 1));
        CHECK(late_there == 0);
      }
  }
  chosen_global_batch = 0;
}

namespace {

void check_first_gradients(Mesh& mesh, const ModelOptions& options, const std::vector<float>& wanted) {
  const std::unique_ptr<Model> model = model_of<float>(options, mesh);
  train_step(*model, mesh, 0);
  const std::vector<Difference> found = differences(*model, wanted);
  const double bound = gradient_bound(options.shape);
  for (size_t i = 0; i < found.size(); ++i) {
    CAPTURE(model->tensors().tensors()[i].name);
    const double norm = std::sqrt(found[i].wanted);
    CHECK(norm > 0);
    CHECK_WITHIN("gradients", std::sqrt(found[i].squares), bound * norm);
    CHECK_WITHIN("key third", std::sqrt(found[i].noise), bound * norm);
  }
}

}  // namespace

TEST_CASE("the gradients of a first step equal one rank's, tensor by tensor") {
  const ModelShape& shape = shape_for_ranks();
  const std::vector<float> wanted = first_step_of_one_rank<float>(shape, State::gradient);
  for_meshes(mesh_shapes(shape), 1, [&](Mesh& mesh, int turn) {
    check_first_gradients(mesh, options_on(shape, mesh, turn), wanted);
  }, every_second());
}

TEST_CASE("every schedule with both ways to split attention") {
  if (rank_count() != 4) return skip("needs four ranks");
  Mesh mesh(ranks().mesh, {.cp = 2, .pp = 2});
  const ModelShape shape = tiny(4);
  const std::vector<float> wanted = first_step_of_one_rank<float>(shape, State::gradient);
  for (const std::string& schedule : schedules)
    for (ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses}) {
      CAPTURE(schedule);
      CAPTURE(int(method));
      pipeline_schedule = schedule;
      check_first_gradients(mesh, {.shape = shape, .micro_batch = 2, .chunks = schedule == "interleaved" ? 2 : 1,
                                   .store = {.rooms = ContextOptions{method}}}, wanted);
    }
}

namespace {

// The logits of the tokens that follow the first `tokens` tokens of some texts, then one more, ..., the first `end`.
std::vector<float> next_logits(Model& model, int tokens, int end) {
  BatchBuffers buffers(128, test_stream());
  TokenByToken next(model, buffers);
  std::vector<float> all;
  for (; tokens <= end; ++tokens) {
    std::vector<std::vector<int>> texts(size_t(model.options().samples));
    for (size_t text = 0; text < texts.size(); ++text)
      for (size_t i = 0; i < size_t(tokens); ++i) texts[text].push_back(int((text * 31 + i * (3 + text) + i * i % 7) % 211));
    for (const std::vector<float>& logits : next(texts)) all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

}  // namespace

// Prompts so short that some ranks that split the sequence have no key at first, and such that the positions are full.
TEST_CASE("text: the logits after a few tokens and after many equal one rank's, with a cache and without") {
  const ModelShape& shape = shape_for_ranks();
  const int P = shape.positions;
  const auto logits_on = [&](const ModelOptions& options, Mesh& mesh) {
    const std::unique_ptr<Model> model = model_of<float>(options, mesh);
    std::vector<float> all;
    for (const auto& [first, last] : {std::pair{1, 4}, {5, 7}, {P - 1, P + 2}, {P + P / 2, P + P / 2 + 1}}) {
      const std::vector<float> logits = next_logits(*model, first, last);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  };
  ModelOptions options = {.shape = shape, .micro_batch = 4, .samples = 3};
  const std::vector<float> wanted = from_rank_0([&] {
    Mesh alone;
    return logits_on(options, alone);
  });
  for_meshes(mesh_shapes(shape), rank_count() <= 4 ? 3 : 1, [&](Mesh& mesh, int turn) {
    const auto& [tp, cp, dp, pp, islands] = mesh.shape();
    const bool can_share_heads = cp > 1 && shape.heads % (tp * cp) == 0;
    method_of(options) = turn % 3 == 1 && can_share_heads ? ContextMethod::ulysses : ContextMethod::ring;
    options.cached_positions = turn % 3 == 2 ? 0 : P;
    const bool can_interleave = pp > 1 && shape.layers >= 2 * pp && micro_batches(options, mesh) % pp == 0;
    options.chunks = can_interleave ? 1 + turn % 2 : 1;
    pipeline_schedule = options.chunks > 1 ? "interleaved" : "1f1b";
    check_logits(logits_on(options, mesh), wanted, logit_bound(shape));
  });
}

// ---- the rehearsal of a pipeline

namespace {

using Bytes = std::map<std::string, std::map<std::string, double>>;  // by group and collective

// What a model computes and sends.
struct Outcome {
  std::vector<float> losses, norms, gradients, state, logits;
  std::vector<Bytes> sent;  // by step
  bool operator==(const Outcome&) const = default;
};

std::vector<float> own_gradients(const Parameters& store) {
  std::vector<float> all;
  for (const Slice& slice : store.kept_slices()) {
    const std::vector<float> values = values_of(store, slice, State::gradient);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

Outcome outcome_of(Model& model, Mesh& mesh) {
  Outcome outcome;
  StepsInFlight in_flight(model, mesh);
  for (size_t step = 0; step < some_steps; ++step) {
    in_flight.begin(false, false);
    train_step(model, mesh, step);
    in_flight.end(step + 1, 0, {});
    const FinishedStep finished = in_flight.finish();
    outcome.losses.push_back(float(finished.result.loss));
    outcome.norms.push_back(float(finished.result.norm));
    outcome.sent.emplace_back();
    for (const auto& [group, sent] : mesh.take_traffic(finished.traffic)) outcome.sent.back()[group] = sent.bytes_sent;
  }
  outcome.losses.push_back(validation_loss(model, mesh));
  outcome.gradients = own_gradients(model.trained_store());
  outcome.state = own_state(model.trained_store());
  outcome.logits = next_logits(model, 3, 6);
  return outcome;
}

// The last entries of the flight recorder: group, number and name.
std::vector<std::string> last_records() {
  std::vector<std::string> all;
  for (const FlightRecorder::Entry& entry : recorded_calls())
    all.push_back(std::string(entry.group) + " #" + std::to_string(entry.number) + " " + entry.name);
  return {all.end() - std::min<long>(20, long(all.size())), all.end()};
}

// Rehearses as the program does, with everybody watching.
void rehearse_and_watch(Model& model, Mesh& mesh) {
  Profiler& profiler = Profiler::instance();
  int heard = 0;
  profiler.enabled = profiler.trace = true;
  profiler.listener = [&](auto...) { ++heard; };
  const std::vector<std::string> before = last_records();
  const int P = model.options().seq_len, traffic = mesh.begin_traffic();
  rehearse(ranks().all, mesh, model, ProductFile("none"), [&] {
    BatchBuffers buffers(1 << 10, test_stream(), model.options().slots + 1);
    rehearse_step(model, schedule_of(model.options(), mesh), buffers, 1);
    TokenByToken(model, buffers).rehearse(3, size_t(P + P / 2));
    CUDA_CHECK(cudaDeviceSynchronize());
  });
  profiler.enabled = profiler.trace = false;
  profiler.listener = nullptr;
  CHECK(heard == 0);
  for (const auto& [group, sent] : mesh.take_traffic(traffic)) {
    CAPTURE(group);
    const bool is_lane = group.starts_with("from_") || group.starts_with("to_");
    const bool takes_part = group == "tp" || group == "cp";
    double bytes = 0;
    for (const auto& [_, of_kind] : sent.bytes_sent) bytes += double(of_kind);
    if (is_lane || takes_part) CHECK((bytes == 0) == is_lane);
  }
  CHECK(profiler.collect().empty());
  CHECK(profiler.take_timeline().ranges.empty());
  for (int wait = 0; wait < 100 && last_records() != before; ++wait)  // until the mesh's own thread has looked
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(last_records() == before);
  const std::vector<float> gradients = own_gradients(model.trained_store());
  CHECK(std::ranges::count(gradients, 0.0f) == long(gradients.size()));
}

}  // namespace

TEST_CASE_TEMPLATE("a rehearsed pipeline has the same bits and sends the same bytes, and nothing shows it", T, float,
                   __nv_bfloat16) {
  if (rank_count() == 8 && !std::is_same_v<T, float>) return skip("six ranks have as many meshes");
  const ModelShape shape = tiny(std::max(2 * rank_count(), 4));
  for_meshes(pipelines(shape), rank_count() <= 4 ? 4 : 1, [&](Mesh& mesh, int turn) {
    ModelOptions options = options_on(shape, mesh, turn);
    options.samples = 1;
    options.cached_positions = turn % 3 ? shape.positions : 0;
    options.store.stochastic_rounding = !std::is_same_v<T, float> && turn % 2;
    const std::unique_ptr<Model> plain = model_of<T>(options, mesh);
    const Outcome wanted = outcome_of(*plain, mesh);
    const std::unique_ptr<Model> rehearsed = model_of<T>(options, mesh);
    rehearse_and_watch(*rehearsed, mesh);
    const Outcome actual = outcome_of(*rehearsed, mesh);
    CHECK(actual.losses == wanted.losses);
    CHECK(actual.sent == wanted.sent);
    CHECK((actual == wanted));
  }, every_few());
}

// ---- decisions and copies

TEST_CASE("the same mesh gives the same bits") {
  for_meshes(mesh_shapes(tiny(rank_count())), 1, [&](Mesh& mesh, int turn) {
    const ModelOptions options = options_on(tiny(rank_count()), mesh, turn);
    const Curve first = train<float>(options, mesh, some_steps), again = train<float>(options, mesh, some_steps);
    CHECK(again.losses == first.losses);
    CHECK(again.norms == first.norms);
  }, every_few());
}

TEST_CASE("a NaN in a weight, or a gradient, of any rank: all ranks leave the update out, and go on") {
  for_meshes(mesh_shapes(tiny(rank_count())), 1, [&](Mesh& mesh, int turn) {
    const ModelOptions options = options_on(tiny(rank_count()), mesh, turn);
    const std::unique_ptr<Model> owner = model_of<float>(options, mesh);
    const int unit = owner->tensors().chunks()[0].first + 1;
    check_nan_on_each_rank(*owner, mesh, unit, unit, [&](int rank) { return (rank + turn) % 2 || options.store.zero > 1; });
  }, every_few());
}

TEST_CASE("fp16: all ranks leave the same updates out, and have one loss scale") {
  for_meshes(mesh_shapes(tiny(rank_count())), 1, [&](Mesh& mesh, int turn) {
    check_loss_scale(options_on(tiny(rank_count()), mesh, turn), mesh);
  }, every_few());
}

// Both ends update the embedding by themselves, by gradients that are the same.
TEST_CASE_TEMPLATE("wte is the same on the first and the last stage, bit by bit, with stochastic rounding too", T, float,
                   __nv_bfloat16) {
  for_meshes(pipelines(tiny(rank_count())), 1, [&](Mesh& mesh, int turn) {
    ModelOptions options = options_on(tiny(rank_count()), mesh, turn);
    options.store.stochastic_rounding = !std::is_same_v<T, float>;
    const std::unique_ptr<Model> model = model_of<T>(options, mesh);
    for (size_t step = 0; step < some_steps; ++step) train_step(*model, mesh, step);
    std::vector<float> mine;
    for (const Slice& slice : model->trained_store().kept_slices()) {
      if (slice.tensor->name != "wte.weight") continue;
      for (State state : {State::weight, State::first_moment, State::second_moment}) {
        const std::vector<float> values = values_of(model->trained_store(), slice, state);
        mine.insert(mine.end(), values.begin(), values.end());
      }
    }
    Communicator& ends = mesh.ends();
    CHECK((ends.size() == 2 || mine.empty()));
    if (mine.empty()) return;  // another stage, or a piece of padding
    Buffer<float> own(mine), both(2 * mine.size());
    ends.after(test_stream());
    ends.all_gather(both.data(), own.data(), mine.size());
    ends.wait_for_all(test_stream());
    const std::vector<float> values = both.get();
    CHECK(std::equal(mine.begin(), mine.end(), values.begin()));
    CHECK(std::equal(mine.begin(), mine.end(), values.begin() + long(mine.size())));
  }, every_few());
}

// ---- 16 bits

// Rows are rounded as one rank rounds them, but for the parts of attention in a ring. Apart from that only sums in
// another order differ: wte's gradient, the norm, and sums over data-parallel and tensor-parallel ranks. Six ranks have
// as many meshes as eight, and take less time.
TEST_CASE("bf16: curves are as near to fp32's as one rank's") {
  const ModelShape shape = tiny(std::max(rank_count(), 2));
  if (rank_count() == 8) return skip("six ranks have as many meshes");
  check_bf16_curves(shape, mesh_shapes(shape), options_on);
}

// ---- bytes and memory

TEST_CASE_TEMPLATE("the formulas give the bytes sent and allocated", T, float, __nv_bfloat16) {
  const ModelShape shape = tiny(std::max(rank_count(), 4));
  for_meshes(mesh_shapes(shape), rank_count() >= 6 ? 1 : std::is_same_v<T, float> ? 4 : 2, [&](Mesh& mesh, int turn) {
    ModelOptions options = options_on(shape, mesh, turn);
    if (mesh.data().size() == 1) options.store.zero = 0;
    const Curve curve = train<T>(options, mesh, 2);
    const Actions actions = schedule_of(options, mesh);
    options.slots = slots_of(actions);
    options.splits_backward = pipeline_schedule == "zb";
    const TensorList list(shape, mesh.tp().size(), mesh.tp().rank(), layers_of(options.shape, mesh.stage(options.chunks)));
    const Shards shards(list, mesh.data().size(), mesh.data().rank());
    check_bytes(curve, bytes_of_mesh<T>(options, mesh, list, shards));
    check_memory(curve, bytes_of_activations<T>(options, list, mesh.shape().cp), 14 * (options.slots + 1) * (shape.layers + 1));
  }, (every_few() + 1) / 2);
}

// Long samples are trained so: all ranks share one sample, and keep as little of it as they can.
TEST_CASE("samples that are long beside the channels: losses, bytes and memory in bf16 with ZeRO 3, blocks recomputed") {
  using T = __nv_bfloat16;
  const int N = rank_count();
  Mesh alone, mesh(ranks().mesh, {.cp = N});
  chosen_global_batch = 2;
  ModelOptions options = {.shape = {2, N, 16 * N, 61, 96 * N}, .micro_batch = 1, .recompute = Recompute::block};
  Curve wanted;
  if (ranks().all.rank() == 0) wanted = train<T>(options, alone, 2);
  const std::vector<float> losses = all_values(wanted.losses);
  options.store.zero = 3;
  for (ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses}) {
    CAPTURE(int(method));
    method_of(options) = method;
    const Curve curve = train<T>(options, mesh, 2);
    CHECK_WITHIN("losses of long samples", largest_difference(curve.losses, losses), 1e-3);
    const TensorList list(options.shape, 1, 0, layers_of(options.shape, mesh.stage(options.chunks)));
    check_bytes(curve, bytes_of_mesh<T>(options, mesh, list, Shards(list, N, mesh.data().rank())));
    check_memory(curve, bytes_of_activations<T>(options, list, N), 16 * 3);
  }
  chosen_global_batch = 0;
}

namespace {

// Random options that no check refuses, on a random mesh of these ranks: a tiny model, and everything that memory
// depends on.
struct RandomJob {
  Options o;
  MeshShape mesh;

  explicit RandomJob(unsigned seed) : random_(seed) {
    std::vector<MeshShape> meshes;
    for (int islands = 1; islands <= rank_count(); ++islands)
      for (int tp = 1; tp <= rank_count() / islands; ++tp)
        for (int cp = 1; cp <= rank_count() / (islands * tp); ++cp)
          for (int pp = 1; pp <= rank_count() / (islands * tp * cp); ++pp)
            if (const int others = islands * tp * cp * pp; rank_count() % others == 0)
              meshes.push_back({tp, cp, rank_count() / others, pp, islands});
    mesh = one_of(meshes);
    o.mesh = mesh;
    if (mesh.islands > 1 || up_to(3) == 0) o.outer.local_steps = 10;
    const bool is_outer = o.outer.is_on();
    if (is_outer) o.outer.dtype = one_of<std::string>({"fp32", "int8", "int4"}), o.outer.delay = up_to(9);
    o.dtype = is_outer ? one_of<std::string>({"fp32", "bf16"}) : one_of<std::string>({"fp32", "bf16", "fp16"});
    const bool is_bf16 = o.dtype == "bf16";
    o.stochastic_rounding = is_bf16 && !is_outer && up_to(1);
    o.reduce_dtype = is_bf16 && up_to(1) ? "bf16" : "fp32";
    if (o.reduce_dtype == "fp32" && !is_outer) o.compress = std::array{"none", "int8", "int4"}[size_t(up_to(2))];
    o.pp_schedule = mesh.pp > 1 ? one_of(schedules) : "1f1b";
    if (o.pp_schedule == "interleaved") o.pp_chunks = 2 + up_to(1);
    const bool is_zb = o.pp_schedule == "zb";
    o.zero = up_to(is_zb ? 1 : 3);
    o.recompute = is_zb ? "none" : one_of<std::string>({"none", "gelu", "block"});
    o.cp_method = one_of<std::string>({"ring", "ulysses"});
    o.tp_pieces = 1 + up_to(2);
    o.micro_batch = 1 + up_to(2);
    o.global_batch = o.micro_batch * mesh.batches() * mesh.pp * (1 + up_to(2));
    o.logit_chunks = up_to(5);
    o.sample_every = size_t(up_to(1));
    o.seq_len = 2 * mesh.cp * mesh.tp * (1 + up_to(4));
    const int heads = mesh.tp * mesh.cp * (1 + up_to(1));
    o.shape = {mesh.pp * o.pp_chunks + up_to(3), heads, heads * (16 + up_to(1)), 50 + up_to(900), o.seq_len + up_to(9)};
    o.plan = true;  // needs no data
    StepOptions in_fp8 = o;  // where the sizes suit eight bits
    in_fp8.fp8 = true, in_fp8.fp8_keep = up_to(1);
    if (is_bf16 && shape_problem(in_fp8).empty()) o.fp8 = true, o.fp8_keep = in_fp8.fp8_keep;
    if (o.compress != "none" && o.zero < 2 && up_to(1)) o.compress = concat("powersgd:", 1 + up_to(8));
    if (up_to(1)) o.moments = "bf16";
    if (up_to(1) && !(is_outer && is_bf16)) o.offload = o.recompute == "block" ? "optimizer,activations" : "optimizer";
    if (o.zero > 0 && !o.stochastic_rounding && o.offload == "none" && !is_outer) o.compress_weights = "int8";
    o.sms.beside_islands = o.outer.delay > 0;  // as the room does when options are parsed
    complete_options(o, rank_count());
    refuse(shape_problem(o));
  }

 private:
  int up_to(int most) { return int(random_() % unsigned(most + 1)); }
  template <class T>
  T one_of(const std::vector<T>& all) {
    return all[size_t(up_to(int(all.size()) - 1))];
  }
  std::mt19937 random_;
};

// Allocated on this rank so far: calls, and bytes. None where nobody counts them.
std::pair<size_t, size_t> allocations() {
#ifdef __NVCC__
  return {};
#else
  return {cpu::counts.allocations, cpu::counts.allocated_bytes};
#endif
}

}  // namespace

// Each rank plans for itself, and then allocates. A planned model allocates nothing.
TEST_CASE("a plan is what training allocates, byte for byte: random jobs on these ranks") {
  const TemporaryFolder folder;  // each rank has its own
  Datasets data;
  data.train.emplace(std::vector<std::string>{put(folder / "text", std::string(1000, 'x'))});
  for (unsigned seed = 0; seed < 16; ++seed) {
    CAPTURE(seed);
    Ranks& all = ranks().all;
    RandomJob random(100 * unsigned(rank_count()) + seed);
    const auto before = allocations();
    const RankPlan plan = planned(random.o, all.rank());
    CHECK(allocations() == before);
    Mesh mesh(ranks().mesh, random.mesh);
    const auto first = allocations();
    const std::unique_ptr<Model> model = build_model_to_train(random.o, mesh, test_stream());
    const ProcessHooks hooks;
    Interruption interruption;
    heeds_signals = false;
    Job job = {random.o, all, mesh, test_stream(), "", hooks, interruption};
    double waited = 0;
    Batches batches(job, *model, data, waited);
    const auto last = allocations();
    CheckpointWriter writer("", size_t(1) << 30, {all, mesh.shape().tp});
    writer.reserve(written_blocks(*model, RankGroup::chunk_bytes_for(all.size())), saved_states(random.o, mesh));
    const auto& buffers = batches.buffers().memory().categories();
    CHECK(text_of(plan) == text_of(rank_plan(*model, mesh, all.rank(), buffers, writer.snapshot_bytes())));
    if (last != before) CHECK(plan.total() == last.second - first.second);
  }
}

TEST_CASE("a plan for a GPU that is not here: the workspaces of its libraries by formulas, all else as on the CPU device") {
  if (allocations() == std::pair<size_t, size_t>()) return skip("a GPU is here");
  for (unsigned seed = 0; seed < 16; ++seed) {
    CAPTURE(seed);
    RandomJob random(100 * unsigned(rank_count()) + seed);
    RankPlan here = planned(random.o, 0);
    const RankPlan elsewhere = planned(random.o, 0, false);
    const Options& o = random.o;
    const int shared = o.cp_method == "ring" ? 1 : o.mesh.cp, T = o.seq_len / o.mesh.cp * shared, NH = o.shape.heads / o.mesh.tp / shared;
    size_t workspaces = size_t(32) << 20;
    if (o.dtype != "fp32") workspaces += round_up(size_t(2 * o.micro_batch * NH * T * T), size_t(256));
    for (MemoryCategory& category : here.memory)
      if (category.name == "workspace") category.bytes += workspaces;
    here.memory.insert(here.memory.end(), {{"NCCL", nccl_bytes(o)}, {"modules", size_t(1) << 30}});
    CHECK(text_of(elsewhere) == text_of(here));
  }
}

TEST_CASE("a plan for a GPU that is not here: a buffer of NCCL for each CTA of a group's ring, two for its tree, one for each sender") {
  const auto buffers = [](const MeshShape& mesh, const std::string& method = "ring", int ctas = -1) {
    StepOptions o;
    o.mesh = mesh, o.cp_method = method, o.sms.ctas = ctas;
    return int(std::lround(double(nccl_bytes(o)) / (9.2 * (1 << 20))));
  };
  CHECK(buffers({}) == 0);
  CHECK(buffers({.dp = 8}) == 3 * (4 + 8));
  CHECK(buffers({.tp = 8}) == 3 * (4 + 16));
  CHECK(buffers({.tp = 8, .dp = 2}, "ring", 0) == 3 * (4 + 24 + 24));
  CHECK(buffers({.cp = 4}) == 3 * (4 + 8 + 16) + 16);
  CHECK(buffers({.cp = 4}, "ulysses") == 3 * (4 + 8 + 16) + 3 * 16);
  CHECK(buffers({.dp = 2, .islands = 3}) == 3 * (4 + 8 + 8) + 2 * 8);
  CHECK(buffers({.pp = 4}) == 3 * (4 + 16 + 4 * 2) + 2 * 2);  // both ends; four lanes, of which two receive
}

TEST_CASE("N ranks that split the sequence have an Nth of gpt2-medium's activations each") {
  check_share_of_activations({.cp = rank_count()});
}
