// The ladder of the embedding's backward pass: each of the B·T rows of dout is added to two rows of float.
//
//   dwte[tokens[b,t], :] += dout[b,t,:];   dwpe[t, :] = Σ_b dout[b,t,:]
//
// Least bytes: dout read once, the rows of dwte that occur read and written, dwpe written. Two additions an element. It
// is a scatter with collisions, and as uneven as words are: a few tokens make up most of a text, and the commonest
// alone a twentieth of it. A rung must say who adds when two rows meet; and in which order, if runs are to agree to the
// last bit.
#include <climits>
#include <set>

#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/embedding.cuh"

namespace {

using namespace ladder;

// Zipf's law: the k-th commonest token has probability 1/k, up to a factor.
std::vector<int> text_like_tokens(size_t count, int vocabulary) {
  std::mt19937 generator(3);
  std::vector<int> tokens(count);
  for (int& token : tokens)
    token = std::min(vocabulary, int(std::pow(vocabulary + 1.0, std::ldexp(double(generator()), -32)))) - 1;
  return tokens;
}

inline std::vector<int> sorted_by_token(const std::vector<int>& tokens) {
  std::vector<int> order(tokens.size());
  sort_by_token(tokens.data(), int(tokens.size()), order.data());
  return order;
}

template <class T>
struct EmbeddingBackward {
  static constexpr const char* name = "embedding_backward";
  static std::vector<Shape> checked_shapes() {
    return {{{"batch", 2}, {"seq_len", 5}, {"channels", 64}, {"vocabulary", 1}},
            {{"batch", 3}, {"seq_len", 3}, {"channels", 77}, {"vocabulary", 50}},
            {{"batch", 1}, {"seq_len", 3}, {"channels", 264}, {"vocabulary", 3}}};
  }
  static Shape counted_shape() { return {{"batch", 4}, {"seq_len", 64}, {"channels", 768}, {"vocabulary", 50257}}; }
  static Shape timed_shape() { return {{"batch", 64}, {"seq_len", 1024}, {"channels", 768}, {"vocabulary", 50257}}; }
  static std::vector<Rung<EmbeddingBackward>> rungs();

  explicit EmbeddingBackward(const Shape& shape)
      : batch(shape["batch"]), seq_len(at_most(INT_MAX / batch, shape, "seq_len")), channels(shape["channels"]),
        vocabulary(shape["vocabulary"]),
        host_tokens(text_like_tokens(size_t(rows()), vocabulary)), tokens(host_tokens),
        order(sorted_by_token(host_tokens)), dout(count()), dwte_before(size_t(vocabulary) * channels, 1, 0, 2),
        dwte(dwte_before.size()), dwpe(size_t(seq_len) * channels) {}

  void reset() {
    CUDA_CHECK(cudaMemcpy(dwte.data(), dwte_before.data(), dwte.size() * sizeof(float), cudaMemcpyDeviceToDevice));
    dwpe.poison();
  }
  int rows() const { return batch * seq_len; }
  size_t count() const { return size_t(rows()) * channels; }
  double elements() const { return double(count()); }
  double bytes() const {
    const double occurring = double(std::set<int>(host_tokens.begin(), host_tokens.end()).size());
    return elements() * sizeof(T) + (2 * occurring + seq_len) * channels * sizeof(float);
  }
  double flops() const { return 2 * elements(); }

  std::vector<Output> outputs() const {
    const std::vector<double> d = dout.numbers();
    std::vector<double> dwte_right = dwte_before.numbers(), dwpe_right(dwpe.size());
    for (size_t i = 0; i < d.size(); ++i) {
      const size_t row = i / channels, column = i % channels;
      dwte_right[size_t(host_tokens[row]) * channels + column] += d[i];
      dwpe_right[row % seq_len * channels + column] += d[i];
    }
    // At most all rows meet in one sum: terms of size 1 that cancel to √rows, and so many additions that each round a
    // number of that size.
    const double size = std::sqrt(double(rows())), tolerance = 3 * size * rounding<float>;
    return {{"dwte", dwte.numbers(), dwte_right, size, tolerance},
            {"dwpe", dwpe.numbers(), dwpe_right, size, tolerance}};
  }

  int batch, seq_len, channels, vocabulary;
  std::vector<int> host_tokens;
  Buffer<int> tokens, order;
  RandomBuffer<T> dout;
  RandomBuffer<float> dwte_before;
  Buffer<float> dwte, dwpe;
};

// ---- 1: a thread an element
//
// Every element goes where it belongs by two atomics, 8 bytes beside the 2 of bf16 that are read. Additions to dwpe
// meet at B rows each, those to dwte at as many as a token is common, and queue there. Which comes first is chance: so
// are the last bits.

template <class T>
__global__ void thread_per_element_kernel(float* dwte, float* dwpe, const int* tokens, const T* dout, size_t count,
                                          int seq_len, int channels) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const size_t row = i / channels, column = i % channels;
  const float d = to_float(dout[i]);
  atomicAdd(&dwte[size_t(tokens[row]) * channels + column], d);
  atomicAdd(&dwpe[row % seq_len * channels + column], d);
}

template <class T>
void thread_per_element(EmbeddingBackward<T>& o, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(o.dwpe.data(), 0, o.dwpe.size() * sizeof(float), stream));
  thread_per_element_kernel<T><<<blocks_for(o.count(), 256), 256, 0, stream>>>(
      o.dwte.data(), o.dwpe.data(), o.tokens.data(), o.dout.data(), o.count(), o.seq_len, o.channels);
}

// ---- 2: positions are gathered
//
// Which rows meet at a position is known without looking: a thread owns an element of dwpe, adds its B terms up in a
// register and writes once. One of two atomics an element is gone, a B-th of a store takes its place, and dwpe's bits
// are settled. dout is read by two kernels now, 2 bytes more.

template <class T>
__global__ void scatter_tokens_kernel(float* dwte, const int* tokens, const T* dout, size_t count, int channels) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) atomicAdd(&dwte[size_t(tokens[i / channels]) * channels + i % channels], to_float(dout[i]));
}

template <class T, int N>
void gather_positions(EmbeddingBackward<T>& o, cudaStream_t stream) {
  const int threads = std::min(round_up(o.channels / N, 32), 256);
  position_embedding_backward_kernel<T, N><<<o.seq_len, threads, 0, stream>>>(o.dwpe.data(), o.dout.data(), o.batch,
                                                                              o.seq_len, o.channels, false);
}

template <class T>
void gathered_positions(EmbeddingBackward<T>& o, cudaStream_t stream) {
  scatter_tokens_kernel<T><<<blocks_for(o.count(), 256), 256, 0, stream>>>(
      o.dwte.data(), o.tokens.data(), o.dout.data(), o.count(), o.channels);
  gather_positions<T, 1>(o, stream);
}

// ---- 3: tokens are sorted
//
// The host, which has the tokens before the GPU needs them, sorts the rows by token: equal ones are neighbours, and
// what was a scatter is a gather again. A block starts at each sorted place; the first of a token's run adds the whole
// run to dwte in order, the others leave. No atomics, and a row of dwte is touched once for a run, not for each of its
// rows.

template <class T, int N>
__global__ void sorted_tokens_kernel(float* dwte, const int* tokens, const int* order, const T* dout, int rows,
                                     int channels) {
  const int first = blockIdx.x, token = tokens[order[first]];
  if (first > 0 && tokens[order[first - 1]] == token) return;
  for (int column = threadIdx.x * N; column < channels; column += blockDim.x * N) {
    float sum[N], d[N];
    load(dwte + size_t(token) * channels + column, sum);
    for (int i = first; i < rows && tokens[order[i]] == token; ++i) {
      load(dout + size_t(order[i]) * channels + column, d);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += d[k];
    }
    store(dwte + size_t(token) * channels + column, sum);
  }
}

template <class T, int N>
void gather(EmbeddingBackward<T>& o, cudaStream_t stream) {
  const int threads = std::min(round_up(o.channels / N, 32), 256);
  sorted_tokens_kernel<T, N><<<o.rows(), threads, 0, stream>>>(o.dwte.data(), o.tokens.data(), o.order.data(),
                                                               o.dout.data(), o.rows(), o.channels);
  gather_positions<T, N>(o, stream);
}

template <class T>
void sorted_tokens(EmbeddingBackward<T>& o, cudaStream_t stream) {
  gather<T, 1>(o, stream);
}

// ---- 4: packs of 16 bytes
//
// The same two kernels with 8 elements of bf16 to a thread: an eighth of the loads of dout, and of what comes with each
// of them, two look-ups of where a run's next row is. Sectors are not fewer but more, 18.7 bytes an element instead of
// 15.7: 8 floats of a table are two accesses of 16 bytes, each to half of a sector. A cache puts the halves together.

template <class T>
void packs(EmbeddingBackward<T>& o, cudaStream_t stream) {
  with_pack<T>(o.channels, [&](auto width) { gather<T, decltype(width)::value>(o, stream); });
}

// ---- 5: eight rows of a run at a time: the kernel of the model
//
// A run was a chain: the place of the next row, its token, and only then, if the run goes on, the row; three waits for
// a row. The commonest token's run is thousands of rows, and ends when all others have long been done. Now eight places
// are looked up at once, then eight tokens, then eight rows: the same bytes and an eighth of the waits.

template <class T>
void rows_at_once(EmbeddingBackward<T>& o, cudaStream_t stream) {
  embedding_backward<T>(o.dwte, o.dwpe, o.tokens, o.order, o.dout, {0, o.vocabulary}, o.batch, o.seq_len, o.seq_len,
                        o.channels, false, stream);
}

template <class T>
std::vector<Rung<EmbeddingBackward<T>>> EmbeddingBackward<T>::rungs() {
  return {
      {"thread_per_element", "two atomics an element, which queue where tokens are equal", thread_per_element<T>},
      {"gathered_positions", "dwpe: a thread adds over the batch: one atomic less", gathered_positions<T>},
      {"sorted_tokens", "dwte: a block adds up a run of equal tokens: no atomics, the same bits", sorted_tokens<T>},
      {"packs", "16 bytes a load: an eighth of the instructions", packs<T>},
      {"rows_at_once", "kernels/embedding.cuh: eight rows of a run under way at once", rows_at_once<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<EmbeddingBackward>(count, arguments); }
