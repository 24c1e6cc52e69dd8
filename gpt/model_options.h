// The options that a model is built with, and the batch that it is given for a pass.
#pragma once

#include <optional>
#include <string>

#include "gpt/actions.h"
#include "gpt/parameters.h"
#include "gpt/shapes.h"
#include "gpt/step_options.h"
#include "gpt/tokens.h"
#include "kernels/positions.h"

// Which activations backward computes again instead of keeping them from forward: none; gelu's output (4C of the 16C
// elements per row and layer); all activations of a block except its input (C elements per row).
enum class Recompute { none, gelu, block };

// Bytes of workspace that libraries take on a device that is not here, for a plan (runtime/planner/memory.cuh).
struct LibraryWorkspaces {
  size_t gemm, attention;
};

struct ModelOptions {
  ModelShape shape = {};
  int micro_batch = 0, seq_len = 0;
  Recompute recompute = Recompute::none;
  int tp_pieces = 1;               // pieces of rows that tensor parallelism sends (extensions/tensor_parallel/tensor_parallel.cuh)
  int chunks = 1;                  // of layers, which each stage has (gpt/actions.h)
  int slots = 1;                   // pairs of micro-batch and chunk that can wait for their backward at the same time
  bool splits_backward = false;    // the schedule has actions of Work::input and Work::weight
  int logit_chunks = 1;            // the head computes ⌈R / logit_chunks⌉ rows at a time
  int cached_positions = 0;        // in the cache of keys and values that text is generated with; 0: no cache
  int samples = 0;                 // texts that are generated at the same time, at most micro_batch
  std::string attention = "own";   // who computes it, as --attention names them (gpt/attention.cuh)
  std::optional<LibraryWorkspaces> elsewhere = {};
  StoreOptions store = {};
  LoraOptions lora = {};
};

// A micro-batch in the device's memory (gpt/batch_buffers.cuh puts it there).
struct Batch {
  Tokens tokens = {};              // for the first and last chunk
  int batch_size = 0;              // B
  Positions positions = {};        // of the rows, T for each sample
  bool first = true, last = true;  // is it the first, the last of the step's micro-batches on this rank?
  bool training = true;            // backward will follow
  bool empty = false;              // this rank has none in this micro-step, and only meets the others (ZeRO 2 and 3)
  Action action = {Work::forward, 0};  // the work to be done with it, and where its activations are kept until backward
  int cached = 0, added = 0;       // text: tokens of each text that are in the cache, and tokens that this pass adds
  float loss_weight = 0;           // factor of each token's loss: 1 / (tokens of the step on all ranks); 0: compute no loss
};
