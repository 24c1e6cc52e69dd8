// Tensor parallelism beside one rank: exchanged rows exactly, training within the rounding of sums in another order.
#include "test/ranks/training.cuh"

#include "parallel/tensor_parallel.cuh"

namespace {

// Heads that many numbers of ranks divide; head sizes that nothing divides; vocabularies with shards of padding only.
constexpr ModelShape eight_heads = {8, 8, 40, 211, 32}, six_heads = {3, 6, 54, 211, 36}, few_tokens = {1, 8, 48, 129, 16};

int rank_count() { return ranks().control->size(); }

// Meshes of all ranks with tp ranks that share layers, for every tp > 1 that divides both their number and the heads.
std::vector<MeshShape> meshes(const ModelShape& shape) {
  std::vector<MeshShape> shapes;
  for (int tp = 2; tp <= rank_count(); ++tp)
    if (rank_count() % tp == 0 && shape.heads % tp == 0) shapes.push_back({.tp = tp, .dp = rank_count() / tp});
  return shapes;
}

const ModelShape& shape_for_ranks() { return rank_count() % 3 ? eight_heads : six_heads; }

struct AllRandom {
  AllRandom() { all_tensors_random = true; }
  ~AllRandom() { all_tensors_random = false; }
};

// What this rank keeps of a state, by tensor, at its place in the whole tensor; NaN elsewhere.
std::map<std::string, std::vector<float>> by_tensor(const Model& model, const Parameters& store, State state) {
  std::map<std::string, std::vector<float>> tensors;
  for (const Slice& slice : store.own_slices()) {
    const TensorDescriptor& tensor = model.tensors().find(slice.tensor->name);
    std::vector<float>& whole = tensors.try_emplace(tensor.name, tensor.count(), NAN).first->second;
    const std::vector<float> values = values_of(store, slice, state);
    for (size_t i = 0; i < values.size(); ++i) whole[tensor.part.whole(slice.first + i)] = values[i];
  }
  return tensors;
}

// Rank 0's values, on all ranks.
std::vector<float> of_rank_0(const std::vector<float>& values) {
  return all_values(ranks().control->rank() == 0 ? values : std::vector<float>{});
}

}  // namespace

TEST_CASE("pieces of rows cover them, and every rank has as many of each") {
  for (int ranks : {1, 2, 3, 8})
    for (int own : {1, 2, 5, 64})
      for (int pieces : {1, 2, 4, 7}) {
        int next = 0;
        for (const Rows& piece : cut_rows(own * ranks, ranks, pieces)) {
          CHECK(piece.first == next);
          CHECK(piece.count > 0);
          CHECK(piece.count % ranks == 0);
          next += piece.count;
        }
        CHECK(next == own * ranks);
      }
}

TEST_CASE("rows are gathered in their natural order, and scattered sums are exact") {
  const int columns = 5, n = rank_count(), rows = 12 * n;
  Mesh mesh(ranks().mesh, {.tp = n});
  for (int pieces : {1, 2, 3, 4, 50}) {
    CAPTURE(pieces);
    TensorParallel<float> tp(mesh.tp(), pieces, test_stream());
    // Element (row, column) of the gathered matrix is row·100 + column; own rows lie piece after piece.
    std::vector<float> mine;
    for (const Rows& piece : cut_rows(rows, n, pieces))
      for (int i = 0; i < piece.count / n; ++i)
        for (int column = 0; column < columns; ++column)
          mine.push_back(float((piece.first + tp.rank() * piece.count / n + i) * 100 + column));
    Buffer<float> own(mine), buffer(size_t(rows) * columns), copy(size_t(rows) * columns), sums(mine.size());
    const float* gathered = tp.gather_then(buffer, own, rows, columns, [&](const float* all, Rows piece) {
      CUDA_CHECK(cudaMemcpyAsync(piece.of(copy.data(), columns), piece.of(all, columns),
                                 size_t(piece.count) * columns * sizeof(float), cudaMemcpyDeviceToDevice, test_stream()));
    });
    CHECK(gathered == (n == 1 ? own.data() : buffer.data()));
    std::vector<float> wanted;
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column) wanted.push_back(float(row * 100 + column));
    CHECK(copy.get() == wanted);

    // Each rank's term is (rank + 1) times the matrix.
    bool meanwhile = false;
    Buffer<float> again(size_t(rows) * columns);
    const float* there = tp.start_gather(again, own, rows, columns, false);
    tp.then_scatter(sums, buffer, rows, columns, [&](float* out, Rows piece) {
      std::vector<float> term(piece.of(wanted.data(), columns), piece.of(wanted.data(), columns) + piece.count * columns);
      for (float& x : term) x *= float(tp.rank() + 1);
      copy_and_wait(piece.of(out, columns), term.data(), term.size(), cudaMemcpyHostToDevice, test_stream());
    }, [&] {
      meanwhile = true;
      CUDA_CHECK(cudaMemcpyAsync(copy, there, mine.size() * sizeof(float), cudaMemcpyDeviceToDevice, test_stream()));
    });
    CHECK(meanwhile);
    for (float& x : mine) x *= float(n * (n + 1) / 2);
    CHECK(sums.get() == mine);
    const std::vector<float> copied = copy.get();
    CHECK(std::equal(wanted.begin(), wanted.begin() + long(mine.size()), copied.begin()));
  }
}

TEST_CASE("losses and norms are those of one rank, on every mesh") {
  const AllRandom all_random;
  int number = 0;
  for (const ModelShape& shape : {shape_for_ranks(), few_tokens})
    for (const MeshShape& mesh_shape : meshes(shape))
      for (Recompute recompute : {Recompute::none, Recompute::gelu, Recompute::block}) {
        if (recompute != Recompute::none && &shape != &shape_for_ranks() && number > 9) continue;
        const int stage = number % 4, pieces = 1 + number % 3;
        ++number;
        CAPTURE(mesh_shape.tp);
        CAPTURE(stage);
        CAPTURE(pieces);
        CAPTURE(int(recompute));
        Mesh mesh(ranks().mesh, mesh_shape);
        const Curve curve = train<float>({.shape = shape, .micro_batch = 2, .recompute = recompute, .tp_pieces = pieces,
                                          .logit_chunks = 1 + number % 2, .store = {.stage = stage}}, mesh, some_steps);
        check_fp32_curve(curve, shape);
      }
}
