// What Hopper's copy engine and tensor cores do not see: bytes of shared memory that a thread has written, and for which
// it has not called share_with_engines(). Only the build that sees each access notices that (VARIANT=counts).
#include <filesystem>
#include <string>

#include "dev/ladders/cpu/access_counts.h"
#include "extensions/hopper/kernels/hopper.cuh"
#include "test/kernel_test.cuh"

static_assert(cpu::counts_accesses, "accesses are seen with VARIANT=counts");

namespace {

// Threads write a box of 64 × 64, which the copy engine stores, or the tensor cores multiply.
enum class Engine { stores_box, stores_floats, multiplies_a, multiplies_b };

template <Engine engine, bool shares>
__global__ void engines_kernel(float* out, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) char memory[];
  uint16_t *box = reinterpret_cast<uint16_t*>(memory), *other_box = box + 64 * box_columns;
  __shared__ Barrier full;
  if (threadIdx.x == 0) init_barrier(full, 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * box_columns; i += blockDim.x) box[i] = other_box[i] = uint16_t(i);
  if (shares || threadIdx.x != 77) share_with_engines();
  __syncthreads();
  if (engine == Engine::stores_box || engine == Engine::stores_floats) {
    if (threadIdx.x > 0) return;
    if (engine == Engine::stores_box) store_box(map, 0, 0, box);
    else store_floats(out, reinterpret_cast<float*>(box), 64 * 128);
    commit_stores();
    finish_stores();
    return;
  }
  // The copy engine writes one operand, which the tensor cores then see.
  uint16_t* loaded = engine == Engine::multiplies_a ? other_box : box;
  if (threadIdx.x == 0) {
    arrive_expecting(full, 64 * 128);
    load_box(loaded, map, 0, 0, full);
  }
  wait(full, 0);
  float sum[8][4] = {};
  order_registers();
  multiply_m64k16<__nv_bfloat16, true>(sum, along_k(box, 0), along_n<64>(other_box, 0), false);
  commit_products();
  wait_for_products(sum);
}

template <Engine engine, bool shares = false>
void run_engine() {
  Buffer<uint16_t> matrix(std::vector<uint16_t>(64 * box_columns));
  const TensorMap map = make_tensor_map(reinterpret_cast<__nv_bfloat16*>(matrix.data()), 64, box_columns, 64);
  Buffer<float> out(64 * 32);
  engines_kernel<engine, shares><<<1, 128, 2 * 64 * 128, test_stream()>>>(out.data(), map);
  CUDA_CHECK(cudaDeviceSynchronize());
}

// What this program prints when it runs the test of that name.
std::string output_of(const std::string& test) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  std::string output;
  FILE* pipe = popen(("'" + program + "' --no-skip --test-case='" + test + "' 2>&1").c_str(), "r");
  for (char text[256]; fgets(text, sizeof text, pipe);) output += text;
  pclose(pipe);
  return output;
}

}  // namespace

TEST_CASE("planted: a box that is stored" * doctest::skip()) { run_engine<Engine::stores_box>(); }
TEST_CASE("planted: floats that are stored" * doctest::skip()) { run_engine<Engine::stores_floats>(); }
TEST_CASE("planted: operand a" * doctest::skip()) { run_engine<Engine::multiplies_a>(); }
TEST_CASE("planted: operand b" * doctest::skip()) { run_engine<Engine::multiplies_b>(); }

TEST_CASE("bytes that one thread of 128 has not shared with the engines are reported where these read them") {
  run_engine<Engine::stores_box, true>();
  run_engine<Engine::stores_floats, true>();
  run_engine<Engine::multiplies_a, true>();
  run_engine<Engine::multiplies_b, true>();
  for (const std::string name : {"a box that is stored", "floats that are stored", "operand a", "operand b"}) {
    const std::string output = output_of("planted: " + name);
    INFO(output);
    CHECK(output.find("reads what threads have written without share_with_engines(): call it after") != output.npos);
  }
}
