// The host's code of the GPU's matrix products (kernels/gemm/cublaslt.h), on the CPU device, with a cuBLASLt made for
// tests (cublasLt.h here): layouts and epilogues by all the cases of test_matmul and test_fp8, then which algorithm is
// taken when.
#include "test/test_fp8.cu"
#include "test/test_matmul.cu"

namespace {

// Read at the first CUDA call
[[maybe_unused]] const int two_devices = setenv("GPT_CPU_DEVICES", "2", 1);
[[maybe_unused]] const int an_h100 = setenv("GPT_CPU_MULTIPROCESSORS", "132", 1);

constexpr int bias_epilogue = CUBLASLT_EPILOGUE_BIAS;

// Everything is as in a rehearsal, on the rank that times; shapes must still be new ones, as plans are kept.
struct Fresh {
  Fresh() { gemm_choices() = {.times = true}, fake_library = {}; }
  ~Fresh() { gemm_choices() = {}, fake_library = {}; }
};

// A product of (m,16) and (16,8); every test has its own m. Returns the number of the algorithm that ran last.
struct Product {
  explicit Product(int m, bool with_bias = false) : shape{m, 8, 16}, with_bias(with_bias) {}
  GemmShape shape;
  bool with_bias;
  Operands<float, float> in = {random_integers<float>(size_t(shape.m) * 16, 4), random_integers<float>(16 * 8, 4, 2),
                               random_integers<float>(8, 100, 3), random_integers<float>(size_t(shape.m) * 8, 100, 4)};

  int multiply(bool accumulate = false) {
    GemmShape s = shape;
    s.accumulate = accumulate;
    CHECK(run(in, s, with_bias) == reference(in, s, with_bias));
    return fake_library.ran.empty() ? 0 : fake_library.ran.back();
  }
  std::string name() const {
    using namespace cublaslt;
    return gemm_choices().full_name(name_of<float, float>(shape, with_bias ? Epilogue::bias : Epilogue::none));
  }
};

std::string text_of_algorithm(int number) { return cublaslt::text_of({{uint64_t(number), 0, 0, 0, 0, 0, 0, ~uint64_t(0)}}); }

}  // namespace

TEST_CASE("parts of a sum are added in float, and with a bias there are no parts") {
  const Fresh fresh;
  fake_library.proposed = {{1, 4, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 0},
                           {2, 4, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 3000},
                           {3, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 6000}};
  CHECK(Product(10).multiply() == 2);
  CHECK(Product(10, true).multiply() == 3);
}

TEST_CASE("the fastest algorithm is taken; candidates take turns") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1, .microseconds = 6000}, {.number = 2, .microseconds = 1000}, {.number = 3, .microseconds = 3000}};
  Product product(11);
  CHECK(product.multiply() == 2);
  REQUIRE(fake_library.ran.size() >= 13);
  for (size_t i = 0; i + 1 < fake_library.ran.size(); ++i) CHECK(fake_library.ran[i] == int(i % 3) + 1);
  fake_library.ran.clear();
  CHECK(product.multiply() == 2);
  CHECK(fake_library.ran.size() == 1);
}

TEST_CASE("a device that was idle is busy for 0.2 s before candidates are timed") {
  const Fresh fresh;
  const auto seconds = [](auto work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  last_comparison = {};
  CHECK(seconds([] { Product(12).multiply(); }) >= 0.2);
  CHECK(seconds([] { Product(13).multiply(); }) < 0.2);
}

TEST_CASE("a sum takes what the product without it took, and allocates nothing") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1, .microseconds = 5000}, {.number = 2}};
  Product product(14), alone(15);
  product.multiply();
  product.multiply(true);  // the test's own buffers are not counted below
  const auto allocations_of = [&](bool accumulate) {
    const size_t before = cpu::counts.allocations;
    CHECK(product.multiply(accumulate) == 2);
    return cpu::counts.allocations - before;
  };
  CHECK(allocations_of(true) == allocations_of(false));
  fake_library.ran.clear();
  gemm_choices().times = false;
  CHECK(alone.multiply(true) == 1);  // of the product without it nothing is known: the first, untimed
  CHECK(fake_library.ran.size() == 1);
  CHECK(!gemm_choices().known.contains(alone.name()));
}

TEST_CASE("a sum that comes first is timed, too: in a rehearsal its values have no meaning") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1, .microseconds = 5000}, {.number = 2}};
  Product product(16);
  GemmShape sum = product.shape;
  sum.accumulate = true;
  run(product.in, sum, false);
  CHECK(gemm_choices().known.contains(product.name()));
  CHECK(product.multiply() == 2);
}

TEST_CASE("a shape that was used untimed before is timed all the same") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1, .microseconds = 5000}, {.number = 2}};
  Product product(18);
  gemm_choices().times = false;
  CHECK(product.multiply() == 1);
  gemm_choices().times = true;
  CHECK(product.multiply() == 2);
  CHECK(gemm_choices().known.contains(product.name()));
}

TEST_CASE("what all ranks have learned is taken from then on, also for shapes that were used before") {
  const Fresh fresh;
  gemm_choices().times = false;
  fake_library.proposed = {{.number = 1}, {.number = 2}};
  Product product(17);
  CHECK(product.multiply() == 1);
  gemm_choices().learn({product.name() + "\n" + text_of_algorithm(2) + "\n"});
  CHECK(product.multiply() == 2);
}

TEST_CASE("what a checkpoint holds is taken if this card and library can, else the first; nothing is timed") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1}, {.number = 2}, {.number = 3}};
  fake_library.unsuitable = {7};
  gemm_choices() = {.library = "rank 0's card"};
  int m = 20;
  const auto with = [&](const std::string& choice) {
    Product product(m++);
    gemm_choices().known[product.name()] = choice;
    return product.multiply();
  };
  CHECK(with(text_of_algorithm(3)) == 3);
  CHECK(with(text_of_algorithm(4)) == 4);  // rank 0's heuristic proposes what this one's does not
  CHECK(with(text_of_algorithm(7)) == 1);
  CHECK(with("2") == 1);
  CHECK(with("") == 1);
  CHECK(with(text_of_algorithm(3).substr(0, 12)) == 1);
  const std::string old = text_of_algorithm(3);
  fake_library.version += 1;
  CHECK(with(old) == 1);
  CHECK(Product(m++).multiply() == 1);  // not in the checkpoint
}

TEST_CASE("what is kept is the algorithm itself, under rank 0's name") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 6, .microseconds = 4000}, {.number = 5}};
  gemm_choices().library = "rank 0's card";
  Product product(30);
  product.multiply();
  REQUIRE(gemm_choices().known.size() == 1);
  const auto [name, choice] = *gemm_choices().known.begin();
  CHECK(name.starts_with("rank 0's card "));
  CHECK(choice == "130002 5 0 0 0 0 0 0 0");
}

TEST_CASE("a choice is taken also where the library proposes nothing") {
  const Fresh fresh;
  fake_library.proposed.clear();
  Product product(31);
  gemm_choices().known[product.name()] = text_of_algorithm(1);
  CHECK(product.multiply() == 1);
}

TEST_CASE("an algorithm that fails, in whatever way, is left out for good") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1}, {.number = 2}, {.number = 3, .microseconds = 4000}};
  Product product(32);
  fake_library.failing[2] = CUBLAS_STATUS_EXECUTION_FAILED;
  CHECK(product.multiply() == 1);
  fake_library.failing[1] = CUBLAS_STATUS_EXECUTION_FAILED;
  CHECK(product.multiply() == 3);
  fake_library.failing.clear();
  CHECK(product.multiply() == 3);
}

TEST_CASE("a bias that no epilogue adds is what the product starts from; a product that nobody can do says why") {
  const Fresh fresh;
  fake_library.failures[bias_epilogue] = CUBLAS_STATUS_EXECUTION_FAILED;
  check<__nv_bfloat16, __nv_bfloat16>(33, 17, 9);
  check<float, float>(33, 64, 9);
  fake_library.failures[CUBLASLT_EPILOGUE_DEFAULT] = CUBLAS_STATUS_EXECUTION_FAILED;
  const Product product(34);
  CHECK_THROWS_WITH(run(product.in, product.shape, false), "cuBLASLt can't do a matrix product of m=34 n=8 k=16: execution failed");
}

TEST_CASE("a rank that can't fuse what the others do goes its own way, and times nothing") {
  const Fresh fresh;
  gemm_choices().times = false;
  using namespace cublaslt;
  using T = __nv_bfloat16;
  GemmChoices& choices = gemm_choices();
  const auto set = [&](const std::string& name, const std::string& choice) { choices.known[choices.full_name(name)] = choice; };
  const GemmShape forward = {35, 64, 48}, dx = {.m = 35, .n = 48, .k = 64, .transpose_b = true};
  const GemmShape dweight = {.m = 48, .n = 64, .k = 35, .transpose_a = true};
  set("gelu bf16 35 64 48", "fused");
  set("gelu gradient bf16 35 48 64", "fused");
  set("bias gradient bf16 48 64 35", "fused");
  set(name_of<T, T>(forward, Epilogue::gelu), text_of_algorithm(1));
  set(name_of<T, T>(dx, Epilogue::gelu_gradient), text_of_algorithm(1));
  set(name_of<T, float>(dweight, Epilogue::column_sums), text_of_algorithm(1));
  for (int epilogue : {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_BGRADA})
    fake_library.failures[epilogue] = CUBLAS_STATUS_NOT_SUPPORTED;
  check_gelu<T>(35, 48, 64);
  Buffer<T> x(random_values<T>(35 * 48)), dout(random_values<T>(35 * 64));
  Buffer<float> sums(48 * 64), column_sums(64), workspace(linear_workspace(35, 64));
  linear_weight_gradient<T>(sums, column_sums, dout, x, 35, 48, 64, false, workspace, test_stream());
  CHECK(fake_library.ran.size() == 3);
}

TEST_CASE("where collectives may be under way a product leaves SMs to them, and its algorithm is chosen for the rest") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1, .microseconds = 5000}, {.number = 2}};
  int all = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, 0));
  REQUIRE(all == 132);
  Product product(37);
  product.multiply();
  CHECK(fake_library.blocks == 132);
  {
    const SmMargin margin(16);
    fake_library.proposed = {{.number = 1}, {.number = 2, .microseconds = 5000}};
    CHECK(product.multiply() == 1);
    CHECK(fake_library.blocks == 116);
    const SmMargin larger(100);
    product.multiply();
    CHECK(fake_library.blocks == 66);  // half of them at least
  }
  CHECK(product.multiply() == 2);
  CHECK(fake_library.blocks == 132);
  std::vector<std::string> names;
  for (const auto& [name, choice] : gemm_choices().known) names.push_back(name);
  CHECK(names == std::vector<std::string>{" product 37 8 16 0 0 0 0 0", ", margin 100 product 37 8 16 0 0 0 0 0",
                                          ", margin 16 product 37 8 16 0 0 0 0 0"});
}

TEST_CASE("a workspace that was taken back is not used any more") {
  const Fresh fresh;
  Buffer<char> lent(gemm_workspace_bytes);
  Product product(36);
  use_gemm_workspace(lent.data());
  product.multiply();
  CHECK(fake_library.workspace == lent.data());
  use_gemm_workspace(nullptr);
  product.multiply();
  const void* own = fake_library.workspace;
  CHECK(own != nullptr);
  CHECK(own != lent.data());
  use_gemm_workspace(lent.data());
  product.multiply();
  CHECK(fake_library.workspace == lent.data());
  use_gemm_workspace(nullptr);
  product.multiply();
  CHECK(fake_library.workspace == own);
}

TEST_CASE("a handle is of the device that it was made on: each device has its own") {
  const Fresh fresh;
  for (int device : {0, 1, 0}) {
    CUDA_CHECK(cudaSetDevice(device));
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const Buffer<float> a(std::vector<float>(3 * 5, 2)), b(std::vector<float>(5 * 7, 3)), d(3 * 7);
    gemm<float, float>(d, a, b, nullptr, {3, 7, 5}, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CHECK(d.get() == std::vector<float>(3 * 7, 30));
    CUDA_CHECK(cudaStreamDestroy(stream));
  }
  CUDA_CHECK(cudaSetDevice(0));
}

TEST_CASE("products in eight bits: a name for each pair of formats, and fast sums where they are asked for") {
  const Fresh fresh;
  const Operand a(32, 16, Fp8Format::e4m3, 1), b(16, 16, Fp8Format::e5m2, 2), c(16, 16, Fp8Format::e4m3, 3);
  Buffer<Float> d(32 * 16);
  for (const bool fast : {false, true})
    for (const Operand* other : {&b, &c}) {
      const GemmShape shape = {.m = 32, .n = 16, .k = 16, .transpose_b = true, .fast_sums = fast};
      matmul_fp8<Float>("matmul", d.data(), a.matrix(), other->matrix(), nullptr, shape, test_stream());
      CHECK(fake_library.fast_sums == fast);
    }
  CHECK(gemm_choices().known.size() == 4);
  CHECK_THROWS_WITH_AS(matmul_fp8<Float>("matmul", d.data(), b.matrix(), b.matrix(), nullptr, {.m = 16, .n = 16, .k = 16, .transpose_b = true},
                                         test_stream()), "cuBLASLt can't do a matrix product of m=16 n=16 k=16: not supported", std::runtime_error);
}
