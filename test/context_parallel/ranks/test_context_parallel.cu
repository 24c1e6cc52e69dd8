// Attention over ranks that split the sequence, beside attention of one rank over whole sequences: each rank computes both.
// For remove_events.sh: 3 ranks
#include "test/ranks/ranks.cuh"

#include "extensions/context_parallel/model.cuh"
#include "test/attention_reference.h"

namespace {

int size() { return ranks().all.size(); }

// The sizes of attention over all rows and over this rank's, and which rows these are.
struct Job {
  AttentionSizes all, own;
  Positions positions;

  // A tensor's elements of this rank's rows. all: (B,T,columns).
  template <class T>
  std::vector<T> own_rows(const std::vector<T>& all_rows) const {
    const size_t rows = size_t(own.batch) * own.queries, columns = all_rows.size() / (size_t(all.batch) * all.queries);
    std::vector<T> values;
    for (size_t row = 0; row < rows; ++row) {
      const size_t from = row / own.queries * all.queries + positions.of_row(int(row));
      values.insert(values.end(), &all_rows[from * columns], &all_rows[from * columns] + columns);
    }
    return values;
  }
};

// The job of this rank among all.
Job job_of(ContextMethod method, int batch, int own_rows, int head_size) {
  const int heads = 2 * size(), seq_len = own_rows * size();
  return {square_attention(batch, seq_len, heads, head_size), square_attention(batch, own_rows, heads, head_size),
          positions_of(method, seq_len, size(), ranks().all.rank())};
}

// What a model keeps of a layer on this rank: tensors (R,c) of its own rows, or as many elements of its heads.
template <class T>
struct Layer {
  Layer(const Job& job, unsigned seed)
      : all_qkv(random_values<T>(size_t(job.all.batch) * job.all.queries * 3 * job.all.channels(), 1, 0, seed)),
        all_dout(random_values<T>(all_qkv.size() / 3, 1, 0, seed + 1)), own_qkv(job.own_rows(all_qkv)),
        dout(job.own_rows(all_dout)), qkv(own_qkv.size()), out(dout.size()), heads_out(dout.size()), dqkv(own_qkv.size()),
        lse(size_t(job.own.batch) * job.own.heads * job.own.queries), row_dots(lse.size()) {}
  std::vector<T> all_qkv, all_dout;
  Buffer<T> own_qkv, dout, qkv, out, heads_out, dqkv;
  Buffer<float> lse, row_dots;

  void forward(ContextParallel<T>& cp, const Job& job) {
    CUDA_CHECK(cudaMemcpyAsync(cp.rows_of_qkv(qkv), own_qkv, own_qkv.size() * sizeof(T), cudaMemcpyDeviceToDevice,
                               test_stream()));
    cp.forward(out, cp.keeps_heads() ? heads_out.data() : nullptr, lse, qkv, 0, job.own, {}, nullptr);
  }
  void backward(ContextParallel<T>& cp, const Job& job) {
    cp.backward(dqkv, row_dots, dout, out, cp.keeps_heads() ? heads_out.data() : nullptr, qkv, lse, job.own, {}, nullptr);
  }

  // Results must have one rank's bits.
  void check_same(const Job& job) const {
    const auto& [batch, seq_len, keys, heads, head_size, causal, past] = job.all;
    Buffer<T> whole_qkv(all_qkv), whole_dout(all_dout), whole_out(all_dout.size()), whole_dqkv(all_qkv.size());
    Buffer<float> whole_lse(size_t(batch) * heads * seq_len), dots(whole_lse.size());
    attention_forward<T>(whole_out, whole_lse, whole_qkv, batch, seq_len, heads, head_size, test_stream());
    attention_backward<T>(whole_dqkv, dots, whole_dout, whole_out, whole_qkv, whole_lse, batch, seq_len, heads, head_size,
                          test_stream());
    CHECK(same_bits(out.get(), job.own_rows(whole_out.get())));
    CHECK(same_bits(dqkv.get(), job.own_rows(whole_dqkv.get())));
  }
  // As in test_ring.cu.
  void check_close(const Job& job) const {
    const AttentionReference expected = attention_reference(as_double(all_qkv), as_double(all_dout), job.all);
    const double f = attention_sum_error(job.all), u = rounding<T>;
    CHECK_WITHIN("out", worst_excess(out.numbers(), job.own_rows(expected.out), job.own_rows(expected.out_terms),
                                     2 * u + (2 * size() - 1) * f, f), 1);
    CHECK_WITHIN("dqkv", worst_excess(dqkv.numbers(), job.own_rows(expected.dqkv), job.own_rows(expected.dqkv_terms),
                                      2 * u + 4 * f, 4 * f), 1);
  }
  void check(const Job& job, ContextMethod method) const {
    if (method == ContextMethod::ring) check_close(job);
    else check_same(job);
  }
};

// Memory of the class, which is NaN until it is written.
struct Workspace {
  template <class T>
  Workspace(ContextParallel<T>& cp, const AttentionSizes& largest, bool training) : memory(bytes(cp, largest, training)) {
    Arena arena(reinterpret_cast<char*>(memory.data()));
    cp.lay_out(arena, largest, training);
  }
  template <class T>
  static size_t bytes(ContextParallel<T>& cp, const AttentionSizes& largest, bool training) {
    Arena counting;
    cp.lay_out(counting, largest, training);
    return counting.bytes();
  }
  Buffer<uint8_t> memory;
};

#define METHODS ContextMethod::ring, ContextMethod::ulysses

}  // namespace

TEST_CASE_TEMPLATE("two layers, forward and backward, equal one rank's, twice", T, float, __nv_bfloat16) {
  Mesh mesh(ranks().mesh, {.cp = size()});
  for (ContextMethod method : {METHODS}) {
    CAPTURE(int(method));
    const auto attention = context_parallel_attention<T>(mesh.cp(), method, test_stream());
    ContextParallel<T>& cp = *attention;
    const Job large = job_of(method, 2, 10, 20);
    const Workspace workspace(cp, large.own, true);
    for (const Job& job : {large, job_of(method, 1, 2, 64)}) {
      Layer<T> first(job, 1), second(job, 3);
      std::vector<std::vector<T>> bits[2];
      for (auto& of_run : bits) {
        for (Layer<T>* layer : {&first, &second})
          for (Buffer<T>* written : {&layer->qkv, &layer->out, &layer->heads_out, &layer->dqkv}) written->poison();
        first.forward(cp, job), second.forward(cp, job);
        second.backward(cp, job), first.backward(cp, job);
        for (const Layer<T>* layer : {&first, &second}) {
          layer->check(job, method);
          of_run.push_back(layer->out.get()), of_run.push_back(layer->dqkv.get());
        }
      }
      for (size_t i = 0; i < bits[0].size(); ++i) CHECK(same_bits(bits[0][i], bits[1][i]));
    }
  }
}

TEST_CASE_TEMPLATE("bytes that are sent, and memory, by the formulas", T, float, __nv_bfloat16) {
  Mesh mesh(ranks().mesh, {.cp = size()});
  for (ContextMethod method : {METHODS}) {
    CAPTURE(int(method));
    const auto attention = context_parallel_attention<T>(mesh.cp(), method, test_stream());
    ContextParallel<T>& cp = *attention;
    CHECK(cp.keeps_heads() == (method == ContextMethod::ulysses));
    const Job job = job_of(method, 2, 8, 32);
    const double n = size(), w = sizeof(T), values = 2 * 8 * job.own.channels(), statistics = 2 * job.own.heads * 8;
    const bool ring = method == ContextMethod::ring;
    const auto memory_is = [&](bool training, double bytes) {  // each array begins at a multiple of 256 bytes
      const double taken = double(Workspace::bytes(cp, job.own, training));
      CHECK((taken >= bytes && taken < bytes + 8 * 256));
    };
    memory_is(false, ring ? values * (4 * w + 4) + 4 * statistics : 6 * values * w);
    memory_is(true, ring ? values * (4 * w + 40) + 4 * statistics : 6 * values * w);

    const Workspace workspace(cp, job.own, true);
    Layer<T> layer(job, 1);
    const auto sent_is = [&](double bytes, auto work) {
      CUDA_CHECK(cudaDeviceSynchronize());
      const double before = transport_bytes();
      const int number = mesh.begin_traffic();
      work();
      CUDA_CHECK(cudaDeviceSynchronize());
      const Traffic traffic = mesh.take_traffic(number)["cp"];
      double sent = 0;
      for (const auto& [name, part] : traffic.bytes_sent) sent += part;
      CHECK(sent == about(bytes));
      CHECK(traffic.exposed_milliseconds > 0);
      if (transport_bytes() > 0) CHECK(transport_bytes() - before == about(bytes));
    };
    sent_is(ring ? (n - 1) * 2 * values * w : (n - 1) / n * 4 * values * w, [&] { layer.forward(cp, job); });
    sent_is(ring ? (n - 1) * 2 * values * (w + 4) : (n - 1) / n * 4 * values * w, [&] { layer.backward(cp, job); });
  }
}

#ifndef __NVCC__
TEST_CASE("Ulysses sends each rank one message, and copies its own, however many samples there are") {
  Mesh mesh(ranks().mesh, {.cp = size()});
  const auto attention = context_parallel_attention<float>(mesh.cp(), ContextMethod::ulysses, test_stream());
  ContextParallel<float>& cp = *attention;
  const Job largest = job_of(ContextMethod::ulysses, 4, 2, 16);
  const Workspace workspace(cp, largest.own, true);
  for (int batch : {1, 4}) {
    CAPTURE(batch);
    const Job job = job_of(ContextMethod::ulysses, batch, 2, 16);
    Layer<float> layer(job, 1);
    const auto exchanges_twice = [&](auto work) {
      const size_t sends = cpu::nccl_sends(), operations = cpu::nccl_operations(), copies = cpu::counts.copies;
      work();
      CHECK(cpu::nccl_sends() - sends == size_t(2 * (size() - 1)));
      CHECK(cpu::nccl_operations() - operations == 2);
      return cpu::counts.copies - copies;
    };
    CHECK(exchanges_twice([&] { layer.forward(cp, job); }) == 2 + 1);  // (and the test's copy of qkv)
    CHECK(exchanges_twice([&] { layer.backward(cp, job); }) == 2);
    CUDA_CHECK(cudaDeviceSynchronize());
    layer.check_same(job);
  }
}
#endif

TEST_CASE("ranks have the rows of a sample between them") {
  Mesh mesh(ranks().mesh, {.cp = size()});
  for (ContextMethod method : {METHODS}) {
    const int seq_len = 6 * size(), rank = mesh.cp().rank();
    const Positions positions = positions_of(method, seq_len, size(), rank);
    std::vector<float> mine;
    for (int row = 0; row < 6; ++row) mine.push_back(float(positions.of_row(row)));
    std::vector<float> all = all_values(mine);
    std::sort(all.begin(), all.end());
    for (int position = 0; position < seq_len; ++position) CHECK(all[size_t(position)] == float(position));
    if (method == ContextMethod::ulysses) CHECK(mine[5] == float(rank * 6 + 5));
    else CHECK(mine[0] + mine[5] == float(seq_len - 1));  // an early row and a late one
  }
}
