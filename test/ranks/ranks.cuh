// For tests that several ranks run together, under mpirun (test/run.sh): every rank runs every test case, rank 0
// reports.
//
// What must hold is checked on every rank. A rank that leaves a test case early would let the others wait for ever: the
// watchdog ends the job then.
#pragma once

#define DOCTEST_CONFIG_IMPLEMENT
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "gpt/launch.h"
#include "gpt/mesh.cuh"
#include "gpt/ranks.h"
#include "test/kernel_test.cuh"
#include "test/run_cases.h"
#include "test/turns.h"

struct RanksOfTest {
  Ranks& all;
  // On GPUs a product may have other bits where it leaves multiprocessors free, and many tests compare bits of two meshes.
  Mesh mesh{all, {.dp = all.size()}, take_device(all, true), {.sms = {.margin = 0}}};
  explicit RanksOfTest(Ranks& started) : all(started) {
    all.watch(300, 600);  // seconds: a rank that hangs ends the job in the end, and one on a loaded machine does not
    all.meanwhile([] { is_ready(test_stream()); });
  }
};

inline RanksOfTest* ranks_of_test = nullptr;  // ended by hand, not by a destructor
inline RanksOfTest& ranks() { return *ranks_of_test; }

// Gathers all ranks' values, in the order of ranks.
inline std::vector<float> all_values(const std::vector<float>& mine) {
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(float));
  std::string all;
  for (const std::string& part : ranks().all.all_gather(bytes)) all += part;
  std::vector<float> values(all.size() / sizeof(float));
  std::memcpy(values.data(), all.data(), all.size());
  return values;
}

// Returns on all ranks what rank 0 computes.
template <class Compute>
std::vector<float> from_rank_0(Compute compute) {
  return all_values(ranks().all.rank() == 0 ? compute() : std::vector<float>());
}

// Bytes that left this rank so far; 0 where nobody counts them.
inline double transport_bytes() {
#ifdef __NVCC__
  return 0;
#else
  return double(cpu::nccl_bytes_sent());
#endif
}

// What has been given to streams so far, a group of calls being one; 0 where nobody counts.
inline double nccl_operations() {
#ifdef __NVCC__
  return 0;
#else
  return double(cpu::nccl_operations());
#endif
}

// A case without an assertion on this rank may have one on another.
inline void keep_empty_on_all_ranks() {
  std::string mine;
  for (const std::string& name : cases.empty) mine += name + "\n";
  const std::vector<std::string> lists = ranks().all.all_gather(mine);
  cases.passed += int(std::erase_if(cases.empty, [&](const std::string& name) {
    return !std::ranges::all_of(lists, [&](const std::string& list) { return list.find(name + "\n") != std::string::npos; });
  }));
}

int main(int argc, char** argv) {
  Ranks alone;
  Ranks* reporter = &alone;
  try {
    const Launch launch = find_launch();
    if (launch.size == 1) throw std::runtime_error("needs several ranks: mpirun -np 3 " + std::string(argv[0]));
    prepare_cuda(launch);
    Ranks& all = *connect_ranks(launch).release();
    reporter = &all;
    ranks_of_test = new RanksOfTest(all);
    doctest::Context context(argc, argv);
    select_file(context, argv[0]);
    std::ostringstream log;  // of ranks whose success goes without saying
    if (all.rank()) context.setCout(&log);
    context.setOption("no-colors", true);
    const int failed = run_cases(context, all.rank() ? log : std::cout, keep_empty_on_all_ranks);
    if (failed && all.rank()) std::fprintf(stderr, "rank %d: %s\n", all.rank(), log.str().c_str());
    std::string others;
    const std::vector<std::string> results = all.all_gather(std::to_string(failed));
    for (int rank = 1; rank < all.size(); ++rank)
      if (results[size_t(rank)] != "0") others += " " + std::to_string(rank);
    if (all.rank() == 0 && !others.empty()) std::printf("failed on ranks%s\n", others.c_str());
    all.meanwhile([] {});  // the device needs MPI
    end_mpi();
    all.finish();
    std::fflush(stdout);
    _exit(failed || !others.empty());
  } catch (const std::exception& error) {
    reporter->fail(error.what());
  }
}
