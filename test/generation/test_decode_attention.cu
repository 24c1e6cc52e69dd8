// Attention of one token over a cache of keys and values against float64, of ranks that share it too, and the cache itself.
#include "extensions/context_parallel/sequence_split.h"
#include "extensions/generation/kernels/decode_attention.cuh"
#include "test/kernel_test.cuh"

#include <memory>

namespace {

struct Shape {
  int batch, heads, head_size, positions;
  int channels() const { return heads * head_size; }
};

// A cache, at first full of NaN from key `keys` on: nobody may read them.
template <class T>
struct Cache {
  Cache(const Shape& s, int keys)
      : k(filled(s, keys, 5)), v(filled(s, keys, 6)), keys_d(k), values_d(v),
        view{keys_d.data(), values_d.data(), s.heads, s.head_size, s.positions} {}

  static std::vector<T> filled(const Shape& s, int keys, int seed) {
    std::vector<T> all = random_values<T>(size_t(s.batch) * s.heads * s.positions * s.head_size, 1, 0, seed);
    for (size_t i = 0; i < all.size(); ++i)
      if (int(i / size_t(s.head_size) % size_t(s.positions)) >= keys) all[i] = from_float<T>(NAN);
    return all;
  }

  std::vector<T> k, v;
  Buffer<T> keys_d, values_d;
  KeyValueCache<T> view;
};

// Checks out (B,NH,HS), attention of the rows of q (B,3,NH,HS) over the first `keys` keys.
template <class T>
void check_attention(const char* what, const std::vector<T>& out, const std::vector<T>& q, const Cache<T>& cache,
                     const Shape& s, int keys) {
  const int C = s.channels();
  // As in test_attention: float sums of `keys` and HS terms of random sign, then one rounding of the result.
  const double f = attention_sum_error(keys, s.head_size);
  double worst = 0;
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.heads; ++h) {
      std::vector<double> p(static_cast<size_t>(keys));
      const auto in_cache = [&](int j, int d) { return ((size_t(b) * s.heads + h) * s.positions + j) * s.head_size + d; };
      double sum = 0;
      for (int j = 0; j < keys; ++j) {
        double score = 0;
        for (int d = 0; d < s.head_size; ++d)
          score += double(to_float(q[size_t(b) * 3 * C + h * s.head_size + d])) * to_float(cache.k[in_cache(j, d)]);
        sum += p[size_t(j)] = std::exp(score / std::sqrt(double(s.head_size)));
      }
      for (int d = 0; d < s.head_size; ++d) {
        double expected = 0, terms = 0;
        for (int j = 0; j < keys; ++j) {
          const double term = p[size_t(j)] / sum * to_float(cache.v[in_cache(j, d)]);
          expected += term;
          terms += std::abs(term);
        }
        const double actual = to_float(out[size_t(b) * C + h * s.head_size + d]);
        const double error = std::abs(actual - expected) / (rounding<T> * std::abs(expected) + f * terms + f);
        if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
      }
    }
  CHECK_WITHIN(what, worst, 1);
}

template <class T>
void check(const Shape& s, int keys) {
  CAPTURE(s.head_size);
  CAPTURE(keys);
  const std::vector<T> qkv = random_values<T>(size_t(s.batch) * 3 * s.channels());
  Cache<T> cache(s, keys);
  Buffer<T> qkv_d(qkv), out(size_t(s.batch) * s.channels());
  Buffer<float> workspace(decode_workspace(s.batch, s.positions, s.heads, s.head_size));
  decode_attention<T>(out, qkv_d, cache.view, s.batch, keys, workspace, test_stream());
  check_attention("out", out.get(), qkv, cache, s, keys);
}

// The keys and values of cache positions `rows`, as a tensor (B,rows,3,NH,HS). Its queries are NaN, and so is all of
// position −1.
template <class T>
std::vector<T> qkv_of(const Cache<T>& cache, const Shape& s, const std::vector<int>& rows) {
  std::vector<T> qkv;
  for (int b = 0; b < s.batch; ++b)
    for (int row : rows)
      for (const std::vector<T>* part : {static_cast<const std::vector<T>*>(nullptr), &cache.k, &cache.v})
        for (int c = 0; c < s.channels(); ++c) {
          const int head = c / s.head_size;
          const size_t from = ((size_t(b) * s.heads + head) * s.positions + row) * s.head_size + c % s.head_size;
          qkv.push_back(part && row >= 0 ? (*part)[from] : from_float<T>(NAN));
        }
  return qkv;
}

// Plays ranks of context parallelism, one after the other: a prompt of some tokens, then each later token by itself.
// The ranks share the keys of a text (ring), or the heads (Ulysses).
template <class T>
void check_ranks(const Shape& s, int ranks, int prompt, bool share_heads) {
  CAPTURE(ranks);
  CAPTURE(prompt);
  CAPTURE(share_heads);
  const int C = s.channels(), heads = share_heads ? s.heads / ranks : s.heads;
  const int room = share_heads ? s.positions : s.positions / ranks;
  const std::vector<T> qkv = random_values<T>(size_t(s.batch) * 3 * C);
  const Cache<T> text(s, s.positions);
  const size_t part = attention_part(s.batch, s.heads, s.head_size);
  Buffer<float> parts(ranks * part), workspace(decode_workspace(s.batch, room, heads, s.head_size));
  Buffer<T> q(qkv), out(size_t(s.batch) * C);
  const auto attend = [&](int rank, const Cache<T>& cache, int keys) {
    decode_attention<T, true>(parts.data() + rank * part, q, cache.view, s.batch, keys, workspace, test_stream());
  };
  const auto append = [&](const Cache<T>& cache, const T* rows, int length, int count, int first) {
    const QkvHeads<const T> own = packed_qkv(rows + cache.view.first_head * s.head_size, length, C);
    if (count > 0) append_to_cache<T>(cache.view, own, s.batch, count, first, test_stream());
    CUDA_CHECK(cudaStreamSynchronize(test_stream()));  // the caller's rows end
  };
  std::vector<std::unique_ptr<Cache<T>>> caches;
  std::vector<KeptTokens> kept;
  for (int rank = 0; rank < ranks; ++rank) {
    Cache<T>& cache = *caches.emplace_back(std::make_unique<Cache<T>>(Shape{s.batch, heads, s.head_size, room}, 0));
    cache.view.first_head = share_heads ? rank * heads : 0;
    cache.view.all_heads = s.heads;
    const Positions positions = share_heads ? neighbours(prompt) : zigzag(prompt, ranks, rank);
    kept.push_back({positions, share_heads ? 1 : ranks, share_heads ? 0 : rank});
    std::vector<int> rows;
    for (int i = 0; i < positions.length; ++i) rows.push_back(positions.of_row(i) < prompt ? positions.of_row(i) : -1);
    const Buffer<T> rows_d(qkv_of(text, s, rows));
    append(cache, rows_d, positions.length, positions.before(prompt), 0);
  }
  for (int token = prompt; token < s.positions; ++token) {
    const Buffer<T> row(qkv_of(text, s, {token}));
    int keepers = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const Cache<T>& cache = *caches[size_t(rank)];
      const int before = kept[size_t(rank)].before(token), keys = kept[size_t(rank)].before(token + 1);
      REQUIRE(keys <= room);
      keepers += keys - before;
      append(cache, row, 1, keys - before, before);
      attend(rank, cache, keys);
    }
    REQUIRE(keepers == (share_heads ? ranks : 1));
    merge_attention<T>(out, parts, ranks, s.batch, s.heads, s.head_size, test_stream());
    if (token < prompt + 5 || token + 1 == s.positions) check_attention("merged", out.get(), qkv, text, s, token + 1);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("attention of one token over the cache", T, float, __nv_bfloat16, __half) {
  for (int keys : {1, 2, decode_keys - 1, decode_keys, decode_keys + 1, 2 * decode_keys, 1000}) check<T>({2, 3, 64, 1000}, keys);
  for (int head_size : {16, 17, 32, 80, 128}) check<T>({1, 2, head_size, 300}, 299);
}

TEST_CASE("a part without keys is zeros that count nothing; a key that is NaN is not lost") {
  const Shape s = {2, 2, 17, 5};
  Cache<float> cache(s, 0);
  Buffer<float> qkv(random_values<float>(size_t(2) * 3 * s.channels()));
  Buffer<float> workspace(attention_part(2, 2, 17)), part(workspace.size());
  const auto attend = [&](int keys) {
    decode_attention<float, true>(part.data(), qkv, cache.view, 2, keys, workspace, test_stream());
    return part.get();
  };
  const std::vector<float> none = attend(0), some = attend(1);
  for (size_t i = 0; i < none.size(); ++i) {
    CHECK(none[i] == (i % 18 < 17 ? 0 : -INFINITY));
    CHECK(std::isnan(some[i]));
  }
}

TEST_CASE_TEMPLATE("ranks that share the keys of a text, or its heads, find together what one rank finds", T, float,
                   __nv_bfloat16) {
  for (bool share_heads : {false, true}) {
    if (!large_shapes) check_ranks<T>({1, 6, 17, 12}, 2, 5, share_heads);
    for (int ranks = 1; large_shapes && ranks <= 3; ++ranks) {
      for (int prompt : {1, 5, 11, 12}) check_ranks<T>({2, 6, 17, 24}, ranks, prompt, share_heads);
      check_ranks<T>({1, 6, 16, 600}, ranks, 590, share_heads);
    }
  }
}

TEST_CASE_TEMPLATE("keys and values go to their places, and nowhere else", T, float, __nv_bfloat16) {
  for (const Shape& s : {Shape{3, 2, 16, 11}, Shape{2, 3, 17, 9}}) {
    const int C = s.channels(), seq_len = 6, rows = 4, first = 5;
    const std::vector<T> qkv = random_values<T>(size_t(s.batch) * seq_len * 3 * C);
    Cache<T> cache(s, s.positions);
    append_to_cache<T>(cache.view, packed_qkv<const T>(Buffer<T>(qkv), seq_len, C), s.batch, rows, first, test_stream());
    CUDA_CHECK(cudaStreamSynchronize(test_stream()));
    for (int b = 0; b < s.batch; ++b)
      for (int t = 0; t < rows; ++t)
        for (int c = 0; c < C; ++c) {
          const int head = c / s.head_size, position = first + t;
          const size_t to = ((size_t(b) * s.heads + head) * s.positions + position) * s.head_size + c % s.head_size;
          const size_t from = (size_t(b) * seq_len + t) * 3 * C + c;
          cache.k[to] = qkv[from + C];
          cache.v[to] = qkv[from + 2 * C];
        }
    CHECK(same_bits(cache.keys_d.get(), cache.k));
    CHECK(same_bits(cache.values_d.get(), cache.v));
  }
}
