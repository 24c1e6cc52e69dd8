// Runs grids, and implements the functions that kernels call: barriers, shuffles, votes, reductions. cpu/README.md
// follows one launch through it; cpu/block.h runs the threads of a block.
#include "cpu/device.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "cpu/block.h"
#include "cpu/workers.h"

constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};

namespace cpu {

using counting::Event, counting::record;

constinit thread_local bool plain_loop = false;

void fatal(const char* format, ...) {
  static std::mutex once;
  once.lock();  // and never unlocked: the first thread ends the program
  va_list arguments;
  va_start(arguments, format);
  std::fflush(stdout);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  std::quick_exit(1);  // a test program says there which case it was (test/run_cases.h)
}

void refuse(Location where, const char* format, ...) {
  char message[512], place[256] = "";
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  if (where.line()) std::snprintf(place, sizeof place, "at %s:%u ", where.file_name(), unsigned(where.line()));
  const BlockRunner& runner = *current_runner;
  fatal("kernel %s, %s: %s%s", runner.launch().kernel, runner.name_of(runner.running_thread()).c_str(), place, message);
}

namespace {

// Sets the results of the lanes in the mask only: other lanes may not have read the result of their own collective yet.
void set_lanes(uint64_t* results, uint32_t mask, uint64_t value) {
  for (int lane = 0; lane < warp_size; ++lane)
    if (mask >> lane & 1) results[lane] = value;
}

// lanes[0] = all 32 lanes combined, in the order of the tree of five __shfl_xor_sync steps.
template <class T, class Operation>
void combine_lanes(T (&lanes)[warp_size], Operation operation) {
#pragma GCC unroll 5
  for (int offset = warp_size / 2; offset > 0; offset /= 2)
    for (int lane = 0; lane < offset; ++lane) lanes[lane] = operation(lanes[lane], lanes[lane + offset]);
}

template <class T>
void combine_lanes(T (&lanes)[warp_size], Reduction reduction) {
  switch (reduction) {
    case Reduction::sum: return combine_lanes(lanes, [](T a, T b) { return a + b; });
    case Reduction::max: return combine_lanes(lanes, [](T a, T b) { return a > b ? a : b; });
    case Reduction::min: return combine_lanes(lanes, [](T a, T b) { return a < b ? a : b; });
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction == Reduction::bit_and) return combine_lanes(lanes, [](T a, T b) { return a & b; });
    if (reduction == Reduction::bit_or) return combine_lanes(lanes, [](T a, T b) { return a | b; });
    return combine_lanes(lanes, [](T a, T b) { return a ^ b; });
  }
}

}  // namespace

// ---- functions that kernels call

bool next_thread_slow() { return current_runner->next_thread(); }
void* dynamic_shared_memory() { return current_runner->shared_memory(); }
size_t dynamic_shared_bytes() { return current_runner->launch().shared_bytes; }

void sync_threads(Location where) {
  record(Event::barrier, nullptr, 1, __builtin_return_address(0));
  current_runner->sync_threads(where);
}

int block_in_cluster() { return current_runner->block_in_cluster(); }
void* shared_memory_of(int rank, void* shared) { return current_runner->shared_memory_of(rank, shared); }

void sync_cluster(Location where) {
  record(Event::barrier, nullptr, 1, __builtin_return_address(0));
  meet_at(cluster_barrier, current_runner->threads(), true, where);
}

void sync_warp(uint32_t mask, Location where) { current_runner->sync_warp(mask, where); }

uint64_t exchange(uint32_t mask, uint64_t value, int source_lane, Location where) {
  auto combine = [mask](const uint64_t* values, uint64_t* results, const int* sources) {
    for (int lane = 0; lane < warp_size; ++lane)
      if (mask >> lane & 1) results[lane] = values[sources[lane]];
  };
  current_runner->collective(mask, value, source_lane, where, combine);
  return current_runner->result();
}

uint32_t ballot(uint32_t mask, bool predicate, Location where) {
  record(Event::shuffle, nullptr, 1, __builtin_return_address(0));
  auto combine = [mask](const uint64_t* values, uint64_t* results, const int*) {
    uint32_t votes = 0;
    for (int lane = 0; lane < warp_size; ++lane)
      if (mask >> lane & 1 && values[lane]) votes |= 1u << lane;
    set_lanes(results, mask, votes);
  };
  current_runner->collective(mask, predicate, 0, where, combine);
  return uint32_t(current_runner->result());
}

template <class T>
T reduce(uint32_t mask, T value, Reduction reduction, Location where) {
  // A GPU has an instruction for integers; for floats it needs as many shuffles as the tree is high.
  const int shuffles = std::is_integral_v<T> ? 1 : std::bit_width(unsigned(std::popcount(mask) - 1));
  record(Event::shuffle, nullptr, size_t(shuffles), __builtin_return_address(0));
  auto combine = [=](const uint64_t* values, uint64_t* results, const int*) {
    // A lane outside the mask must not change the result: its value is zero, or, for operations without a zero, the
    // value of a lane in the mask.
    const bool has_zero = reduction == Reduction::sum || reduction == Reduction::bit_xor;
    const T neutral = has_zero ? T{} : from_bits<T>(values[lowest(mask)]);
    T lanes[warp_size];
    for (int lane = 0; lane < warp_size; ++lane) lanes[lane] = mask >> lane & 1 ? from_bits<T>(values[lane]) : neutral;
    combine_lanes(lanes, reduction);
    set_lanes(results, mask, to_bits(lanes[0]));
  };
  current_runner->collective(mask, to_bits(value), 0, where, combine);
  return from_bits<T>(current_runner->result());
}
template float reduce(uint32_t, float, Reduction, Location);
template int reduce(uint32_t, int, Reduction, Location);
template unsigned reduce(uint32_t, unsigned, Reduction, Location);

// Copies word by word, because ThreadSanitizer intercepts memcpy even in files that it does not instrument.
void warp_instruction(void* lane, size_t bytes, void (*execute)(void* lanes), Location where) {
  using Word [[gnu::may_alias]] = uint32_t;
  auto combine = [=](const uint64_t* values, uint64_t*, const int*) {
    const size_t words = bytes / sizeof(Word);
    alignas(64) Word lanes[warp_size * 16];
    for (size_t i = 0; i < warp_size * words; ++i) lanes[i] = reinterpret_cast<Word*>(values[i / words])[i % words];
    execute(lanes);
    for (size_t i = 0; i < warp_size * words; ++i) reinterpret_cast<Word*>(values[i / words])[i % words] = lanes[i];
  };
  current_runner->collective(0xffffffffu, to_bits(lane), 0, where, combine);
}

// ---- how much dynamic shared memory a kernel may have

size_t& allowed_shared_bytes(const void* kernel) {
  static std::mutex mutex;
  static std::map<const void*, size_t> allowed;
  std::lock_guard lock(mutex);
  return allowed.try_emplace(kernel, usual_shared_bytes).first->second;
}

bool may_have_its_shared_memory(const Launch& launch) {
  const size_t wanted = launch.shared_bytes;
  const size_t most = wanted <= usual_shared_bytes ? wanted : allowed_shared_bytes(launch.code);
  if (wanted > most && wanted <= most_shared_bytes)
    std::fprintf(stderr, "kernel %s: a launch with %zu bytes of dynamic shared memory, where %zu are allowed: call "
                         "cudaFuncSetAttribute for it before, here and there with all template arguments\n",
                 launch.kernel, wanted, most);
  return wanted <= most;
}

// ---- one grid

void run_grid(const Launch& launch) {
  if (rehearsal) return rehearsal(launch);
  if (!switches().computes) return;
  static std::atomic<uint64_t> launches{0};
  const uint64_t seed = schedule().seed + 0x9e3779b97f4a7c15u * ++launches;
  const size_t blocks = size_t(launch.grid.x) * launch.grid.y * launch.grid.z / launch.cluster;  // or clusters
  std::vector<size_t> order;
  if (schedule().order != Order::forward) {
    order.resize(blocks);
    std::iota(order.rbegin(), order.rend(), size_t(0));
    Random random(seed);
    if (schedule().order == Order::random)
      for (size_t i = blocks - 1; i > 0; --i) std::swap(order[i], order[random.below(int(i + 1))]);
  }
  auto run = [&](size_t i) {
    size_t b = launch.cluster * (order.empty() ? i : order[i]);
    uint3 index{unsigned(b % launch.grid.x), unsigned(b / launch.grid.x % launch.grid.y),
                unsigned(b / (size_t(launch.grid.x) * launch.grid.y))};
    thread_local BlockRunner runner;  // a worker runs one block at a time
    runner.run_block(launch, index, seed ^ (b * 0xd1342543de82ef95u));
  };
  if (sanitizers::one_worker) {
    for (size_t i = 0; i < blocks; ++i) sanitizers::run_isolated([&] { run(i); });
    sanitizers::acquire(&launch);
    return;
  }
  if (blocks == 1) run(0);
  else parallel_for(blocks, std::max<size_t>(1, blocks / (8 * size_t(omp_get_max_threads()))), run);
}

}  // namespace cpu
