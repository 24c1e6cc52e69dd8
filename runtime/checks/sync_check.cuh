// `--check-sync`: are tensors that several ranks hold still the same on all of them? A faulty device or a missing
// synchronisation makes the copies differ without any error. Checksums of every tensor (runtime/checks/kernels/statistics.cuh) find
// the rank and the tensor.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include "gpt/mesh.cuh"
#include "gpt/parameters.h"
#include "gpt/ranks.h"

// Collective. To be called after `step` updates; if ranks of the mesh differ, it fails on all of them. The model runs on `stream`.
void check_sync(Ranks& ranks, const Mesh& mesh, Parameters& parameters, size_t step, cudaStream_t stream);
