// `--check-ranks`: before training starts, each rank times a matrix product, a copy in its memory and its link to the
// next rank. Slow ranks are named, because one slow GPU or cable slows the whole job, and nothing else says which one.
//
//   product  (2048)³ in the storage type on a GPU, FLOP/s = 2·2048³ / time
//   copy     64 MiB, bytes read and written / time
//   link     16 MiB to the next rank and 16 MiB from it, one pair at a time, bytes each way / time
//
// A link between GPUs of two hosts that is too slow for any training is refused: most likely NCCL has not found the fast
// network.
#pragma once

#include <string>
#include <vector>

#include "gpt/job.cuh"
#include "runtime/checks/options.h"

struct RankSpeed {
  double product, copy, link;  // FLOP/s, bytes/s, bytes/s
};

// dtype: fp32, bf16 or fp16. Called by all ranks; rank 0 prints. Links are timed with a communicator of their own; its
// memory is freed afterwards. refuses: fails if a link between hosts is too slow. Returns this rank's speed.
RankSpeed check_ranks(const Job& job, const std::string& dtype, bool refuses);

// The speed of this rank in the run's storage type, which the first call measures. It refuses slow links if --check-ranks was
// given.
inline const RankSpeed& speed_of_rank(const Job& job) {
  static const RankSpeed speed = check_ranks(job, job.options.dtype, job.options.of<CheckOptions>().ranks);
  return speed;
}

// NCCL tells the name of its network only in its log. Makes NCCL write one, unless NCCL_DEBUG asks for it elsewhere. To
// be called before NCCL's first call.
void note_network();

// Describes a problem of the links between hosts; empty: none. links: bytes/s from each rank to the next; hosts: the
// name of each rank's host; network: its name; empty: not known.
std::string network_problem(const std::vector<double>& links, const std::vector<std::string>& hosts, const std::string& network);
