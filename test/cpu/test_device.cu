// The CPU device as a kernel and its host code see it: indices, barriers, warp collectives, atomics, cooperative
// groups, memory and streams. What must fail, and what only a permuted schedule shows, is in test_failures.cu.
#include "dev/ladders/cpu/access_counts.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <memory>
#include <numeric>
#include <vector>

#include "cpu/block.h"
#include "test/kernel_test.cuh"
#include "test/skip.h"

namespace {

// Results of a kernel that gets an array of `count` elements as its first argument. `launch` launches it.
template <class T, class LaunchKernel>
std::vector<T> results(size_t count, LaunchKernel launch) {
  Buffer<T> out(count);
  launch(out);
  CUDA_CHECK(cudaGetLastError());
  return out.get();
}

// A launch passes its arguments as they are: a Buffer would be copied.
template <class T>
T* pointer(const Buffer<T>& buffer) {
  return buffer;
}

__device__ int linear_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
__device__ int linear_block() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

// ---- indices

__global__ void index_kernel(int* out, bool wait) {
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  if (wait) __syncthreads();  // the same indices on fibers as in a plain loop
  out[linear_block() * threads + linear_thread()] =
      threadIdx.x + 100 * threadIdx.y + 10000 * threadIdx.z + 1000000 * linear_block();
}

void check_indices(dim3 grid, dim3 block) {
  const int blocks = grid.x * grid.y * grid.z, threads = block.x * block.y * block.z;
  std::vector<int> expected;
  for (int b = 0; b < blocks; ++b)
    for (unsigned z = 0; z < block.z; ++z)
      for (unsigned y = 0; y < block.y; ++y)
        for (unsigned x = 0; x < block.x; ++x) expected.push_back(x + 100 * y + 10000 * z + 1000000 * b);
  for (bool wait : {false, true}) {
    auto launch = [&](int* out) { index_kernel<<<grid, block, 0, test_stream()>>>(out, wait); };
    CHECK(results<int>(size_t(blocks) * threads, launch) == expected);
  }
}

}  // namespace

TEST_CASE("every thread of every block runs once, with its own indices") {
  check_indices(1, 1);
  check_indices(7, 64);
  check_indices(3, 33);  // a last warp of one thread
  check_indices(2, 1024);
  check_indices({2, 3}, {5, 7});
  check_indices({2, 3, 4}, {4, 3, 11});
  check_indices({1, 1, 5}, {1, 1, 64});
}

TEST_CASE("memory accesses are counted where counters are built in (test_access_counts.cu)") {
  cpu::start_counting();
  check_indices(1, 32);
  CHECK((cpu::stop_counting() != cpu::AccessCounts{}) == cpu::counts_accesses);
  CHECK(cpu::counts_by_line().empty() != cpu::counts_accesses);
}

TEST_CASE("launches that no GPU accepts") {
  auto error_of = [](dim3 grid, dim3 block, size_t shared_bytes) {
    index_kernel<<<grid, block, shared_bytes>>>(nullptr, false);
    CHECK(cudaPeekAtLastError() == cudaPeekAtLastError());  // peeking does not reset it
    const cudaError_t error = cudaGetLastError();
    CHECK(cudaGetLastError() == cudaSuccess);
    return error;
  };
  CHECK(error_of(1, 1025, 0) == cudaErrorInvalidConfiguration);
  CHECK(error_of(1, {32, 33}, 0) == cudaErrorInvalidConfiguration);
  CHECK(error_of(1, {1, 1, 65}, 0) == cudaErrorInvalidConfiguration);
  CHECK(error_of(0, 32, 0) == cudaErrorInvalidConfiguration);
  CHECK(error_of(1, 0, 0) == cudaErrorInvalidConfiguration);
  CHECK(error_of({1, 65536}, 32, 0) == cudaErrorInvalidConfiguration);
  CHECK(error_of(1, 32, 48 * 1024 + 1) == cudaErrorInvalidValue);  // nobody has asked for more than 48 KB
  CHECK(error_of(1, 32, 227 * 1024 + 1) == cudaErrorInvalidValue);
  cudaLaunchAttribute cluster{cudaLaunchAttributeClusterDimension, {2}};
  const cudaLaunchConfig_t three_blocks{3, 32, 0, nullptr, &cluster, 1};
  CHECK(cudaLaunchKernelEx(&three_blocks, index_kernel, nullptr, false) == cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  CHECK(cudaFuncSetAttribute(index_kernel, attribute, 227 * 1024 + 1) == cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(index_kernel, attribute, 227 * 1024) == cudaSuccess);
}

// ---- barriers and shared memory

// Each round every thread adds what its neighbour had in the round before.
template <class T>
__global__ void neighbour_kernel(T* out, int rounds) {
  extern __shared__ __align__(16) char memory[];
  T* values = reinterpret_cast<T*>(memory);
  __shared__ T total;
  const int t = threadIdx.x, n = blockDim.x;
  values[t] = T(t + blockIdx.x);
  for (int round = 0; round < rounds; ++round) {
    __syncthreads();
    const T neighbour = values[(t + 1) % n];
    __syncthreads();
    values[t] += neighbour;
  }
  __syncthreads();
  if (t == n - 1) {
    total = 0;
    for (int i = 0; i < n; ++i) total += values[i];
  }
  __syncthreads();
  out[blockIdx.x * n + t] = values[t] + total;
}

TEST_CASE_TEMPLATE("barriers in loops, dynamic and static shared memory", T, int, double) {
  const int blocks = 3, rounds = 5;
  for (int n : {1, 31, 64, 100, 1024}) {
    std::vector<T> expected;
    for (int block = 0; block < blocks; ++block) {
      std::vector<T> values(n);
      std::iota(values.begin(), values.end(), T(block));
      for (int round = 0; round < rounds; ++round) {
        std::vector<T> before = values;
        for (int t = 0; t < n; ++t) values[t] += before[(t + 1) % n];
      }
      const T total = std::accumulate(values.begin(), values.end(), T(0));
      for (T value : values) expected.push_back(value + total);
    }
    auto launch = [&](T* out) { neighbour_kernel<T><<<blocks, n, n * sizeof(T), test_stream()>>>(out, rounds); };
    CHECK(results<T>(size_t(blocks) * n, launch) == expected);
  }
}

// Threads of a warp pass a value on in shared memory, with barriers for pairs of lanes only.
__global__ void pair_kernel(int* out) {
  __shared__ int values[64];
  const int t = threadIdx.x;
  values[t] = 3 * t;
  __syncwarp(3u << (t % 32 & ~1));
  out[t] = values[t ^ 1];
}

TEST_CASE("__syncwarp of a part of the warp") {
  std::vector<int> expected(64);
  for (int t = 0; t < 64; ++t) expected[t] = 3 * (t ^ 1);
  CHECK(results<int>(64, [](int* out) { pair_kernel<<<1, 64, 0, test_stream()>>>(out); }) == expected);
}

// ---- warp collectives

template <class T>
__global__ void shuffle_kernel(T* out, int width, int argument) {
  const int t = threadIdx.x, n = blockDim.x;
  const T value = T(10 * t);
  out[t] = __shfl_sync(0xffffffffu, value, argument, width);
  out[n + t] = __shfl_xor_sync(0xffffffffu, value, argument, width);
  out[2 * n + t] = __shfl_down_sync(0xffffffffu, value, argument, width);
  out[3 * n + t] = __shfl_up_sync(0xffffffffu, value, argument, width);
  out[4 * n + t] = __shfl_sync(0xffffffffu, value, 31 - t % 32);  // a source of its own for every lane
}

TEST_CASE_TEMPLATE("shuffles of every kind and width", T, int, float, double, uint64_t) {
  const int n = 64;
  for (int width : {1, 2, 8, 16, 32})
    for (int argument : {0, 1, 3, 16, 31}) {
      std::vector<T> expected(5 * n);
      for (int t = 0; t < n; ++t) {
        const int begin = t / width * width, end = begin + width;  // of the thread's segment
        const int partner = t % 32 ^ argument;
        expected[t] = T(10 * (begin + argument % width));
        expected[n + t] = T(10 * (t / 32 * 32 + partner < end ? t / 32 * 32 + partner : t));
        expected[2 * n + t] = T(10 * (t + argument < end ? t + argument : t));
        expected[3 * n + t] = T(10 * (t - argument >= begin ? t - argument : t));
        expected[4 * n + t] = T(10 * (t / 32 * 32 + 31 - t % 32));
      }
      CAPTURE(width);
      CAPTURE(argument);
      auto launch = [&](T* out) { shuffle_kernel<T><<<1, n, 0, test_stream()>>>(out, width, argument); };
      CHECK(results<T>(5 * n, launch) == expected);
    }
}

__global__ void vote_kernel(unsigned* out, unsigned predicates) {
  const int t = threadIdx.x, predicate = predicates >> t & 1;
  const unsigned mask = t < 12 ? 0x00000fffu : 0xfffff000u;  // two groups of one warp, each with collectives of its own
  out[t] = __ballot_sync(mask, predicate);
  out[32 + t] = __any_sync(mask, predicate);
  out[64 + t] = __all_sync(mask, predicate);
  if (t < 12) out[96 + t] = __shfl_sync(mask, unsigned(t), 11 - t);
  else out[96 + t] = __shfl_sync(mask, unsigned(t), 43 - t);
}

TEST_CASE("votes and shuffles of two parts of a warp") {
  for (unsigned predicates : {0u, 0xffffffffu, 0x00000fffu, 0x80000001u}) {
    std::vector<unsigned> expected(128);
    for (unsigned t = 0; t < 32; ++t) {
      const unsigned mask = t < 12 ? 0x00000fffu : 0xfffff000u;
      expected[t] = predicates & mask;
      expected[32 + t] = (predicates & mask) != 0;
      expected[64 + t] = (predicates & mask) == mask;
      expected[96 + t] = t < 12 ? 11 - t : 43 - t;
    }
    auto launch = [&](unsigned* out) { vote_kernel<<<1, 32, 0, test_stream()>>>(out, predicates); };
    CHECK(results<unsigned>(128, launch) == expected);
  }
}

template <class T>
__global__ void warp_reduction_kernel(T* out, unsigned mask) {
  const int t = threadIdx.x;
  if (!(mask >> t & 1)) return;
  const T value = T(37 * t + 5) * (t % 2 ? T(-1) : T(1));
  out[t] = __reduce_add_sync(mask, value);
  out[32 + t] = __reduce_max_sync(mask, value);
  out[64 + t] = __reduce_min_sync(mask, value);
  out[96 + t] = T(__reduce_and_sync(mask, unsigned(value)));
  out[128 + t] = T(__reduce_or_sync(mask, unsigned(value)));
  out[160 + t] = T(__reduce_xor_sync(mask, unsigned(value)));
}

TEST_CASE_TEMPLATE("__reduce_*_sync over whole and partial masks", T, int, unsigned) {
  for (unsigned mask : {0xffffffffu, 0x00000001u, 0x0f0f00f0u, 0xaaaaaaaau}) {
    T sum = 0, largest = std::numeric_limits<T>::min(), smallest = std::numeric_limits<T>::max();
    unsigned all_of = ~0u, any_of = 0, odd = 0;
    for (int t = 0; t < 32; ++t) {
      if (!(mask >> t & 1)) continue;
      const T value = T(37 * t + 5) * (t % 2 ? T(-1) : T(1));
      sum += value;
      largest = std::max(largest, value);
      smallest = std::min(smallest, value);
      all_of &= unsigned(value);
      any_of |= unsigned(value);
      odd ^= unsigned(value);
    }
    auto launch = [&](T* out) { warp_reduction_kernel<T><<<1, 32, 0, test_stream()>>>(out, mask); };
    const std::vector<T> actual = results<T>(192, launch);
    const T expected[] = {sum, largest, smallest, T(all_of), T(any_of), T(odd)};
    for (int t = 0; t < 32; ++t)
      for (int k = 0; k < 6; ++k) CHECK(actual[32 * k + t] == (mask >> t & 1 ? expected[k] : T(-1)));  // -1: poison
  }
}

// The CPU device's one-collective reduction stands for the five shuffles of the GPU: the bits must agree.
__global__ void same_tree_kernel(float* out, const float* values) {
  const float value = values[threadIdx.x];
  float sum = value;
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  out[threadIdx.x] = sum;
  out[32 + threadIdx.x] = warp_reduce_sum(value);
}

TEST_CASE("warp_reduce_sum has the bits of a butterfly of shuffles") {
  Buffer<float> values(random_values<float>(32, 1e4));
  auto launch = [&](float* out) { same_tree_kernel<<<1, 32, 0, test_stream()>>>(out, pointer(values)); };
  const std::vector<float> sums = results<float>(64, launch);
  for (float sum : sums) CHECK(sum == sums[0]);
}

// ---- atomics

__global__ void atomic_kernel(int* out, float* sum) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(sum, 0.5f);
  atomicAdd(&out[0], 1);
  atomicMax(&out[1], i);
  atomicMin(&out[2], -i);
  if (atomicCAS(&out[3], 0, 7) == 0) atomicAdd(&out[4], 1);  // one thread finds the 0
  if (atomicExch(&out[5], 1) == 0) atomicAdd(&out[6], 1);
}

TEST_CASE("atomics of all threads on the same words") {
  Buffer<float> sum(std::vector<float>{0});
  auto launch = [&](int* out) {
    CUDA_CHECK(cudaMemsetAsync(out, 0, 7 * sizeof(int), test_stream()));
    atomic_kernel<<<50, 96, 0, test_stream()>>>(out, pointer(sum));
  };
  CHECK(results<int>(7, launch) == std::vector<int>{4800, 4799, -4799, 7, 1, 1, 1});
  CHECK(sum.get() == std::vector<float>{2400});
}

// The block that finishes last adds up what all blocks have left: how a grid is reduced in one launch.
__global__ void last_block_kernel(int* total, int* partials, unsigned* finished) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = 1 << blockIdx.x;
    __threadfence();
    is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last || threadIdx.x > 0) return;
  __threadfence();
  for (unsigned block = 0; block < gridDim.x; ++block) *total += partials[block];
}

TEST_CASE("the last block sees what the others wrote") {
  Buffer<int> partials(20);
  Buffer<unsigned> finished(std::vector<unsigned>{0});
  auto launch = [&](int* total) {
    CUDA_CHECK(cudaMemsetAsync(total, 0, sizeof(int), test_stream()));
    last_block_kernel<<<20, 32, 0, test_stream()>>>(total, pointer(partials), pointer(finished));
  };
  CHECK(results<int>(1, launch) == std::vector<int>{(1 << 20) - 1});
}

// ---- cooperative groups

namespace cg = cooperative_groups;

template <unsigned Size>
__global__ void tile_kernel(int* out) {
  const cg::thread_block block = cg::this_thread_block();
  const cg::thread_block_tile<Size> tile = cg::tiled_partition<Size>(block);
  const int n = block.size(), t = block.thread_rank(), rank = tile.thread_rank();
  int* column = out + t;
  auto add = [&](int value) {
    *column = value;
    column += n;
  };
  add(rank);
  add(tile.meta_group_rank());
  add(tile.shfl(t, 1));
  add(tile.shfl_xor(t, Size / 2));
  add(tile.shfl_down(t, 1));
  add(tile.shfl_up(t, 1));
  add(tile.any(rank == 2));
  add(tile.all(t >= int(Size)));
  add(tile.ballot(rank % 2));
  add(cg::reduce(tile, t, cg::plus<int>()));
  add(cg::reduce(tile, t, cg::less<int>()));
  add(cg::reduce(tile, t, cg::greater<int>()));

  __shared__ int values[128];
  values[t] = t;
  tile.sync();
  add(values[t - rank + (rank + 1) % Size]);
  block.sync();
  add(values[n - 1 - t]);
}

template <unsigned Size>
void check_tiles() {
  const int n = 96, size = Size;
  const std::vector<int> actual = results<int>(14 * n, [](int* out) {
    tile_kernel<Size><<<1, dim3(8, 12), 0, test_stream()>>>(out);
  });
  for (int t = 0; t < n; ++t) {
    const int rank = t % size, first = t - rank, last = first + size - 1;
    const int odd_ranks = int(0xaaaaaaaau & 0xffffffffu >> (32 - size));
    const std::vector<int> expected = {
        rank, t / size, first + 1, first + (rank ^ size / 2), std::min(t + 1, last), std::max(t - 1, first), size > 2,
        first >= size, odd_ranks, (first + last) * size / 2, first, last, first + (rank + 1) % size, n - 1 - t};
    for (int k = 0; k < 14; ++k) {
      CAPTURE(k);
      CHECK(actual[k * n + t] == expected[k]);
    }
  }
}

TEST_CASE("cooperative groups: tiles of a block") {
  check_tiles<2>();
  check_tiles<4>();
  check_tiles<16>();
  check_tiles<32>();
}

// ---- memory

TEST_CASE("memory: rows that are apart are copied in their stream's order, and counted") {
  Buffer<int> from(std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}), to(std::vector<int>(8));
  const cpu::Counts before = cpu::counts;
  CUDA_CHECK(cudaMemcpy2DAsync(to, 16, from + 1, 12, 8, 2, cudaMemcpyDeviceToDevice, test_stream()));
  const cpu::Counts counts = cpu::counts - before;
  CHECK(counts.copies == 1);
  CHECK(counts.copied_bytes == 16);
  CHECK(to.get() == std::vector<int>{2, 3, 0, 0, 5, 6, 0, 0});
}

TEST_CASE("memory: what is refused") {
  int* p = nullptr;
  CHECK(cudaMalloc(&p, size_t(1) << 60) == cudaErrorMemoryAllocation);
  CHECK(p == nullptr);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&p, 0) == cudaSuccess);
  CHECK(cudaFree(nullptr) == cudaSuccess);

  std::vector<int> host(10, 1);
  Buffer<int> device(10), other(10);
  int* const end = device + 10;
  CHECK(cudaMemcpy(device, host.data(), 40, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(cudaMemcpy(device, host.data(), 41, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(host.data(), end - 1, 8, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(other, end - 1, 8, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemset(device + 9, 0, 5) == cudaErrorInvalidValue);
  CHECK(cudaMemset(device + 9, 0, 4) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);  // a later success does not reset it
  CHECK(device.get() == std::vector<int>{1, 1, 1, 1, 1, 1, 1, 1, 1, 0});

  const auto copy_rows = [&](const int* from, size_t pitch, size_t width, size_t rows) {
    return cudaMemcpy2DAsync(other, 12, from, pitch, width, rows, cudaMemcpyDeviceToDevice, test_stream());
  };
  CHECK(copy_rows(device + 2, 16, 8, 3) == cudaErrorInvalidValue);  // reads past the end
  CHECK(copy_rows(device, 4, 4, 4) == cudaSuccess);
  CHECK(copy_rows(device, 4, 4, 5) == cudaErrorInvalidValue);       // writes past the end
  CHECK(copy_rows(device, 4, 8, 2) == cudaErrorInvalidValue);       // rows are longer than the pitch
  CHECK(copy_rows(device, 4, 4, 0) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);

  int on_the_stack;
  CHECK(cudaFree(&on_the_stack) == cudaErrorInvalidValue);
  CHECK(cudaFree(device + 1) == cudaErrorInvalidValue);
  CHECK(cudaHostUnregister(&on_the_stack) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  CHECK(std::string(cudaGetErrorName(cudaErrorInvalidValue)) == "cudaErrorInvalidValue");
  CHECK(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
}

// ---- streams and events: right under every schedule

__global__ void append_kernel(int* list, int value) {
  list[++list[0]] = value;
}

__global__ void copy_kernel(int* to, const int* from) { *to = *from; }

TEST_CASE("a stream keeps the order of issue") {
  Buffer<int> list(101);
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  CUDA_CHECK(cudaMemsetAsync(list, 0, 101 * sizeof(int), stream));
  std::vector<int> expected{100};
  for (int i = 0; i < 100; ++i) {
    append_kernel<<<1, 1, 0, stream>>>(pointer(list), i);
    expected.push_back(i);
  }
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CHECK(list.get() == expected);
  CUDA_CHECK(cudaStreamDestroy(stream));
  CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
}

TEST_CASE("a stream waits for another one's event, and again when it is recorded again") {
  cudaStream_t first, second;
  cudaEvent_t event;
  CUDA_CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  CUDA_CHECK(cudaEventCreate(&event));
  CHECK(cudaEventQuery(event) == cudaSuccess);  // never recorded
  CUDA_CHECK(cudaStreamWaitEvent(second, event));
  Buffer<int> list(4), copy(1);
  CUDA_CHECK(cudaMemsetAsync(list, 0, 4 * sizeof(int), first));
  for (int i = 1; i <= 3; ++i) {
    append_kernel<<<1, 1, 0, first>>>(pointer(list), 10 * i);
    CUDA_CHECK(cudaEventRecord(event, first));
    CUDA_CHECK(cudaStreamWaitEvent(second, event));
    copy_kernel<<<1, 1, 0, second>>>(pointer(copy), list + i);
    CUDA_CHECK(cudaStreamSynchronize(second));
    CHECK(copy.get() == std::vector<int>{10 * i});
  }
  CUDA_CHECK(cudaEventSynchronize(event));
  CHECK(cudaEventQuery(event) == cudaSuccess);
  CUDA_CHECK(cudaEventDestroy(event));
  CUDA_CHECK(cudaStreamDestroy(first));
  CUDA_CHECK(cudaStreamDestroy(second));
}

TEST_CASE("the null stream waits for blocking streams, and they for it") {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  Buffer<int> list(4), copy(1);
  CUDA_CHECK(cudaMemset(list, 0, sizeof(int)));
  append_kernel<<<1, 1, 0, stream>>>(pointer(list), 7);
  copy_kernel<<<1, 1>>>(pointer(copy), list + 1);
  append_kernel<<<1, 1, 0, stream>>>(pointer(list), 8);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CHECK(copy.get() == std::vector<int>{7});
  CHECK(list.get() == std::vector<int>{2, 7, 8, -1});
  CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_CASE("copies are deferred, of pageable memory too") {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Buffer<int> device(std::vector<int>{3});
  int pageable = 1, pinned = 1;
  CUDA_CHECK(cudaHostRegister(&pinned, sizeof(int), cudaHostRegisterDefault));
  for (int* host : {&pageable, &pinned}) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
    if (cpu::streams_are_deferred()) CHECK(*host == 1);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CHECK(*host == 3);
  }
  pageable = 4;
  CUDA_CHECK(cudaMemcpyAsync(device, &pageable, sizeof(int), cudaMemcpyHostToDevice, stream));
  if (cpu::streams_are_deferred()) pageable = 5;  // too early
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CHECK(device.get()[0] == pageable);
  CUDA_CHECK(cudaHostUnregister(&pinned));
  CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_CASE("whether an event is ready can be asked without leaving an error behind") {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t event;
  CUDA_CHECK(cudaEventCreate(&event));
  CHECK(is_ready(event));  // never recorded
  CUDA_CHECK(cudaEventRecord(event, stream));
  for (const bool ready : {is_ready(event), is_ready(stream)}) CHECK(ready == !cpu::streams_are_deferred());
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CHECK(is_ready(event));
  CHECK(is_ready(stream));
  CUDA_CHECK(cudaEventDestroy(event));
  CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_CASE("events measure time") {
  cudaEvent_t start, end;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&end));
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorInvalidResourceHandle);
  CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
  CUDA_CHECK(cudaEventRecord(start, test_stream()));
  CUDA_CHECK(cudaEventRecord(end, test_stream()));
  if (cpu::streams_are_deferred()) {
    CHECK(cudaEventQuery(end) == cudaErrorNotReady);
    CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady);
    CHECK(cudaGetLastError() == cudaErrorNotReady);
  }
  CUDA_CHECK(cudaEventSynchronize(end));
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
  CHECK(milliseconds >= 0);
  CUDA_CHECK(cudaEventDestroy(start));
  CUDA_CHECK(cudaEventDestroy(end));
}

// vm.max_map_count is 65,530, and a stack with a guard takes two mappings. 128 workers of blocks of 256 threads have 32,768 stacks.
TEST_CASE("workers of many processors may have more stacks than a process has mappings") {
  if (cpu::sanitizers::one_worker) return skip("sanitizers keep data of each stack, and run one worker");
  std::vector<std::unique_ptr<cpu::Fiber>> stacks(40'000);
  for (auto& stack : stacks) stack = std::make_unique<cpu::Fiber>(0, [] {});
  CHECK(cpu::Fiber::stacks >= stacks.size());
}
