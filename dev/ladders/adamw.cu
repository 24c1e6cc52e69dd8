// The ladder of an AdamW update (Loshchilov, Hutter, arXiv:1711.05101) of n weights, with g the clipped gradient:
//
//   m = β1·m + (1−β1)·g;   v = β2·v + (1−β2)·g²
//   w = w·(1 − lr·decay) − lr · m·correction1 / (√(v·correction2) + ε);   a 16-bit model's weights: w rounded
//
// Least bytes: w, g, m, v read and w, m, v written, all floats: 28 per weight; the working weights of a 16-bit model: 2
// more. About 15 FLOPs per weight do not limit anything: 30 bytes take an H100 9 ps, in which it executes 270
// instructions. The cost is in values that are written to memory and read again for the next line of the formula.
#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/adamw.cuh"

namespace {

using namespace ladder;

constexpr float clip_factor_of_step = 0.37f;
constexpr AdamW options = {
    .learning_rate = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};

// Weights of type T with float masters, which in fp32 are the weights themselves.
template <class T>
struct AdamWUpdate {
  static constexpr bool has_masters = !std::is_same_v<T, float>;
  static constexpr const char* name = "adamw";
  static std::vector<Shape> checked_shapes() {
    std::vector<Shape> shapes = {{{"elements", 16}}, {{"elements", 1040}}};
    if (large_shapes) shapes.push_back({{"elements", 12304}});
    return shapes;
  }
  static Shape counted_shape() { return {{"elements", 1 << 17}}; }
  static Shape timed_shape() { return {{"elements", 1 << 26}}; }
  static std::vector<Rung<AdamWUpdate>> rungs();

  explicit AdamWUpdate(const Shape& shape)
      : count(shape["elements"]), decayed(count / 2 / pack_width<float> * pack_width<float>), masters_before(count),
        first_before(count, 0.3, 0, 2), second_before(count, 0.01, 0.1, 3), gradients(count, 1, 0, 4),
        masters(count), first(count), second(count), working(has_masters ? count : 0),
        factor(std::vector<float>{clip_factor_of_step}), state(std::vector<AdamWState>(1)) {
    adamw_count(state, factor, options, nullptr);
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
  }

  void reset();
  double elements() const { return double(count); }
  double bytes() const { return adamw_counts(elements(), sizeof(T)).bytes; }
  double flops() const { return adamw_counts(elements(), sizeof(T)).flops; }
  std::vector<Output> outputs() const;

  T* weights() const {
    if constexpr (has_masters) return working;
    else return masters;
  }

  size_t count, decayed;  // the elements before `decayed` decay
  RandomBuffer<float> masters_before, first_before, second_before, gradients;
  Buffer<float> masters, first, second;
  Buffer<T> working;
  Buffer<float> factor;
  Buffer<AdamWState> state;  // of the first update
};

template <class T>
void AdamWUpdate<T>::reset() {
  working.poison();
  const auto restore = [&](float* to, const float* from) {
    CUDA_CHECK(cudaMemcpy(to, from, count * sizeof(float), cudaMemcpyDeviceToDevice));
  };
  restore(masters, masters_before);
  restore(first, first_before);
  restore(second, second_before);
  CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

// torch.optim.AdamW's documentation, line by line.
template <class T>
std::vector<Output> AdamWUpdate<T>::outputs() const {
  std::vector<double> w = masters_before.numbers(), m = first_before.numbers(), v = second_before.numbers();
  const std::vector<double> g = gradients.numbers();
  const double lr = options.learning_rate, beta1 = options.beta1, beta2 = options.beta2;
  for (size_t i = 0; i < count; ++i) {
    const double gradient = g[i] * clip_factor_of_step;
    if (i < decayed) w[i] -= lr * options.weight_decay * w[i];
    m[i] = beta1 * m[i] + (1 - beta1) * gradient;
    v[i] = beta2 * v[i] + (1 - beta2) * gradient * gradient;
    const double m_hat = m[i] / (1 - beta1), v_hat = v[i] / (1 - beta2);
    w[i] -= lr * m_hat / (std::sqrt(v_hat) + options.epsilon);
  }
  // The first moment's terms, which may cancel, are rounded three times, the second moment's terms five times. A
  // weight of size 1 is rounded once. Decay and update together are some hundredths of it, and add at most one more
  // rounding.
  std::vector<Output> outputs = {{"first moments", first.numbers(), m, 1, 3 * rounding<float>},
                                 {"second moments", second.numbers(), v, 0, 5 * rounding<float>},
                                 {"weights", masters.numbers(), w, 1, 2 * rounding<float>}};
  if (has_masters)
    outputs.push_back({"working weights", working.numbers(), w, 1e-4, rounding<T> + 2 * rounding<float>});
  return outputs;
}

// ---- 1: one kernel per line
//
// Each line of the formula is a kernel, with one thread per element. Computing m reads and writes 12 bytes, v 12, w 16,
// and rounding 6: together 46, half as much again as the 30 that are needed. The gradient is read twice. m, v and w are
// read from memory again, although a register held them before. Four launches do the work of one. (The clip factor and
// the corrections add 4 bytes, and one sector per warp each time; caches serve them.)

__global__ void first_moment_kernel(float* first, const float* gradients, const float* factor, size_t count,
                                    float beta1) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float gradient = gradients[i] * *factor;
  first[i] = beta1 * first[i] + (1 - beta1) * gradient;
}

__global__ void second_moment_kernel(float* second, const float* gradients, const float* factor, size_t count,
                                     float beta2) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float gradient = gradients[i] * *factor;
  second[i] = beta2 * second[i] + (1 - beta2) * gradient * gradient;
}

__global__ void weight_kernel(float* weights, const float* first, const float* second, const AdamWState* state,
                              size_t count, size_t decayed, AdamW o) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float decay = i < decayed ? o.learning_rate * o.weight_decay : 0.0f;
  const float denominator = sqrtf(second[i] * state->correction2) + o.epsilon;
  weights[i] -= decay * weights[i] + o.learning_rate * (first[i] * state->correction1) / denominator;
}

template <class T>
unsigned blocks(const AdamWUpdate<T>& o) {
  return blocks_for(o.count, pack_block);
}

template <class T>
void kernel_per_line(AdamWUpdate<T>& o, cudaStream_t stream) {
  first_moment_kernel<<<blocks(o), pack_block, 0, stream>>>(o.first.data(), o.gradients.data(), o.factor.data(),
                                                             o.count, options.beta1);
  second_moment_kernel<<<blocks(o), pack_block, 0, stream>>>(o.second.data(), o.gradients.data(), o.factor.data(),
                                                              o.count, options.beta2);
  weight_kernel<<<blocks(o), pack_block, 0, stream>>>(o.masters.data(), o.first.data(), o.second.data(),
                                                       o.state.data(), o.count, o.decayed, options);
  if constexpr (AdamWUpdate<T>::has_masters)
    round_kernel<T><<<blocks(o), pack_block, 0, stream>>>(o.working.data(), o.masters.data(), o.count);
}

// ---- 2: one kernel
//
// In rung 1 every value was read again for the next line. One kernel keeps the four values of an element in registers
// until all lines are computed: 16 bytes are read and 14 written, 30 per element, the least. It is the same arithmetic
// in the same order.

template <class T>
__global__ void fused_kernel(T* weights, float* masters, float* first, float* second, const float* gradients,
                             const float* factor, const AdamWState* state, size_t count, size_t decayed, AdamW o) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float gradient = gradients[i] * *factor, decay = i < decayed ? o.learning_rate * o.weight_decay : 0.0f;
  const float m = o.beta1 * first[i] + (1 - o.beta1) * gradient;
  const float v = o.beta2 * second[i] + (1 - o.beta2) * gradient * gradient;
  const float denominator = sqrtf(v * state->correction2) + o.epsilon;
  const float w = masters[i] - (decay * masters[i] + o.learning_rate * (m * state->correction1) / denominator);
  first[i] = m;
  second[i] = v;
  masters[i] = w;
  if constexpr (AdamWUpdate<T>::has_masters) weights[i] = from_float<T>(w);
}

template <class T>
void fused(AdamWUpdate<T>& o, cudaStream_t stream) {
  fused_kernel<T><<<blocks(o), pack_block, 0, stream>>>(o.weights(), o.masters.data(), o.first.data(), o.second.data(),
                                                         o.gradients.data(), o.factor.data(), o.state.data(), o.count,
                                                         o.decayed, options);
}

// ---- 3: packs of 16 bytes: the kernel of the model
//
// The bytes are already the least. Each of the 2,048 threads of an SM has four loads of 4 bytes under way, 32 KB per
// SM, which is enough: little time is left to gain. The other cost, for each element, is a thread's additional work:
// index, bounds, addresses, and the three numbers of the step. Four elements per thread share this work, and each load
// or store moves 16 bytes.

template <class T>
void packs(AdamWUpdate<T>& o, cudaStream_t stream) {
  adamw<T>(o.weights(), o.masters, o.first, o.second, o.gradients, o.factor, o.state, o.count, o.decayed, options,
           stream);
}

template <class T>
bool whole_packs(const AdamWUpdate<T>& o) {
  return o.count % pack_width<float> == 0;
}

template <class T>
std::vector<Rung<AdamWUpdate<T>>> AdamWUpdate<T>::rungs() {
  return {
      {"kernel_per_line", "m, v, w, rounding: what one writes the next one reads again", kernel_per_line<T>},
      {"fused", "one kernel: an element's values stay in registers from line to line", fused<T>},
      {"packs", "kernels/adamw.cuh: 16 bytes per load: a quarter of the instructions around it", packs<T>,
       whole_packs<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<AdamWUpdate>(count, arguments); }
