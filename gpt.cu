// The model for one storage type: the Makefile compiles this file with -DSTORAGE_TYPE=fp32, bf16 and fp16.
#include "gpt.cuh"

namespace {

using fp32 = float;
using bf16 = __nv_bfloat16;
using fp16 = __half;

std::unique_ptr<Model> make(const ModelOptions& options, Communicator& dp, cudaStream_t stream) {
  return std::make_unique<GPT<STORAGE_TYPE>>(options, dp, stream);
}

[[maybe_unused]] const bool registered = model_makers().emplace(dtype_name<STORAGE_TYPE>, make).second;

}  // namespace
