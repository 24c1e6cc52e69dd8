// Heads that are split between ranks, exactly: elements are numbers that every type has.
#include "extensions/context_parallel/kernels/split_heads.cuh"
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
        swap_axes<T>("split_heads", messages, tensor, rows * parts, ranks, width, test_stream());
        const Buffer<float> maximum(std::vector<float>(1));
        swap_axes<T>("join_heads", again, messages, ranks, rows * parts, width, test_stream(), maximum.data());
        CHECK(same_bits(messages.get(), expected));
        CHECK(same_bits(again.get(), values));
        if (std::is_same_v<T, __nv_bfloat16>) check_maximum(maximum.numbers()[0], again.numbers());
      }
}

TEST_CASE_TEMPLATE("runs of samples are joined from the ranks' messages, and split again", T, float, __nv_bfloat16, __half) {
  for (int ranks : {2, 3})
    for (int samples : {1, 2, 5})
      for (size_t run : {size_t(1), size_t(51), size_t(256 + 64)}) {  // elements
        CAPTURE(ranks);
        CAPTURE(samples);
        CAPTURE(run);
        const size_t count = size_t(ranks * samples) * run;
        const std::vector<T> values = random_integers<T>(count, 100);
        std::vector<T> expected(count);
        for (size_t rank = 0; rank < size_t(ranks); ++rank)
          for (size_t sample = 0; sample < size_t(samples); ++sample)
            for (size_t i = 0; i < run; ++i)
              expected[(sample * size_t(ranks) + rank) * run + i] = values[(rank * size_t(samples) + sample) * run + i];
        Buffer<T> messages(values), heads(count), again(count);
        swap_axes<T>("join_runs", heads, messages, ranks, samples, run, test_stream());
        swap_axes<T>("split_runs", again, heads, samples, ranks, run, test_stream());
        CHECK(same_bits(heads.get(), expected));
        CHECK(same_bits(again.get(), values));
      }
}

TEST_CASE("heads are moved at the price of a copy") {
  Buffer<__nv_bfloat16> tensor(std::vector<__nv_bfloat16>(5 * 96)), messages(tensor.size());
  Profiler::instance().enabled = true;
  Profiler::instance().collect();
  swap_axes<__nv_bfloat16>("split_heads", messages, tensor, 5 * 3, 2, 16, test_stream());
  swap_axes<__nv_bfloat16>("join_heads", tensor, messages, 2, 5 * 3, 16, test_stream());
  auto totals = Profiler::instance().collect();
  Profiler::instance().enabled = false;
  CHECK(totals["split_heads"].bytes == 4 * 5 * 96);
  CHECK(totals["join_heads"].bytes == 4 * 5 * 96);
}
