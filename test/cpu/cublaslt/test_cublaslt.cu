// The host's code of the GPU's matrix products (kernels/gemm/cublaslt.h), on the CPU device, with a cuBLASLt made for
// tests (cublasLt.h here): layouts and epilogues by all the cases of test_matmul and test_fp8, then which algorithm is
// taken when, and what the next start of a program takes (runtime/cache/product_file.h).
#include <sys/stat.h>
#include <unistd.h>

#include <thread>

#include "gpt/rehearsal.cuh"
#include "runtime/cache/product_file.h"
#include "test/temporary_folder.h"
#include "test/fp8/test_fp8.cu"
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
                           {2, 4, CUBLASLT_REDUCTION_SCHEME_INPLACE, 9000},
                           {3, 4, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 9000},
                           {4, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 30000}};
  const auto taken = [](auto out, bool has_bias) {
    using namespace cublaslt;
    using T = __nv_bfloat16;
    using Out = decltype(out);
    const Buffer<T> a(random_values<T>(10 * 16)), b(random_values<T>(16 * 8)), bias(random_values<T>(8));
    const Buffer<Out> d(10 * 8);
    gemm<T, Out>(d, a, b, has_bias ? bias.data() : nullptr, {10, 8, 16}, test_stream());
    CUDA_CHECK(cudaStreamSynchronize(test_stream()));
    return fake_library.ran.back();
  };
  CHECK(taken(float(), false) == 1);  // D itself is in float
  CHECK(taken(__nv_bfloat16(), false) == 3);
  CHECK(taken(__nv_bfloat16(), true) == 4);
}

TEST_CASE("candidates are what the library proposes with the schemes that add in float and with any, each once") {
  const Fresh fresh;
  fake_library.proposed = {{.number = 1, .microseconds = 9000}, {.number = 2, .microseconds = 9000}};
  fake_library.proposed_for_any = {{.number = 2, .microseconds = 9000}, {.number = 3}};
  Product product(38);
  CHECK(product.multiply() == 3);
  REQUIRE(fake_library.ran.size() >= 13);
  for (size_t i = 0; i + 1 < fake_library.ran.size(); ++i) CHECK(fake_library.ran[i] == int(i % 3) + 1);
  fake_library.proposed.clear();  // one of the lists may be empty
  CHECK(Product(39).multiply() == 3);
  fake_library.proposed = std::move(fake_library.proposed_for_any);
  fake_library.proposed_for_any = {{.splits = 2, .scheme = CUBLASLT_REDUCTION_SCHEME_NONE}};  // which is not proposed
  CHECK(Product(40).multiply() == 3);
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
  double fastest = 1;  // of five, as other programs may have the core
  for (int number = 50; number < 55; ++number) fastest = std::min(fastest, seconds([=] { Product(number).multiply(); }));
  CHECK(fastest < 0.2);
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

// ---- from start to start

namespace {

// A start of the program: a rehearsal, then a step. Returns the number of the algorithm that the step takes.
struct Start {
  int taken = 0;
  bool timed = false;
  std::string said;
  std::map<std::string, std::string> saved;  // choices that a checkpoint gets

  Start(Product product, const std::filesystem::path& products, std::map<std::string, std::string> checkpoint = {},
        const std::string& library = gemm_library()) {
    static int starts = 0;
    gemm_choices() = {.library = library, .known = std::move(checkpoint), .lessons = 100 * ++starts};  // plans are made anew
    fake_library.ran.clear();
    Ranks alone;
    const Mesh mesh;
    said = choose_algorithms(alone, mesh, ProductFile(products.string()), [&] { product.multiply(); });
    timed = fake_library.ran.size() > 1;
    taken = product.multiply();
    saved = gemm_choices().known;
  }
};

// Number `fastest` of two is the fastest today.
void measure(int fastest) {
  fake_library.proposed = {{.number = 1, .microseconds = fastest == 1 ? 0 : 9000}, {.number = 2, .microseconds = fastest == 2 ? 0 : 9000}};
}

}  // namespace

TEST_CASE("two starts choose the same though times differ, and the second times nothing") {
  const Fresh fresh;
  const TemporaryFolder folder;
  const std::filesystem::path products = folder / "new" / "products";
  measure(2);
  const Start first(Product(50), products);
  CHECK(first.taken == 2);
  CHECK(first.said == "1 timed, kept in " + products.string());
  measure(1);
  const Start second(Product(50), products);
  CHECK(second.taken == 2);
  CHECK(!second.timed);
  CHECK(second.said == "");
  CHECK(second.saved == first.saved);
  const Start other(Product(51), products);  // another shape joins it
  CHECK(other.taken == 1);
  CHECK(other.timed);
  CHECK(other.saved.size() == 1);  // a checkpoint gets what its run asks for, and not the whole file
  CHECK(choices_in(content_of(products)).size() == 2);
  CHECK(Start(Product(50), products, {}, "another card or library").timed);
  CHECK(choices_in(content_of(products)).size() == 3);
  const SmMargin margin(16);
  CHECK(Start(Product(50), products).timed);
  CHECK(choices_in(content_of(products)).size() == 4);
}

TEST_CASE("names in the file have card, library, workspace, margin and shape") {
  const Fresh fresh;
  const TemporaryFolder folder;
  const SmMargin margin(16);
  Start(Product(52), folder / "products");
  const ProductChoices choices = choices_in(content_of(folder / "products"));
  REQUIRE(choices.size() == 1);
  CHECK(contains(choices.begin()->first, ", cuBLASLt 130002 with 32 MiB of workspace, margin 16 product 52 8 16 0 0 0 0 0"));
}

TEST_CASE("a checkpoint's choice comes before the file's, which stays as it is") {
  const Fresh fresh;
  const TemporaryFolder folder;
  measure(1);
  const Start before(Product(53), folder / "products");
  const std::string content = content_of(folder / "products");
  ProductChoices checkpoint = before.saved;
  checkpoint.begin()->second = text_of_algorithm(2);
  const Start resumed(Product(53), folder / "products", checkpoint);
  CHECK(resumed.taken == 2);
  CHECK(!resumed.timed);
  CHECK(resumed.said == "");
  CHECK(resumed.saved == checkpoint);
  CHECK(content_of(folder / "products") == content);
  Start(Product(53), folder / "other", checkpoint);  // what a checkpoint brings, nobody has timed here
  CHECK(!std::filesystem::exists(folder / "other"));
}

TEST_CASE("--products none times nothing, keeps nothing, and a resumed run goes on with the first proposals") {
  const Fresh fresh;
  const TemporaryFolder folder;
  measure(2);
  fake_library.proposed_for_any = {{.number = 3, .microseconds = 9000}, {.number = 2}};
  const Start none(Product(54), "none");
  CHECK(none.taken == 1);
  CHECK(!none.timed);
  CHECK(none.said == "");
  CHECK(!std::filesystem::exists("none"));
  CHECK(Start(Product(54), "none").taken == 1);
  const Start timed(Product(54), folder / "products");
  CHECK(timed.taken == 2);
  const Start resumed(Product(54), folder / "products", none.saved);
  CHECK(resumed.taken == 1);
  CHECK(!resumed.timed);
  CHECK(Start(Product(54), "none", timed.saved).taken == 2);
}

TEST_CASE("lines that are damaged are timed anew, left out, and told of in one line") {
  const Fresh fresh;
  const TemporaryFolder folder;
  const std::filesystem::path products = folder / "products";
  measure(2);
  Start(Product(55), products), Start(Product(56), products);
  const std::string whole = content_of(products);
  CHECK(choices_in(whole).size() == 2);
  for (const bool is_cut : {false, true}) {
    std::string damaged = whole;
    if (is_cut) damaged.resize(damaged.size() - 3);  // a disk was full
    else damaged[damaged.size() - 3] ^= 1;
    put(products, damaged);
    measure(2);
    CHECK(choices_in(damaged).size() == 1);
    CHECK(Start(Product(55), products).said == "");  // its line is whole
    const Start again(Product(56), products);
    CHECK(again.taken == 2);
    CHECK(again.said == "1 timed, kept in " + products.string() + ", without lines that were damaged");
    CHECK(content_of(products) == whole);
  }
  for (const char* noise : {"", "\n", " \t", "\t \t\n\n ", "x\ty", "0123456789abcdef \t"}) CHECK(choices_in(noise).empty());
}

TEST_CASE("a file that is something else is not touched, and one line says so") {
  const Fresh fresh;
  const TemporaryFolder folder;
  measure(2);
  put(folder / "model.safetensors", "something that took a week\n");
  const Start start(Product(57), folder / "model.safetensors");
  CHECK(start.taken == 2);
  CHECK(is_line_with(start.said, "1 timed, and not kept: ", "model.safetensors: holds something else: remove it, or give another --products"));
  CHECK(content_of(folder / "model.safetensors") == "something that took a week\n");
  CHECK(is_line_with(ProductFile(folder.path()).keep({{"name", "choice"}}), "not kept", "is not a regular file"));
  CHECK(is_line_with(ProductFile("").keep({{"name", "choice"}}), "1 timed, and not kept: neither XDG_CACHE_HOME nor HOME is set: give --products FILE"));
  CHECK(is_line_with(ProductFile(folder / "model.safetensors" / "products").keep({{"name", "choice"}}), "1 timed, and not kept", "Not a directory"));
}

TEST_CASE("a folder that may not be written to harms nothing: what is there is taken, the rest is timed at each start") {
  const Fresh fresh;
  const TemporaryFolder folder;
  measure(2);
  Start(Product(58), folder / "products");
  const std::string content = content_of(folder / "products");
  std::filesystem::remove(folder / "products.lock");
  REQUIRE(chmod(folder.path().c_str(), 0555) == 0);
  const uid_t user = geteuid();
  if (user == 0) REQUIRE(seteuid(65534) == 0);  // root may write anywhere
  const std::string said = ProductFile(folder / "products").keep({{"name", "choice"}});
  ProductChoices read = ProductFile(folder / "products").read();
  if (user == 0) REQUIRE(seteuid(0) == 0);
  REQUIRE(chmod(folder.path().c_str(), 0755) == 0);
  CHECK(is_line_with(said, "1 timed, and not kept: ", (folder / "products.lock").string() + ": cannot open: Permission denied"));
  CHECK(read.size() == 1);
  CHECK(content_of(folder / "products") == content);
}

TEST_CASE("jobs that add at the same time lose nothing, and the first choice for a name stays") {
  const TemporaryFolder folder;
  std::vector<std::thread> jobs;
  for (int job = 0; job < 4; ++job)
    jobs.emplace_back([&, job] {
      for (int i = 0; i < 25; ++i) {
        const std::string number = std::to_string(i), own = std::to_string(job) + ' ' + number;
        ProductFile(folder / "products").keep({{own, "choice"}, {"of all " + number, own}});
      }
    });
  for (std::thread& job : jobs) job.join();
  const std::string content = content_of(folder / "products");
  CHECK(choices_in(content).size() == 4 * 25 + 25);
  CHECK(std::ranges::count(content, '\n') == 1 + 4 * 25 + 25);
  ProductFile(folder / "products").keep({{"of all 7", "another"}});
  CHECK(content_of(folder / "products") == content);
}

TEST_CASE("the user's file is in XDG_CACHE_HOME, else in HOME") {
  const std::optional<std::string> home = std::getenv("HOME") ? std::optional<std::string>(std::getenv("HOME")) : std::nullopt;
  setenv("HOME", "/home/her", 1);
  for (const char* cache : {"", "relative", "/caches"}) {
    setenv("XDG_CACHE_HOME", cache, 1);
    CHECK(user_products() == (*cache == '/' ? "/caches/gpt.cu/products" : "/home/her/.cache/gpt.cu/products"));
  }
  unsetenv("XDG_CACHE_HOME"), unsetenv("HOME");
  CHECK(user_products() == "");
  if (home) setenv("HOME", home->c_str(), 1);
}
