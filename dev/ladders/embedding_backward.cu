// The ladder of the embedding's backward pass: each of the B·T rows of dout is added to two rows of float.
//
//   dwte[tokens[b,t], :] += dout[b,t,:];   dwpe[t, :] = Σ_b dout[b,t,:]
//
// Least bytes: dout read once, the rows of dwte that occur read and written, dwpe written. Two additions per element.
// Several rows may add to the same row of a table, and how many differs as much as word frequencies do: a few tokens
// make up most of a text, and the most frequent alone a twentieth of it. A rung must say which thread adds where two
// rows meet, and in which order, if runs are to agree to the last bit.
#include <climits>
#include <set>

#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/embedding.cuh"

namespace {

using namespace ladder;

// Zipf's law: the k-th most frequent token has probability 1/k, up to a factor.
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
        dwte(dwte_before.size()), dwpe(size_t(seq_len) * channels), workspace(embedding_workspace(rows(), channels)) {}

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
    // At most all rows are added to one sum. Terms of size 1 cancel to √rows, and each of these additions rounds a
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
  Buffer<float> dwte, dwpe, workspace;
};

// ---- 1: one thread per element
//
// Every element is added to both tables by an atomic: 8 bytes besides the 2 of bf16 that are read. At an address of
// dwpe B additions meet, at one of dwte as many as its token is frequent; they are done one after another. Their order
// depends on timing, and so do the last bits.

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
// Which rows belong to a position is known in advance: a thread has an element of dwpe, adds up its B terms in a
// register and writes once. One of the two atomics per element is gone, and a B-th of a store takes its place. The bits
// of dwpe no longer change. dout is now read by two kernels, 2 bytes more.

template <class T>
__global__ void scatter_tokens_kernel(float* dwte, const int* tokens, const T* dout, size_t count, int channels) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) atomicAdd(&dwte[size_t(tokens[i / channels]) * channels + i % channels], to_float(dout[i]));
}

template <class T, int N>
void gather_positions(EmbeddingBackward<T>& o, cudaStream_t stream) {
  const int threads = embedding_threads(o.channels / N);
  position_embedding_backward_kernel<T, N><<<o.seq_len, threads, 0, stream>>>(o.dwpe.data(), o.dout.data(), o.batch,
                                                                              neighbours(o.seq_len), o.channels, false);
}

template <class T>
void gathered_positions(EmbeddingBackward<T>& o, cudaStream_t stream) {
  scatter_tokens_kernel<T><<<blocks_for(o.count(), 256), 256, 0, stream>>>(
      o.dwte.data(), o.tokens.data(), o.dout.data(), o.count(), o.channels);
  gather_positions<T, 1>(o, stream);
}

// ---- 3: tokens are sorted
//
// The host, which has the tokens before the GPU needs them, sorts the rows by token, so equal tokens are neighbours and
// form a run. One block starts per sorted row. The block at the start of a run adds up the whole run in order and adds
// the sum to dwte; the others return. There are no atomics, and a row of dwte is read and written once per run instead
// of once per row.

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
  const int threads = embedding_threads(o.channels / N);
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
// The same two kernels, but each thread has 8 elements of bf16: an eighth of the loads of dout, and of the two look-ups
// before each of them, which find the next row of the run. More sectors are counted, not fewer, 18.7 bytes per element
// instead of 15.7: 8 floats of a table take two accesses of 16 bytes, and each counts as a sector. A cache joins the
// two halves.

template <class T>
void packs(EmbeddingBackward<T>& o, cudaStream_t stream) {
  with_pack<T>(o.channels, [&](auto width) { gather<T, decltype(width)::value>(o, stream); });
}

// ---- 5: 64 rows a block: the kernel of the model
//
// Until now a thread looked up where the next row of the run is, then its token, and loaded the row only if the run
// goes on: it waited three times per row. The run of the most frequent token has thousands of rows, and ends long after
// all others. Now each block has 64 of the sorted rows, which it looks up at once, and loads eight of them before it adds
// the first. A run that is longer than a block's part of it is put together from partial sums by a second kernel. The
// longest way through this is 64 rows and some partial sums, instead of thousands of rows.

template <class T>
void blocks_of_rows(EmbeddingBackward<T>& o, cudaStream_t stream) {
  embedding_backward<T>(o.dwte, o.dwpe, o.tokens, o.order, o.dout, {0, o.vocabulary}, o.batch, neighbours(o.seq_len),
                        o.seq_len, o.channels, false, o.workspace, stream);
}

template <class T>
std::vector<Rung<EmbeddingBackward<T>>> EmbeddingBackward<T>::rungs() {
  return {
      {"thread_per_element", "two atomics per element, which queue where tokens are equal", thread_per_element<T>},
      {"gathered_positions", "dwpe: a thread adds over the batch: one atomic less", gathered_positions<T>},
      {"sorted_tokens", "dwte: a block adds up a run of equal tokens: no atomics, the same bits", sorted_tokens<T>},
      {"packs", "16 bytes per load: an eighth of the instructions", packs<T>},
      {"blocks_of_rows", "kernels/embedding.cuh: 64 rows a block, eight loads under way at once", blocks_of_rows<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<EmbeddingBackward>(count, arguments); }
