// Hopper's asynchronous instructions against what the PTX ISA documents of them, and the matrix product made of them.
#include <algorithm>
#include <numeric>

#include "dev/ladders/matmul_wgmma.cuh"
#include "test/kernel_test.cuh"

namespace {

// Every test but the first is skipped where the instructions are not.
const auto on_hopper = doctest::skip([] {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && !has_wgmma();  // without a device the tests say what is wrong
}());

// Where element (row, column) of a box is, in elements.
__host__ __device__ int in_box(int row, int column) {
  return row * box_columns + (column / 8 ^ row % 8) * 8 + column % 8;
}

__device__ void make_barriers(Barrier* barriers, int count, int arrivals) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; ++i) init_barrier(barriers[i], arrivals);
    share_barriers();
  }
  __syncthreads();
}

}  // namespace

TEST_CASE("which device this is") {
  if (!has_wgmma()) return skip("all cases of this file: this GPU, or this build, is not of compute capability 9.0a");
  CHECK(device_attribute(cudaDevAttrComputeCapabilityMajor) == 9);
}

// ---- barriers

namespace {

// The last thread, in a warp of its own, sends one number after another to all others.
__global__ void rounds_kernel(int* out, int rounds) {
  __shared__ Barrier full, empty;
  __shared__ int number;
  make_barriers(&full, 1, 1);
  const int t = threadIdx.x, receivers = blockDim.x - 1;
  make_barriers(&empty, 1, receivers);
  for (int round = 0; round < rounds; ++round)
    if (t == receivers) {
      wait(empty, (round + 1) % 2);
      number = 1 + round * round;
      arrive(full);
    } else {
      wait(full, round % 2);
      out[round * receivers + t] = number;
      arrive(empty);
    }
}

}  // namespace

TEST_CASE("barriers: threads wait for each other over many phases" * on_hopper) {
  const int rounds = 7, receivers = 64;
  std::vector<int> expected;
  for (int round = 0; round < rounds; ++round) expected.insert(expected.end(), receivers, 1 + round * round);
  Buffer<int> out(expected.size());
  rounds_kernel<<<1, receivers + 1, 0, test_stream()>>>(out.data(), rounds);
  CHECK(out.get() == expected);
}

namespace {

// Two groups of 64 threads take turns to change the same numbers. The first turn of all is announced before the loop,
// so the first group waits once more after it.
__global__ void turns_kernel(unsigned* out, int turns) {
  __shared__ unsigned numbers[64];
  const int group = threadIdx.x / 64, t = threadIdx.x % 64, own = 1 + group, other = 2 - group;
  if (group == 1) {
    numbers[t] = t;
    announce_at(other, 128);
  }
  for (int turn = 0; turn < turns; ++turn) {
    wait_at(own, 128);
    numbers[t] = 3 * numbers[t] + group;
    if (turn == turns - 1) out[group * 64 + t] = numbers[t];
    announce_at(other, 128);
  }
  if (group == 0) wait_at(own, 128);
}

}  // namespace

TEST_CASE("numbered barriers: two groups of threads take turns" * on_hopper) {
  const int turns = 5;
  std::vector<unsigned> numbers(64), expected;
  std::iota(numbers.begin(), numbers.end(), 0);
  for (int turn = 0; turn < 2 * turns; ++turn) {
    for (unsigned& x : numbers) x = 3 * x + turn % 2;
    if (turn >= 2 * turns - 2) expected.insert(expected.end(), numbers.begin(), numbers.end());
  }
  Buffer<unsigned> out(expected.size());
  turns_kernel<<<1, 128, 0, test_stream()>>>(out.data(), turns);
  CHECK(out.get() == expected);
}

// ---- boxes

namespace {

constexpr int most_box_rows = 64;

__global__ void load_box_kernel(uint16_t* out, const __grid_constant__ TensorMap map, int row, int column,
                                int box_rows) {
  alignas(1024) __shared__ uint16_t box[most_box_rows * box_columns];
  __shared__ Barrier full;
  make_barriers(&full, 1, 1);
  if (threadIdx.x == 0) {
    arrive_expecting(full, box_rows * 128);
    load_box(box, map, row, column, full);
  }
  wait(full, 0);
  for (int i = threadIdx.x; i < box_rows * box_columns; i += blockDim.x) out[i] = box[i];
}

// Stores twice from the same memory: the second box lies 100 rows further down, and its numbers go on where the first
// box's end.
__global__ void store_box_kernel(const __grid_constant__ TensorMap map, int row, int column, int box_rows) {
  alignas(1024) __shared__ uint16_t box[most_box_rows * box_columns];
  const int count = box_rows * box_columns;
  for (int copy = 0; copy < 2; ++copy) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) box[i] = uint16_t(i + copy * count);
    share_with_engines();
    __syncthreads();
    if (threadIdx.x == 0) {
      store_box(map, row + 100 * copy, column, box);
      commit_stores();
      wait_for_stores<0>();
    }
    __syncthreads();
  }
}

struct BoxCase {
  int rows, columns, box_rows, row, column;  // the matrix, the box's height, and where it lies
};
const std::vector<BoxCase> stored_boxes = {{64, 64, 64, 0, 0}, {37, 88, 16, 3, 16},  {37, 88, 64, 30, 40},
                                           {1, 8, 8, 0, 0},    {37, 88, 16, 37, 88}, {37, 88, 16, 0, 88},
                                           {200, 72, 8, 199, 64}};
// The copy engine loads boxes that begin before the matrix, too.
const std::vector<BoxCase> loaded_boxes = [] {
  std::vector<BoxCase> boxes = stored_boxes;
  boxes.insert(boxes.end(), {{37, 88, 8, -3, -8}, {37, 88, 8, -3, 8}, {37, 88, 8, 3, -56}, {37, 88, 8, -8, -64}});
  return boxes;
}();

}  // namespace

TEST_CASE_TEMPLATE("load_box: any place, zeros outside, chunks permuted" * on_hopper, T, __nv_bfloat16, __half) {
  for (const auto& [rows, columns, box_rows, row, column] : loaded_boxes) {
    CAPTURE(rows); CAPTURE(box_rows); CAPTURE(row); CAPTURE(column);
    std::vector<uint16_t> matrix(rows * columns), expected(box_rows * box_columns);
    for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = uint16_t(i + 1);
    for (int r = 0; r < box_rows; ++r)
      for (int c = 0; c < box_columns; ++c) {
        const int x = column + c, y = row + r;
        expected[in_box(r, c)] = x >= 0 && x < columns && y >= 0 && y < rows ? matrix[y * columns + x] : 0;
      }
    Buffer<uint16_t> matrix_d(matrix), out(expected.size());
    const TensorMap map = make_tensor_map(reinterpret_cast<const T*>(matrix_d.data()), rows, columns, box_rows);
    load_box_kernel<<<1, 96, 0, test_stream()>>>(out.data(), map, row, column, box_rows);
    CHECK(out.get() == expected);
  }
}

TEST_CASE_TEMPLATE("store_box: any place, nothing outside" * on_hopper, T, __nv_bfloat16, __half) {
  for (const auto& [rows, columns, box_rows, row, column] : stored_boxes) {
    CAPTURE(rows); CAPTURE(box_rows); CAPTURE(row); CAPTURE(column);
    std::vector<uint16_t> expected((rows + 100) * columns, 0xffff);
    for (int i = 0; i < 2 * box_rows * box_columns; ++i) {
      const int copy = i / (box_rows * box_columns), r = i / box_columns % box_rows, c = i % box_columns;
      const int x = column + c, y = row + r + 100 * copy;
      if (x >= 0 && x < columns && y >= 0 && y < rows + 100)
        expected[y * columns + x] = uint16_t(in_box(r, c) + copy * box_rows * box_columns);
    }
    Buffer<uint16_t> matrix(expected.size());
    const TensorMap map = make_tensor_map(reinterpret_cast<const T*>(matrix.data()), rows + 100, columns, box_rows);
    store_box_kernel<<<1, 96, 0, test_stream()>>>(map, row, column, box_rows);
    CHECK(matrix.get() == expected);
  }
}

namespace {

constexpr int stack_box_rows = 16;

// Copies a box of one stack to a place of another.
__global__ void copy_box_kernel(const __grid_constant__ TensorMap from, StackPlace loaded,
                                const __grid_constant__ TensorMap to, StackPlace stored) {
  alignas(1024) __shared__ uint16_t box[stack_box_rows * box_columns];
  __shared__ Barrier full;
  make_barriers(&full, 1, 1);
  if (threadIdx.x == 0) {
    arrive_expecting(full, sizeof box);
    load_box(box, from, loaded, full);
    wait(full, 0);
    store_box(to, stored, box);
    commit_stores();
    wait_for_stores<0>();
  }
}

}  // namespace

// Where a box reaches over the edge of its matrix, other matrices lie in memory. These elements are loaded as zeros,
// and storing leaves them as they are.
TEST_CASE("boxes of a stack: heads of samples, in rows with strides" * on_hopper) {
  const int rows = 21, columns = 24, heads = 3, samples = 2, row_stride = 104, sample_stride = rows * row_stride + 8;
  std::vector<uint16_t> numbers(samples * sample_stride);
  std::iota(numbers.begin(), numbers.end(), 1);
  const auto place = [&](const StackPlace& at, int row, int column) {
    return size_t(at.outer * sample_stride + at.inner * columns + (at.row + row) * row_stride + at.column + column);
  };
  const auto is_inside = [&](const StackPlace& at, int row, int column) {
    return at.row + row >= 0 && at.row + row < rows && at.column + column >= 0 && at.column + column < columns;
  };
  const std::pair<StackPlace, StackPlace> cases[] = {
      {{0, 0, 0, 0}, {0, 0, 0, 0}}, {{1, 2, 16, 0}, {1, 2, 16, 0}}, {{1, 1, 8, 8}, {0, 1, 8, 8}}, {{0, 2, -5, -8}, {1, 0, 3, 0}}};
  for (const auto& [loaded, stored] : cases) {
    CAPTURE(loaded.row);
    std::vector<uint16_t> expected(numbers.size(), 0xffff);
    for (int row = 0; row < stack_box_rows; ++row)
      for (int column = 0; column < box_columns; ++column)
        if (is_inside(stored, row, column))
          expected[place(stored, row, column)] = is_inside(loaded, row, column) ? numbers[place(loaded, row, column)] : 0;
    Buffer<uint16_t> from(numbers), to(numbers.size());
    auto map = [&](Buffer<uint16_t>& memory) {
      const auto* data = reinterpret_cast<const __half*>(memory.data());
      return make_tensor_map(
          MatrixStack<const __half>{data, rows, columns, heads, samples, row_stride, columns, sample_stride},
          stack_box_rows);
    };
    copy_box_kernel<<<1, 32, 0, test_stream()>>>(map(from), loaded, map(to), stored);
    CHECK(to.get() == expected);
  }
}

namespace {

constexpr int added_floats = 32;

// Each block takes a number. The blocks add to the same floats in the order of their numbers; the first block stores.
__global__ void add_in_order_kernel(float* sums, unsigned* ticket, unsigned* counter) {
  alignas(16) __shared__ float own[added_floats];
  __shared__ unsigned number;
  if (threadIdx.x == 0) number = atomicAdd(ticket, 1u);
  __syncthreads();
  own[threadIdx.x] = number == 0 ? 1 : 1 / (float(number) + threadIdx.x);
  share_with_engines();
  __syncthreads();
  if (threadIdx.x > 0) return;
  wait_for_count(counter, number);
  if (number == 0) store_floats(sums, own, sizeof own);
  else add_floats(sums, own, sizeof own);
  commit_stores();
  finish_stores();
  count_up(counter);
}

}  // namespace

TEST_CASE("blocks add floats one after the other" * on_hopper) {
  const unsigned blocks = 200;
  Buffer<float> sums(added_floats);
  Buffer<unsigned> numbers(std::vector<unsigned>(2));
  add_in_order_kernel<<<blocks, added_floats, 0, test_stream()>>>(sums.data(), numbers.data(), numbers.data() + 1);
  std::vector<float> expected(added_floats, 1);
  for (unsigned number = 1; number < blocks; ++number)
    for (int i = 0; i < added_floats; ++i) expected[i] += 1 / (float(number) + i);
  CHECK(sums.get() == expected);
  CHECK(numbers.get() == std::vector<unsigned>(2, blocks));
}

namespace {

// One thread waits for the count of another, which loads and stores a box before.
__global__ void count_in_block_kernel(uint16_t* out, unsigned* counter, const __grid_constant__ TensorMap from,
                                      const __grid_constant__ TensorMap to) {
  alignas(1024) __shared__ uint16_t box[8 * box_columns];
  __shared__ Barrier full;
  make_barriers(&full, 1, 1);
  if (threadIdx.x == 0) {
    wait_for_count(counter, 1);
    load_box(box, to, 0, 0, full);
    arrive_expecting(full, sizeof box);
    wait(full, 1);
    for (int i = 0; i < 8 * box_columns; ++i) out[i] = box[in_box(i / box_columns, i % box_columns)];
  }
  if (threadIdx.x == 32) {
    arrive_expecting(full, sizeof box);
    load_box(box, from, 0, 0, full);
    wait(full, 0);
    store_box(to, 0, 0, box);
    commit_stores();
    finish_stores();
    count_up(counter);
  }
}

}  // namespace

TEST_CASE("a thread sees the stores that another thread of its block has counted" * on_hopper) {
  std::vector<uint16_t> numbers(8 * box_columns);
  std::iota(numbers.begin(), numbers.end(), 1);
  Buffer<uint16_t> from(numbers), to(numbers.size()), out(numbers.size());
  Buffer<unsigned> counter(std::vector<unsigned>(1));
  auto map = [&](Buffer<uint16_t>& memory) {
    return make_tensor_map(reinterpret_cast<const __half*>(memory.data()), 8, box_columns, 8);
  };
  count_in_block_kernel<<<1, 64, 0, test_stream()>>>(out.data(), counter.data(), map(from), map(to));
  CHECK(out.get() == numbers);
}

// ---- a ring of stages

namespace {

constexpr int ring_stages = 3, ring_rows = 16, ring_consumers = 128;

// sums[t] = the sum of column t % 64 of the matrix, over 8 of every 16 rows: from row 8·(t / 64) on.
__global__ void ring_kernel(int* sums, const __grid_constant__ TensorMap map, int boxes) {
  alignas(1024) __shared__ uint16_t stages[ring_stages][ring_rows * box_columns];
  __shared__ Barrier full[ring_stages], empty[ring_stages];
  make_barriers(full, ring_stages, 1);
  make_barriers(empty, ring_stages, ring_consumers);
  const int t = threadIdx.x;
  int sum = 0;
  for (int box = 0; box < boxes; ++box) {
    const int stage = box % ring_stages, parity = box / ring_stages % 2;
    if (t == ring_consumers) {
      wait(empty[stage], parity ^ 1);
      arrive_expecting(full[stage], sizeof stages[stage]);
      load_box(stages[stage], map, box * ring_rows, 0, full[stage]);
    } else if (t < ring_consumers) {
      wait(full[stage], parity);
      for (int row = t / 64 * 8; row < t / 64 * 8 + 8; ++row) sum += stages[stage][in_box(row, t % 64)];
      arrive(empty[stage]);
    }
  }
  if (t < ring_consumers) sums[t] = sum;
}

}  // namespace

TEST_CASE("a ring of stages: copies run ahead, and never into what is still read" * on_hopper) {
  for (int boxes : {1, 2, 3, 4, 11}) {
    CAPTURE(boxes);
    std::vector<uint16_t> matrix(boxes * ring_rows * box_columns);
    std::vector<int> expected(ring_consumers);
    for (size_t i = 0; i < matrix.size(); ++i) {
      matrix[i] = uint16_t(i * 7 % 1009);
      expected[i % box_columns + i / box_columns % 16 / 8 * 64] += matrix[i];
    }
    Buffer<uint16_t> matrix_d(matrix);
    Buffer<int> sums(ring_consumers);
    const auto* halves = reinterpret_cast<const __half*>(matrix_d.data());
    const TensorMap map = make_tensor_map(halves, boxes * ring_rows, box_columns, ring_rows);
    ring_kernel<<<1, ring_consumers + 32, 0, test_stream()>>>(sums.data(), map, boxes);
    CHECK(sums.get() == expected);
  }
}

// ---- clusters

namespace {

// In each round a thread takes the number of its neighbour in the next block of the cluster.
__global__ void neighbours_kernel(int* numbers, int blocks_in_cluster, int rounds) {
  const int block = block_in_cluster(), first = blockIdx.x - block;
  const int place = blockIdx.x * blockDim.x + threadIdx.x;
  const int neighbour = (first + (block + 1) % blocks_in_cluster) * blockDim.x + threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    const int number = numbers[neighbour];
    sync_cluster();
    numbers[place] = 3 * number + block;
    sync_cluster();
  }
}

}  // namespace

TEST_CASE("sync_cluster: blocks see what the others have written" * on_hopper) {
  const int threads = 64, clusters = 3, rounds = 5;
  for (int blocks : {1, 2, 4}) {
    CAPTURE(blocks);
    std::vector<int> numbers(clusters * blocks * threads);
    std::iota(numbers.begin(), numbers.end(), 0);
    Buffer<int> out(numbers);
    for (int round = 0; round < rounds; ++round) {
      const std::vector<int> before = numbers;
      for (int i = 0; i < int(numbers.size()); ++i) {
        const int block = i / threads % blocks, neighbour = i + ((block + 1) % blocks - block) * threads;
        numbers[i] = 3 * before[neighbour] + block;
      }
    }
    launch_clusters(blocks, neighbours_kernel, clusters * blocks, threads, 0, test_stream(), out.data(), blocks, rounds);
    CHECK(out.get() == numbers);
  }
}

namespace {

// Both blocks of a cluster sum as ring_kernel does; each cluster has boxes of its own. A block loads half of a box's
// rows, for both blocks.
struct ClusterRing {
  alignas(1024) uint16_t stages[ring_stages][ring_rows * box_columns];
  Barrier full[ring_stages], empty[ring_stages];
};
__global__ void cluster_ring_kernel(int* sums, const __grid_constant__ TensorMap map, int boxes) {
  extern __shared__ __align__(1024) char memory[];
  ClusterRing& ring = *reinterpret_cast<ClusterRing*>(memory);
  make_barriers(ring.full, ring_stages, 1);
  make_barriers(ring.empty, ring_stages, 2 * ring_consumers);
  sync_cluster();
  const int t = threadIdx.x, half = block_in_cluster() * ring_rows / 2;
  int sum = 0;
  for (int box = 0; box < boxes; ++box) {
    const int stage = box % ring_stages, parity = box / ring_stages % 2;
    const int row = (blockIdx.x / 2 * boxes + box) * ring_rows + half;
    if (t == ring_consumers) {
      wait(ring.empty[stage], parity ^ 1);
      arrive_expecting(ring.full[stage], sizeof ring.stages[stage]);
      load_box(ring.stages[stage] + half * box_columns, map, row, 0, ring.full[stage], 3);
    } else if (t < ring_consumers) {
      wait(ring.full[stage], parity);
      for (int r = t / 64 * 8; r < t / 64 * 8 + 8; ++r) sum += ring.stages[stage][in_box(r, t % 64)];
      for (int block = 0; block < 2; ++block) arrive_at(ring.empty[stage], block);
    }
  }
  if (t < ring_consumers) sums[blockIdx.x * ring_consumers + t] = sum;
  sync_cluster();
}

}  // namespace

TEST_CASE("a ring in two blocks: each loads half of a stage for both" * on_hopper) {
  const int clusters = 3;
  for (int boxes : {1, 2, 3, 4, 11}) {
    CAPTURE(boxes);
    std::vector<uint16_t> matrix(clusters * boxes * ring_rows * box_columns);
    std::vector<int> expected(clusters * 2 * ring_consumers);
    for (size_t i = 0; i < matrix.size(); ++i) {
      matrix[i] = uint16_t(i * 7 % 1009);
      const size_t cluster = i / (boxes * ring_rows * box_columns);
      for (size_t block = 2 * cluster; block < 2 * cluster + 2; ++block)
        expected[block * ring_consumers + i % box_columns + i / box_columns % 16 / 8 * 64] += matrix[i];
    }
    Buffer<uint16_t> matrix_d(matrix);
    Buffer<int> sums(expected.size());
    const auto* halves = reinterpret_cast<const __half*>(matrix_d.data());
    const TensorMap map = make_tensor_map(halves, clusters * boxes * ring_rows, box_columns, ring_rows / 2);
    launch_clusters(2, cluster_ring_kernel, 2 * clusters, ring_consumers + 32, sizeof(ClusterRing), test_stream(),
                    sums.data(), map, boxes);
    CHECK(sums.get() == expected);
  }
}

namespace {

struct BoxForOthers {
  alignas(1024) uint16_t box[8 * box_columns];
  Barrier full;
};

// Each block of a cluster of four loads a box for the block after it, the last one for the first.
__global__ void box_for_next_kernel(uint16_t* out, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) char memory[];
  BoxForOthers& shared = *reinterpret_cast<BoxForOthers*>(memory);
  make_barriers(&shared.full, 1, 1);
  if (threadIdx.x == 0) arrive_expecting(shared.full, sizeof shared.box);
  sync_cluster();
  const int block = block_in_cluster();
  if (threadIdx.x == 0) load_box(shared.box, map, 8 * block, 0, shared.full, 1u << (block + 1) % 4);
  wait(shared.full, 0);
  for (int i = threadIdx.x; i < 8 * box_columns; i += blockDim.x)
    out[block * 8 * box_columns + i] = shared.box[in_box(i / box_columns, i % box_columns)];
  sync_cluster();
}

}  // namespace

TEST_CASE("load_box to another block alone" * on_hopper) {
  std::vector<uint16_t> matrix(4 * 8 * box_columns);
  std::iota(matrix.begin(), matrix.end(), 1);
  Buffer<uint16_t> matrix_d(matrix), out(matrix.size());
  const TensorMap map = make_tensor_map(reinterpret_cast<const __half*>(matrix_d.data()), 4 * 8, box_columns, 8);
  launch_clusters(4, box_for_next_kernel, 4, 64, sizeof(BoxForOthers), test_stream(), out.data(), map);
  std::rotate(matrix.begin(), matrix.end() - 8 * box_columns, matrix.end());
  CHECK(out.get() == matrix);
}

// ---- products

namespace {

constexpr int depth = 64;

// sums (64, N) = or += a (64, 64) · b (64, N), which is stored so for b_along_n, else as its transpose. Four products,
// in two groups. For along_m, the transpose of a is given.
enum class Left { along_k, along_m, registers };

template <class T, bool b_along_n, int N, Left left>
__global__ void products_kernel(float* sums, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                                bool add) {
  extern __shared__ __align__(1024) char memory[];
  T *a_box = reinterpret_cast<T*>(memory), *b_boxes = a_box + 64 * depth;
  __shared__ Barrier full;
  make_barriers(&full, 1, 1);
  if (threadIdx.x == 0) {
    arrive_expecting(full, (64 + N) * depth * int(sizeof(T)));
    load_box(a_box, a, 0, 0, full);
    for (int column = 0; column < (b_along_n ? N : box_columns); column += box_columns)
      load_box(b_boxes + column * depth, b, 0, column, full);
  }
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 + lane / 4, first_column = lane % 4 * 2;
  auto place = [&](int j, int i) { return sums + (first_row + i / 2 * 8) * N + 8 * j + first_column + i % 2; };
  float sum[N / 8][4];
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
    for (int i = 0; i < 4; ++i) sum[j][i] = *place(j, i);
  wait(full, 0);
  uint32_t rows[depth / 16][4];
#pragma unroll
  for (int k = 0; k < depth / 16; ++k)
    for (int r = 0; r < 4; ++r)
      memcpy(&rows[k][r], &a_box[in_box(first_row + r % 2 * 8, 16 * k + r / 2 * 8 + first_column)], 4);
  order_registers();
#pragma unroll
  for (int k = 0; k < depth / 16; ++k) {
    const auto columns = b_along_n ? along_n<depth>(b_boxes, k * bytes_of_16_along_n)
                                   : along_k(b_boxes, k * bytes_of_16_along_k);
    if constexpr (left == Left::registers) multiply_m64k16<T, b_along_n>(sum, rows[k], columns, add || k > 0);
    else if constexpr (left == Left::along_k)
      multiply_m64k16<T, b_along_n>(sum, along_k(a_box, k * bytes_of_16_along_k), columns, add || k > 0);
    else multiply_m64k16<T, b_along_n, true>(sum, along_m(a_box, k * bytes_of_16_along_n), columns, add || k > 0);
    if (k == 1) {
      commit_products();
      order_registers();
    }
  }
  commit_products();
  wait_for_products<1>();
  wait_for_products(sum);
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
    for (int i = 0; i < 4; ++i) *place(j, i) = sum[j][i];
}

// On integers: the sums are exact.
template <class T, bool b_along_n, int N, Left left = Left::along_k>
void check_products(bool add) {
  CAPTURE(b_along_n); CAPTURE(N); CAPTURE(add); CAPTURE(int(left));
  const auto a = random_integers<T>(64 * depth, 9), b = random_integers<T>(depth * N, 9, 2);
  const auto start = random_integers<float>(64 * N, 1000, 3);
  std::vector<float> expected(64 * N);
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < N; ++column) {
      float& sum = expected[row * N + column] = add ? start[row * N + column] : 0;
      for (int k = 0; k < depth; ++k)
        sum += to_float(a[left == Left::along_m ? k * 64 + row : row * depth + k]) * to_float(b[b_along_n ? k * N + column : column * depth + k]);
    }
  Buffer<T> a_d(a), b_d(b);
  Buffer<float> sums(64 * N);  // NaN, which stays NaN if something is added to it
  if (add) sums = start;
  const TensorMap a_map = make_tensor_map(a_d.data(), 64, depth, 64);
  const TensorMap b_map = b_along_n ? make_tensor_map(b_d.data(), depth, N, depth)
                                    : make_tensor_map(b_d.data(), N, depth, N);
  const int bytes = (64 + N) * depth * int(sizeof(T));
  const auto kernel = products_kernel<T, b_along_n, N, left>;
  allow_shared_memory(kernel, bytes);
  kernel<<<1, 128, bytes, test_stream()>>>(sums.data(), a_map, b_map, add);
  CHECK(sums.get() == expected);
}

}  // namespace

TEST_CASE_TEMPLATE("multiply_m64k16: all widths, all ways that a and b can lie" * on_hopper, T, __nv_bfloat16,
                   __half) {
  for (bool add : {false, true}) {
    check_products<T, false, 64>(add);
    check_products<T, true, 64>(add);
    check_products<T, true, 64, Left::registers>(add);
    check_products<T, false, 64, Left::registers>(add);
    check_products<T, true, 128, Left::registers>(add);
    check_products<T, true, 64, Left::along_m>(add);
    check_products<T, false, 128>(add);
    check_products<T, false, 256>(add);
    check_products<T, true, 128>(add);
    check_products<T, true, 256>(add);
  }
}

// ---- the matrix product

namespace {

template <class Way, class T>
void check_matmul(int m, int n, int k, int most_blocks = INT_MAX) {
  CAPTURE(m); CAPTURE(n); CAPTURE(k); CAPTURE(most_blocks);
  const auto a = random_values<T>(size_t(m) * k), b = random_values<T>(size_t(k) * n, 1, 0, 2);
  std::vector<double> expected(size_t(m) * n);
  for (int i = 0; i < m; ++i)
    for (int p = 0; p < k; ++p)
      for (int j = 0; j < n; ++j)
        expected[size_t(i) * n + j] += double(to_float(a[size_t(i) * k + p])) * to_float(b[size_t(p) * n + j]);
  Buffer<T> a_d(a), b_d(b), c(expected.size());
  matmul_wgmma<Way, T>(c, a_d, b_d, m, n, k, test_stream(), most_blocks);
  CHECK_CLOSE(c.numbers(), expected, std::sqrt(double(k)), rounding<T> + tensor_core_sum_error(k));
}

}  // namespace

TEST_CASE_TEMPLATE("matmul_wgmma: consumers share a tile" * on_hopper, T, __nv_bfloat16, __half) {
  using Way = wgmma_rung::SharedTile;
  check_matmul<Way, T>(72, 136, 80);
  check_matmul<Way, T>(1, 8, 8);
  check_matmul<Way, T>(129, 264, 64);
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check_matmul<Way, T>(256, 384, 192);
  check_matmul<Way, T>(300, 520, 328);     // 6 steps a tile: more than there are stages
  check_matmul<Way, T>(300, 520, 328, 1);  // all 9 tiles are one block's: the ring goes on from tile to tile
  check_matmul<Way, T>(2200, 264, 8);      // two groups of tile rows
  check_matmul<Way, T>(2200, 264, 72, 5);
}

TEST_CASE_TEMPLATE("matmul_wgmma: two blocks share a tile of b" * on_hopper, T, __nv_bfloat16, __half) {
  using Way = wgmma_rung::SharedByTwo;
  check_matmul<Way, T>(200, 136, 80);
  check_matmul<Way, T>(1, 8, 8);         // the second block has nothing to store
  check_matmul<Way, T>(257, 264, 64);    // three rows of tiles
  check_matmul<Way, T>(257, 8, 328, 1);  // all of one cluster, 6 steps a tile
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check_matmul<Way, T>(256, 384, 192);
  check_matmul<Way, T>(300, 520, 328, 2);
  check_matmul<Way, T>(2200, 264, 72, 5);  // two groups of tile rows
}

TEST_CASE_TEMPLATE("matmul_wgmma: a tile for each consumer" * on_hopper, T, __nv_bfloat16, __half) {
  using Way = wgmma_rung::TileEach;
  check_matmul<Way, T>(72, 136, 80);
  check_matmul<Way, T>(1, 8, 8);
  check_matmul<Way, T>(129, 264, 64, 1);  // 6 tiles of one step
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check_matmul<Way, T>(256, 384, 192, 2);
  check_matmul<Way, T>(300, 264, 456);     // 8 steps a tile: more than there are stages
  check_matmul<Way, T>(300, 264, 456, 1);  // 9 tiles, of which one consumer has five
  check_matmul<Way, T>(300, 264, 840, 2);  // of 14 steps: the ring goes round twice while a consumer waits
  check_matmul<Way, T>(2200, 264, 8, 5);   // two groups of tile rows
}
