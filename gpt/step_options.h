// The work of a training step, and how ranks split it: the options that a plan's forecast reads, and that
// its search chooses. Names and values as on the command line.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "gpt/deal.h"
#include "gpt/shapes.h"
#include "gpt/sm_options.h"

// The bits of a code by its name; 0: it is none.
inline int code_bits(const std::string& name) { return name == "int8" ? 8 : name == "int4" ? 4 : 0; }

// What is trained beside the model's own weights, which then stay as they are.
struct LoraOptions {
  int rank = 0;  // 0: there are no adapters, and all tensors of the model are trained
  double alpha = 0;
  std::vector<std::string> modules = {};  // the layers of a block that have adapters, by PEFT's names, in order

  bool is_on() const { return rank > 0; }
  bool operator==(const LoraOptions&) const = default;
  std::string text() const { return is_on() ? concat("rank ", rank, ", alpha ", alpha, ", ", joined(modules)) : "off"; }
};

// How groups of ranks that train apart average their weights.
struct OuterOptions {
  int local_steps = 0;  // H: updates between two outer steps; 0: there are none
  double lr = 0.7, momentum = 0.9;
  std::string dtype = "fp32";  // of messages between islands: fp32, int8 or int4
  int delay = 0;               // N: updates that an island makes meanwhile, less than H

  bool is_on() const { return local_steps > 0; }
  int bits() const { return code_bits(dtype); }
};

struct StepOptions {
  ModelShape shape = {};  // which the options for it, the data and --init decide together (gpt/setup.cuh)
  MeshShape mesh = {};    // dp follows from the number of ranks (complete_options)
  std::vector<int> shares = {};  // of the micro-batches of a step, one for each data-parallel rank; empty: all have the same
  bool measures_shares = false;  // they follow from the ranks' speed
  int seq_len = 0, micro_batch = 4, global_batch = 0;
  std::string dtype = "fp32", reduce_dtype = "fp32", recompute = "none", attention = "auto";
  std::string compress = "none", compress_weights = "none", compress_where = "all";  // gradients and weights on their way
  int ranks_per_host = 1;         // where it matters here, or on the cluster that is planned for
  bool stochastic_rounding = false;
  std::string moments = "fp32", offload = "none";  // offload: a list with commas
  bool fp8 = false;
  std::string fp8_gradients = "e5m2", fp8_scale = "tensor";
  int fp8_keep = 1;
  LoraOptions lora = {};
  OuterOptions outer = {};
  int zero = 0, tp_pieces = 1, pp_chunks = 1;
  int delay = 0;  // steps after which gradients are applied
  SmOptions sms;
  std::string cp_method = "ring", pp_schedule = "1f1b";
  bool generate = false;  // a room's command runs instead of training (gpt/command.h)

  bool offloads(const std::string& what) const {
    return offload != "none" && (',' + offload + ',').find(',' + what + ',') != std::string::npos;
  }
  // Of a gradient on its way to other ranks; 0: it is not sent as a code.
  int compressed_bits() const { return code_bits(compress); }
  // R of "powersgd:R", of the factors that gradients travel as; 0: they do not.
  int low_rank() const { return compress.starts_with("powersgd:") ? std::stoi(compress.substr(9)) : 0; }
  bool compresses_gradients() const { return compress != "none"; }
  bool compresses() const { return compresses_gradients() || compress_weights != "none"; }
  // Neighbouring data-parallel ranks between which nothing is compressed, on a cluster that a plan is for.
  int ranks_inside() const {
    const int ranks = mesh.cp * mesh.dp, neighbours = compress_where == "hosts" ? ranks_per_host / mesh.tp : 1;
    return neighbours > 0 && neighbours < ranks && ranks % neighbours == 0 ? neighbours : 1;
  }
  int64_t rows() const { return int64_t(micro_batch) * (seq_len / mesh.cp); }  // of a micro-batch, on a rank
  int parts_of_a_sample() const { return mesh.cp == 1 ? 1 : cp_method == "ring" ? 2 * mesh.cp : mesh.cp; }  // that --cp cuts
  double tokens() const { return double(global_batch) * seq_len; }              // of a step, of all islands
  // Factor of each token's loss. In training an island's loss is the mean over its own tokens.
  double loss_weight(bool training) const { return (training ? mesh.islands : 1) / tokens(); }
  int64_t all_shares() const { return std::accumulate(shares.begin(), shares.end(), int64_t(0)); }
  Deal deal() const;                                                            // of the micro-batches of a step
  // A rank's number among the data-parallel ranks of all islands.
  int batch_rank(const MeshPlace& place) const { return place.dp + mesh.dp * place.island; }
  // Micro-steps of one of these ranks in a step. With ZeRO 2 and 3 all ranks meet in each micro-step.
  int micro_steps(int batch_rank) const { return zero >= 2 ? deal().most() : deal().of_rank(batch_rank); }
  // Of a rank in a step; with shares, of the one that has most.
  int micro_batches() const { return shares.empty() ? global_batch / (micro_batch * mesh.batches()) : deal().most(); }
};

// The divisors of a number that are at most `most`, in order.
std::vector<int> divisors(int number, int most);
// "1, 2, 3 or 6": those from `least` on.
std::string divisors_text(int number, int least = 1);
// The end of a line about a sequence length that is no multiple of `divisor`, as `flag` would have it.
std::string cure_of_seq_len(const StepOptions& o, const std::string& flag, int divisor);

// The problem with the samples of a step and the schedule, on this mesh; empty: there is none.
std::string batch_problem(const StepOptions& o);

// The problem with the model's shape, or why these ranks cannot split it and its micro-batches; empty: there is none.
std::string shape_problem(const StepOptions& o);
