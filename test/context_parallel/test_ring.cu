// The ring of ranks that attention's keys travel in, played in one process: the messages are pointers.
#include "extensions/context_parallel/kernels/ring.cuh"

#include <deque>

#include "extensions/context_parallel/sequence_split.h"
#include "test/attention_reference.h"
#include "test/kernel_test.cuh"

namespace {

// The tensors of one rank.
template <class T>
struct Player {
  Player(const std::vector<T>& own_qkv, const std::vector<T>& own_dout, size_t statistics)
      : qkv(own_qkv), dout(own_dout), out(dout.size()), keys(2 * dout.size()), dqkv(qkv.size()), lse(statistics),
        part_lse(statistics), row_dots(statistics), sums(qkv.size()), part(qkv.size()), keys_sums(keys.size()) {}
  Buffer<T> qkv, dout, out, keys, dqkv;
  Buffer<float> lse, part_lse, row_dots, sums, part, keys_sums;
  Buffer<float> maxima{std::vector<float>(2)};  // of out, and of dqkv
};

// Tensors (B,T,columns) of all ranks, whose rows stand where zigzag puts them.
class Rows {
 public:
  Rows(int batch, int seq_len, int ranks) : batch_(batch), seq_len_(seq_len), ranks_(ranks) {}

  template <class T>
  std::vector<T> of_rank(const std::vector<T>& all, int rank) const {
    std::vector<T> own(all.size() / size_t(ranks_));
    for_each_row(rank, all.size(), [&](size_t here, size_t there, size_t columns) {
      std::copy_n(&all[there], columns, &own[here]);
    });
    return own;
  }
  void put(std::vector<double>& all, const std::vector<double>& own, int rank) const {
    for_each_row(rank, all.size(), [&](size_t here, size_t there, size_t columns) {
      std::copy_n(&own[here], columns, &all[there]);
    });
  }

 private:
  template <class Function>
  void for_each_row(int rank, size_t count, Function function) const {
    const Positions positions = zigzag(seq_len_, ranks_, rank);
    const size_t columns = count / size_t(batch_ * seq_len_);
    for (int row = 0; row < batch_ * positions.length; ++row)
      function(size_t(row) * columns, (size_t(row / positions.length) * seq_len_ + positions.of_row(row)) * columns, columns);
  }
  int batch_, seq_len_, ranks_;
};

template <class T>
using Players = std::deque<Player<T>>;

template <class T>
void play_forward(Players<T>& players, const AttentionSizes& own) {
  const int ranks = int(players.size());
  for (auto& p : players) pack_keys(p.keys.data(), static_cast<const T*>(p.qkv), own, test_stream());
  for (int number = 0; number < ranks; ++number)
    for (int rank = 0; rank < ranks; ++rank) {
      const RingStep step{rank, ranks, number};
      Player<T>& p = players[rank];
      ring_forward<T>(step, p.out, p.lse, p.sums, p.part_lse, p.qkv, players[step.owner()].keys, own, test_stream(), {}, p.maxima.data());
    }
}

template <class T>
void play_backward(Players<T>& players, const AttentionSizes& own) {
  const int ranks = int(players.size());
  CUDA_CHECK(cudaStreamSynchronize(test_stream()));  // poison() does not wait for kernels that still use the memory
  for (auto& p : players) {
    for (Buffer<float>* used : {&p.sums, &p.part_lse, &p.row_dots}) used->poison();
    copy_late_queries(p.part_lse, p.lse, own, test_stream());
  }
  for (int number = 0; number < ranks; ++number)
    for (int rank = 0; rank < ranks; ++rank) {
      const RingStep step{rank, ranks, number};
      Player<T> &p = players[rank], &owner = players[step.owner()];
      p.part.poison();
      ring_backward<T>(step, number ? p.part : p.sums, p.row_dots, p.dout, p.out, p.qkv, owner.keys, p.lse, p.part_lse, own,
                       test_stream());
      if (number) add_ring_part(step, p.sums, owner.keys_sums, p.part, own, test_stream());
      CUDA_CHECK(cudaStreamSynchronize(test_stream()));  // before `part` is poisoned again
    }
  for (auto& p : players) finish_ring_gradients<T>(p.dqkv, p.sums, p.keys_sums, own, test_stream(), p.maxima.data() + 1);
}

// run: the length of each of a rank's two runs of tokens.
template <class T>
void check(int ranks, int run, int heads, int head_size) {
  CAPTURE(ranks);
  CAPTURE(run);
  CAPTURE(head_size);
  const AttentionSizes all = square_attention(2, 2 * ranks * run, heads, head_size);
  const AttentionSizes own = square_attention(2, 2 * run, heads, head_size);
  const Rows rows(2, all.queries, ranks);
  const auto qkv = random_values<T>(size_t(2) * all.queries * 3 * all.channels());
  const auto dout = random_values<T>(qkv.size() / 3, 1, 0, 2);
  Players<T> players;
  for (int rank = 0; rank < ranks; ++rank)
    players.emplace_back(rows.of_rank(qkv, rank), rows.of_rank(dout, rank), size_t(2) * heads * own.queries);
  play_forward(players, own);
  play_backward(players, own);

  const AttentionReference expected = attention_reference(as_double(qkv), as_double(dout), all);
  const Rows lse_rows(2 * heads, all.queries, ranks);
  std::vector<double> out(dout.size()), lse(expected.lse.size()), dqkv(qkv.size());
  for (int rank = 0; rank < ranks; ++rank) {
    rows.put(out, players[rank].out.numbers(), rank);
    rows.put(dqkv, players[rank].dqkv.numbers(), rank);
    lse_rows.put(lse, players[rank].lse.numbers(), rank);
    if (!std::is_same_v<T, __nv_bfloat16>) continue;  // which alone is cast to eight bits
    check_maximum(players[rank].maxima.numbers()[0], players[rank].out.numbers());
    check_maximum(players[rank].maxima.numbers()[1], players[rank].dqkv.numbers());
  }
  // As in test_attention.cu, with two more errors: outputs of parts are rounded to T, and each of the ranks − 1 weights
  // is off by 2f. dqkv is also off by twice the rounding of `out`.
  const double f = attention_sum_error(all), u = rounding<T>;
  CHECK_CLOSE(lse, expected.lse, 1.0, f);
  CHECK_WITHIN("out", worst_excess(out, expected.out, expected.out_terms, 2 * u + (2 * ranks - 1) * f, f), 1);
  CHECK_WITHIN("dqkv", worst_excess(dqkv, expected.dqkv, expected.dqkv_terms, 2 * u + 4 * f, 4 * f), 1);
}

}  // namespace

TEST_CASE("ring: every query meets each key that it sees in one step, and all steps are the same work") {
  for (int ranks : {1, 2, 3, 4, 5})
    for (int run : {1, 3}) {
      const AttentionSizes own = square_attention(1, 2 * run, 1, 16);
      std::vector<std::vector<int>> met(size_t(2 * ranks * run), std::vector<int>(size_t(2 * ranks * run)));
      for (int rank = 0; rank < ranks; ++rank)
        for (int number = 0; number < ranks; ++number) {
          const RingStep step{rank, ranks, number};
          const auto [first_query, sizes] = ring_part(step, own);
          CHECK(sizes.pairs() == 2 * run * run);
          const Positions queries = zigzag(2 * ranks * run, ranks, rank), keys = zigzag(2 * ranks * run, ranks, step.owner());
          for (int query = 0; query < sizes.queries; ++query)
            for (int key = 0; key <= sizes.last_key(query); ++key)
              ++met[size_t(queries.of_row(first_query + query))][size_t(keys.of_row(key))];
        }
      for (size_t query = 0; query < met.size(); ++query)
        for (size_t key = 0; key < met.size(); ++key) CHECK(met[query][key] == (key <= query));
    }
}

TEST_CASE_TEMPLATE("ring: attention of all ranks is attention over all tokens", T, float, __nv_bfloat16, __half) {
  check<T>(2, 1, 1, 16);
  check<T>(3, 3, 2, 16);
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check<T>(2, 33, 2, 64);
  check<T>(3, 8, 3, 17);  // packs of one element
  check<T>(3, 33, 2, 128);
  check<T>(4, 3, 2, 32);
  check<T>(5, 1, 3, 40);
  check<T>(5, 20, 1, 80);
}

TEST_CASE("ring: a part whose weight is almost nothing or almost all") {
  const AttentionSizes own = square_attention(1, 2, 1, 16);
  for (const float part : {-300.0f, 0.0f, 300.0f}) {
    Buffer<float> out(std::vector<float>(32, 3)), lse(std::vector<float>(2)), sums(std::vector<float>(32, 1));
    Buffer<float> part_lse(std::vector<float>(2, part));
    merge_ring_part<float>({1, 3, 1}, out, lse, sums, part_lse, own, test_stream());
    CHECK(sums.get() == std::vector<float>(32, part < 0 ? 1.0f : part > 0 ? 3.0f : 2.0f));
    CHECK(std::abs(lse.get()[1] - (part < 0 ? 0 : part > 0 ? 300 : std::log(2.0f))) < 1e-6);
  }
}

TEST_CASE("ring: bytes and FLOPs") {
  using T = __nv_bfloat16;
  Profiler::instance().enabled = true;
  Profiler::instance().collect();
  const auto totals = [](const RingStep& step) {
    const AttentionSizes own = square_attention(2, 6, 3, 16);
    const auto qkv = random_values<T>(12 * 144), dout = random_values<T>(12 * 48);
    Player<T> p(qkv, dout, 2 * 3 * 6);
    pack_keys<T>(p.keys, p.qkv, own, test_stream());
    copy_late_queries(p.part_lse, p.lse, own, test_stream());
    merge_ring_part<T>(step, p.out, p.lse, p.sums, p.part_lse, own, test_stream());
    if (!step.is_first()) add_ring_part(step, p.sums, p.keys_sums, p.part, own, test_stream());
    finish_ring_gradients<T>(p.dqkv, p.sums, p.keys_sums, own, test_stream());
    return Profiler::instance().collect();
  };
  auto first = totals({1, 3, 0}), earlier = totals({1, 3, 1}), later = totals({1, 3, 2}), middle = totals({0, 3, 1});
  Profiler::instance().enabled = false;
  const double tensor = 12 * 48, statistics = 2 * 3 * 6;  // elements of out and lse
  CHECK(first["pack_keys"].bytes == 8 * tensor);
  CHECK(first["copy_late_queries"].bytes == 4 * statistics);
  CHECK(first["finish_ring_gradients"].bytes == 26 * tensor);
  CHECK(first["merge_ring_part"].bytes == 6 * tensor);
  CHECK(first["merge_ring_part"].flops == 0);
  CHECK(earlier["merge_ring_part"].bytes == 10 * tensor + 20 * statistics);  // all queries
  CHECK(earlier["merge_ring_part"].flops == 3 * tensor);
  CHECK(middle["merge_ring_part"].bytes == 10 * tensor / 2 + 20 * statistics / 2);  // half of them
  CHECK(later["merge_ring_part"].bytes == 6 * tensor / 2 + 20 * statistics / 2 + 2 * tensor + 4 * tensor / 2);
  CHECK(earlier["add_ring_part"].bytes == 4 * (2 + 2 + 2) * tensor);  // a part; dq, twice; all of dk and dv
  CHECK(later["add_ring_part"].bytes == 4 * 3 * 2.5 * tensor);
}
