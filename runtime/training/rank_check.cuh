// `--check-ranks`: before training starts, each rank times a matrix product, a copy in its memory and its link to the
// next rank. Slow ranks are named, because one slow GPU or cable slows the whole job, and nothing else says which one.
//
//   product  (2048)³ in the storage type on a GPU, FLOP/s = 2·2048³ / time
//   copy     64 MiB, bytes read and written / time
//   link     16 MiB to the next rank and 16 MiB from it, one pair at a time, bytes each way / time
#pragma once

#include <string>

#include "parallel/collectives.cuh"
#include "parallel/processes/control.h"

// dtype: fp32, bf16 or fp16. Called by all ranks; rank 0 prints. NCCL connects neighbours for it and takes memory, so
// it comes before a model is built.
void check_ranks(const std::string& dtype, Control& control, Communicator& communicator, cudaStream_t stream);
