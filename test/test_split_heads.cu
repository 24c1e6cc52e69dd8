// Heads that are split between ranks, exactly: elements are numbers that every type has.
#include "kernels/attention/split_heads.cuh"
#include "test/kernel_test.cuh"

TEST_CASE_TEMPLATE("heads are split into a message for each rank, and joined again", T, float, __nv_bfloat16, __half) {
  for (int ranks : {1, 2, 3, 8})
    for (int parts : {1, 3})
      for (int width : {1, 17, 64}) {  // channels of a rank
        if (!large_shapes && ranks > 2) continue;
        CAPTURE(ranks);
        CAPTURE(parts);
        CAPTURE(width);
        const int channels = ranks * width;
        const size_t rows = 5, count = rows * parts * channels;
        const std::vector<T> values = random_integers<T>(count, 100);
        std::vector<T> expected(count);
        for (size_t row = 0; row < rows; ++row)
          for (int part = 0; part < parts; ++part)
            for (int c = 0; c < channels; ++c)
              expected[((c / width * rows + row) * parts + part) * width + c % width] =
                  values[(row * parts + part) * channels + c];
        Buffer<T> tensor(values), messages(count), again(count);
        split_heads<T>(messages, tensor, rows, parts, channels, ranks, test_stream());
        join_heads<T>(again, messages, rows, parts, channels, ranks, test_stream());
        CHECK(same_bits(messages.get(), expected));
        CHECK(same_bits(again.get(), values));
      }
}

TEST_CASE("heads are moved at the price of a copy") {
  Buffer<__nv_bfloat16> tensor(std::vector<__nv_bfloat16>(5 * 96)), messages(tensor.size());
  Profiler::instance().enabled = true;
  Profiler::instance().collect();
  split_heads<__nv_bfloat16>(messages, tensor, 5, 3, 32, 2, test_stream());
  join_heads<__nv_bfloat16>(tensor, messages, 5, 3, 32, 2, test_stream());
  auto totals = Profiler::instance().collect();
  Profiler::instance().enabled = false;
  CHECK(totals["split_heads"].bytes == 4 * 5 * 96);
  CHECK(totals["join_heads"].bytes == 4 * 5 * 96);
}
