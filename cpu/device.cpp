// Runs grids: blocks on OpenMP workers, the threads of a block on fibers. cpu/README.md follows one launch through it.
//
// Terms: a *thread* is a CUDA thread. A *fiber* is a stack that threads run on. A *worker* is an OpenMP thread and
// owns one block at a time. "Runnable" threads have not started or have been woken; the others wait or have ended.
#include "cpu/device.h"

#include <boost/context/detail/fcontext.hpp>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/sanitizers.h"
#include "cpu/schedule.h"
#include "cpu/workers.h"

constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};

namespace cpu {

constinit thread_local bool plain_loop = false;

void fatal(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fflush(stdout);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  std::_Exit(1);
}

namespace {

namespace context = boost::context::detail;

constexpr int max_threads = 1024, warp_size = 32, max_warps = max_threads / warp_size;
constexpr size_t guard_bytes = 64 * 1024;  // a multiple of every page size; -fstack-clash-protection skips no page

int lowest(uint32_t bits) { return __builtin_ctz(bits); }  // bits != 0
int highest(uint32_t bits) { return 31 - __builtin_clz(bits); }

// A stack with a guard page below it, so that an overflow faults instead of overwriting a neighbour.
struct Fiber {
  explicit Fiber(int number, void (*entry)(context::transfer_t)) {
    memory = static_cast<char*>(mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED || mprotect(memory, guard_bytes, PROT_NONE) != 0)
      fatal("cannot map %zu bytes for a fiber's stack: %s; give fewer OMP_NUM_THREADS, or raise vm.max_map_count",
            stack_bytes, strerror(errno));
    // Tops are staggered by cache lines: equal offsets in every stack would fall into the same cache sets.
    char* top = memory + guard_bytes + stack_bytes - (number % 32) * 192;
    context = context::make_fcontext(top, stack_bytes - (number % 32) * 192, entry);
    sanitizer.created(memory + guard_bytes, stack_bytes);
  }
  Fiber() = default;  // the worker's own stack
  ~Fiber() {
    sanitizer.destroyed();
    if (memory) munmap(memory, guard_bytes + stack_bytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  char* memory = nullptr;
  context::fcontext_t context = nullptr;
  sanitizers::FiberState sanitizer;
};

// One warp collective in progress. Concurrent ones in a warp have disjoint masks, hence different lowest lanes.
struct Rendezvous {
  uint32_t mask = 0, arrived = 0, barriers = 0;  // barriers: __syncwarp calls completed
};

class Worker {
 public:
  void run_block(const Launch& launch, uint3 index, uint64_t seed);
  bool next_thread();
  void sync_threads(Location where);
  void sync_warp(uint32_t mask, Location where);
  template <class Combine>
  void collective(uint32_t mask, uint64_t value, int source_lane, Location where, Combine combine);

  uint64_t result() const { return results_[current_]; }
  void* shared_memory() { return shared_.get(); }
  void run_fiber(context::transfer_t from);

 private:
  void prepare_shared_memory(size_t bytes);
  void make_all_runnable(int first);
  void make_runnable(int warp, uint32_t lanes);
  void leave_plain_loop();
  int pick();
  void set_current(int thread);
  void finish_current();
  void wait(Location where, const char* what);
  void resume(int thread);
  void jump(Fiber* to);
  Fiber* idle_fiber();
  uint32_t missing_lanes(int waiting) const;
  [[noreturn]] void report_deadlock() const;
  std::string name_of(int thread) const;

  const Launch* launch_ = nullptr;
  int threads_ = 0, warps_ = 0, current_ = 0, next_ = -1, finished_ = 0, at_barrier_ = 0, barriers_ = 0;
  uint32_t runnable_[max_warps];  // a bit a lane
  uint32_t runnable_warps_ = 0;   // a bit a warp with at least one runnable lane
  Random random_{0};
  int warp_priority_[max_warps];

  Fiber main_;
  Fiber* running_ = &main_;
  Fiber* previous_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;

  // Per thread: the fiber it waits on (null: not started), where and for what; per lane values of a collective.
  Fiber* fiber_of_[max_threads];
  Location where_[max_threads];
  const char* waits_for_[max_threads];
  bool ended_[max_threads];
  uint64_t values_[max_threads], results_[max_threads];
  int source_lanes_[max_threads];
  Rendezvous rendezvous_[max_warps][warp_size];

  // Objects that stand for the barriers in the race detector, for the block and for each rendezvous. Two in turn: a
  // thread that is already at the next barrier must not be taken for one at this barrier.
  std::unique_ptr<char[]> fences_{new char[2 + 2 * max_threads]};

  std::unique_ptr<char[], decltype(&std::free)> shared_{nullptr, &std::free};
  size_t shared_bytes_ = 0;
};

Worker& worker() {
  thread_local Worker instance;
  return instance;
}

void fiber_entry(context::transfer_t from) {
  static_cast<Worker*>(from.data)->run_fiber(from);
}

// ---- switching fibers

void Worker::jump(Fiber* to) {
  previous_ = running_;
  running_ = to;
  previous_->sanitizer.leaving(to->sanitizer);
  context::transfer_t from = context::jump_fcontext(to->context, this);
  previous_->context = from.fctx;
  running_->sanitizer.arrived();
}

void Worker::run_fiber(context::transfer_t from) {
  previous_->context = from.fctx;
  running_->sanitizer.arrived();
  for (;;) {
    launch_->run_threads(launch_->body);
    // No thread can start here any more: hand over to one that was woken or, at the block's end, to the worker.
    Fiber* to = next_ < 0 ? &main_ : fiber_of_[next_] ? fiber_of_[next_] : idle_fiber();
    if (!sanitizers::fiber_per_thread) idle_.push_back(running_);
    jump(to);
  }
}

Fiber* Worker::idle_fiber() {
  if (idle_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>(int(fibers_.size()), fiber_entry));
    return fibers_.back().get();
  }
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

// ---- choosing the next thread

void Worker::set_current(int thread) {
  current_ = thread;
  const dim3& size = blockDim;
  if (size.y == 1 && size.z == 1) threadIdx = {unsigned(thread), 0, 0};
  else threadIdx = {thread % size.x, thread / size.x % size.y, thread / (size.x * size.y)};
}

void Worker::make_runnable(int warp, uint32_t lanes) {
  runnable_[warp] |= lanes;
  if (runnable_[warp]) runnable_warps_ |= 1u << warp;
}

void Worker::make_all_runnable(int first) {
  runnable_warps_ = 0;
  for (int warp = 0; warp < warps_; ++warp) {
    int begin = std::clamp(first - warp * warp_size, 0, warp_size);
    int end = std::min(threads_ - warp * warp_size, warp_size);
    uint64_t lanes = (uint64_t(1) << end) - (uint64_t(1) << begin);
    runnable_[warp] = 0;
    if (begin < end) make_runnable(warp, uint32_t(lanes));
  }
}

// Takes a runnable thread off the list: -1 when there is none.
int Worker::pick() {
  if (!runnable_warps_) return -1;
  int warp = current_ / warp_size, lane = current_ % warp_size;
  switch (schedule().order) {
    case Order::forward: {
      if (!runnable_[warp]) {
        uint32_t later = runnable_warps_ & ~((2u << warp) - 1);
        warp = lowest(later ? later : runnable_warps_);
        lane = warp_size - 1;
      }
      uint32_t after = runnable_[warp] & ~((uint64_t(2) << lane) - 1);
      lane = lowest(after ? after : runnable_[warp]);
      break;
    }
    case Order::reverse:
      warp = highest(runnable_warps_);
      lane = highest(runnable_[warp]);
      break;
    case Order::random: {
      // Mostly the warp of highest priority (drawn a block), so that some warps run far ahead of others: that finds
      // buffers reused too early, which uniformly random choices rarely do.
      warp = -1;
      bool uniform = random_.below(8) == 0;
      for (int i = 0, skip = uniform ? random_.below(__builtin_popcount(runnable_warps_)) : 0; i < warps_; ++i)
        if (runnable_warps_ >> warp_priority_[i] & 1 && skip-- == 0) {
          warp = warp_priority_[i];
          break;
        }
      uint32_t lanes = runnable_[warp];
      for (int skip = random_.below(__builtin_popcount(lanes)); skip; --skip) lanes &= lanes - 1;
      lane = lowest(lanes);
      break;
    }
  }
  runnable_[warp] &= ~(1u << lane);
  if (!runnable_[warp]) runnable_warps_ &= ~(1u << warp);
  return warp * warp_size + lane;
}

void Worker::finish_current() {
  ended_[current_] = true;
  ++finished_;
  sanitizers::thread_ends(launch_);
}

// A thread has ended on the running fiber. True: the next one starts on it, and is current. False: next_ is woken on
// its own fiber instead, or (-1) nothing is left that can run.
bool Worker::next_thread() {
  next_ = -1;
  if (plain_loop) {
    current_ = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    if (current_ < threads_) {
      set_current(current_);
      return true;
    }
    finished_ = threads_;
    return false;
  }
  finish_current();
  next_ = pick();
  if (next_ < 0) return false;
  set_current(next_);
  return !fiber_of_[next_] && !sanitizers::fiber_per_thread;
}

// ---- waiting

// Until here the block ran as a loop: threads before the current one have ended, those after it have not started.
void Worker::leave_plain_loop() {
  plain_loop = false;
  current_ = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  finished_ = current_;
  std::fill_n(ended_, current_, true);
  std::fill_n(ended_ + current_, threads_ - current_, false);
  std::fill_n(fiber_of_, threads_, nullptr);
  make_all_runnable(current_ + 1);
}

void Worker::wait(Location where, const char* what) {
  fiber_of_[current_] = running_;
  where_[current_] = where;
  waits_for_[current_] = what;
  int thread = pick();
  if (thread < 0) jump(&main_);  // a deadlock: the main context reports it
  set_current(thread);
  jump(fiber_of_[thread] ? fiber_of_[thread] : idle_fiber());
}

void Worker::sync_threads(Location where) {
  if (plain_loop) leave_plain_loop();
  const void* barrier = fences_.get() + barriers_ % 2;
  sanitizers::release(barrier);
  if (++at_barrier_ == threads_) {
    at_barrier_ = 0;
    ++barriers_;
    make_all_runnable(0);
    runnable_[current_ / warp_size] &= ~(1u << current_ % warp_size);
    if (!runnable_[current_ / warp_size]) runnable_warps_ &= ~(1u << current_ / warp_size);
  } else {
    wait(where, "__syncthreads");
  }
  sanitizers::acquire(barrier);
}

void Worker::sync_warp(uint32_t mask, Location where) {
  if (plain_loop) leave_plain_loop();
  const int warp = current_ / warp_size, lowest_lane = mask ? lowest(mask) : 0;
  Rendezvous& here = rendezvous_[warp][lowest_lane];
  const void* barrier = fences_.get() + 2 + 2 * (warp * warp_size + lowest_lane) + here.barriers % 2;
  sanitizers::release(barrier);
  collective(mask, 0, 0, where, [&](const uint64_t*, uint64_t*, const int*) { ++here.barriers; });
  sanitizers::acquire(barrier);
}

// The lane brings `value`; the last lane of `mask` to arrive calls combine(first thread of the warp) to fill results_.
template <class Combine>
void Worker::collective(uint32_t mask, uint64_t value, int source_lane, Location where, Combine combine) {
  if (plain_loop) leave_plain_loop();
  int warp = current_ / warp_size, lane = current_ % warp_size, first = warp * warp_size;
  Rendezvous& here = rendezvous_[warp][mask ? lowest(mask) : 0];
  if (!(mask >> lane & 1) || (here.arrived && here.mask != mask))
    fatal("kernel %s, %s: at %s:%u lane %d calls a warp collective with mask %#x%s", launch_->kernel,
          name_of(current_).c_str(), where.file_name(), unsigned(where.line()), lane, mask,
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
  combine(values_ + first, results_ + first, source_lanes_ + first);
  make_runnable(warp, mask & ~(1u << lane));
}

// ---- one block

void Worker::prepare_shared_memory(size_t bytes) {
  // Exactly as large as asked for, so that AddressSanitizer sees the element after the last one.
  if (bytes != shared_bytes_) {
    void* memory = nullptr;
    if (bytes && posix_memalign(&memory, 128, bytes) != 0) fatal("no memory for %zu bytes of shared memory", bytes);
    shared_.reset(static_cast<char*>(memory));
    shared_bytes_ = bytes;
  }
  if (schedule().order != Order::forward && bytes) std::memset(shared_.get(), 0xff, bytes);  // NaN
}

void Worker::run_block(const Launch& launch, uint3 index, uint64_t seed) {
  launch_ = &launch;
  blockIdx = index;
  blockDim = launch.block;
  gridDim = launch.grid;
  threads_ = int(launch.block.x * launch.block.y * launch.block.z);
  warps_ = (threads_ + warp_size - 1) / warp_size;
  finished_ = at_barrier_ = 0;
  prepare_shared_memory(launch.shared_bytes);

  set_current(0);
  plain_loop = schedule().order == Order::forward && !sanitizers::fiber_per_thread;
  if (!plain_loop) {
    random_ = Random(seed);
    std::iota(warp_priority_, warp_priority_ + warps_, 0);
    for (int i = warps_ - 1; i > 0; --i) std::swap(warp_priority_[i], warp_priority_[random_.below(i + 1)]);
    std::fill_n(ended_, threads_, false);
    std::fill_n(fiber_of_, threads_, nullptr);
    const bool starts_with_0 = schedule().order == Order::forward;  // which is current already
    make_all_runnable(starts_with_0 ? 1 : 0);
    if (!starts_with_0) set_current(pick());
  }
  if (sanitizers::fiber_per_thread) {  // created here, so that no CUDA thread appears to have started another
    for (int i = 0; i < threads_; ++i) fibers_.push_back(std::make_unique<Fiber>(i, fiber_entry));
    for (auto& fiber : fibers_) idle_.push_back(fiber.get());
  }
  jump(idle_fiber());
  plain_loop = false;
  if (finished_ != threads_) report_deadlock();
  if (sanitizers::fiber_per_thread) {
    sanitizers::acquire(launch_);  // what the threads did comes before freeing the block's memory
    idle_.clear();
    fibers_.clear();
  }
}

std::string Worker::name_of(int thread) const {
  const dim3& size = blockDim;
  char text[128];
  std::snprintf(text, sizeof text, "block (%u,%u,%u), thread (%u,%u,%u)", blockIdx.x, blockIdx.y, blockIdx.z,
                thread % size.x, thread / size.x % size.y, thread / (size.x * size.y));
  return text;
}

// Lanes that the warp collective of this thread waits for; 0: it waits at a block barrier.
uint32_t Worker::missing_lanes(int waiting) const {
  for (const Rendezvous& here : rendezvous_[waiting / warp_size])
    if (here.arrived >> waiting % warp_size & 1) return here.mask & ~here.arrived;
  return 0;
}

void Worker::report_deadlock() const {
  int waiting = -1, ended = -1, other = -1;
  for (int t = threads_ - 1; t >= 0; --t) (ended_[t] ? ended : waiting) = t;
  for (int t = 0; t < threads_; ++t)
    if (!ended_[t] && where_[t].line() != where_[waiting].line()) other = t;
  std::string rest;
  auto add = [&](int t, const std::string& what) {
    rest += "; " + name_of(t) + what;
  };
  if (other >= 0)
    add(other, " waits for " + std::string(waits_for_[other]) + " at " + where_[other].file_name() + ":" +
                   std::to_string(where_[other].line()));
  char lanes[64];
  std::snprintf(lanes, sizeof lanes, "; missing are lanes %#x of its warp", missing_lanes(waiting));
  if (missing_lanes(waiting)) rest = lanes + rest;
  else if (ended >= 0) add(ended, " has ended without reaching it");
  fatal("deadlock in kernel %s: %s waits for %s at %s:%u (%d of %d threads wait, %d have ended)%s", launch_->kernel,
        name_of(waiting).c_str(), waits_for_[waiting], where_[waiting].file_name(), unsigned(where_[waiting].line()),
        threads_ - finished_, threads_, finished_, rest.c_str());
}

// Lanes outside the mask may not have fetched the result of a collective of their own yet.
void set_lanes(uint64_t* results, uint32_t mask, uint64_t value) {
  for (int lane = 0; lane < warp_size; ++lane)
    if (mask >> lane & 1) results[lane] = value;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T apply(Reduction reduction, T a, T b) {
  switch (reduction) {
    case Reduction::sum: return a + b;
    case Reduction::max: return a > b ? a : b;
    case Reduction::min: return a < b ? a : b;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction == Reduction::bit_and) return a & b;
    if (reduction == Reduction::bit_or) return a | b;
    return a ^ b;
  }
  return a;
}

}  // namespace

// ---- what kernels call

bool next_thread_slow() { return worker().next_thread(); }
void sync_threads(Location where) { worker().sync_threads(where); }
void* dynamic_shared_memory() { return worker().shared_memory(); }

void sync_warp(uint32_t mask, Location where) { worker().sync_warp(mask, where); }

uint64_t exchange(uint32_t mask, uint64_t value, int source_lane, Location where) {
  auto combine = [mask](const uint64_t* values, uint64_t* results, const int* sources) {
    for (int lane = 0; lane < warp_size; ++lane)
      if (mask >> lane & 1) results[lane] = values[sources[lane]];
  };
  worker().collective(mask, value, source_lane, where, combine);
  return worker().result();
}

uint32_t ballot(uint32_t mask, bool predicate, Location where) {
  auto combine = [mask](const uint64_t* values, uint64_t* results, const int*) {
    uint32_t votes = 0;
    for (int lane = 0; lane < warp_size; ++lane)
      if (mask >> lane & 1 && values[lane]) votes |= 1u << lane;
    set_lanes(results, mask, votes);
  };
  worker().collective(mask, predicate, 0, where, combine);
  return uint32_t(worker().result());
}

// The same tree as five __shfl_xor_sync steps, so that one call here gives the bits of the shuffles.
template <class T>
T reduce(uint32_t mask, T value, Reduction reduction, Location where) {
  auto combine = [=](const uint64_t* values, uint64_t* results, const int*) {
    T lanes[warp_size];
    bool first = true;
    T neutral{};
    for (int lane = 0; lane < warp_size; ++lane)
      if (mask >> lane & 1) {
        lanes[lane] = from_bits<T>(values[lane]);
        if (first && reduction != Reduction::sum && reduction != Reduction::bit_xor) neutral = lanes[lane];
        first = false;
      }
    for (int lane = 0; lane < warp_size; ++lane)
      if (!(mask >> lane & 1)) lanes[lane] = neutral;
    for (int offset = warp_size / 2; offset > 0; offset /= 2)
      for (int lane = 0; lane < offset; ++lane) lanes[lane] = apply(reduction, lanes[lane], lanes[lane + offset]);
    uint64_t bits = 0;
    std::memcpy(&bits, lanes, sizeof(T));
    set_lanes(results, mask, bits);
  };
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  worker().collective(mask, bits, 0, where, combine);
  return from_bits<T>(worker().result());
}
template float reduce(uint32_t, float, Reduction, Location);
template int reduce(uint32_t, int, Reduction, Location);
template unsigned reduce(uint32_t, unsigned, Reduction, Location);

// ---- one grid

void run_grid(const Launch& launch) {
  static std::atomic<uint64_t> launches{0};
  const uint64_t seed = schedule().seed + 0x9e3779b97f4a7c15u * ++launches;
  const size_t blocks = size_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  std::vector<size_t> order;
  if (schedule().order != Order::forward) {
    order.resize(blocks);
    std::iota(order.rbegin(), order.rend(), size_t(0));
    Random random(seed);
    if (schedule().order == Order::random)
      for (size_t i = blocks - 1; i > 0; --i) std::swap(order[i], order[random.below(int(i + 1))]);
  }
  auto run = [&](size_t i) {
    size_t b = order.empty() ? i : order[i];
    uint3 index{unsigned(b % launch.grid.x), unsigned(b / launch.grid.x % launch.grid.y),
                unsigned(b / (size_t(launch.grid.x) * launch.grid.y))};
    worker().run_block(launch, index, seed ^ (b * 0xd1342543de82ef95u));
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
