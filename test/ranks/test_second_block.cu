// A second kind of block in the place of GPT-2's, on any mesh: the layers know how ranks share them, and the stage runs any block.
// Its gradients beside finite differences of the loss, and its curves beside one rank's.
#include "gpt/stage.cuh"
#include "test/ranks/training.cuh"

// ---- the block, as CONTRIBUTING.md walks through it: x += attention(rms(x)·W)·W;  x += relu(rms(x)·W)²·W. Its norm has no
// parameters and no mean, its activation is another one, and no product has a bias.

enum SecondTensor { second_qkv, second_projection, second_up, second_down };

// One thread for each row: sum = stream + branch, out = sum · rstd.
template <class Float>
__global__ void rms_forward_kernel(Float* out, Float* sum, float* rstd, const Float* stream, const Float* branch, int C) {
  const size_t row = size_t(blockIdx.x) * C;
  float squares = 0;
  for (int c = 0; c < C; ++c) {
    if (branch) sum[row + c] = Float(float(stream[row + c]) + float(branch[row + c]));
    const float x = float((branch ? sum : stream)[row + c]);
    squares += x * x;
  }
  rstd[blockIdx.x] = 1 / sqrtf(squares / C + 1e-5f);
  for (int c = 0; c < C; ++c) out[row + c] = Float(float((branch ? sum : stream)[row + c]) * rstd[blockIdx.x]);
}

// dsum += rstd · (dout − y · mean(dout · y)), y = sum · rstd
template <class Float>
__global__ void rms_backward_kernel(Float* dsum, const Float* dout, const Float* sum, const float* rstd, int C) {
  const size_t row = size_t(blockIdx.x) * C;
  const float r = rstd[blockIdx.x];
  float mean = 0;
  for (int c = 0; c < C; ++c) mean += float(dout[row + c]) * float(sum[row + c]) * r / C;
  for (int c = 0; c < C; ++c)
    dsum[row + c] = Float(float(dsum[row + c]) + r * (float(dout[row + c]) - float(sum[row + c]) * r * mean));
}

// out = relu(before)²; backward: `out` holds dout and becomes dout · 2·relu(before).
template <class Float>
__global__ void squared_relu_kernel(Float* out, const Float* before, int columns, bool backward) {
  for (size_t i = size_t(blockIdx.x) * columns; i < size_t(blockIdx.x + 1) * columns; ++i) {
    const float x = fmaxf(float(before[i]), 0);
    out[i] = Float(backward ? 2 * x * float(out[i]) : x * x);
  }
}

template <class Float>
void rms_forward(Float* out, Float* sum, float* rstd, const Residual<Float>& x, const LayerContext<Float>& on) {
  rms_forward_kernel<<<on.r, 1, 0, on.stream>>>(out, sum, rstd, x.stream, x.branch, on.C());
}
template <class Float>
void rms_backward(Float* dsum, const Float* dout, const Float* sum, const float* rstd, const LayerContext<Float>& on) {
  rms_backward_kernel<<<on.r, 1, 0, on.stream>>>(dsum, dout, sum, rstd, on.C());
}
template <class Float>
void squared_relu(Float* out, const Float* before, bool backward, const LayerContext<Float>& on) {
  squared_relu_kernel<<<on.R, 1, 0, on.stream>>>(out, before, 4 * on.c(), backward);
}

template <class Float>
class SecondBlock {
 public:
  using Activations = BlockActivations<Float>;
  using Gradients = BlockGradients<Float>;

  SecondBlock(LayerContext<Float>& on, Attention<Float>& attention)
      : unit(on.store, on.list), qkv(on, unit, second_qkv, unit.none, 3 * on.c()),
        up(on, unit, second_up, unit.none, 4 * on.c()), projection(on, unit, second_projection, unit.none, on.c()),
        down(on, unit, second_down, unit.none, 4 * on.c()), attention(attention), on_(on) {}

  static std::vector<TensorRow> tensors(size_t C) {
    using namespace split_by;
    return {{second_qkv, "attn.qkv", {C, 3 * C}, Initial::normal, qkv_columns},
            {second_projection, "attn.out", {C, C}, Initial::residual_normal, rows},
            {second_up, "mlp.up", {C, 4 * C}, Initial::normal, columns},
            {second_down, "mlp.down", {4 * C, C}, Initial::residual_normal, rows}};
  }

  Residual<Float> forward(const Activations& a, const Residual<Float>& x, Float* branch) {
    forward_for_backward(a, x, branch);
    down.forward(branch, a.gelu);                              // (r,C)
    return {a.middle, branch};
  }
  void forward_for_backward(const Activations& a, const Residual<Float>& x, Float* branch) {
    rms_forward(a.norm1, a.input, a.stats1.rstd, x, on_);    // (r,C)   a.input = x.stream + x.branch
    qkv.forward(attention.input(a.attention), a.norm1);        // (R,3c)
    attention.forward(unit.number() - 1, a.attention);         // (R,c)
    projection.forward(branch, a.attention.out);               // (r,C)
    rms_forward(a.norm2, a.middle, a.stats2.rstd, {a.input, branch}, on_);  // (r,C)   a.middle = a.input + branch
    up.forward(a.up, a.norm2);                                 // (R,4c)
    recompute_gelu(a);                                         // (R,4c)
  }
  void recompute_gelu(const Activations& a) { squared_relu(a.gelu, a.up, false, on_); }

  void backward(Float* dx, Activations& a, Gradients& d, WeightGradients<Float>& later) {
    down.input_gradient(d.up, dx);                             // (R,4c)
    squared_relu(d.up, a.up, true, on_);
    later.announce(up, a.norm2);
    later.add(down, dx, a.gelu, a.middle);                     // (4c,C)
    up.start_input_gradient(d.narrow, d.up);                   // (r,C)   is there after finish
    later.add(up, d.up, a.norm2, a.up);                        // (C,4c)
    up.finish_input_gradient();
    rms_backward(dx, d.narrow, a.middle, a.stats2.rstd, on_);  // (r,C)
    projection.input_gradient(d.narrow, dx);                   // (R,c)
    later.announce(qkv, a.norm1);
    later.add(projection, dx, a.attention.out, a.input);       // (c,C)
    attention.backward(d.qkv, d.narrow, a.attention);          // (R,3c)
    qkv.start_input_gradient(d.narrow, d.qkv);                 // (r,C)   is there after finish
    later.add(qkv, d.qkv, a.norm1, a.attention.qkv);           // (C,3c)
    qkv.finish_input_gradient();
    rms_backward(dx, d.narrow, a.input, a.stats1.rstd, on_);  // (r,C)
  }

  UnitInUse<Float> unit;
  ColumnLinear<Float> qkv, up;
  RowLinear<Float> projection, down;
  Attention<Float>& attention;

 private:
  LayerContext<Float>& on_;
};

// ---- the tests

namespace {

int rank_count() { return ranks().all.size(); }

constexpr ModelShape shape = {2, 4, 32, 61, 8};

// From here on models of fp32 have the second block.
void use_second_block() {
  model_makers()["fp32"] = [](const ModelOptions& options, Mesh& mesh, cudaStream_t stream) -> std::unique_ptr<Model> {
    return std::make_unique<StageModel<float, SecondBlock>>(options, mesh, stream);
  };
}

// A weight of any tensor, which is the same on every mesh.
float weight_of(const TensorDescriptor& tensor, size_t i) {
  return (tensor.initial == Initial::one) + (tensor.unit == 0 ? 2 : 1) * random_of(tensor.name, i);
}

// Sets a whole tensor on all ranks that have some of it, each element moved by `by` times its direction.
void set_weights(Model& model, const TensorDescriptor& tensor, const float* direction = nullptr, double by = 0) {
  std::vector<float> values(tensor.count());
  for (size_t i = 0; i < values.size(); ++i) values[i] = weight_of(tensor, i) + (direction ? float(by * direction[i]) : 0);
  model.trained_store().copy_in({&tensor, 0, values.size()}, State::weight, values);
}

// The loss of the first step's samples.
double loss_of(Model& model, Mesh& mesh) {
  model.trained_store().forget_passes();
  MicroBatches batches(model, mesh, 0, false);
  model.begin_sums();
  for (const Action& action : forwards(model.stage(), micro_batches(model.options(), mesh))) model.run(batches.batch(action));
  return model.loss();
}

}  // namespace

TEST_CASE("gradients equal finite differences, where ranks share layers, sequences and stages") {
  use_second_block();
  Mesh mesh(ranks().mesh, {.tp = 2, .cp = 2, .dp = rank_count() / 8, .pp = 2});
  const std::unique_ptr<Model> model = model_of<float>({.shape = shape, .micro_batch = 2}, mesh);
  const std::vector<TensorDescriptor>& tensors = model->tensors().tensors();
  // The gradients, first of one rank, then of these, from the same weights
  const auto all_weights = [&](Model& of) {
    for (const TensorDescriptor& tensor : of.tensors().tensors()) set_weights(of, tensor);
  };
  const std::vector<float> wanted = from_rank_0([&] {
    Mesh alone;
    const std::unique_ptr<Model> one = model_of<float>(shape, alone, 2);
    all_weights(*one);
    train_step(*one, alone, 0);
    std::vector<float> all;
    for (const Slice& slice : one->trained_store().kept_slices()) {
      const std::vector<float> values = values_of(one->trained_store(), slice, State::gradient);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  });
  all_weights(*model);
  train_step(*model, mesh, 0);
  const std::vector<Difference> found = differences(*model, wanted);
  for (size_t i = 0; i < tensors.size(); ++i) {
    CAPTURE(tensors[i].name);
    CHECK_WITHIN("gradient", std::sqrt(found[i].squares), gradient_bound(shape) * std::sqrt(found[i].wanted));
  }
  // Along a tensor's gradient g the loss grows by |g| for each unit of length. Losses of size 4 are off by some 1e-6,
  // as they are rounded. On both sides of two steps, that changes a slope of 1 by 1e-4 of it, and the least slope,
  // 0.25, by 0.4e-3. The third derivative, up to 10 % of a slope at a step of 0.04, cancels between two differences
  // (Richardson).
  all_weights(*model);
  for (const TensorDescriptor& tensor : tensors) {
    CAPTURE(tensor.name);
    const float* const gradient = &wanted[offset_of(model->tensors(), tensor)];
    double squares = 0;
    for (size_t i = 0; i < tensor.count(); ++i) squares += double(gradient[i]) * gradient[i];
    const double length = std::sqrt(squares);
    const auto moved = [&](double by) {
      set_weights(*model, tensor, gradient, by / length);
      return loss_of(*model, mesh);
    };
    const auto slope_with = [&](double step) { return (moved(step) - moved(-step)) / (2 * step); };
    const double slope = (4 * slope_with(0.005) - slope_with(0.01)) / 3;
    set_weights(*model, tensor);
    REQUIRE(length > 0);
    CHECK_WITHIN("slope", slope / length - 1, 0.001);
  }
}

TEST_CASE("losses and norms equal one rank's, on meshes of all kinds") {
  use_second_block();
  const int n = rank_count();
  for (const auto& [mesh_shape, schedule] : {std::pair(MeshShape{.tp = 2, .cp = 2, .dp = n / 8, .pp = 2}, "1f1b"),
                                             {MeshShape{.tp = 2, .dp = n / 4, .pp = 2}, "zb"},
                                             {MeshShape{.cp = 2, .dp = n / 2}, "1f1b"}}) {
    pipeline_schedule = schedule;
    Mesh mesh(ranks().mesh, mesh_shape);
    check_fp32_curve(train<float>({.shape = shape, .micro_batch = 2, .store = {.zero = mesh_shape.pp == 1 ? 3 : 1}}, mesh), shape);
  }
}
