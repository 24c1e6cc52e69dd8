// Pipelines beside one rank: every schedule, on every mesh.
#include "test/ranks/training.cuh"

namespace {

// As many layers as eight stages need, or four with two chunks each; head sizes that nothing divides.
constexpr ModelShape eight_layers = {8, 8, 40, 211, 16}, six_layers = {6, 6, 54, 211, 18};
const std::vector<std::string> schedules = {"1f1b", "interleaved", "zb", "gpipe"};

// Zeros and ones would hide a bias that is added twice.
[[maybe_unused]] const bool all_random = all_tensors_random = true;

int rank_count() { return ranks().control->size(); }
const ModelShape& shape_for_ranks() { return rank_count() % 3 ? eight_layers : six_layers; }

// Meshes of all ranks with more than one stage.
std::vector<MeshShape> mesh_shapes(const ModelShape& shape) {
  std::vector<MeshShape> shapes;
  for (int tp = 1; tp < rank_count(); ++tp)
    for (int pp = 2; tp * pp <= rank_count(); ++pp)
      if (rank_count() % (tp * pp) == 0 && shape.heads % tp == 0 && pp <= shape.layers)
        shapes.push_back({.tp = tp, .dp = rank_count() / (tp * pp), .pp = pp});
  return shapes;
}

// What runs may differ in, in rotation: schedules, ZeRO stages, recomputation, pieces, numbers of micro-batches. Of these the
// schedule allows some only.
ModelOptions options_of(const ModelShape& shape, const Mesh& mesh, int turn) {
  const int stages = mesh.shape().pp, samples = global_batch() / mesh.shape().dp;
  pipeline_schedule = schedules[size_t(turn) % schedules.size()];
  if (pipeline_schedule == "interleaved" && shape.layers < 2 * stages) pipeline_schedule = "1f1b";
  const bool is_zb = pipeline_schedule == "zb", is_interleaved = pipeline_schedule == "interleaved";
  const int most = turn / 4 % 2 ? 2 : 1;  // samples at a time
  ModelOptions options = {.shape = shape, .micro_batch = samples % most ? 1 : most,
                          .recompute = is_zb ? Recompute::none : Recompute(turn % 3), .tp_pieces = 1 + turn % 2,
                          .logit_chunks = turn % 2 ? 3 : 1,
                          .store = {.stage = is_zb ? turn / 4 % 2 : (turn + turn / 4) % 4}};
  if (is_interleaved) options.chunks = std::min(2 + turn / 4 % 3, shape.layers / stages);
  if (is_interleaved && samples / options.micro_batch % stages) options.micro_batch = samples / stages;
  return options;
}

// Calls work(mesh, turn) with each mesh, `runs` times.
template <class Call>
void for_meshes(const ModelShape& shape, int runs, Call work) {
  int turn = rank_count();
  for (const MeshShape& mesh_shape : mesh_shapes(shape)) {
    Mesh mesh(ranks().mesh, mesh_shape);
    for (int run = 0; run < runs; ++run, ++turn) {
      CAPTURE(mesh_shape.tp);
      CAPTURE(mesh_shape.dp);
      CAPTURE(mesh_shape.pp);
      CAPTURE(turn);
      work(mesh, turn);
    }
  }
}

// A pipeline of all ranks.
struct AllStages : Mesh {
  AllStages() : Mesh(ranks().mesh, {.pp = rank_count()}) {}
};

ModelShape tiny(int layers) { return {layers, 2, 32, 61, 8}; }

}  // namespace

TEST_CASE("losses and norms are those of one rank, on every mesh, under every schedule") {
  size_t steps = all_steps;  // and a validation, on the first mesh
  for_meshes(shape_for_ranks(), rank_count() == 8 ? 2 : 4, [&](Mesh& mesh, int turn) {
    const ModelOptions options = options_of(shape_for_ranks(), mesh, turn);
    const Curve curve = train<float>(options, mesh, std::exchange(steps, some_steps));
    check_fp32_curve(curve, shape_for_ranks());
  });
}

// Every activation and every gradient travels as it is, and gradients are added up in the order of micro-batches.
TEST_CASE_TEMPLATE("a pipeline of all ranks has the bits of one rank: the first loss, all gradients but wte's", T, float,
                   __nv_bfloat16) {
  if (rank_count() == 1) return;
  AllStages mesh;
  for (const std::string& schedule : schedules) {
    CAPTURE(schedule);
    pipeline_schedule = schedule;
    const int chunks = schedule == "interleaved" ? 2 : 1;
    const ModelShape shape = tiny(rank_count() * 2);
    const std::vector<float> wanted = first_step_of_one_rank<T>(shape, State::gradient);
    const std::unique_ptr<Model> model = model_of<T>({.shape = shape, .micro_batch = 2, .chunks = chunks}, mesh);
    train_step(*model, mesh, 0);
    float loss = 0;
    if (mesh.place().pp == 0) {
      Mesh alone;
      const std::unique_ptr<Model> one = model_of<T>(shape, alone, 2);
      train_step(*one, alone, 0);
      loss = one->loss();
    }
    CHECK(model->loss() == all_values({loss})[0]);
    for (const Slice& slice : model->store().own_slices()) {
      CAPTURE(slice.tensor->name);
      const std::vector<float> actual = values_of(model->store(), slice, State::gradient);
      const auto expected = wanted.begin() + long(offset_of(model->tensors(), *slice.tensor) + slice.first);
      if (slice.tensor->name != "wte.weight") CHECK(std::equal(actual.begin(), actual.end(), expected));
    }
  }
}

TEST_CASE("any number of micro-batches") {
  const int stages = rank_count();
  if (stages == 1) return;
  AllStages mesh;
  const ModelShape shape = tiny(2 * stages);
  for (const std::string& schedule : schedules)
    for (int micro_batches : {1, stages - 1, stages, stages + 1, 2 * stages}) {
      if (schedule == "interleaved" && micro_batches % stages) continue;
      CAPTURE(schedule);
      CAPTURE(micro_batches);
      pipeline_schedule = schedule;
      chosen_global_batch = micro_batches;
      const ModelOptions options = {.shape = shape, .micro_batch = 1, .chunks = schedule == "interleaved" ? 2 : 1};
      const Curve curve = train<float>(options, mesh, some_steps);
      ModelOptions of_one = options;
      of_one.chunks = 1;
      Mesh alone;
      Curve wanted;
      if (mesh.place().pp == 0) wanted = train<float>(of_one, alone, some_steps);
      CHECK_WITHIN("losses", largest_difference(curve.losses, all_values(wanted.losses)), 1e-5);
      CHECK_WITHIN("norms", largest_difference(curve.norms, all_values(wanted.norms)), 1e-5);
    }
  chosen_global_batch = 0;
}
