// Token and position embedding. Nothing here needs a tolerance: forward rounds one sum, and backward adds
// small integers, whose sums are exact in any order.
#include "extensions/context_parallel/sequence_split.h"
#include "kernels/embedding.cuh"
#include "test/kernel_test.cuh"

namespace {

// seq_len: the length of whole samples; rank `rank` of `ranks` has its part of each.
struct Shape {
  int batch, seq_len, positions, channels, vocabulary;
  ContextMethod method = ContextMethod::ring;
  int ranks = 1, rank = 0;

  Positions rows() const { return positions_of(method, seq_len, ranks, rank); }
  // The rank has runs r and 2N−1−r of 2N runs of the sample, or run r of N.
  size_t position(size_t row) const {
    const int length = seq_len / ranks, half = length / 2, i = int(row) % length;
    if (ranks == 1 || method == ContextMethod::ulysses) return size_t(rank * length + i);
    return size_t(i < half ? rank * half + i : (2 * ranks - 1 - rank) * half + i - half);
  }
};

std::vector<int> random_tokens(const Shape& s) {
  std::mt19937 generator(3);
  std::vector<int> tokens(size_t(s.batch) * s.seq_len / s.ranks);
  for (int& token : tokens) token = generator() % s.vocabulary;
  tokens.front() = s.vocabulary - 1;
  return tokens;
}

template <class T>
void check_forward(const Shape& s, const std::vector<int>& tokens) {
  const size_t C = s.channels;
  const auto wte = random_values<T>(s.vocabulary * C), wpe = random_values<T>(s.positions * C, 1, 0, 2);
  std::vector<T> expected(tokens.size() * C);
  for (size_t i = 0; i < expected.size(); ++i) {
    const size_t row = i / C, column = i % C;
    const float token = to_float(wte[tokens[row] * C + column]);
    const float position = to_float(wpe[s.position(row) * C + column]);
    expected[i] = from_float<T>(token + position);
  }
  Buffer<int> tokens_d(tokens);
  Buffer<T> wte_d(wte), wpe_d(wpe), out(expected.size());
  const VocabularyShard all = {0, s.vocabulary};
  embedding_forward<T>(out, tokens_d, wte_d, wpe_d, all, s.rows(), 0, int(tokens.size()), s.channels, test_stream());
  CHECK(same_bits(out.get(), expected));

  // In two pieces: the second one begins in the middle of a sequence.
  if (!large_shapes) return skip("this build is too slow for large shapes");
  out.poison();
  const int half = int(tokens.size() + 1) / 2, rest = int(tokens.size()) - half;
  embedding_forward<T>(out, tokens_d, wte_d, wpe_d, all, s.rows(), 0, half, s.channels, test_stream());
  if (rest > 0)
    embedding_forward<T>(out + half * C, tokens_d + half, wte_d, wpe_d, all, s.rows(), half, rest, s.channels, test_stream());
  CHECK(same_bits(out.get(), expected));
}

template <class T>
void check_backward(const Shape& s, const std::vector<int>& tokens, bool accumulate) {
  CAPTURE(accumulate);
  const size_t C = s.channels;
  const auto dout = random_integers<T>(tokens.size() * C, 8);
  // The head has written wte's gradient before; wpe's holds something only if it is to be accumulated.
  auto dwte = random_integers<float>(s.vocabulary * C, 100, 2);
  auto dwpe = random_integers<float>(s.positions * C, 100, 3);
  std::vector<int> order(tokens.size());
  sort_by_token(tokens.data(), int(tokens.size()), order.data());
  Buffer<int> tokens_d(tokens), order_d(order);
  Buffer<T> dout_d(dout);
  Buffer<float> dwte_d(dwte), dwpe_d(dwpe.size());
  if (accumulate) dwpe_d = dwpe;
  else dwpe.assign(dwpe.size(), 0);
  for (size_t i = 0; i < dout.size(); ++i) {
    const size_t row = i / C, column = i % C;
    dwte[tokens[row] * C + column] += to_float(dout[i]);
    dwpe[s.position(row) * C + column] += to_float(dout[i]);
  }
  Buffer<float> workspace(embedding_workspace(int(tokens.size()), s.channels));
  embedding_backward<T>(dwte_d, dwpe_d, tokens_d, order_d, dout_d, {0, s.vocabulary}, s.batch, s.rows(), s.positions, s.channels,
                        accumulate, workspace, test_stream());
  CHECK(dwte_d.get() == dwte);
  CHECK(dwpe_d.get() == dwpe);
}

// The shards of `ranks` ranks, `rows` tokens each: the last ones may have fewer tokens, or none.
std::vector<VocabularyShard> shards_of(int vocabulary, int ranks, int rows) {
  std::vector<VocabularyShard> shards;
  for (int rank = 0; rank < ranks; ++rank) {
    const int first = std::min(rank * rows, vocabulary);
    shards.push_back({first, std::min(rows, vocabulary - first)});
  }
  return shards;
}

// Rank 0 adds the positions. If it has the token, too, all other terms of the sum are zero. If another rank has it, two
// terms are not zero: the position and the token that one rank would have added. So the sum over the ranks, rounded
// once, has one rank's bits.
template <class T>
void check_forward_of_shards(const Shape& s, const std::vector<VocabularyShard>& shards) {
  const size_t C = s.channels;
  const auto tokens = random_tokens(s);
  const int rows = int(tokens.size());
  const auto wte = random_values<T>(s.vocabulary * C), wpe = random_values<T>(s.positions * C, 1, 0, 2);
  Buffer<int> tokens_d(tokens);
  Buffer<T> wte_d(wte), wpe_d(wpe), whole(rows * C);
  embedding_forward<T>(whole, tokens_d, wte_d, wpe_d, {0, s.vocabulary}, s.rows(), 0, rows, s.channels, test_stream());
  std::vector<float> sums(rows * C);
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    const auto first = wte.begin() + shards[rank].first * C;
    Buffer<T> own(std::vector<T>(first, first + shards[rank].rows * C)), out(rows * C);
    const T* const positions = rank == 0 ? wpe_d.data() : nullptr;
    embedding_forward<T>(out, tokens_d, own, positions, shards[rank], s.rows(), 0, rows, s.channels, test_stream());
    const std::vector<T> terms = out.get();
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += to_float(terms[i]);
  }
  std::vector<T> rounded;
  for (float sum : sums) rounded.push_back(from_float<T>(sum));
  CHECK(same_bits(rounded, whole.get()));
}

// The rows of all shards, one after the other, equal the whole gradient's, and what lies around them stays.
template <class T>
void check_backward_of_shards(const Shape& s, const std::vector<VocabularyShard>& shards) {
  const size_t C = s.channels, guard = 2 * C;
  const auto tokens = random_tokens(s);
  const auto dout = random_integers<T>(tokens.size() * C, 8);
  const auto before = random_integers<float>(s.vocabulary * C, 100, 2);
  std::vector<int> order(tokens.size());
  sort_by_token(tokens.data(), int(tokens.size()), order.data());
  Buffer<int> tokens_d(tokens), order_d(order);
  Buffer<T> dout_d(dout);
  Buffer<float> workspace(embedding_workspace(int(tokens.size()), s.channels));
  const auto backward = [&](float* dwte, float* dwpe, VocabularyShard shard) {
    embedding_backward<T>(dwte, dwpe, tokens_d, order_d, dout_d, shard, s.batch, s.rows(), s.positions, s.channels, false,
                          workspace, test_stream());
  };
  Buffer<float> dwte(before), dwpe(s.positions * C);
  backward(dwte, dwpe, {0, s.vocabulary});
  std::vector<float> rows;
  for (const VocabularyShard& shard : shards) {
    const size_t count = shard.rows * C;
    std::vector<float> around(guard + count + guard, 12345);
    std::copy_n(before.begin() + shard.first * C, count, around.begin() + guard);
    Buffer<float> own(around), own_dwpe(s.positions * C);
    backward(own + guard, own_dwpe, shard);
    const std::vector<float> after = own.get(), untouched(guard, 12345);
    CHECK(std::equal(untouched.begin(), untouched.end(), after.begin()));
    CHECK(std::equal(untouched.begin(), untouched.end(), after.begin() + guard + count));
    CHECK(same_bits(own_dwpe.get(), dwpe.get()));
    rows.insert(rows.end(), after.begin() + guard, after.begin() + guard + count);
  }
  CHECK(same_bits(rows, dwte.get()));
}

template <class T>
void check(const Shape& s) {
  CAPTURE(s.seq_len);
  CAPTURE(s.channels);
  const std::vector<int> repeated(random_tokens(s).size(), s.vocabulary / 2);
  for (const std::vector<int>& tokens : {random_tokens(s), repeated}) {
    check_forward<T>(s, tokens);
    check_backward<T>(s, tokens, false);
    check_backward<T>(s, tokens, true);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("embedding forward and backward", T, float, __nv_bfloat16, __half) {
  check<T>({1, 1, 1, 16, 2});
  if (large_shapes) check<T>({3, 48, 64, 51, 211});  // packs of one element; fewer tokens than positions
  if (large_shapes) check<T>({2, 40, 40, 64, 5});    // every token many times
  check<T>({5, 60, 60, 16, 3});   // runs of a hundred rows, over two or three blocks
  check<T>({2, 140, 140, 16, 1}); // one run over all blocks
  check<T>({2, 1, 2, 515, 30});   // more columns than threads
  check<T>({1, 9, 12, 260, 50});  // packs of 16 bytes in float only
  check<T>({1, 9, 12, 272, 50});  // packs of 64 bytes in float only
  // A part of each sample
  check<T>({2, 12, 13, 16, 5, ContextMethod::ring, 3, 1});
  check<T>({2, 12, 13, 16, 5, ContextMethod::ulysses, 3, 2});
}

TEST_CASE_TEMPLATE("shards of the vocabulary", T, float, __nv_bfloat16, __half) {
  if (!large_shapes) return skip("this build is too slow for large shapes");
  const Shape odd = {2, 3, 4, 19, 211}, packed = {2, 4, 4, 64, 129}, long_runs = {5, 60, 60, 16, 3};
  for (const auto& [s, ranks, rows] : {std::tuple{odd, 3, 128}, {odd, 4, 53}, {packed, 8, 128}, {long_runs, 2, 2}}) {
    CAPTURE(ranks);
    const auto shards = shards_of(s.vocabulary, ranks, rows);
    check_forward_of_shards<T>(s, shards);
    check_backward_of_shards<T>(s, shards);
  }
}

TEST_CASE("positions are sorted by token, stably") {
  const std::vector<int> tokens = {7, 0, 7, 3, 0, 7};
  std::vector<int> order(tokens.size());
  sort_by_token(tokens.data(), int(tokens.size()), order.data());
  CHECK(order == std::vector<int>{1, 4, 3, 0, 2, 5});

  const std::vector<int> many = random_tokens({8, 1000, 1000, 1, 50257});
  std::vector<int> expected(many.size());
  std::iota(expected.begin(), expected.end(), 0);
  std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) { return many[a] < many[b]; });
  order.resize(many.size());
  sort_by_token(many.data(), int(many.size()), order.data());
  CHECK(order == expected);
}
