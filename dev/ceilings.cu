// Prints what this device can do at best (dev/ceilings.cuh), for `train_gpt --profile --ceilings FILE` and
// dev/bench.py:
//
//   make build/gpu/ceilings && build/gpu/ceilings > ceilings.json
#include <cstdio>

#include "dev/ceilings.cuh"

namespace {

// One line of JSON (runtime/ceilings.h reads it).
void measure() {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double copy = ceilings::copy_rate(stream);
  const ceilings::ProductRate fp32 = ceilings::product_rate<float>(stream),
                              bf16 = ceilings::product_rate<__nv_bfloat16>(stream),
                              fp16 = ceilings::product_rate<__half>(stream);
  std::printf(R"({"device": "%s", "copy_bytes_per_s": %.4g, )"
              R"("flops_per_s": {"fp32": %.4g, "bf16": %.4g, "fp16": %.4g}, )"
              R"("copied_bytes": %zu, "sides": {"fp32": %d, "bf16": %d, "fp16": %d}})" "\n",
              properties.name, copy, fp32.flops, bf16.flops, fp16.flops, ceilings::copy_bytes, fp32.side, bf16.side,
              fp16.side);
  CUDA_CHECK(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  try {
    measure();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ceilings: %s\n", error.what());
    return 1;
  }
}
