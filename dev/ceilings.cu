// Prints the peak rates of this device (dev/ceilings.cuh), for `train_gpt --profile --ceilings FILE` and dev/bench.py, and the
// rates of kernels in a training step, which the planner's forecast needs, too (runtime/planner/forecast.md):
//
//   make build/gpu/ceilings && build/gpu/ceilings > ceilings.json
#include <cstdio>

#include "dev/ceilings.cuh"
#include "kernels/adamw.cuh"
#include "kernels/attention/attention.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"

namespace {

using ceilings::steady_seconds;

// The rates in one storage type. FLOPs are counted as dev/roofline.py counts them.
struct Rates {
  int side;
  double product, attention_forward, attention_backward, gelu;  // FLOP/s
  double norm_row, loss_row;                                    // seconds
};

// The extra time of a row beyond its bytes at the rate of copies. If it takes no longer: so little that it does not
// count.
double beside_bytes(double seconds, double bytes, double copy) { return std::max(1e-12, seconds - bytes / copy); }

// Whole tiles on the diagonal of the causal mask count: a block has 64 queries, and T + 64 keys are computed for two of them.
template <class T>
void measure_attention(Rates& rates, cudaStream_t stream) {
  constexpr int B = 4, NH = 12, HS = 64, length = 512;
  constexpr size_t count = size_t(B) * length * NH * HS;
  constexpr double pairs = double(B) * NH * length * (length + 64) / 2;
  const RandomBuffer<T> qkv(3 * count), dout(count, 1, 0, 2);
  Buffer<T> out(count), dqkv(3 * count);
  Buffer<float> lse(count / HS), row_dots(count / HS);
  rates.attention_forward = 4 * HS * pairs / steady_seconds(stream, [&] {
    attention_forward<T>(out, lse, qkv, B, length, NH, HS, stream);
  });
  rates.attention_backward = 14 * HS * pairs / steady_seconds(stream, [&] {
    attention_backward<T>(dqkv, row_dots, dout, out, qkv, lse, B, length, NH, HS, stream);
  });
}

// FLOP/s of GELU, forward and backward together: exponentials, and no sums.
template <class T>
double gelu_rate(cudaStream_t stream) {
  constexpr int rows = 4096, columns = 1024;
  const RandomBuffer<T> x(size_t(rows) * columns);
  Buffer<T> y(size_t(rows) * columns);
  return (10.0 + 20.0) * rows * columns / steady_seconds(stream, [&] {
    gelu_forward<T>(y, x, rows, columns, stream);
    gelu_backward<T>(y, x, rows, columns, stream);
  });
}

// The extra time of a short row of LayerNorm beyond its bytes, the mean of forward and backward.
template <class T>
double norm_row(double copy, cudaStream_t stream) {
  constexpr int rows = 4096, C = 256;
  constexpr size_t count = size_t(rows) * C;
  const RandomBuffer<T> residual(count), branch(count, 1, 0, 2), dout(count, 1, 0, 3), weight(C), bias(C);
  RandomBuffer<T> dsum(count);
  Buffer<T> out(count), sum(count);
  Buffer<float> mean(rows), rstd(rows), dweight(C), dbias(C), workspace(layernorm_workspace(rows, C));
  const double seconds = steady_seconds(stream, [&] {
    residual_layernorm_forward<T>(out, sum, mean, rstd, residual, branch, weight, bias, rows, C, stream);
    layernorm_backward<T>(dsum, dweight, dbias, dout, sum, weight, mean, rstd, rows, C, false, workspace, stream);
  });
  return beside_bytes(seconds / rows, 8.0 * C * sizeof(T), copy) / 2;
}

// The extra time of a row of 2,048 bytes of logits beyond its bytes.
template <class T>
double loss_row(double copy, cudaStream_t stream) {
  constexpr int rows = 4096, V = 2048 / sizeof(T);
  RandomBuffer<T> logits(size_t(rows) * V);
  Buffer<float> losses(rows), total(1);
  const Buffer<int> targets(std::vector<int>(rows, 0));
  const Buffer<float> scale(std::vector<float>{1});
  const double seconds = steady_seconds(stream, [&] {
    cross_entropy<T>(logits, losses, total, targets, rows, V, V, 1.0f, scale, true, stream);
  });
  return beside_bytes(seconds / rows, 2.0 * V * sizeof(T), copy);
}

template <class T>
Rates rates_of(double copy, cudaStream_t stream) {
  const ceilings::ProductRate product = ceilings::product_rate<T>(stream);
  Rates rates = {product.side, product.flops, 0, 0, gelu_rate<T>(stream), norm_row<T>(copy, stream), loss_row<T>(copy, stream)};
  measure_attention<T>(rates, stream);
  return rates;
}

// Bytes per second of AdamW in fp32, which reads and writes more arrays at a time than a copy.
double update_rate(cudaStream_t stream) {
  constexpr size_t count = size_t(1) << 24;
  const RandomBuffer<float> gradients(count);
  Buffer<float> weights(count), first(count), second(count);
  const Buffer<float> factor(std::vector<float>{1});
  for (Buffer<float>* state : {&weights, &first, &second})
    CUDA_CHECK(cudaMemsetAsync(state->data(), 0, count * sizeof(float), stream));
  const Buffer<AdamWState> counter(std::vector<AdamWState>(1));
  const AdamW options = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f};
  adamw_count(counter, factor, options, stream);
  return 28.0 * count / steady_seconds(stream, [&] {
    adamw<float>(weights, weights, first, second, gradients, factor, counter, count, count, options, stream);
  });
}

// Seconds from one small kernel to the next.
double launch_seconds(cudaStream_t stream) {
  const Buffer<float> factor(std::vector<float>{1});
  const Buffer<AdamWState> counter(std::vector<AdamWState>(1));
  return steady_seconds(stream, [&] { adamw_count(counter, factor, {}, stream); });
}

// One line of JSON (runtime/reports/ceilings.h reads it).
void measure() {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double copy = ceilings::copy_rate(stream);
  const Rates fp32 = rates_of<float>(copy, stream), bf16 = rates_of<__nv_bfloat16>(copy, stream),
              fp16 = rates_of<__half>(copy, stream);
  const auto print = [&](const char* name, double Rates::*rate) {
    std::printf(R"("%s": {"fp32": %.4g, "bf16": %.4g, "fp16": %.4g}, )", name, fp32.*rate, bf16.*rate, fp16.*rate);
  };
  std::printf(R"({"device": "%s", "integrated": %d, "processors": %d, "copy_bytes_per_s": %.4g, "update_bytes_per_s": %.4g, "launch_s": %.4g, )",
              properties.name, device_attribute(cudaDevAttrIntegrated), device_attribute(cudaDevAttrMultiProcessorCount), copy, update_rate(stream), launch_seconds(stream));
  print("flops_per_s", &Rates::product);
  print("attention_forward_flops_per_s", &Rates::attention_forward);
  print("attention_backward_flops_per_s", &Rates::attention_backward);
  print("gelu_flops_per_s", &Rates::gelu);
  print("norm_row_s", &Rates::norm_row);
  print("loss_row_s", &Rates::loss_row);
  std::printf(R"("copied_bytes": %zu, "sides": {"fp32": %d, "bf16": %d, "fp16": %d}})" "\n", ceilings::copy_bytes,
              fp32.side, bf16.side, fp16.side);
  CUDA_CHECK(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  try {
    measure();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ceilings: %s\n", error.what());
    return 1;
  }
}
