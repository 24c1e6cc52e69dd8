// Times the collectives that training waits for, between all ranks: all_gather, reduce_scatter and all_reduce, by size.
//
//   make DEVICE=gpu build/gpu/collectives && GPT_PROGRAM=build/gpu/collectives dev/cluster/torchrun.sh 8
//
// NCCL moves data by blocks that occupy multiprocessors. NCCL_MIN_CTAS=8 NCCL_MAX_CTAS=8 makes it take exactly 8, so that
// one sees how many are enough: all others can compute at the same time.
//
// A row is the median of 21 rounds on the slowest rank. Bandwidths are defined as in nccl-tests: with S bytes of the
// whole array (on a rank after all_gather, before reduce_scatter, before and after all_reduce) in t seconds on N ranks,
//
//   bus bandwidth = S/t · (N−1)/N for all_gather and reduce_scatter, twice that for all_reduce
//
// is the rate at which each rank's link works, if no byte travels more often than necessary.
#include <cstdio>

#include "dev/ladders/ranks/world.cuh"
#include "dev/random_buffer.cuh"
#include "gpt/launch.h"

namespace {

using Float = __nv_bfloat16;

struct Collective {
  const char* name;
  double passes;  // of the bytes through a link
  // whole: S bytes; part: S/N bytes; into: S bytes
  void (*launch)(Float* into, const Float* from, size_t whole, size_t part, ncclComm_t comm, cudaStream_t stream);
};

const Collective collectives[] = {
    {"all_gather", 1, [](Float* into, const Float* from, size_t, size_t part, ncclComm_t comm, cudaStream_t stream) {
       NCCL_CHECK(ncclAllGather(from, into, part, ncclBfloat16, comm, stream));
     }},
    {"reduce_scatter", 1, [](Float* into, const Float* from, size_t, size_t part, ncclComm_t comm, cudaStream_t stream) {
       NCCL_CHECK(ncclReduceScatter(from, into, part, ncclBfloat16, ncclSum, comm, stream));
     }},
    {"all_reduce", 2, [](Float* into, const Float* from, size_t whole, size_t, ncclComm_t comm, cudaStream_t stream) {
       NCCL_CHECK(ncclAllReduce(from, into, whole, ncclBfloat16, ncclSum, comm, stream));
     }}};

void measure(ladder::World& world) {
  const double n = world.size();
  const std::vector<size_t> sizes = ladder::is_gpu ? std::vector<size_t>{1 << 20, 8 << 20, 64 << 20, 512 << 20}
                                                   : std::vector<size_t>{64 << 10, 1 << 20};
  if (world.rank() == 0) std::printf("%-16s %12s %12s %12s   (%d ranks, bf16)\n", "collective", "MiB", "µs", "bus GB/s", world.size());
  for (const Collective& collective : collectives)
    for (size_t bytes : sizes) {
      const size_t part = bytes / sizeof(Float) / size_t(world.size()), whole = part * size_t(world.size());
      const RandomBuffer<Float> from(whole);
      Buffer<Float> into(whole);
      const double seconds = world.time([] {}, [&] {
        collective.launch(into, from, whole, part, world.comm(), world.stream());
      }).median;
      if (world.rank() > 0) continue;
      std::printf("%-16s %12.3f %12.1f %12.2f\n", collective.name, double(bytes) / (1 << 20), 1e6 * seconds,
                  collective.passes * double(whole * sizeof(Float)) * (n - 1) / n / seconds / 1e9);
      std::fflush(stdout);
    }
}

}  // namespace

int main(int count, char** arguments) {
  std::unique_ptr<Ranks> ranks;
  try {
    const bool share_gpu = count == 2 && std::string(arguments[1]) == "--share-gpu";
    if (count > 1 && !share_gpu) fail(excerpt(arguments[1]), ": the only option is --share-gpu (several ranks on a GPU)");
    ranks = connect_ranks(find_launch());
    ranks->watch(60, 120);
    {
      ladder::World world(*ranks, share_gpu);
      measure(world);
    }
    end_mpi();
    ranks->finish();
    return 0;
  } catch (const std::exception& error) {
    if (ranks) ranks->fail(error.what());
    std::fprintf(stderr, "collectives: %s\n", error.what());
    return 1;
  }
}
