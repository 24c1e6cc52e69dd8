// What the CPU device must find: deadlocks, missing barriers and waits, accesses out of bounds, races, stack overflows.
//
// Which mistakes are found depends on how this file is built: out of bounds with VARIANT=asan, races with VARIANT=tsan,
// everything else always. What concerns Hopper's instructions is in test_hopper_failures.cu.
#define DOCTEST_CONFIG_IMPLEMENT
#include <stdexcept>
#include <string>

#include "dev/ladders/clusters.cuh"
#include "test/cpu/failing_programs.h"
#include "test/kernel_test.cuh"
#include "test/run_cases.h"

#if defined(__SANITIZE_ADDRESS__)
constexpr bool finds_bounds = true;
#else
constexpr bool finds_bounds = false;
#endif

namespace {

constexpr int n = 64;  // threads a block

// ---- barriers that somebody never reaches

constexpr int missing_thread_line = __LINE__ + 3;
__global__ void missing_thread() {
  if (blockIdx.x == 1 && threadIdx.x == 5) return;
  __syncthreads();
}

constexpr int two_barriers_line = __LINE__ + 2;
__global__ void two_barriers() {
  if (threadIdx.y == 0) __syncthreads();
  else __syncwarp(0xffffffffu);  // half of the warp waits at the other one
}

constexpr int missing_lane_line = __LINE__ + 3;
__global__ void missing_lane(int* out) {
  if (threadIdx.x == 40) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
}

constexpr int masks_line = __LINE__ + 2;
__global__ void different_masks(int* out) {
  out[threadIdx.x] = __ballot_sync(threadIdx.x == 1 ? 3u : 0xffffffffu, 1);
}

__global__ void mask_without_itself(int* out) { out[threadIdx.x] = __ballot_sync(0x0fffffffu, 1); }

// ---- a barrier taken out of a block reduction, and a race between blocks

constexpr int reduction_write_line = __LINE__ + 5, reduction_read_line = reduction_write_line + 4;
template <bool WithBarrier>
__global__ void block_sum(int* sum, const int* values) {
  __shared__ int scratch[n];
  const int t = threadIdx.x;
  scratch[t] = values[t];
  if constexpr (WithBarrier) __syncthreads();
  if (t < n - 1) return;
  int total = 0;
  for (int i = 0; i < n; ++i) total += scratch[i];
  *sum = total;
}

template <bool WithBarrier>
ExitCode run_block_sum() {
  Buffer<int> values(std::vector<int>(n, 2)), sum(1);
  block_sum<WithBarrier><<<1, n, 0, test_stream()>>>(&sum[0], &values[0]);
  return sum.get()[0] == 2 * n ? right : wrong;
}

constexpr int blocks_line = __LINE__ + 1;
__global__ void same_element(int* out) { *out = blockIdx.x; }

// ---- an asynchronous copy that is used before it has arrived, or never waited for

template <bool WithWait>
__global__ void copy_asynchronously(int* out, const int* in) {
  __shared__ int values[n];
  copy_async<4>(values + threadIdx.x, in + threadIdx.x, true);
  if constexpr (WithWait) wait_for_copies();
  out[threadIdx.x] = values[threadIdx.x];
  wait_for_copies();
}

template <bool WithWait>
ExitCode run_copy() {
  Buffer<int> in(std::vector<int>(n, 2)), out(n);
  copy_asynchronously<WithWait><<<1, n, 0, test_stream()>>>(&out[0], &in[0]);
  return out.get() == in.get() ? right : wrong;
}

__global__ void unfinished_copy(const int* in) {
  __shared__ int values[n];
  copy_async<4>(values + threadIdx.x, in + threadIdx.x, true);
}

// ---- a box that is read before it has arrived, and a barrier that waits for bytes that never come

constexpr int missing_bytes_line = __LINE__ + 12;
template <bool WithWait, int bytes>
__global__ void load_a_box(int* out, const TensorMap map) {
  alignas(1024) __shared__ uint16_t box[box_columns];
  __shared__ Barrier full;
  if (threadIdx.x == 0) {
    init_barrier(full, 1);
    share_barriers();
    arrive_expecting(full, bytes);
    load_box(box, map, 0, 0, full);
  }
  __syncthreads();
  if (WithWait || threadIdx.x == 0) wait(full, 0);
  out[threadIdx.x] = box[threadIdx.x];
}

__global__ void barrier_not_made() {
  __shared__ Barrier barrier;
  arrive(barrier);
}

template <bool WithWait, int bytes = 128>
ExitCode run_box() {
  Buffer<uint16_t> matrix(std::vector<uint16_t>(n, 2));
  Buffer<int> out(n);
  const TensorMap map = make_tensor_map(matrix.data(), 1, n, 1);
  load_a_box<WithWait, bytes><<<1, n, 0, test_stream()>>>(&out[0], map);
  return out.get() == std::vector<int>(n, 2) ? right : wrong;
}

// ---- clusters: a barrier that a thread never reaches, and shared memory that is out of reach

constexpr int missing_in_cluster_line = __LINE__ + 3;
__global__ void missing_in_cluster() {
  if (blockIdx.x == 3 && threadIdx.x == 5) return;
  sync_cluster();
}

__device__ void arrive_at_neighbour(Barrier& barrier) {
  if (threadIdx.x == 0) init_barrier(barrier, 1);
  sync_cluster();
  if (threadIdx.x == 0) arrive_at(barrier, 1 - block_in_cluster());
}

__global__ void neighbour_has_ended() {
  extern __shared__ __align__(8) char memory[];
  arrive_at_neighbour(*reinterpret_cast<Barrier*>(memory));
}

__global__ void not_dynamic_shared() {
  __shared__ Barrier barrier;
  arrive_at_neighbour(barrier);
}

// ---- an instruction of the whole warp, before which lanes have not waited for each other

constexpr int matrix_write_line = __LINE__ + 4, matrix_read_line = matrix_write_line + 2;
__global__ void load_too_early(int* out) {
  alignas(16) __shared__ uint32_t rows[32][4];
  uint32_t registers[4];
  rows[(threadIdx.x + 1) % 32][0] = threadIdx.x;

  load_matrices(registers, shared_address(rows[threadIdx.x]));
  out[threadIdx.x] = int(registers[0]);
}

// ---- a stream that does not wait for another one

__global__ void write_kernel(int* out, int value) { *out = value; }
__global__ void copy_kernel(int* to, const int* from) { *to = *from; }

template <bool WithWait>
ExitCode run_streams() {
  cudaStream_t producer, consumer;
  cudaEvent_t written;
  CUDA_CHECK(cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamCreateWithFlags(&consumer, cudaStreamNonBlocking));
  CUDA_CHECK(cudaEventCreate(&written));
  Buffer<int> value(1), copy(1);
  write_kernel<<<1, 1, 0, producer>>>(&value[0], 42);
  CUDA_CHECK(cudaEventRecord(written, producer));
  if (WithWait) CUDA_CHECK(cudaStreamWaitEvent(consumer, written));
  copy_kernel<<<1, 1, 0, consumer>>>(&copy[0], &value[0]);
  CUDA_CHECK(cudaEventDestroy(written));
  CUDA_CHECK(cudaStreamDestroy(producer));
  CUDA_CHECK(cudaStreamDestroy(consumer));
  return copy.get()[0] == 42 ? right : wrong;
}

// ---- a host call on the null stream, beside work of a stream that does not wait for it

enum class HostCall { clears, reads, writes };

template <HostCall call, bool WithWait>
ExitCode run_null_stream() {
  Buffer<int> value(1), copy(1);
  int number = 42;
  if (call != HostCall::writes) write_kernel<<<1, 1, 0, test_stream()>>>(&value[0], number);
  if (call != HostCall::writes && WithWait) CUDA_CHECK(cudaStreamSynchronize(test_stream()));
  if (call == HostCall::clears) {
    CUDA_CHECK(cudaMemset(value, 0, sizeof number));
    return value.get()[0] == 0 ? right : wrong;
  }
  if (call == HostCall::reads) {
    number = 0;
    CUDA_CHECK(cudaMemcpy(&number, value, sizeof number, cudaMemcpyDeviceToHost));
    return number == 42 ? right : wrong;
  }
  CUDA_CHECK(cudaMemcpy(value, &number, sizeof number, cudaMemcpyHostToDevice));
  if (WithWait) CUDA_CHECK(cudaStreamSynchronize(nullptr));
  copy_kernel<<<1, 1, 0, test_stream()>>>(&copy[0], &value[0]);
  CUDA_CHECK(cudaStreamSynchronize(test_stream()));
  return copy.get()[0] == 42 ? right : wrong;
}

}  // namespace

// ---- one element past the end. Not in the unnamed namespace, just as the kernels in kernels/ are not: it would make
// their __shared__ arrays local to this file, and those are easier to guard.

constexpr int past_end_line = __LINE__ + 1;
[[gnu::noinline]] __device__ float element(const float* values, int i) { return values[i]; }

template <int N>
__global__ void past_static_shared(float* out) {
  __shared__ float other[N], values[4][N];  // memory on both sides that a wrong index could hit
  other[threadIdx.x] = values[threadIdx.x % 4][threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = element(&values[0][0], 3 * N + threadIdx.x + 1) + other[0];
}

__global__ void past_dynamic_shared(float* out) {
  extern __shared__ float values[];
  values[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = element(values, threadIdx.x + 1);
}

__global__ void past_device_buffer(float* out, const float* values) {
  out[threadIdx.x] = element(values, threadIdx.x + 1);
}

namespace {

// ---- more than a fiber's stack

[[gnu::noinline]] __device__ int descend(int depth) {
  volatile int frame[64];
  frame[depth % 64] = depth;
  return depth == 0 ? 0 : descend(depth - 1) + frame[depth % 64];
}

__global__ void deep_recursion(int* out, int depth) {
  __syncthreads();  // each thread has a fiber of its own now
  out[threadIdx.x] = descend(depth);
}

[[gnu::noinline]] __device__ int use_large_frame() {
  volatile char frame[1 << 18];  // reaches over the guard page into the stacks of other threads
  frame[0] = 1;
  return frame[0];
}

__global__ void large_frame(int* out) {
  __syncthreads();
  if (threadIdx.x == 0) *out = use_large_frame();
}

// ---- running them

ExitCode run_program(const std::string& name) {
  Buffer<int> out_buffer(n);
  Buffer<float> floats_buffer(n), values_buffer(n);
  int* out = out_buffer;
  float *floats = floats_buffer, *values = values_buffer;
  if (name == "missing_thread") missing_thread<<<2, n>>>();
  else if (name == "two_barriers") two_barriers<<<1, dim3(16, 2)>>>();
  else if (name == "missing_lane") missing_lane<<<1, n>>>(out);
  else if (name == "different_masks") different_masks<<<1, 32>>>(out);
  else if (name == "mask_without_itself") mask_without_itself<<<1, 32>>>(out);
  else if (name == "block_sum") return run_block_sum<true>();
  else if (name == "block_sum_without_barrier") return run_block_sum<false>();
  else if (name == "copy_asynchronously") return run_copy<true>();
  else if (name == "copy_asynchronously_without_wait") return run_copy<false>();
  else if (name == "unfinished_copy") unfinished_copy<<<1, n>>>(out);
  else if (name == "load_a_box") return run_box<true>();
  else if (name == "load_a_box_without_wait") return run_box<false>();
  else if (name == "load_a_box_and_wait_for_more") return run_box<true, 129>();
  else if (name == "barrier_not_made") barrier_not_made<<<1, 1>>>();
  else if (name == "missing_in_cluster") launch_clusters(2, missing_in_cluster, 4, n, 0, nullptr);
  else if (name == "neighbour_has_ended") launch_clusters(2, neighbour_has_ended, 2, n, sizeof(Barrier), nullptr);
  else if (name == "not_dynamic_shared") launch_clusters(2, not_dynamic_shared, 2, n, sizeof(Barrier), nullptr);
  else if (name == "load_too_early") load_too_early<<<1, 32>>>(out);
  else if (name == "same_element") same_element<<<2, 1>>>(out);
  else if (name == "streams") return run_streams<true>();
  else if (name == "streams_without_wait") return run_streams<false>();
  else if (name == "clears") return run_null_stream<HostCall::clears, true>();
  else if (name == "clears_without_wait") return run_null_stream<HostCall::clears, false>();
  else if (name == "reads") return run_null_stream<HostCall::reads, true>();
  else if (name == "reads_without_wait") return run_null_stream<HostCall::reads, false>();
  else if (name == "writes") return run_null_stream<HostCall::writes, true>();
  else if (name == "writes_without_wait") return run_null_stream<HostCall::writes, false>();
  else if (name == "past_static_shared") past_static_shared<n><<<1, n>>>(floats);
  else if (name == "past_dynamic_shared") past_dynamic_shared<<<1, n, n * sizeof(float)>>>(floats);
  else if (name == "past_device_buffer") past_device_buffer<<<1, n>>>(floats, values);
  else if (name == "deep_recursion") deep_recursion<<<1, n>>>(out, 5000);
  else if (name == "large_frame") large_frame<<<1, n>>>(out);
  else throw std::invalid_argument("no program " + name);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaDeviceSynchronize());
  return right;
}

std::string here(int line) { return std::string(__FILE__) + ":" + std::to_string(line); }

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count == 3 && arguments[1] == std::string("--program")) return run_program(arguments[2]);
  return run_cases(argument_count, arguments);
}

TEST_CASE("a barrier that a thread never reaches is a deadlock, reported in one line") {
  for (const std::string& schedule : schedules) {
    const Outcome outcome = run("missing_thread", schedule);
    INFO(outcome.output);
    CHECK(outcome.code == 1);
    CHECK(outcome.output == "deadlock in kernel missing_thread: block (1,0,0), thread (0,0,0) waits for " +
                                ("__syncthreads at " + here(missing_thread_line)) +
                                " (63 of 64 threads wait, 1 have ended); block (1,0,0), thread (5,0,0) has ended " +
                                "without reaching it\n");
  }
}

TEST_CASE("two groups of threads that wait for each other are a deadlock that names both") {
  const Outcome outcome = run("two_barriers");
  INFO(outcome.output);
  CHECK(outcome.code == 1);
  CHECK(outcome.mentions("block (0,0,0), thread (0,0,0) waits for __syncthreads at " + here(two_barriers_line)));
  CHECK(outcome.mentions("waits for a warp collective at " + here(two_barriers_line + 1)));
}

TEST_CASE("a shuffle that a lane of the mask never reaches is a deadlock") {
  for (const std::string& schedule : schedules) {
    const Outcome outcome = run("missing_lane", schedule);
    INFO(outcome.output);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions("thread (32,0,0) waits for a warp collective at " + here(missing_lane_line)));
    CHECK(outcome.mentions("(31 of 64 threads wait, 33 have ended); missing are lanes 0x100 of its warp\n"));
  }
}

TEST_CASE("masks that contradict each other are refused") {
  Outcome outcome = run("different_masks");
  INFO(outcome.output);
  CHECK(outcome.code == 1);
  CHECK(outcome.output == "kernel different_masks, block (0,0,0), thread (1,0,0): at " + here(masks_line) +
                              " lane 1 calls a warp collective with mask 0x3, other lanes of it with another mask\n");
  outcome = run("mask_without_itself");
  CHECK(outcome.code == 1);
  CHECK(outcome.mentions("lane 28 calls a warp collective with mask 0xfffffff, which does not name the lane itself"));
}

TEST_CASE("a missing barrier is right in forward order, wrong in a permuted one" * doctest::skip(finds_races)) {
  for (const std::string& schedule : schedules) {
    CAPTURE(schedule);
    CHECK(run("block_sum", schedule).code == right);
    CHECK(run("block_sum_without_barrier", schedule).code == (schedule == "forward" ? right : wrong));
  }
}

TEST_CASE("an asynchronous copy has not arrived before the thread waits for it") {
  CHECK(run("copy_asynchronously").code == right);
  CHECK(run("copy_asynchronously_without_wait").code == wrong);
  const Outcome outcome = run("unfinished_copy");
  CHECK(outcome.code == 1);
  CHECK(outcome.output == "kernel unfinished_copy: a thread ends without waiting for its asynchronous work\n");
}

TEST_CASE("a box has not arrived before the thread waits for it") {
  for (const std::string& schedule : schedules) {
    CAPTURE(schedule);
    CHECK(run("load_a_box", schedule).code == right);
    CHECK(run("load_a_box_without_wait", schedule).code == (finds_races ? race : wrong));
    const Outcome outcome = run("load_a_box_and_wait_for_more", schedule);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions("waits for an mbarrier at " + here(missing_bytes_line) + " (64 of 64 threads wait"));
  }
  CHECK(run("barrier_not_made").mentions("thread (0,0,0): an mbarrier is used before it is made"));
}

TEST_CASE("in a cluster, a barrier that a thread never reaches, and memory that is not there, are reported") {
  for (const std::string& schedule : schedules) {
    const Outcome outcome = run("missing_in_cluster", schedule);
    INFO(outcome.output);
    CHECK(outcome.mentions("block (2,0,0), thread (0,0,0) waits for an mbarrier at " + here(missing_in_cluster_line) +
                           " (127 of 128 threads wait, 1 have ended)"));
  }
  CHECK(run("neighbour_has_ended").mentions("block (1,0,0), thread (0,0,0): reaches shared memory of block 0 of its "
                                            "cluster, which has ended"));
  CHECK(run("not_dynamic_shared").mentions("a block reaches memory of another that is not dynamic shared memory"));
}

TEST_CASE("a missing wait between streams is right in forward order, wrong in some permuted ones") {
  int wrong_runs = 0;
  for (const std::string& schedule : schedules) {
    CAPTURE(schedule);
    CHECK(run("streams", schedule).code == right);
    const Outcome outcome = run("streams_without_wait", schedule);
    if (schedule == "forward") CHECK(outcome.code == right);
    if (outcome.code == wrong) ++wrong_runs;
  }
  CHECK(wrong_runs > 0);
}

TEST_CASE("the null stream and a stream that does not wait for it: host calls without a wait are wrong in permuted schedules") {
  for (const std::string program : {"clears", "reads", "writes"}) {
    int wrong_runs = 0;
    for (const std::string& schedule : schedules) {
      CAPTURE(program);
      CAPTURE(schedule);
      CHECK(run(program, schedule).code == right);
      const Outcome outcome = run(program + "_without_wait", schedule);
      if (schedule == "forward") CHECK(outcome.code == right);
      if (schedule == "reverse" && program != "writes") CHECK(outcome.code == wrong);
      if (outcome.code == wrong) ++wrong_runs;
    }
    CHECK(wrong_runs > 0);
  }
}

// In the child process this very case faults: as the CPU device does it, which ends the program, or as a GPU does it, whose
// calls all fail from then on.
TEST_CASE("a fault stops the program, which names the case; the cases after it run in a new process") {
  if (const char* fault = std::getenv("GPT_TEST_FAULT")) {
    if (fault == std::string("call")) device_error = [] { return std::string("an illegal instruction was encountered"); };
    else missing_thread<<<2, n>>>();
    CHECK(cudaDeviceSynchronize() != cudaSuccess);
    return;
  }
  const std::string name = doctest::getContextOptions()->currentTest->m_name;
  const std::string command = " test/every_case.sh " + std::filesystem::read_symlink("/proc/self/exe").string() +
                              " -tc='masks that*,a fault*,an unknown schedule*'";
  for (const auto& [fault, reason] : {std::pair("call", "an illegal instruction was encountered"), {"kernel", "as the line above says"}}) {
    CAPTURE(fault);
    const Outcome outcome = run_command(std::string("GPT_TEST_FAULT=") + fault + command);
    CAPTURE(outcome.output);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions("\nstopped: the case \"" + name + "\" has broken the device: " + reason +
                           ". The cases after it need a new process: --first=3\ncases: 1 passed, 1 failed, 0 skipped\n"));
    CHECK(outcome.mentions("\ncases: 2 passed, 1 failed, "));
    CHECK(outcome.output.find("--first") == outcome.output.rfind("--first"));
  }
}

TEST_CASE("an unknown schedule is refused") {
  const Outcome outcome = run("block_sum", "random");
  CHECK(outcome.code == 1);
  CHECK(outcome.output == "GPT_CPU_SCHEDULE is 'random'; give forward, reverse or random:SEED\n");
}

TEST_CASE("AddressSanitizer reports one element past shared and device memory" * doctest::skip(!finds_bounds)) {
  for (const std::string name : {"past_static_shared", "past_dynamic_shared", "past_device_buffer"}) {
    const Outcome outcome = run(name);
    INFO(outcome.output);
    CHECK(outcome.code == 1);
    const bool is_static = name == "past_static_shared";
    CHECK(outcome.mentions(is_static ? "global-buffer-overflow" : "heap-buffer-overflow"));
    CHECK(outcome.mentions("READ of size 4"));
    CHECK(outcome.mentions(here(past_end_line)));
    CHECK(outcome.mentions(name));  // the kernel
  }
}

TEST_CASE("ThreadSanitizer names both lines of a race, whatever the result" * doctest::skip(!finds_races)) {
  CHECK(run("block_sum").code == right);
  Outcome outcome = run("block_sum_without_barrier");
  INFO(outcome.output);
  CHECK(outcome.code == race);
  CHECK(outcome.mentions("data race"));
  CHECK(outcome.mentions(here(reduction_write_line)));
  CHECK(outcome.mentions(here(reduction_read_line)));
  outcome = run("load_too_early");
  CHECK(outcome.code == race);
  CHECK(outcome.mentions(here(matrix_write_line)));
  CHECK(outcome.mentions(here(matrix_read_line)));
  outcome = run("same_element");
  CHECK(outcome.code == race);
  CHECK(outcome.mentions(here(blocks_line)));
}

TEST_CASE("a stack that overflows hits the guard page" * doctest::skip(finds_races || finds_bounds)) {
  constexpr int segmentation_fault = 128 + 11;
  CHECK(run("deep_recursion").code == segmentation_fault);
  CHECK(run("large_frame").code == segmentation_fault);
}
