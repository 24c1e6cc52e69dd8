// Every kernel gives the same bits again: with 1, 2, 5 and 16 threads on the CPU, in four runs on a GPU.
//
// Random numbers, so that any other order of additions would show; sizes of several blocks and several tiles.
#include <omp.h>

#include "kernels/adamw.cuh"
#include "kernels/attention/attention.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/linear.cuh"
#include "kernels/norm.cuh"
#include "kernels/random.cuh"
#include "test/kernel_test.cuh"

namespace {

constexpr int batch = 3, seq_len = 211, rows = batch * seq_len, channels = 128;
constexpr int vocabulary = 500, padded = 512;

template <class... Buffers>
std::string bytes_of(const Buffers&... buffers) {
  std::string bytes;
  auto append = [&](const auto& values) {
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  (append(buffers.get()), ...);
  return bytes;
}

// run() makes its outputs afresh and returns their bytes.
template <class Run>
void check(Run run) {
  std::string first;
  for (int threads : {1, 2, 5, 16}) {
    CAPTURE(threads);
    omp_set_num_threads(threads);
    const std::string bytes = run();
    if (first.empty()) first = bytes;
    CHECK_UNARY(bytes == first);
  }
}

template <class T, class Forward, class Backward>
void check_attention(Forward forward, Backward backward) {
  const int heads = 2, head_size = channels / heads;
  Buffer<T> qkv(random_values<T>(rows * 3 * channels)), dout(random_values<T>(rows * channels));
  check([&] {
    Buffer<T> out(rows * channels), dqkv(rows * 3 * channels);
    Buffer<float> lse(rows * heads), row_dots(rows * heads);
    forward(out.data(), lse.data(), qkv.data(), batch, seq_len, heads, head_size, test_stream());
    backward(dqkv.data(), row_dots.data(), dout.data(), out.data(), qkv.data(), lse.data(), batch, seq_len, heads,
             head_size, test_stream());
    return bytes_of(out, dqkv, lse, row_dots);
  });
}

std::vector<int> random_tokens() {
  std::mt19937 generator(6);
  std::vector<int> tokens(rows);
  for (int& token : tokens) token = generator() % 50;
  return tokens;
}

}  // namespace

TEST_CASE_TEMPLATE("embedding", T, float, __nv_bfloat16) {
  const auto tokens = random_tokens();
  std::vector<int> order(rows);
  sort_by_token(tokens.data(), rows, order.data());
  Buffer<int> tokens_d(tokens), order_d(order);
  Buffer<T> wte(random_values<T>(padded * channels)), wpe(random_values<T>(seq_len * channels));
  Buffer<T> dout(random_values<T>(rows * channels));
  check([&] {
    Buffer<T> out(rows * channels);
    Buffer<float> dwte(random_values<float>(padded * channels)), dwpe(seq_len * channels), workspace(embedding_workspace(rows, channels));
    embedding_forward<T>(out, tokens_d, wte, wpe, {0, vocabulary}, neighbours(seq_len), 0, rows, channels, test_stream());
    embedding_backward<T>(dwte, dwpe, tokens_d, order_d, dout, {0, vocabulary}, batch, neighbours(seq_len), seq_len, channels, false,
                          workspace, test_stream());
    return bytes_of(out, dwte, dwpe);
  });
}

TEST_CASE_TEMPLATE("layernorm", T, float, __nv_bfloat16) {
  Buffer<T> residual(random_values<T>(rows * channels)), branch(random_values<T>(rows * channels, 1, 0, 2));
  Buffer<T> weight(random_values<T>(channels)), bias(random_values<T>(channels, 1, 0, 2));
  Buffer<T> dout(random_values<T>(rows * channels, 1, 0, 3));
  check([&] {
    Buffer<T> out(rows * channels), sum(rows * channels), dsum(random_values<T>(rows * channels));
    Buffer<float> mean(rows), rstd(rows), dweight(channels), dbias(channels);
    Buffer<float> workspace(layernorm_workspace(rows, channels));
    residual_layernorm_forward<T>(out, sum, mean, rstd, residual, branch, weight, bias, rows, channels,
                                  test_stream());
    layernorm_backward<T>(dsum, dweight, dbias, dout, sum, weight, mean, rstd, rows, channels, false,
                          workspace, test_stream());
    return bytes_of(out, sum, mean, rstd, dsum, dweight, dbias);
  });
}

TEST_CASE_TEMPLATE("matrix products and column sums", T, float, __nv_bfloat16) {
  const int outputs = 700;
  Buffer<T> x(random_values<T>(rows * channels)), weight(random_values<T>(channels * outputs));
  Buffer<T> bias(random_values<T>(outputs)), dout(random_values<T>(rows * outputs));
  check([&] {
    Buffer<T> out(rows * outputs), dx(rows * channels), logits(rows * outputs), dhead(rows * channels);
    Buffer<float> dweight(channels * outputs), dbias(outputs), dwte(outputs * channels);
    Buffer<float> workspace(linear_workspace(rows, outputs));
    linear_forward<T>(out, x, weight, bias, rows, channels, outputs, test_stream());
    linear_input_gradient<T>(dx, dout, weight, rows, channels, outputs, test_stream());
    linear_weight_gradient<T>(dweight, dbias, dout, x, rows, channels, outputs, false, workspace, test_stream());
    head_forward<T>(logits, x, weight, rows, channels, outputs, test_stream());  // weight as (outputs, C)
    head_backward<T>(dhead, dwte, dout, x, weight, rows, channels, outputs, false, test_stream());
    return bytes_of(out, dx, logits, dhead, dweight, dbias, dwte);
  });
}

TEST_CASE_TEMPLATE("attention", T, float, __nv_bfloat16) {
  check_attention<T>([](auto... arguments) { attention_forward<T>(arguments...); },
                     [](auto... arguments) { attention_backward<T>(arguments...); });
}

TEST_CASE("attention on tensor cores") {
  using T = __nv_bfloat16;
  const auto sizes = square_attention(batch, seq_len, 2, channels / 2);
  auto heads = [](const T* tensor) { return packed_heads(tensor, seq_len, channels); };
  auto qkv_heads = [](auto* tensor) { return packed_qkv(tensor, seq_len, channels); };
  check_attention<T>(
      [&](T* out, float* lse, const T* qkv, auto...) {
        flash_attention_forward(packed_heads(out, seq_len, channels), lse, qkv_heads(qkv), sizes, test_stream());
      },
      [&](T* dqkv, float* row_dots, const T* dout, const T* out, const T* qkv, const float* lse, auto...) {
        flash_attention_backward(qkv_heads(dqkv), row_dots, heads(dout), heads(out), qkv_heads(qkv), lse, sizes,
                                 test_stream());
      });
}

TEST_CASE_TEMPLATE("gelu", T, float, __nv_bfloat16) {
  Buffer<T> input(random_values<T>(rows * channels));
  check([&] {
    Buffer<T> out(rows * channels), gradient(random_values<T>(rows * channels));
    gelu_forward<T>(out, input, rows, channels, test_stream());
    gelu_backward<T>(gradient, input, rows, channels, test_stream());
    return bytes_of(out, gradient);
  });
}

TEST_CASE_TEMPLATE("cross-entropy", T, float, __nv_bfloat16) {
  Buffer<int> targets(random_tokens());
  check([&] {
    Buffer<T> logits(random_values<T>(rows * padded));
    Buffer<float> losses(rows), total(std::vector<float>{0.0f}), loss_scale(std::vector<float>{2.0f});
    cross_entropy<T>(logits, losses, total, targets, rows, vocabulary, padded, 1.0f / rows, loss_scale, true,
                     test_stream());
    return bytes_of(logits, losses, total);
  });
}

TEST_CASE("gradient norm") {
  const size_t count = size_t(3 * sum_block * sum_packs * pack_width<float>) + 51;
  Buffer<float> gradients(random_values<float>(count));
  check([&] {
    Buffer<float> partials(partial_sums<float>(count));
    Buffer<double> total(1);
    square_sums(partials, gradients, count, test_stream());
    add_up(total, partials, partials.size(), test_stream());
    return bytes_of(partials, total);
  });
}

TEST_CASE("adamw, with and without masters") {
  const size_t count = 20000;
  const AdamW options = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f};
  Buffer<AdamWState> state(std::vector<AdamWState>{{3, 3.7f, 7.0f}});
  Buffer<float> gradients(random_values<float>(count)), factor(std::vector<float>{0.5f});
  check([&] {
    Buffer<__nv_bfloat16> weights(count), alone(random_values<__nv_bfloat16>(count));
    Buffer<float> masters(random_values<float>(count)), first(std::vector<float>(count, 0.1f));
    Buffer<float> second(std::vector<float>(count, 0.2f));
    adamw<__nv_bfloat16>(weights, masters, first, second, gradients, factor, state, count, count / 2, options,
                         test_stream());
    adamw_stochastic(alone.data(), nullptr, first.data(), second.data(), gradients, factor, state, count, true, options,
                     {1, 0, 2, {}}, test_stream());
    return bytes_of(weights, masters, first, second, alone);
  });
}

TEST_CASE("initial weights") {
  check([] {
    Buffer<float> weights(20001);
    fill_random(weights, 0, weights.size(), random_key(1, "wte.weight"), 0.02f, test_stream());
    return bytes_of(weights);
  });
}
