// Kernels whose rows one thread computes on the CPU device (row_lanes, kept_row_block in cpu/instructions.h), with the lanes, packs
// and blocks that a GPU has (-DCPU_LIKE_A_GPU): all cases of these tests, which `make test` runs with the device's own, too.
#include "test/test_cross_entropy.cu"
#include "test/test_layernorm.cu"
