// A language model that is small enough to be read at once: the byte after four bytes (Bengio et al., "A Neural
// Probabilistic Language Model", 2003).
//
//   x (64)    = the embeddings of the four bytes, 16 numbers each
//   h (64)    = tanh(x·W1 + b1)
//   y (128)   = h·W2 + b2            logits of the next byte
//   loss      = −log softmax(y)[the next byte], in nats, the mean over a batch
//
// The lessons train it with plain stochastic gradient descent, w −= lr·g, each in its own way. A rank computes in one
// thread. Bytes beyond 127 count as the same byte.
#pragma once

#include <cmath>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

class SmallModel {
 public:
  static constexpr int vocabulary = 128, context = 4, channels = 16, inputs = context * channels, hidden = 64;
  // All parameters lie in one array, and their gradients in another one.
  static constexpr size_t embedding = 0, W1 = embedding + vocabulary * channels, b1 = W1 + inputs * hidden, W2 = b1 + hidden,
                          b2 = W2 + hidden * vocabulary, parameters = b2 + vocabulary;
  using Array = std::vector<float>;

  // The text must have more than `context` bytes.
  explicit SmallModel(std::string text) : text_(std::move(text)) {}

  // Weights to start from: uniform, with a variance of 1 / (number of terms) for the products; biases are zero.
  static Array initial_weights(unsigned seed) {
    std::mt19937 random(seed);
    Array w(parameters, 0.0f);
    const auto draw = [&](size_t begin, size_t end, double terms) {
      const float bound = float(std::sqrt(3 / terms));
      for (size_t i = begin; i < end; ++i) w[i] = bound * (2 * float(random() / 4294967296.0) - 1);
    };
    draw(embedding, W1, 1), draw(W1, b1, inputs), draw(W2, b2, hidden);
    return w;
  }

  // The mean loss of `batch` places of the text, which are drawn. gradient: of the same mean; null: not wanted
  float loss(const Array& w, int batch, std::mt19937& random, Array* gradient = nullptr) const {
    if (gradient) gradient->assign(parameters, 0.0f);
    double sum = 0;
    for (int i = 0; i < batch; ++i) sum += loss_at(w, random() % (text_.size() - context), 1.0f / float(batch), gradient);
    return float(sum / batch);
  }

 private:
  int byte(size_t at) const { return std::min<int>(static_cast<unsigned char>(text_[at]), vocabulary - 1); }

  // share: of this place in the mean
  float loss_at(const Array& w, size_t at, float share, Array* gradient) const {
    float x[inputs], h[hidden], y[vocabulary];
    for (int i = 0; i < inputs; ++i) x[i] = w[embedding + size_t(byte(at + i / channels) * channels + i % channels)];
    multiply(h, x, &w[W1], &w[b1], inputs, hidden);
    for (float& value : h) value = std::tanh(value);
    multiply(y, h, &w[W2], &w[b2], hidden, vocabulary);

    const int target = byte(at + context);
    float largest = y[0], sum = 0;
    for (float value : y) largest = std::max(largest, value);
    for (float value : y) sum += std::exp(value - largest);
    const float loss = std::log(sum) + largest - y[target];
    if (!gradient) return loss;

    Array& g = *gradient;
    float dx[inputs] = {}, dh[hidden] = {}, dy[vocabulary];
    for (int j = 0; j < vocabulary; ++j) dy[j] = share * (std::exp(y[j] - largest) / sum - float(j == target));
    multiply_back(dh, &g[W2], &g[b2], dy, h, &w[W2], hidden, vocabulary);
    for (int j = 0; j < hidden; ++j) dh[j] *= 1 - h[j] * h[j];
    multiply_back(dx, &g[W1], &g[b1], dh, x, &w[W1], inputs, hidden);
    for (int i = 0; i < inputs; ++i) g[embedding + size_t(byte(at + i / channels) * channels + i % channels)] += dx[i];
    return loss;
  }

  // out (columns) = in (rows) · weight (rows,columns) + bias
  static void multiply(float* out, const float* in, const float* weight, const float* bias, int rows, int columns) {
    for (int j = 0; j < columns; ++j) out[j] = bias[j];
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) out[j] += in[i] * weight[i * columns + j];
  }
  // Adds the gradients of `in`, weight and bias.
  static void multiply_back(float* din, float* dweight, float* dbias, const float* dout, const float* in, const float* weight,
                            int rows, int columns) {
    for (int j = 0; j < columns; ++j) dbias[j] += dout[j];
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) {
        din[i] += dout[j] * weight[i * columns + j];
        dweight[i * columns + j] += in[i] * dout[j];
      }
  }

  std::string text_;
};
