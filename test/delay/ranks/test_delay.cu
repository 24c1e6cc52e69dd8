// Gradients that are applied a step later (--delay 1; extensions/delay/delayed_gradients.cuh), on meshes of all kinds.
// For remove_events.sh: 4 ranks, *take turns<float>,*curve of one rank
#include "extensions/delay/options.h"
#include "test/ranks/formulas.cuh"

namespace {

constexpr size_t steps = 5;

StoreOptions delayed(StoreOptions store) { return store.rooms.of<DelayOptions>().is_on = true, store; }

void copy_state(Model& to, Model& from, std::initializer_list<State> states) {
  const std::vector<Slice> slices = from.trained_store().kept_slices(), same = to.trained_store().kept_slices();
  for (size_t i = 0; i < same.size(); ++i)
    for (State state : states)
      to.trained_store().copy_in({same[i].tensor, same[i].first, same[i].count}, state, values_of(from.trained_store(), slices[i], state));
}

// An update by what has been set as gradients: no step comes before.
void apply(Model& model, float learning_rate) {
  model.begin_sums();
  model.update({learning_rate, 0.9f, 0.95f, 1e-8f, 0.1f}, 1.0f);
}

float rate_of(size_t step) { return float(learning_rate({"cosine", 3e-3, 3e-4, all_steps, 3, 0}, step)); }  // as train_step()

}  // namespace

// Two models without a delay, in turn: one computes the gradients of a step at given weights, the other one applies what the
// first has computed a step before. test/remove_events.sh runs this one.
TEST_CASE_TEMPLATE("an update applies the gradients of the step before, bit for bit: two arrays that take turns", T, float,
                   __nv_bfloat16) {
  for (int stage : {0, 1})
    for (bool other : {false, true}) {
      CAPTURE(stage);
      CAPTURE(other);
      if (other && std::is_same_v<T, float> && stage == 0) continue;
      StoreOptions store = {.zero = stage, .narrow_moments = other, .offload = {.optimizer = other}};
      store.stochastic_rounding = store.cast_gradients = other && !std::is_same_v<T, float>;
      const std::unique_ptr<Model> model = model_of<T>(deep, mesh(), 2, delayed(store));
      const std::unique_ptr<Model> computes = model_of<T>(deep, mesh(), 2, store), applies = model_of<T>(deep, mesh(), 2, store);
      const auto same = [&] { CHECK(own_state(model->trained_store()) == own_state(applies->trained_store())); };
      float norm = 0;
      for (size_t step = 0; step < steps; ++step) {
        train_step(*model, mesh(), step);
        copy_state(*computes, *applies, {State::weight});
        train_step(*computes, mesh(), step);
        CHECK(model->loss() == computes->loss());
        if (step > 0) apply(*applies, rate_of(step));
        same();
        CHECK(model->gradient_summary().norm == norm);
        CHECK(model->gradient_summary().applied() == (step > 0));
        copy_state(*applies, *computes, {State::gradient});
        norm = computes->gradient_summary().norm;
      }
      CHECK(model->trained_store().waits());
      CHECK(*model->trained_store().settle_waiting() == computes->loss());
      for (const auto& each : {model.get(), applies.get()}) apply(*each, 1e-3f);  // the gradients of the last step
      same();
      CHECK(model->gradient_summary().norm == norm);
      CHECK(!model->trained_store().waits());
    }
}

TEST_CASE("every mesh gives the curve of one rank") {
  const int N = ranks().all.size();
  std::vector<std::pair<MeshShape, const char*>> all = {{{.dp = N}, "1f1b"}};
  if (N % 2 == 0)
    all.insert(all.end(), {{{.tp = 2, .dp = N / 2}, "1f1b"}, {{.cp = 2, .dp = N / 2}, "1f1b"}, {{.dp = N / 2, .pp = 2}, "1f1b"}, {{.dp = N / 2, .pp = 2}, "zb"}});
  constexpr ModelShape shape = {4, 2, 32, 211, 8};
  const auto train_on = [&](Mesh& mesh, int zero) {
    Curve curve = train<float>(shape, mesh, 2, delayed({.zero = zero}), 4);
    curve.norms.erase(curve.norms.begin());  // the first step has applied nothing
    return curve;
  };
  Mesh alone;
  const Curve wanted = train_on(alone, 0);
  for (const auto& [mesh_shape, schedule] : all)
    for (int zero : {0, 1}) {
      CAPTURE(mesh_shape.tp);
      CAPTURE(mesh_shape.cp);
      CAPTURE(mesh_shape.pp);
      CAPTURE(schedule);
      CAPTURE(zero);
      Mesh mesh(ranks().mesh, mesh_shape);
      pipeline_schedule = schedule;
      const Curve curve = train_on(mesh, zero);
      pipeline_schedule = "1f1b";
      CHECK_WITHIN("losses", largest_difference(curve.losses, wanted.losses), 1e-5);
      CHECK_WITHIN("norms", largest_difference(curve.norms, wanted.norms), 1e-5);
    }
}

TEST_CASE("gradients that wait are copied to another model, which goes on with the same bits") {
  for (int stage : {0, 1}) {
    const StoreOptions store = delayed({.zero = stage});
    const std::unique_ptr<Model> model = model_of<float>(odd, mesh(), 2, store), other = model_of<float>(odd, mesh(), 2, store);
    for (size_t step = 0; step < 3; ++step) train_step(*model, mesh(), step);
    const std::optional<float> loss = model->trained_store().settle_waiting();
    copy_state(*other, *model, {State::weight, State::first_moment, State::second_moment, State::gradient});
    other->trained_store().set_progress(2, {}, loss);
    for (size_t step = 3; step < 5; ++step) {
      for (const auto& each : {model.get(), other.get()}) train_step(*each, mesh(), step);
      CHECK(model->loss() == other->loss());
      CHECK(own_state(model->trained_store()) == own_state(other->trained_store()));
    }
  }
}

TEST_CASE("what is not finite or beyond a limit is left out when it would be applied") {
  const std::unique_ptr<Model> model = model_of<float>(odd, mesh(), 2, delayed({}));
  const auto is_applied = [&](size_t step, const std::function<void()>& spoil = [] {}) {
    const std::vector<float> before = own_state(model->trained_store());
    train_step(*model, mesh(), step, spoil);
    CHECK((own_state(model->trained_store()) != before) == was_applied(*model));
    return was_applied(*model);
  };
  CHECK(!is_applied(0));
  CHECK(is_applied(1, [&] {
    const float nan = NAN;
    if (dp().rank() == 0) copy_and_wait(model->trained_store().gradients(0).data + 77, &nan, 1, cudaMemcpyHostToDevice, test_stream());
  }));
  CHECK(!is_applied(2));
  CHECK(is_applied(3));
  // The limit is of the loss of the batch before.
  const float loss = model->loss();
  model->begin_sums();
  model->update({1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f}, 1.0f, {.loss = std::nextafter(loss, 0.0f)});
  CHECK(!was_applied(*model));
  CHECK(model->gradient_summary().loss == loss);
}

TEST_CASE("a step sends the same bytes, keeps twice the gradients, and all its passes can be graphs") {
  for (int stage : {0, 1}) {
    CAPTURE(stage);
    const StoreOptions store = {.zero = stage};
    const Curve plain = train<float>(deep, mesh(), 2, store, some_steps), curve = train<float>(deep, mesh(), 2, delayed(store), 13);
    CHECK(curve.bytes_sent == plain.bytes_sent);
    const Shards shards(TensorList(deep), dp().size(), dp().rank());
    const auto bytes = [](const Curve& of, const char* name) {
      return std::ranges::find(of.memory, name, &MemoryCategory::name)->bytes;
    };
    CHECK(bytes(curve, "gradients") == bytes(plain, "gradients") + round_up(4 * shards.all_whole(), size_t(256)) + 256);
    CHECK(bytes(curve, "optimizer") == bytes(plain, "optimizer"));
#ifndef __NVCC__
    // But for the first forward of ZeRO 1, which waits for the new weights. Each of three batch buffers has had a step's first
    // micro-batch, with each of the two arrays of gradients.
    CHECK(curve.graphs == size_t(2 * micro_batches({.shape = deep, .micro_batch = 2}, mesh()) - stage));
#endif
  }
}
