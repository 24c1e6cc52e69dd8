// What the CPU device must find of mistakes with Hopper's instructions. A GPU reports none of them: it computes wrong
// numbers, now and then, or hangs. That bytes are not shared with the engines is in test_access_engines.cu.
#define DOCTEST_CONFIG_IMPLEMENT
#include <stdexcept>
#include <string>

#include "dev/ladders/clusters.cuh"
#include "test/cpu/failing_programs.h"
#include "test/kernel_test.cuh"
#include "test/run_cases.h"

namespace {

// ---- dynamic shared memory that was not asked for

constexpr int much = 48 * 1024 + 16;

template <int N>
__global__ void use_shared_memory(int* out) {
  extern __shared__ int memory[];
  memory[N] = N;
  *out = memory[N];
}

template <bool asks>
ExitCode run_shared_memory() {
  Buffer<int> out(1);
  if (asks) allow_shared_memory(use_shared_memory<much / 4 - 1>, much);
  else allow_shared_memory(use_shared_memory<1>, much);  // another kernel of the template
  use_shared_memory<much / 4 - 1><<<1, 1, much, test_stream()>>>(out.data());
  if (cudaGetLastError() == cudaErrorInvalidValue) return wrong;
  return out.get()[0] == much / 4 - 1 ? right : wrong;
}

// ---- products

enum class Mistake {
  none, address_not_cut, other_next_box, other_next_rows, row_of_box, no_mode, past_the_end, static_box,
  not_ordered, not_ordered_again, changed_registers, other_product, missing_product, half_a_warpgroup
};

constexpr int columns = 128, n_stored = 64, box_bytes = 64 * 128;

template <Mistake mistake>
__device__ MatrixDescriptor describe_b(const void* boxes) {
  MatrixDescriptor b = along_n<64>(boxes, 0);
  const uint64_t start = b.bits & 0x3fff;
  if (mistake == Mistake::address_not_cut) b.bits += (address_for_engines(boxes) >> 4) - start;
  if (mistake == Mistake::other_next_box) b.bits += uint64_t(1) << 16;
  if (mistake == Mistake::other_next_rows) b.bits += uint64_t(1) << 32;
  if (mistake == Mistake::row_of_box) b.bits += 128 >> 4;
  if (mistake == Mistake::no_mode) b.bits &= ~(uint64_t(3) << 62);
  if (mistake == Mistake::past_the_end) b.bits += box_bytes >> 4;
  return b;
}

// out (64, 128) of each block: the first 16 of k of boxes that threads have written, a from registers.
constexpr int multiply_line = __LINE__ + 16;
template <Mistake mistake>
__global__ void multiply(float* out) {
  extern __shared__ __align__(1024) char memory[];
  alignas(1024) __shared__ uint16_t elsewhere[64];
  auto* boxes = reinterpret_cast<__nv_bfloat16*>(memory);
  for (int i = threadIdx.x; i < box_bytes; i += blockDim.x) boxes[i] = __float2bfloat16_rn(float(i % 61));
  share_with_engines();
  sync_cluster();
  uint32_t a[4] = {0x3f803f80u, 0x40003f80u, threadIdx.x << 24, 0x3f800000u};
  float sum[columns / 8][4] = {};
  const void* box = mistake == Mistake::static_box ? static_cast<void*>(elsewhere) : boxes;
  const MatrixDescriptor b = describe_b<mistake>(box);
  if (mistake != Mistake::not_ordered) order_registers();
  const bool is_other = threadIdx.x / 32 == 3 && mistake == Mistake::other_product;
  if (threadIdx.x / 32 != 3 || mistake != Mistake::missing_product)
    multiply_m64k16<__nv_bfloat16, true>(sum, a, b, is_other);
  commit_products();
  if (mistake == Mistake::changed_registers) a[threadIdx.x % 4] += threadIdx.x == 70;
  if (mistake == Mistake::not_ordered_again) multiply_m64k16<__nv_bfloat16, true>(sum, a, b, true);
  wait_for_products(sum);
  float* own = out + (blockIdx.x * blockDim.x + threadIdx.x) * (columns / 2);
  for (int i = 0; i < columns / 2; ++i) own[i] = sum[i / 4][i % 4];
  sync_cluster();
}

template <Mistake mistake>
std::vector<float> products() {
  const int threads = mistake == Mistake::half_a_warpgroup ? 64 : 128;
  Buffer<float> out(2 * 128 * columns / 2);
  launch_clusters(2, multiply<mistake>, 2, threads, 2 * box_bytes, test_stream(), out.data());
  return out.get();
}

template <Mistake mistake>
ExitCode run_products() {
  return same_bits(products<mistake>(), products<Mistake::none>()) ? right : wrong;
}

// ---- stores that nobody has waited for to the end, and what the copy engine does not do

template <bool to_the_end>
__global__ void store_and_read(float* out, float* stored) {
  alignas(16) __shared__ float own[n_stored];
  own[threadIdx.x] = float(threadIdx.x);
  share_with_engines();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_floats(stored, own, sizeof own);
    commit_stores();
    if (to_the_end) finish_stores();
    else wait_for_stores<0>();
  }
  __syncthreads();
  out[threadIdx.x] = stored[threadIdx.x];
}

template <bool to_the_end>
ExitCode run_stores() {
  Buffer<float> out(n_stored), stored(std::vector<float>(n_stored, -1));
  store_and_read<to_the_end><<<1, n_stored, 0, test_stream()>>>(out.data(), stored.data());
  if (stored.get()[n_stored - 1] != n_stored - 1) throw std::logic_error("at the kernel's end a store is missing");
  return out.get() == stored.get() ? right : wrong;
}

// Thread 0 stores what all have written; the others write again when it says so. It may say so, or count, too early.
enum class Early { nothing, frees, counts };

constexpr int count_line = __LINE__ + 13;
template <Early early>
__global__ void store_once(float* stored, unsigned* counter) {
  alignas(16) __shared__ float own[n_stored];
  __shared__ Barrier empty;
  if (threadIdx.x == 0) init_barrier(empty, 1);
  own[threadIdx.x] = 1;
  share_with_engines();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_floats(stored, own, sizeof own);
    commit_stores();
    if (early == Early::frees) arrive(empty);
    if (early == Early::counts) count_up(counter);
    finish_stores();
    if (early != Early::frees) arrive(empty);
    if (early != Early::counts) count_up(counter);
  } else {
    wait(empty, 0);
    own[threadIdx.x] = 2;
  }
}

template <Early early>
ExitCode run_early() {
  Buffer<float> stored(n_stored);
  Buffer<unsigned> counter(std::vector<unsigned>(1));
  store_once<early><<<1, n_stored, 0, test_stream()>>>(stored.data(), counter.data());
  return stored.get() == std::vector<float>(n_stored, 1) && counter.get()[0] == 1 ? right : wrong;
}

enum class Limit { box_alignment, box_column, stored_column, stored_row, floats, bytes_of_floats, expected_bytes, arrivals, number, threads };

template <Limit limit>
__global__ void pass_a_limit(float* out, const __grid_constant__ TensorMap map) {
  alignas(1024) __shared__ uint16_t box[2 * 8 * box_columns];
  __shared__ Barrier barrier;
  init_barrier(barrier, limit == Limit::arrivals ? 0 : 1);
  const auto* floats = reinterpret_cast<const float*>(box);
  if (limit == Limit::box_alignment) load_box(box + box_columns, map, 0, 0, barrier);
  if (limit == Limit::box_column) load_box(box, map, 0, 17, barrier);
  if (limit == Limit::stored_column) store_box(map, 0, -8, box);
  if (limit == Limit::stored_row) store_box(map, -3, 8, box);
  if (limit == Limit::floats) store_floats(out, floats + 1, 16);
  if (limit == Limit::bytes_of_floats) add_floats(out, floats, 24);
  if (limit == Limit::expected_bytes) arrive_expecting(barrier, 1 << 20);
  if (limit == Limit::arrivals) arrive(barrier);
  if (limit == Limit::number) wait_at(16, 32);
  if (limit == Limit::threads) announce_at(1, 40);
}

template <Limit limit>
ExitCode run_limit() {
  Buffer<uint16_t> matrix(std::vector<uint16_t>(8 * box_columns));
  Buffer<float> out(16);
  pass_a_limit<limit><<<1, 1, 0, test_stream()>>>(out.data(), make_tensor_map(matrix.data(), 8, box_columns, 8));
  CUDA_CHECK(cudaDeviceSynchronize());
  return right;
}

// ---- barriers

// The first thread waits for one phase after another; the other is `ahead` phases further before it looks.
constexpr int lapped_line = __LINE__ + 6;
template <int ahead>
__global__ void run_ahead() {
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) init_barrier(barrier, 1);
  __syncthreads();
  if (threadIdx.x == 0) wait(barrier, 0);
  if (threadIdx.x == 1)
    for (int i = 0; i < ahead; ++i) arrive(barrier);
}

constexpr int part_of_a_warp_line = __LINE__ + 2;
__global__ void part_of_a_warp() {
  if (threadIdx.x % 32 < 16) announce_at(1, 32);
}

// ---- registers

constexpr int registers_line = __LINE__ + 4;
template <int given, int taken>
__global__ void __launch_bounds__(384, 1) exchange_registers() {
  if (threadIdx.x < 128) give_registers<given>();
  else take_registers<taken>();
}

// ---- running them

ExitCode run_program(const std::string& name) {
  if (name == "asked") return run_shared_memory<true>();
  if (name == "not_asked") return run_shared_memory<false>();
  if (name == "product") return run_products<Mistake::none>();
  if (name == "address_not_cut") return run_products<Mistake::address_not_cut>();
  if (name == "other_next_box") return run_products<Mistake::other_next_box>();
  if (name == "other_next_rows") return run_products<Mistake::other_next_rows>();
  if (name == "row_of_box") return run_products<Mistake::row_of_box>();
  if (name == "no_mode") return run_products<Mistake::no_mode>();
  if (name == "past_the_end") return run_products<Mistake::past_the_end>();
  if (name == "static_box") return run_products<Mistake::static_box>();
  if (name == "not_ordered") return run_products<Mistake::not_ordered>();
  if (name == "not_ordered_again") return run_products<Mistake::not_ordered_again>();
  if (name == "changed_registers") return run_products<Mistake::changed_registers>();
  if (name == "other_product") return run_products<Mistake::other_product>();
  if (name == "missing_product") return run_products<Mistake::missing_product>();
  if (name == "half_a_warpgroup") return run_products<Mistake::half_a_warpgroup>();
  if (name == "stored") return run_stores<true>();
  if (name == "stored_not_to_the_end") return run_stores<false>();
  if (name == "freed_and_counted") return run_early<Early::nothing>();
  if (name == "freed_early") return run_early<Early::frees>();
  if (name == "counted_early") return run_early<Early::counts>();
  if (name == "box_alignment") return run_limit<Limit::box_alignment>();
  if (name == "box_column") return run_limit<Limit::box_column>();
  if (name == "stored_column") return run_limit<Limit::stored_column>();
  if (name == "stored_row") return run_limit<Limit::stored_row>();
  if (name == "floats") return run_limit<Limit::floats>();
  if (name == "bytes_of_floats") return run_limit<Limit::bytes_of_floats>();
  if (name == "expected_bytes") return run_limit<Limit::expected_bytes>();
  if (name == "arrivals") return run_limit<Limit::arrivals>();
  if (name == "number") return run_limit<Limit::number>();
  if (name == "threads") return run_limit<Limit::threads>();
  if (name == "one_ahead") run_ahead<1><<<1, 32>>>();
  else if (name == "two_ahead") run_ahead<2><<<1, 32>>>();
  else if (name == "three_ahead") run_ahead<3><<<1, 32>>>();
  else if (name == "part_of_a_warp") part_of_a_warp<<<1, 64>>>();
  else if (name == "registers") exchange_registers<24, 240><<<2, 384>>>();
  else if (name == "too_many_registers") exchange_registers<40, 240><<<2, 384>>>();
  else if (name == "give_more_registers") exchange_registers<176, 240><<<2, 384>>>();
  else throw std::invalid_argument("no program " + name);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaDeviceSynchronize());
  return right;
}

std::string here(int line) { return std::string(__FILE__) + ":" + std::to_string(line) + " "; }

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count == 3 && arguments[1] == std::string("--program")) return run_program(arguments[2]);
  return run_cases(argument_count, arguments);
}

TEST_CASE("more than 48 KB of dynamic shared memory must be asked for, for this very kernel") {
  CHECK(run("asked").code == right);
  const Outcome outcome = run("not_asked");
  CHECK(outcome.code == wrong);
  CHECK(outcome.output == "kernel use_shared_memory: a launch with 49168 bytes of dynamic shared memory, where 49152 "
                          "are allowed: call cudaFuncSetAttribute for it before, here and there with all template "
                          "arguments\n");
}

TEST_CASE("tensor cores read what the bits of a descriptor say: wrong ones give wrong numbers, or are refused") {
  for (const std::string& schedule : schedules) {
    CHECK(run("product", schedule).code == right);
    for (const std::string program : {"address_not_cut", "other_next_box", "other_next_rows"}) {
      CAPTURE(program);
      CHECK(run(program, schedule).code == wrong);
    }
  }
  const std::string where = "at " + here(multiply_line);
  const std::string cure = ": give a box of this block, at a multiple of 1,024 bytes, and mode 1\n";
  CHECK(run("row_of_box").mentions(where + "a product reads bytes 128 to 10368 of dynamic shared memory by mode 1" +
                                   cure));
  CHECK(run("no_mode").mentions(where + "a product reads bytes 0 to 10240 of dynamic shared memory by mode 0" + cure));
  CHECK(run("past_the_end").mentions("bytes 8192 to 18432 of dynamic shared memory by mode 1" + cure));
  CHECK(run("static_box").mentions("describes a box that is not in dynamic shared memory of the block"));
}

TEST_CASE("products: registers are ordered before, and stay as they are until the wait") {
  for (const std::string& schedule : schedules) {
    const std::string message = here(multiply_line) + "starts a group of products without order_registers(): call it";
    CHECK(run("not_ordered", schedule).mentions(message));
    CHECK(run("not_ordered_again", schedule).mentions("starts a group of products without order_registers()"));
    const Outcome outcome = run("changed_registers", schedule);
    INFO(outcome.output);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions("thread (70,0,0): at " + here(multiply_line) +
                           "registers of a have changed before their product was done: wait for it first"));
  }
}

TEST_CASE("products: the four warps of a warpgroup start the same ones") {
  for (const std::string& schedule : schedules) {
    CHECK(run("other_product", schedule).mentions("product 0 of this thread is not its warpgroup's"));
    CHECK(run("missing_product", schedule).mentions("thread (96,0,0): started 0 products, and others of its"));
  }
  CHECK(run("half_a_warpgroup").mentions("starts a product in a block of 64 threads; give whole warpgroups of 128"));
}

TEST_CASE("stores are not visible when their shared memory is free") {
  for (const std::string& schedule : schedules) {
    CHECK(run("stored", schedule).code == right);
    CHECK(run("stored_not_to_the_end", schedule).code == wrong);
  }
}

TEST_CASE("stores are read to the end before their shared memory is free, and finished before they count") {
  for (const std::string& schedule : schedules) {
    CHECK(run("freed_and_counted", schedule).code == right);
    CHECK(run("freed_early", schedule).code == (finds_races ? race : wrong));
    const Outcome outcome = run("counted_early", schedule);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions(here(count_line) + "counts stores that are not finished: call finish_stores() before"));
  }
}

TEST_CASE("limits of barriers and of the copy engine") {
  const std::string where = "kernel pass_a_limit, block (0,0,0), thread (0,0,0): ";
  CHECK(run("box_alignment").mentions(where + "a box does not begin at a multiple of 1,024 bytes: align it"));
  CHECK(run("box_column").output == where + "a box begins at column 17; give a multiple of 8 (16 bytes)\n");
  CHECK(run("stored_column").output == where + "a box is stored from row 0, column -8 on; give none below 0\n");
  CHECK(run("stored_row").output == where + "a box is stored from row -3, column 8 on; give none below 0\n");
  CHECK(run("floats").mentions(where + "16 bytes of floats go from"));
  CHECK(run("bytes_of_floats").mentions(where + "24 bytes of floats go from"));
  CHECK(run("expected_bytes").mentions(where + "an mbarrier expects 1048576 bytes; give at most 1048575"));
  CHECK(run("arrivals").mentions(where + "an mbarrier is used before it is made, or was made for no arrivals"));
  CHECK(run("number").mentions("barrier 16 is for 32 threads; give a number from 1 to 15, and a multiple of 32"));
  CHECK(run("threads").mentions("barrier 1 is for 40 threads; give a number from 1 to 15, and a multiple of 32"));
}

TEST_CASE("tensor maps that the driver refuses") {
  alignas(16) static uint16_t matrix[64];
  CHECK_NOTHROW(make_tensor_map(matrix, 4, 8, 256));
  CHECK_THROWS_AS(make_tensor_map(matrix, 4, 8, 257), std::runtime_error);
  CHECK_THROWS_AS(make_tensor_map(matrix, 4, 8, 0), std::runtime_error);
  CHECK_THROWS_AS(make_tensor_map(matrix, 0, 8, 8), std::runtime_error);
  CHECK_THROWS_AS(make_tensor_map(matrix + 4, 4, 8, 8), std::runtime_error);
  CHECK_THROWS_WITH(make_tensor_map(matrix, 4, 12, 8),
                    "a tensor map of 4 rows, 24 bytes apart, in boxes of 8: give strides and an address that are "
                    "multiples of 16 bytes, sizes from 1 on, and boxes of 1 to 256 rows");
  CHECK_THROWS_AS(make_tensor_map(MatrixStack<uint16_t>{matrix, 4, 8, 1, 1, 8, 32, int64_t(1) << 39}, 8),
                  std::runtime_error);
}

TEST_CASE("a barrier that has ended two phases while a thread waits for one is reported") {
  CHECK(run("one_ahead").code == right);
  for (const std::string program : {"two_ahead", "three_ahead"}) {
    const Outcome outcome = run(program);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions("thread (0,0,0): at " + here(lapped_line) + "waited for a phase of an mbarrier while " +
                           (program == "two_ahead" ? "2" : "3") + " ended: let its other threads wait for this one"));
  }
}

TEST_CASE("numbered barriers are for whole warps") {
  for (const std::string& schedule : schedules) {
    const Outcome outcome = run("part_of_a_warp", schedule);
    INFO(outcome.output);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions("waits for a warp collective at " + here(part_of_a_warp_line)));
    CHECK(outcome.mentions("missing are lanes 0xffff0000 of its warp"));
  }
}

TEST_CASE("a thread takes registers that other threads have given back") {
  for (const std::string& schedule : schedules) {
    CHECK(run("registers", schedule).code == right);
    const Outcome outcome = run("too_many_registers", schedule);
    INFO(outcome.output);
    CHECK(outcome.code == 1);
    CHECK(outcome.mentions("waits for registers that other threads give back at " + here(registers_line)));
  }
  CHECK(run("give_more_registers").mentions("a thread that has 168 registers gives back those above 176"));
}
