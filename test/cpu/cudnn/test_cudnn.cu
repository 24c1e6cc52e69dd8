// The host's code of attention by cuDNN (extensions/cudnn/kernels/attention.cpp) with a library made for tests
// (cudnn_frontend.h), against float64.
#include "extensions/cudnn/kernels/attention.cpp"

#include "test/attention_reference.h"
#include "test/kernel_test.cuh"

namespace {

// Plans and computes packed attention of these sizes, and compares with the reference.
template <class T>
void check_library(const AttentionSizes& s) {
  CAPTURE(s.queries);
  const int C = s.channels();
  const AttentionStrides strides = packed_strides(s.queries, C);
  CHECK_FALSE(library_attention_is_planned<T>(s, strides));
  REQUIRE_EQ(plan_library_attention<T>(s, strides), "");
  CHECK(library_attention_is_planned<T>(s, strides));
  const size_t rows = size_t(s.batch) * s.queries;
  const std::vector<T> qkv = random_values<T>(rows * 3 * C), dout = random_values<T>(rows * C, 1, 0, 2);
  const Buffer<T> x(qkv), d_out(dout), out(rows * C), dx(rows * 3 * C);
  const Buffer<float> lse(rows * s.heads);
  const QkvHeads<const T> packed = packed_qkv<const T>(x.data(), s.queries, C);
  library_attention_forward(packed_heads(out.data(), s.queries, C), lse.data(), packed, s, test_stream(), {});
  library_attention_backward(packed_qkv(dx.data(), s.queries, C), packed_heads<const T>(d_out.data(), s.queries, C),
                             packed_heads<const T>(out.data(), s.queries, C), packed, lse.data(), s, test_stream(), {});
  const AttentionReference wanted = attention_reference(as_double(qkv), as_double(dout), s);
  CHECK_CLOSE(lse.numbers(), wanted.lse, 1, 1e-6);
  CHECK_WITHIN("out", worst_excess(out.numbers(), wanted.out, wanted.out_terms, rounding<T>, 1e-6), 1.0);
  CHECK_WITHIN("dqkv", worst_excess(dx.numbers(), wanted.dqkv, wanted.dqkv_terms, 2 * rounding<T>, 1e-6), 1.0);
}

}  // namespace

TEST_CASE_TEMPLATE("cuDNN: forward and backward, from one workspace", T, __nv_bfloat16, __half) {
  check_library<T>(square_attention(2, 37, 3, 16));
  check_library<T>(square_attention(1, 64, 2, 64));
  CHECK(take_library_attention_workspace_bytes() == 4096);
  CHECK(take_library_attention_workspace_bytes() == 0);
  CHECK(plan_library_attention<T>(square_attention(2, 37, 3, 16), packed_strides(37, 48)) == "");
  CHECK(take_library_attention_workspace_bytes() == 4096);  // another model's, of the same shape
}

TEST_CASE("cuDNN: backward is deterministic, and a shape is planned once for each number of SMs") {
  AttentionSizes s = square_attention(1, 16, 1, 16);
  fake_frontend = FakeFrontend();
  const auto plan = [&] { return plan_library_attention<__nv_bfloat16>(s, packed_strides(16, 16)); };
  CHECK(plan() == "");
  CHECK(plan() == "");
  CHECK(fake_frontend.built == 2);  // forward and backward
  CHECK(fake_frontend.deterministic == 1);
  const SmMargin leaves(1);
  CHECK_FALSE(library_attention_is_planned<__nv_bfloat16>(s, packed_strides(16, 16)));
  CHECK(plan() == "");
  CHECK(fake_frontend.sm_counts == std::vector<int>{0, 0, persistent_blocks(), persistent_blocks()});
  fake_frontend = FakeFrontend();
  fake_frontend.can_leave_sms = false;
  s.batch = 2;
  CHECK(plan() == "");  // by an engine that takes all
  CHECK(fake_frontend.sm_counts == std::vector<int>{0, 0});
}
