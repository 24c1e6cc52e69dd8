// The access counters against counts made by hand: each kernel here does little enough to say exactly what a GPU's
// memory would be asked for. All counts are compared, so that nothing is counted that is not there.
#include "dev/ladders/cpu/access_counts.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <ostream>

#include "test/kernel_test.cuh"

using cpu::AccessCounts, cpu::MemoryCounts;
namespace cg = cooperative_groups;

static_assert(cpu::counts_accesses, "counters are built with VARIANT=counts");

namespace cpu {

std::ostream& operator<<(std::ostream& out, const MemoryCounts& c) {
  return out << "{" << c.requests << " requests, " << c.threads << " threads, " << c.bytes << " bytes, "
             << c.transactions << " transactions, ideal " << c.ideal << "}";
}

std::ostream& operator<<(std::ostream& out, const AccessCounts& c) {
  out << "\n  global " << c.global_loads << c.global_stores << c.global_atomics;
  out << "\n  shared " << c.shared_loads << c.shared_stores << c.shared_atomics;
  return out << "\n  " << c.barriers << " barriers, " << c.shuffles << " shuffles, " << c.matrix_instructions << " mma";
}

}  // namespace cpu

namespace {

template <class Launch>
AccessCounts count(Launch launch) {
  cpu::start_counting();
  launch();
  CUDA_CHECK(cudaGetLastError());
  return cpu::stop_counting();
}

constexpr size_t room = 1 << 14;

template <class T>
Buffer<T>& input() {
  static Buffer<T> buffer{std::vector<T>(room)};
  return buffer;
}

template <class T>
Buffer<T>& output() {
  static Buffer<T> buffer{room};
  return buffer;
}

// One request of a full warp for 4 bytes a thread, side by side; and `n` of them.
constexpr MemoryCounts floats(int64_t n = 1) { return {n, 32 * n, 128 * n, 4 * n, 4 * n}; }
constexpr MemoryCounts shared_floats(int64_t n = 1) { return {n, 32 * n, 128 * n, n, n}; }

// ---- global memory

__global__ void gather_kernel(float* out, const float* in, int stride, int offset) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i * stride + offset];
}

AccessCounts gather(int blocks, int threads, int stride, int offset) {
  return count([&] {
    gather_kernel<<<blocks, threads, 0, test_stream()>>>(output<float>().data(), input<float>().data(), stride, offset);
  });
}

template <class T, int N>
__global__ void pack_kernel(T* out, const T* in) {
  float x[N];
  load(in + threadIdx.x * N, x);
  for (int k = 0; k < N; ++k) x[k] *= 2;
  store(out + threadIdx.x * N, x);
}

template <class T, int N>
AccessCounts pack() {
  return count([] { pack_kernel<T, N><<<1, 32, 0, test_stream()>>>(output<T>().data(), input<T>().data()); });
}

template <class T>
__global__ void copy_kernel(T* out, const T* in) {
  out[threadIdx.x] = in[threadIdx.x];
}

template <class T>
AccessCounts copy() {
  return count([] { copy_kernel<<<1, 32, 0, test_stream()>>>(output<T>().data(), input<T>().data()); });
}

__global__ void reverse_kernel(float4* out, const float4* in) {
  const float4 x = in[threadIdx.x];
  out[threadIdx.x] = make_float4(x.w, x.z, x.y, x.x);
}

struct alignas(16) TwoPacks {
  float values[8];
};

}  // namespace

TEST_CASE("global memory: strides, offsets, blocks") {
  CHECK(gather(1, 32, 1, 0) == AccessCounts{.global_loads = floats(), .global_stores = floats()});
  CHECK(gather(1, 32, 1, 1) == AccessCounts{.global_loads = {1, 32, 128, 5, 4}, .global_stores = floats()});
  CHECK(gather(1, 32, 2, 0) == AccessCounts{.global_loads = {1, 32, 128, 8, 4}, .global_stores = floats()});
  CHECK(gather(1, 32, 8, 0) == AccessCounts{.global_loads = {1, 32, 128, 32, 4}, .global_stores = floats()});
  CHECK(gather(1, 32, 33, 0) == AccessCounts{.global_loads = {1, 32, 128, 32, 4}, .global_stores = floats()});
  CHECK(gather(1, 32, 0, 5) == AccessCounts{.global_loads = {1, 32, 128, 1, 1}, .global_stores = floats()});
  CHECK(gather(5, 64, 1, 0) == AccessCounts{.global_loads = floats(10), .global_stores = floats(10)});
  CHECK(gather(1, 1, 1, 0) == AccessCounts{.global_loads = {1, 1, 4, 1, 1}, .global_stores = {1, 1, 4, 1, 1}});
  const MemoryCounts one_and_a_half{2, 48, 192, 6, 6};
  CHECK(gather(1, 48, 1, 0) == AccessCounts{.global_loads = one_and_a_half, .global_stores = one_and_a_half});
}

TEST_CASE("a pack is one access") {
  const MemoryCounts packs{1, 32, 512, 16, 16};
  const AccessCounts both{.global_loads = packs, .global_stores = packs};
  CHECK(pack<float, pack_width<float>>() == both);
  CHECK(pack<__nv_bfloat16, pack_width<__nv_bfloat16>>() == both);
  CHECK(pack<__half, pack_width<__half>>() == both);
  CHECK(copy<float4>() == both);
  CHECK(count([] {
          reverse_kernel<<<1, 32, 0, test_stream()>>>(output<float4>().data(), input<float4>().data());
        }) == both);
  const MemoryCounts singles{1, 32, 64, 2, 2};
  CHECK(pack<float, 1>() == AccessCounts{.global_loads = floats(), .global_stores = floats()});
  CHECK(pack<__nv_bfloat16, 1>() == AccessCounts{.global_loads = singles, .global_stores = singles});
}

TEST_CASE("what no instruction moves at once is moved in pieces") {
  const MemoryCounts three{3, 96, 384, 36, 12};  // each piece touches all 12 sectors of 32 times 12 bytes
  CHECK(copy<float3>() == AccessCounts{.global_loads = three, .global_stores = three});
  const MemoryCounts two{2, 64, 1024, 64, 32};  // 32 times 32 bytes: half of each sector
  CHECK(copy<TwoPacks>() == AccessCounts{.global_loads = two, .global_stores = two});
}

// ---- shared memory

namespace {

template <int width>
__global__ void transpose_kernel(float* out, const float* in) {
  __shared__ float tile[32][width];
  tile[threadIdx.y][threadIdx.x] = in[32 * threadIdx.y + threadIdx.x];
  __syncthreads();
  out[32 * threadIdx.y + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

__global__ void transpose_dynamic_kernel(float* out, const float* in, int width) {
  extern __shared__ float tile[];
  tile[width * threadIdx.y + threadIdx.x] = in[32 * threadIdx.y + threadIdx.x];
  __syncthreads();
  out[32 * threadIdx.y + threadIdx.x] = tile[width * threadIdx.x + threadIdx.y];
}

template <int width>
void check_transpose(int64_t wavefronts) {
  const dim3 threads(32, 32);
  const AccessCounts expected{.global_loads = floats(32), .global_stores = floats(32),
                              .shared_loads = {32, 1024, 4096, wavefronts, 32}, .shared_stores = shared_floats(32),
                              .barriers = 32};
  float *out = output<float>(), *in = input<float>();
  CHECK(count([&] { transpose_kernel<width><<<1, threads, 0, test_stream()>>>(out, in); }) == expected);
  CHECK(count([&] {
          transpose_dynamic_kernel<<<1, threads, 32 * width * sizeof(float), test_stream()>>>(out, in, width);
        }) == expected);
}

// Copies elements that lie `stride` apart to the upper half. The threads of each group begin with another element.
template <class T>
__global__ void shared_kernel(int stride, int group) {
  alignas(16) __shared__ T elements[128];
  elements[64 + threadIdx.x] = elements[threadIdx.x % group * stride + threadIdx.x / group];
}

template <class T>
AccessCounts shared(int stride, int group = 32) {
  return count([&] { shared_kernel<T><<<1, 32, 0, test_stream()>>>(stride, group); });
}

}  // namespace

TEST_CASE("shared memory: a transpose with and without padding") {
  check_transpose<32>(32 * 32);
  check_transpose<33>(32);
}

TEST_CASE("shared memory: half-warps take 8 bytes a thread, quarter-warps 16") {
  const MemoryCounts pairs{1, 32, 256, 2, 2}, packs{1, 32, 512, 4, 4};
  CHECK(shared<float>(1) == AccessCounts{.shared_loads = shared_floats(), .shared_stores = shared_floats()});
  CHECK(shared<float>(2) == AccessCounts{.shared_loads = {1, 32, 128, 2, 1}, .shared_stores = shared_floats()});
  CHECK(shared<float>(0) == AccessCounts{.shared_loads = {1, 32, 128, 1, 1}, .shared_stores = shared_floats()});
  CHECK(shared<float2>(1) == AccessCounts{.shared_loads = pairs, .shared_stores = pairs});
  CHECK(shared<float4>(1) == AccessCounts{.shared_loads = packs, .shared_stores = packs});
  CHECK(shared<float2>(2) == AccessCounts{.shared_loads = {1, 32, 256, 4, 2}, .shared_stores = pairs});
  CHECK(shared<float4>(2) == AccessCounts{.shared_loads = {1, 32, 512, 8, 4}, .shared_stores = packs});
  // All want the same 16 bytes: still a wavefront for each quarter-warp, but no conflict.
  CHECK(shared<float4>(0) == AccessCounts{.shared_loads = packs, .shared_stores = packs});
  // The whole warp wants equally much of each bank, but a half-warp or a quarter-warp does not.
  CHECK(shared<float2>(2, 16) == AccessCounts{.shared_loads = {1, 32, 256, 4, 2}, .shared_stores = pairs});
  CHECK(shared<float4>(4, 8) == AccessCounts{.shared_loads = {1, 32, 512, 16, 4}, .shared_stores = packs});
  // Two threads to a word: all 64 bytes in one wavefront.
  const MemoryCounts halves{1, 32, 64, 1, 1};
  CHECK(shared<__nv_bfloat16>(1) == AccessCounts{.shared_loads = halves, .shared_stores = halves});
}

// ---- lanes that part

namespace {

__global__ void triangle_kernel(float* out, const float* in) {
  float sum = 0;
  for (unsigned i = 0; i < threadIdx.x; ++i) sum += in[32 * i + threadIdx.x];
  out[threadIdx.x] = sum;
}

// Even lanes load in even iterations, odd lanes in odd ones. They meet at a barrier, or in `meeting_lanes`, or nowhere.
__global__ void take_turns_kernel(float* out, const float* in, bool barrier, unsigned meeting_lanes) {
  float sum = 0;
  for (unsigned i = 0; i < 4; ++i) {
    if (i % 2 == threadIdx.x % 2) sum += in[32 * i + threadIdx.x];
    if (barrier) __syncthreads();
    if (meeting_lanes >> threadIdx.x & 1) __syncwarp(meeting_lanes);
  }
  out[threadIdx.x] = sum;
}

[[gnu::noinline]] __device__ float element(const float* in, int i) { return in[i]; }

__global__ void two_calls_kernel(float* out, const float* in) {
  float x;
  if (threadIdx.x < 16) x = element(in, threadIdx.x);
  else x = element(in, 2 * threadIdx.x);
  out[threadIdx.x] = x;
}

AccessCounts take_turns(int threads, bool barrier, unsigned meeting_lanes) {
  return count([&] {
    take_turns_kernel<<<1, threads, 0, test_stream()>>>(output<float>().data(), input<float>().data(), barrier,
                                                        meeting_lanes);
  });
}

AccessCounts one_warp(void (*kernel)(float*, const float*)) {
  return count([&] { kernel<<<1, 32, 0, test_stream()>>>(output<float>().data(), input<float>().data()); });
}

}  // namespace

TEST_CASE("a lane that leaves a loop is missing from later requests") {
  // The n-th of 31 requests has lanes n to 31: 4 sectors for n < 8, then 3, 2, 1.
  constexpr int64_t accesses = 31 * 32 / 2, sectors = 7 * 4 + 8 * (3 + 2 + 1);
  CHECK(one_warp(triangle_kernel) ==
        AccessCounts{.global_loads = {31, accesses, 4 * accesses, sectors, sectors}, .global_stores = floats()});
}

TEST_CASE("a lane that skips an iteration is missing from it if the warp meets there, else it catches up") {
  const MemoryCounts apart{4, 64, 256, 16, 8};
  CHECK(take_turns(32, false, ~0u) == AccessCounts{.global_loads = apart, .global_stores = floats()});
  CHECK(take_turns(32, true, 0) == AccessCounts{.global_loads = apart, .global_stores = floats(), .barriers = 4});
  // Even lanes in rows 0 and 2, odd lanes in rows 1 and 3: two requests, and each touches two rows.
  const MemoryCounts together{2, 64, 256, 16, 8};
  CHECK(take_turns(32, false, 0) == AccessCounts{.global_loads = together, .global_stores = floats()});
  CHECK(take_turns(32, false, 0xffff) == AccessCounts{.global_loads = together, .global_stores = floats()});
  // A warp of 16 threads meets when these do.
  CHECK(take_turns(16, false, 0xffff) ==
        AccessCounts{.global_loads = {4, 32, 128, 8, 4}, .global_stores = {1, 16, 64, 2, 2}});
}

TEST_CASE("a function called in two places is two instructions") {
  CHECK(one_warp(two_calls_kernel) ==
        AccessCounts{.global_loads = {2, 32, 128, 2 + 4, 2 + 2}, .global_stores = floats()});
}

// ---- what is counted neither as global nor as shared

namespace {

[[gnu::noinline]] __device__ void fill(float (&x)[8], float value) {
  for (float& element : x) element = value;
}

__global__ void private_kernel(float* out, const float*) {
  float x[8];
  fill(x, float(threadIdx.x + blockIdx.x + blockDim.x + gridDim.x));
  out[threadIdx.x] = x[threadIdx.x % 8];
}

}  // namespace

TEST_CASE("a thread's own memory is not counted") {
  CHECK(one_warp(private_kernel) == AccessCounts{.global_stores = floats()});
}

TEST_CASE("only what runs between start and stop is counted") {
  float *out = output<float>(), *in = input<float>();
  auto launch = [&] { gather_kernel<<<1, 32, 0, test_stream()>>>(out, in, 1, 0); };
  launch();
  const AccessCounts once = count(launch);
  launch();
  CHECK(once == AccessCounts{.global_loads = floats(), .global_stores = floats()});
  CHECK(cpu::stop_counting() == once);
  CHECK(count([] {}) == AccessCounts{});
}

// ---- atomics, barriers, shuffles

namespace {

__global__ void atomic_kernel(int* sum, float* sums) {
  __shared__ int count, counts[32];
  atomicAdd(sum, 1);
  atomicAdd(&sums[threadIdx.x], 1.0f);
  atomicMax(&counts[threadIdx.x], 3);
  atomicMin(&count, 3);
}

__global__ void wait_kernel(int times) {
  for (int i = 0; i < times; ++i) __syncthreads();
  __syncwarp();
}

__global__ void reduce_kernel(float* out, const float* in) { out[threadIdx.x] = warp_reduce_sum(in[threadIdx.x]); }

__global__ void vote_kernel(float* out, const float* in) {
  out[threadIdx.x] = __ballot_sync(0xffffffffu, in[threadIdx.x] > 0);
}

__global__ void integer_kernel(float* out, const float*) {
  out[threadIdx.x] = __reduce_add_sync(0xffffffffu, threadIdx.x);
}

__global__ void double_kernel(float* out, const float*) {
  out[threadIdx.x] = float(__shfl_xor_sync(0xffffffffu, double(threadIdx.x), 1));
}

__global__ void tile_kernel(float* out, const float*) {
  const auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  out[threadIdx.x] = cg::reduce(tile, float(threadIdx.x), cg::plus<float>());
}

}  // namespace

TEST_CASE("atomics") {
  const MemoryCounts one_address{1, 32, 128, 1, 1};
  MemoryCounts global = floats(), shared = shared_floats();
  global += one_address;
  shared += one_address;
  CHECK(count([] {
          atomic_kernel<<<1, 32, 0, test_stream()>>>(output<int>().data(), output<float>().data());
        }) == AccessCounts{.global_atomics = global, .shared_atomics = shared});
}

TEST_CASE("barriers, a warp at a time") {
  CHECK(count([] { wait_kernel<<<2, 64, 0, test_stream()>>>(3); }) == AccessCounts{.barriers = 2 * 2 * 3});
  CHECK(count([] { wait_kernel<<<1, 1024, 0, test_stream()>>>(1); }) == AccessCounts{.barriers = 32});
}

TEST_CASE("shuffles: as many as a GPU needs") {
  CHECK(one_warp(reduce_kernel) == AccessCounts{.global_loads = floats(), .global_stores = floats(), .shuffles = 5});
  CHECK(one_warp(vote_kernel) == AccessCounts{.global_loads = floats(), .global_stores = floats(), .shuffles = 1});
  CHECK(one_warp(integer_kernel) == AccessCounts{.global_stores = floats(), .shuffles = 1});
  CHECK(one_warp(double_kernel) == AccessCounts{.global_stores = floats(), .shuffles = 2});
  CHECK(one_warp(tile_kernel) == AccessCounts{.global_stores = floats(), .shuffles = 3});  // four tiles at once
}

// ---- special instructions

namespace {

template <int bytes>
__global__ void copy_async_kernel(const char* in, int copied) {
  alignas(16) __shared__ char memory[32 * bytes];
  copy_async<bytes>(memory + threadIdx.x * bytes, in + threadIdx.x * bytes, int(threadIdx.x) < copied);
  wait_for_copies();
}

template <int bytes>
AccessCounts copies(int copied) {
  return count([&] { copy_async_kernel<bytes><<<1, 32, 0, test_stream()>>>(input<char>().data(), copied); });
}

// Rows of 16 bytes, `row_bytes` bytes apart.
__global__ void matrices_kernel(int row_bytes) {
  extern __shared__ __align__(128) char rows[];
  uint32_t registers[4];
  load_matrices(registers, shared_address(rows + threadIdx.x * row_bytes));
  load_matrices_transposed(registers, shared_address(rows + threadIdx.x * row_bytes));
}

AccessCounts matrices(int row_bytes) {
  return count([&] { matrices_kernel<<<1, 32, 32 * row_bytes, test_stream()>>>(row_bytes); });
}

__global__ void multiply_kernel() {
  float sum[4] = {};
  const uint32_t a[4] = {};
  multiply_m16n8k16<__nv_bfloat16>(sum, a, 0, 0);
}

}  // namespace

TEST_CASE("asynchronous copies load and store when they are started") {
  CHECK(copies<16>(32) == AccessCounts{.global_loads = {1, 32, 512, 16, 16}, .shared_stores = {1, 32, 512, 4, 4}});
  CHECK(copies<16>(8) == AccessCounts{.global_loads = {1, 8, 128, 4, 4}, .shared_stores = {1, 32, 512, 4, 4}});
  CHECK(copies<4>(32) == AccessCounts{.global_loads = floats(), .shared_stores = shared_floats()});
}

TEST_CASE("tensor cores") {
  CHECK(matrices(16) == AccessCounts{.shared_loads = {2, 64, 1024, 8, 8}});
  CHECK(matrices(16 + 128) == AccessCounts{.shared_loads = {2, 64, 1024, 8, 8}});  // padding that keeps rows apart
  CHECK(matrices(128) == AccessCounts{.shared_loads = {2, 64, 1024, 64, 8}});
  CHECK(count([] { multiply_kernel<<<3, 64, 0, test_stream()>>>(); }) == AccessCounts{.matrix_instructions = 6});
}

// ---- lines

namespace {

constexpr int load_line = __LINE__ + 5, strided_line = __LINE__ + 6, store_line = __LINE__ + 7;
constexpr int conflict_line = __LINE__ + 7;
__global__ void lines_kernel(float* out, const float* in) {
  __shared__ float column[32][32];
  float x[4];
  load(in + 4 * threadIdx.x, x);
  x[0] += in[8 * threadIdx.x];
  store(out + 4 * threadIdx.x, x);
  atomicAdd(&column[threadIdx.x][0], x[0]);
}

}  // namespace

TEST_CASE("counts by line, the worst first") {
  const AccessCounts all = one_warp(lines_kernel);
  const std::vector<cpu::LineCounts> lines = cpu::counts_by_line();
  AccessCounts sum;
  std::vector<int> numbers;
  for (const cpu::LineCounts& line : lines) {
    CHECK(line.file == "test/cpu/test_access_counts.cu");
    numbers.push_back(line.line);
    sum += line.counts;
  }
  CHECK(sum == all);
  CHECK(numbers == std::vector{strided_line, conflict_line, load_line, store_line});
}
