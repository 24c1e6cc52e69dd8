// The scheduler of the CPU device: runs the threads of one block, or of the blocks of one cluster, on fibers. Threads
// of a cluster are numbered as if it were one large block.
//
// A *thread* is a CUDA thread; a *fiber* is a stack that threads run on. A thread is *runnable* if it has not started
// yet, or if the event that it waited for has happened. Other threads wait or have ended.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cpu/counting.h"
#include "cpu/context.h"
#include "cpu/device.h"
#include "cpu/sanitizers.h"
#include "cpu/switches.h"

namespace cpu {

constexpr int max_threads = 1024, max_blocks = 8;  // of a cluster
constexpr int warp_size = 32, max_warps = max_threads / warp_size;
constexpr size_t guard_bytes = 64 * 1024;  // a multiple of every page size; -fstack-clash-protection skips no page

inline int lowest(uint32_t bits) { return __builtin_ctz(bits); }  // bits != 0
inline int highest(uint32_t bits) { return 31 - __builtin_clz(bits); }

// A stack with a guard page below it, so that an overflow faults instead of overwriting a neighbour. Each is a mapping of its own,
// and a process has at most 65,530 of them (vm.max_map_count), so later stacks have no guard: the kernel makes one mapping of
// neighbours that are alike.
struct Fiber {
  static constexpr size_t most_guarded = 20'000;
  static inline std::atomic<size_t> stacks = 0;  // number of mapped stacks
  Fiber(int number, void (*entry)());
  Fiber() = default;  // the worker's own stack
  ~Fiber();
  void begin(int number, void (*entry)());  // anew, whatever it ran before
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  char* memory = nullptr;
  void* context = nullptr;
  sanitizers::FiberState sanitizer;
  [[no_unique_address]] counting::Calls calls;
};

// One warp collective in progress. Several at the same time in a warp have disjoint masks, so their lowest lanes
// differ.
struct Rendezvous {
  uint32_t mask = 0, arrived = 0, barriers = 0;  // barriers: number of completed __syncwarp calls
};

class BlockRunner {
 public:
  void run_block(const Launch& launch, uint3 index, uint64_t seed);
  bool next_thread();
  void sync_threads(Location where);
  void sync_warp(uint32_t mask, Location where);
  template <class Combine>
  void collective(uint32_t mask, uint64_t value, int source_lane, Location where, Combine combine);

  // The running thread waits until wake() is called with the same `awaited`. `what`: for the report of a deadlock.
  void wait(Location where, const char* what, const void* awaited = nullptr);
  void wake(const void* awaited);
  void let_others_run(Location where);  // or background work; the running thread goes on when its turn comes

  const Launch& launch() const { return *launch_; }
  uint64_t result() const { return results_[current_]; }
  int threads() const { return threads_; }
  int running_thread() const { return plain_loop ? thread_rank() : current_; }
  int block_in_cluster() const { return block_; }
  std::string name_of(int thread) const;
  void* shared_memory() { return shared_.get() + block_ * shared_stride_; }
  void* shared_memory_of(int rank, void* shared) const;
  [[noreturn]] void run_fiber();

 private:
  void prepare_shared_memory(size_t bytes);
  void make_all_runnable(int first, int end);
  void make_runnable(int warp, uint32_t lanes);
  void take_runnable(int warp, int lane) {
    runnable_[warp] &= ~(1u << lane);
    if (!runnable_[warp]) runnable_warps_ &= ~(1u << warp);
  }
  void leave_plain_loop();
  int pick();
  void set_current(int thread);
  void jump(Fiber* to);
  void switch_to(int thread);
  Fiber* idle_fiber();
  Fiber* fiber_for(int thread) { return fiber_of_[thread] ? fiber_of_[thread] : idle_fiber(); }
  uint32_t missing_lanes(int waiting) const;
  [[noreturn]] void report_deadlock() const;

  const Launch* launch_ = nullptr;
  int threads_ = 0, warps_ = 0, current_ = 0, next_ = -1, finished_ = 0;
  int blocks_ = 1, block_threads_ = 0;  // blocks of a cluster; threads of a block
  unsigned first_block_ = 0;            // blockIdx.x of the cluster's first block
  int block_ = 0;                       // the current thread's block in the cluster, from 0
  bool is_line_ = true;                 // one block, and its threads lie along x
  int at_barrier_[max_blocks] = {}, barriers_[max_blocks] = {};
  uint32_t runnable_[max_warps];  // one bit per lane
  uint32_t runnable_warps_ = 0;   // one bit per warp: it has at least one runnable lane
  Order order_ = Order::forward;
  Random random_{0};
  int warp_priority_[max_warps];

  Fiber main_;
  Fiber* running_ = &main_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;

  // Per thread: the fiber on which it waits (null: not started), the place and reason of its wait, and its values in a
  // collective.
  Fiber* fiber_of_[max_threads];
  Location where_[max_threads];
  const char* waits_for_[max_threads];
  bool ended_[max_threads];
  uint64_t values_[max_threads], results_[max_threads];
  int source_lanes_[max_threads];
  const void* awaited_[max_threads] = {};
  Rendezvous rendezvous_[max_warps][warp_size];

  // Objects that represent the barriers of each block and of each rendezvous in the race detector. Each has two, which
  // are used in turn, so that a thread that is already at the next barrier is not taken for one at this barrier.
  std::unique_ptr<char[]> fences_{new char[2 * max_blocks + 2 * max_threads]};

  std::unique_ptr<char[], decltype(&std::free)> shared_{nullptr, &std::free};
  size_t shared_bytes_ = 0, shared_stride_ = 0;  // from block to block
};

// The runner of the calling thread's block.
extern constinit thread_local BlockRunner* current_runner;

// Asynchronous work that the threads of the worker's block have started (cpu/asynchronous.cpp).
void begin_asynchronous(int blocks);
void end_asynchronous();
int background_work();                 // pieces of work that belong to no thread
void do_background_work(int number);

// Each lane in `mask` gives `value` and waits for the others. The last lane to arrive calls combine(values, results,
// source lanes) for the warp. (Returning result() from here makes waiting 40% slower with g++ 12.)
template <class Combine>
void BlockRunner::collective(uint32_t mask, uint64_t value, int source_lane, Location where, Combine combine) {
  if (plain_loop) leave_plain_loop();
  int warp = current_ / warp_size, lane = current_ % warp_size, first = warp * warp_size;
  Rendezvous& here = rendezvous_[warp][mask ? lowest(mask) : 0];
  if (!(mask >> lane & 1) || (here.arrived && here.mask != mask))
    refuse(where, "lane %d calls a warp collective with mask %#x%s", lane, mask,
           mask >> lane & 1 ? ", other lanes of it with another mask" : ", which does not name the lane itself");
  here.mask = mask;
  here.arrived |= 1u << lane;
  values_[current_] = value;
  source_lanes_[current_] = source_lane;
  if (here.arrived != mask) {
    wait(where, "a warp collective");
    return;
  }
  here.arrived = 0;
  counting::meet_warp(warp, mask);
  combine(values_ + first, results_ + first, source_lanes_ + first);
  make_runnable(warp, mask & ~(1u << lane));
}

}  // namespace cpu
