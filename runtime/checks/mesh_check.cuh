// `--check-mesh`: does this mesh compute the same as one rank? Before the run begins, all ranks together train three
// steps of a smaller job, with the options of the run. Each rank trains the same three steps once more on its own
// device, alone, and compares: losses, norms, and the elements that it keeps: of every tensor's gradient after the
// first step (before clipping) and of every tensor's weights after the third. So no tensor travels, and elements that
// several ranks hold are compared on each of them.
//
// The job has fewer layers and micro-batches, and fewer heads if one rank's memory asks for it. Biases begin with
// random numbers, as zeros would hide mistakes. The learning rate is constant and at most 3e-4, as larger ones amplify
// roundings. The loss scale of fp16 is at most 1024, so that no update is left out.
//
// The bound for rounding errors is relative to the tensor's L2 norm, and follows from the arithmetic (test/README.md).
// C channels, V vocabulary, L layers, N ranks that share gradients; k is the number of terms of a product: the largest
// of 4C, V and the step's tokens.
//
//   fp32      loss, norm   1e-5: the design's promise for every mesh
//             gradient     e = 3 · 2.4e-8·√k · √(24L + 4): the error of a product, times the root of the number of
//                          products before a gradient, in two computations; times 3, as small tensors are worse
//   16 bits   all          twice the distance between one rank's steps in this type and in fp32; with --reduce-dtype
//                          bf16 another 2 · 0.17 % · √N. This may be small by chance, so the bound is at least:
//             loss         a quarter of a rounding, as in test_model
//             norm         the bound of all gradients together, by the triangle inequality
//             gradient     as in fp32
//   weights                at least 6·lr·(√(0.8·e·n) + 2), where n is the tensor's number of elements, and e the bound
//                          of all gradients. AdamW's first updates are about ±lr for a gradient of any size. The sign
//                          is open where a gradient is smaller than its error: for 0.8·e of normally distributed
//                          ones. Three updates of the other sign are 6·lr apart. The root of a count has a standard
//                          deviation of 1/2, so 2 is four of them
//
// The key third of c_attn.bias has a gradient of zero in theory, and of noise in practice. So its gradient is compared
// with the norm of the whole bias, and its weights are not compared.
#pragma once

#include "gpt/batches.cuh"

// Fails on all ranks with the first difference in the order of computation. job.options are complete, their shape too;
// they are not changed. No device memory stays allocated, and no file is written. Collective; rank 0 prints.
void check_mesh(Job& job, const Datasets& data);
