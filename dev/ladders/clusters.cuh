// Clusters of blocks, whose instructions extensions/hopper/kernels/hopper.cuh wraps. No kernel of the program has them: a rung
// of the ladder of matrix products does.
#pragma once

#include "extensions/hopper/kernels/hopper.cuh"

// Launches a kernel whose blocks are clusters; `blocks`, the number of all blocks, is a multiple of a cluster's size.
template <class... Parameters>
void launch_clusters(int blocks_in_cluster, void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes,
                     cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(blocks_in_cluster), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = blocks;
  launch.blockDim = threads;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, arguments...));
}
