// Each special instruction against what the PTX ISA documents of it: known matrices in, exact results out.
#include "test/kernel_test.cuh"

namespace {

// ---- tensor cores

// Element (row, column) of the 16×16 matrix at `values`, of the left operand's register r, half h (0: lower) of `lane`.
int left_element(int lane, int r, int h) { return (lane / 4 + r % 2 * 8) * 16 + lane % 4 * 2 + r / 2 * 8 + h; }

template <class T>
__global__ void multiply_kernel(float* sums, const uint32_t* a, const uint32_t* b) {
  const int lane = threadIdx.x;
  const uint32_t a_registers[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
  float sum[4] = {sums[4 * lane], sums[4 * lane + 1], sums[4 * lane + 2], sums[4 * lane + 3]};
  multiply_m16n8k16<T>(sum, a_registers, b[2 * lane], b[2 * lane + 1]);
  for (int i = 0; i < 4; ++i) sums[4 * lane + i] = sum[i];
}

// Shared memory of the warp: 32 rows of 8 elements, matrix i is rows 8i to 8i + 7.
__global__ void load_kernel(uint32_t* registers, const uint16_t* rows, bool transposed) {
  alignas(16) __shared__ uint16_t matrices[32][8];
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) matrices[lane][i] = rows[8 * lane + i];
  __syncwarp();
  uint32_t loaded[4];
  if (transposed) load_matrices_transposed(loaded, shared_address(matrices[lane]));
  else load_matrices(loaded, shared_address(matrices[lane]));
  for (int i = 0; i < 4; ++i) registers[4 * lane + i] = loaded[i];
}

template <class T>
uint32_t pair_bits(T low, T high) {
  const T pair[2] = {low, high};
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return bits;
}

}  // namespace

TEST_CASE_TEMPLATE("multiply_m16n8k16", T, __nv_bfloat16, __half) {
  const auto a = random_integers<T>(16 * 16, 9), b = random_integers<T>(16 * 8, 9, 2);
  const auto start = random_integers<float>(16 * 8, 1000, 3);
  std::vector<uint32_t> a_registers(32 * 4), b_registers(32 * 2);
  std::vector<float> sums(32 * 4), expected(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r)
      a_registers[4 * lane + r] = pair_bits(a[left_element(lane, r, 0)], a[left_element(lane, r, 1)]);
    for (int r = 0; r < 2; ++r) {
      const int row = lane % 4 * 2 + 8 * r, column = lane / 4;
      b_registers[2 * lane + r] = pair_bits(b[row * 8 + column], b[(row + 1) * 8 + column]);
    }
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      sums[4 * lane + i] = expected[4 * lane + i] = start[row * 8 + column];
      for (int k = 0; k < 16; ++k)
        expected[4 * lane + i] += to_float(a[row * 16 + k]) * to_float(b[k * 8 + column]);
    }
  }
  Buffer<float> sums_d(sums);
  Buffer<uint32_t> a_d(a_registers), b_d(b_registers);
  multiply_kernel<T><<<1, 32, 0, test_stream()>>>(sums_d.data(), a_d.data(), b_d.data());
  CHECK(sums_d.get() == expected);
}

TEST_CASE("multiply_m16n8k16: infinity and NaN come through") {
  const float inf = INFINITY;
  for (const auto& [x, y, is_right] :
       {std::tuple{inf, 1.0f, +[](float sum) { return sum == INFINITY; }},
        std::tuple{inf, 0.0f, +[](float sum) { return std::isnan(sum); }},
        std::tuple{NAN, 0.0f, +[](float sum) { return std::isnan(sum); }}}) {
    const auto a = from_float<__nv_bfloat16>(x), b = from_float<__nv_bfloat16>(y);
    Buffer<float> sums(std::vector<float>(32 * 4));
    Buffer<uint32_t> a_d(std::vector<uint32_t>(32 * 4, pair_bits(a, a)));
    Buffer<uint32_t> b_d(std::vector<uint32_t>(32 * 2, pair_bits(b, b)));
    multiply_kernel<__nv_bfloat16><<<1, 32, 0, test_stream()>>>(sums.data(), a_d.data(), b_d.data());
    for (float sum : sums.get()) CHECK(is_right(sum));
  }
}

TEST_CASE("load_matrices, straight and transposed") {
  std::vector<uint16_t> rows(32 * 8);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = uint16_t(i);
  Buffer<uint16_t> rows_d(rows);
  for (bool transposed : {false, true}) {
    CAPTURE(transposed);
    std::vector<uint32_t> expected;
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int row = lane / 4, column = lane % 4 * 2;
        auto at = [&](int r, int c) { return rows[(8 * matrix + (transposed ? c : r)) * 8 + (transposed ? r : c)]; };
        expected.push_back(pair_bits(at(row, column), at(row, column + 1)));
      }
    Buffer<uint32_t> registers(32 * 4);
    load_kernel<<<1, 32, 0, test_stream()>>>(registers.data(), rows_d.data(), transposed);
    CHECK(registers.get() == expected);
  }
}

// ---- asynchronous copies

namespace {

constexpr int copied = 256;  // bytes

// Thread t copies `bytes` bytes at t·bytes, if t is even; its neighbour's arrive as zeros.
template <int bytes>
__global__ void copy_kernel(char* out, const char* in) {
  alignas(16) __shared__ char memory[copied];
  const int t = threadIdx.x;
  for (int i = 0; i < bytes; ++i) memory[t * bytes + i] = 1;
  __syncthreads();
  copy_async<bytes>(memory + t * bytes, in + t * bytes, t % 2 == 0);
  wait_for_copies();
  __syncthreads();
  for (int i = t; i < copied; i += blockDim.x) out[i] = memory[copied - 1 - i];  // other threads' bytes
}

template <int bytes>
void check_copies() {
  CAPTURE(bytes);
  const auto in = random_integers<float>(copied / 4, 1000);
  std::vector<char> values(copied), expected(copied);
  std::memcpy(values.data(), in.data(), copied);
  for (int i = 0; i < copied; ++i) expected[copied - 1 - i] = i / bytes % 2 == 0 ? values[i] : 0;
  Buffer<char> in_d(copied), out(copied);
  CUDA_CHECK(cudaMemcpy(in_d.data(), values.data(), copied, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaStreamSynchronize(nullptr));
  copy_kernel<bytes><<<1, copied / bytes, 0, test_stream()>>>(out.data(), in_d.data());
  CHECK(out.get() == expected);
}

}  // namespace

TEST_CASE("copy_async") {
  check_copies<16>();
  check_copies<4>();
}

namespace {

constexpr int groups = 3;

// Each thread copies a float in each of three groups, the second of which has another one, too, and a fourth is empty.
// It writes what it finds when it waits for all groups but the last `but`: of the others.
template <int but>
__global__ void copy_groups_kernel(float* out, const float* in) {
  __shared__ float memory[groups + 1][32];
  const int t = threadIdx.x;
  for (int g = 0; g < groups; ++g) {
    copy_async<4>(&memory[g][t], in + g * 32 + t, true);
    if (g == 1) copy_async<4>(&memory[groups][t], in + groups * 32 + t, true);
    commit_copies();
  }
  commit_copies();
  wait_for_copies<but>();
  for (int g = 0; g < groups + 1 - but; ++g) out[g * 32 + t] = memory[g][t];
  if (but < groups) out[groups * 32 + t] = memory[groups][t];
  wait_for_copies();
}

template <int but>
void check_copy_groups() {
  CAPTURE(but);
  const auto in = random_integers<float>((groups + 1) * 32, 1000);
  Buffer<float> in_d(in), out(in.size());
  copy_groups_kernel<but><<<1, 32, 0, test_stream()>>>(out.data(), in_d.data());
  const std::vector<float> found = out.get();
  for (int g = 0; g <= groups; ++g) {
    CAPTURE(g);
    const bool arrived = g == groups ? but < groups : g < groups + 1 - but;
    for (int t = 0; t < 32 && arrived; ++t) CHECK(found[g * 32 + t] == in[g * 32 + t]);
  }
}

}  // namespace

TEST_CASE("copy_async in groups") {
  check_copy_groups<0>();
  check_copy_groups<1>();
  check_copy_groups<2>();
  check_copy_groups<3>();
}

// ---- exp2

namespace {

__global__ void exp2_kernel(float* x) { x[threadIdx.x] = exp2_approximate(x[threadIdx.x]); }

}  // namespace

TEST_CASE("exp2_approximate") {
  std::vector<float> x{0, 1, -1, 127, -INFINITY, INFINITY, NAN};
  for (float y = -125; y < 128; y += 0.37f) x.push_back(y);
  Buffer<float> values(x);
  exp2_kernel<<<1, unsigned(x.size()), 0, test_stream()>>>(values.data());
  const std::vector<float> actual = values.get();
  CHECK(actual[4] == 0);
  CHECK(actual[5] == INFINITY);
  CHECK(std::isnan(actual[6]));
  for (size_t i = 0; i < x.size(); ++i)
    if (std::isfinite(x[i])) CHECK(std::abs(actual[i] / std::exp2(double(x[i])) - 1) <= 0x1p-22);  // as in the PTX ISA
}
