// `--check-sync`: do all ranks still hold the same of what is replicated? A faulty device or a missing synchronisation
// lets copies drift apart silently; checksums (kernels/statistics.cuh) of every tensor name the rank and the tensor.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include "processes/control.h"
#include "parallel/parameters.h"

// Called by all ranks after `step` updates; fails on all of them alike. The model's work is on `stream`.
void check_sync(Control& control, Parameters& parameters, size_t step, cudaStream_t stream);
