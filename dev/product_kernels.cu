// All kernels whose matrix products are Hopper's asynchronous ones, in every type and head size that is compiled, for
// dev/wgmma_hazards.py. Only their machine code is made, no program:
//
//   make DEVICE=gpu ARCHS=90a build/gpu/product_kernels.cubin
#include "dev/ladders/matmul_wgmma.cuh"
#include "extensions/hopper/kernels/hopper_attention_backward.cuh"

template <class Float>
void instantiate_product_kernels() {
  const QkvHeads<const Float> qkv{};
  hopper_attention_forward<Float>({}, nullptr, qkv, {}, nullptr);
  hopper_attention_backward<Float, Float>({}, nullptr, nullptr, {}, {}, qkv, nullptr, {}, nullptr);
  hopper_attention_backward<Float, float>({}, nullptr, nullptr, {}, {}, qkv, nullptr, {}, nullptr);  // of a ring of ranks
  matmul_wgmma<wgmma_rung::SharedTile, Float>(nullptr, nullptr, nullptr, 1, 1, 1, nullptr);
  matmul_wgmma<wgmma_rung::SharedByTwo, Float>(nullptr, nullptr, nullptr, 1, 1, 1, nullptr);
  matmul_wgmma<wgmma_rung::TileEach, Float>(nullptr, nullptr, nullptr, 1, 1, 1, nullptr);
}

template void instantiate_product_kernels<__nv_bfloat16>();
template void instantiate_product_kernels<__half>();
