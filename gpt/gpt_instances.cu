// The model for one storage type: the Makefile compiles this file with -DSTORAGE_TYPE=fp32, bf16 and fp16.
#include "gpt/stage.cuh"

using fp32 = float;
using bf16 = __nv_bfloat16;
using fp16 = __half;

// No name is in an anonymous namespace: nvcc would give all objects of this file the same ones.
template <class T>
std::unique_ptr<Model> make_gpt(const ModelOptions& options, Mesh& mesh, cudaStream_t stream) {
  return std::make_unique<StageModel<T>>(options, mesh, stream);
}

[[maybe_unused]] static const bool registered =
    model_makers().emplace(dtype_name<STORAGE_TYPE>, make_gpt<STORAGE_TYPE>).second;
