#include "cpu/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>

#if defined(__x86_64__)
asm(R"(
  .text
  .globl cpu_switch_context
  .type cpu_switch_context, @function
cpu_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
  .size cpu_switch_context, . - cpu_switch_context
)");
#endif

namespace cpu {

constinit thread_local BlockRunner* current_runner = nullptr;

Fiber::Fiber(int number, void (*entry)()) {
  memory = static_cast<char*>(mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED || (stacks++ < most_guarded && mprotect(memory, guard_bytes, PROT_NONE) != 0))
    fatal("cannot map %zu bytes for a fiber's stack: %s; give fewer OMP_NUM_THREADS, or raise ulimit -v or vm.max_map_count",
          stack_bytes, strerror(errno));
  sanitizer.created(memory + guard_bytes, stack_bytes);
  begin(number, entry);
}

// The tops of stacks are shifted by some cache lines: otherwise equal offsets in all stacks would use the same cache
// sets.
void Fiber::begin(int number, void (*entry)()) {
  const size_t used = stack_bytes - (number % 32) * 192;
  context = make_context(memory + guard_bytes + used, used, entry);
}

Fiber::~Fiber() {
  if (memory) munmap(memory, guard_bytes + stack_bytes), --stacks;
}

namespace {

void fiber_entry() { current_runner->run_fiber(); }

// The fibers for a new block. The race detector takes 0.1 ms to learn of a new fiber, so the fourth block after this
// one uses them again. To the detector these two blocks have an order; neighbouring blocks have none, nor have the
// threads of a block.
std::vector<std::unique_ptr<Fiber>>& fibers_of_block() {
  static std::vector<std::unique_ptr<Fiber>> kept[4];
  static size_t turn = 0;
  return kept[turn++ % 4];
}

}  // namespace

// ---- switching fibers

void BlockRunner::jump(Fiber* to) {
  Fiber* from = running_;
  running_ = to;
  from->sanitizer.leaving(to->sanitizer);
  counting::run_on(to->calls);
  switch_context(from->context, to->context);
  running_->sanitizer.arrived();
}

void BlockRunner::run_fiber() {
  running_->sanitizer.arrived();
  sanitizers::acquire(&launch_->grid);
  for (;;) {
    launch_->run_threads(launch_->body);
    // No more thread can start on this fiber: switch to one that was woken or, at the block's end, to the worker.
    Fiber* to = next_ < 0 ? &main_ : fiber_for(next_);
    if (!sanitizers::fiber_per_thread) idle_.push_back(running_);
    jump(to);
  }
}

Fiber* BlockRunner::idle_fiber() {
  if (idle_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>(int(fibers_.size()), fiber_entry));
    return fibers_.back().get();
  }
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

// Goes on with a thread that pick() has chosen. -1, there is none: on the worker's stack, which does background work or
// reports a deadlock.
void BlockRunner::switch_to(int thread) {
  if (thread < 0) return jump(&main_);
  set_current(thread);
  jump(fiber_for(thread));
}

// ---- choosing the next thread

void BlockRunner::set_current(int thread) {
  current_ = thread;
  if (is_line_) {
    threadIdx = {unsigned(thread), 0, 0};
    return;
  }
  block_ = thread / block_threads_;
  blockIdx.x = first_block_ + block_;
  thread %= block_threads_;
  const dim3& size = blockDim;
  threadIdx = {thread % size.x, thread / size.x % size.y, thread / (size.x * size.y)};
}

void BlockRunner::make_runnable(int warp, uint32_t lanes) {
  runnable_[warp] |= lanes;
  if (runnable_[warp]) runnable_warps_ |= 1u << warp;
}

void BlockRunner::make_all_runnable(int first, int end) {
  for (int warp = first / warp_size; warp * warp_size < end; ++warp) {
    int from = std::max(first - warp * warp_size, 0), to = std::min(end - warp * warp_size, warp_size);
    make_runnable(warp, uint32_t((uint64_t(1) << to) - (uint64_t(1) << from)));
  }
}

// Chooses a runnable thread and marks it as not runnable any more. Returns -1 if there is none.
int BlockRunner::pick() {
  if (!runnable_warps_) return -1;
  int warp = current_ / warp_size, lane = current_ % warp_size;
  switch (order_) {
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
      // Mostly the warp of highest priority (drawn once per block), so that some warps run far ahead of others. That
      // finds buffers that are reused too early, which uniformly random choices rarely find.
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
  take_runnable(warp, lane);
  return warp * warp_size + lane;
}

// Called when a thread has ended on the running fiber. Returns true if the next thread starts on this fiber; it is then
// the current one. Returns false if thread next_ goes on, on its own fiber, or if no thread can run (next_ is -1).
bool BlockRunner::next_thread() {
  next_ = -1;
  if (plain_loop) {
    finished_ = thread_rank();  // threadIdx.x is blockDim.x now, so this is the number of the next thread
    if (finished_ < threads_) set_current(finished_);
    return finished_ < threads_;
  }
  ended_[current_] = true;
  ++finished_;
  sanitizers::release(launch_);
  next_ = pick();
  if (next_ < 0) return false;
  set_current(next_);
  return !fiber_of_[next_] && !sanitizers::fiber_per_thread;
}

// ---- waiting

// Called when the first thread of a block has to wait. So far the block ran as a loop: threads before the current one
// have ended, threads after it have not started.
void BlockRunner::leave_plain_loop() {
  plain_loop = false;
  finished_ = current_ = thread_rank();
  std::fill_n(ended_, current_, true);
  std::fill_n(ended_ + current_, threads_ - current_, false);
  std::fill_n(fiber_of_, threads_, nullptr);
  std::fill_n(runnable_, warps_, 0);
  runnable_warps_ = 0;
  make_all_runnable(current_ + 1, threads_);
}

void BlockRunner::wait(Location where, const char* what, const void* awaited) {
  if (plain_loop) leave_plain_loop();
  fiber_of_[current_] = running_;
  where_[current_] = where;
  waits_for_[current_] = what;
  awaited_[current_] = awaited;
  switch_to(pick());
}

void BlockRunner::let_others_run(Location where) {
  if (plain_loop) leave_plain_loop();
  const int other = pick();
  if (other < 0 && background_work() == 0) return;
  fiber_of_[current_] = running_;
  where_[current_] = where;
  awaited_[current_] = nullptr;
  make_runnable(current_ / warp_size, 1u << current_ % warp_size);
  switch_to(other);
}

void BlockRunner::wake(const void* awaited) {
  for (int t = 0; t < threads_; ++t)
    if (awaited_[t] == awaited) {
      awaited_[t] = nullptr;
      make_runnable(t / warp_size, 1u << t % warp_size);
    }
}

void BlockRunner::sync_threads(Location where) {
  if (plain_loop) leave_plain_loop();
  const void* barrier = fences_.get() + 2 * block_ + barriers_[block_] % 2;
  sanitizers::release(barrier);
  if (++at_barrier_[block_] == block_threads_) {
    at_barrier_[block_] = 0;
    ++barriers_[block_];
    counting::meet_block();
    make_all_runnable(block_ * block_threads_, (block_ + 1) * block_threads_);
    take_runnable(current_ / warp_size, current_ % warp_size);
  } else {
    wait(where, "__syncthreads");
  }
  sanitizers::acquire(barrier);
}

void BlockRunner::sync_warp(uint32_t mask, Location where) {
  if (plain_loop) leave_plain_loop();
  const int warp = current_ / warp_size, lowest_lane = mask ? lowest(mask) : 0;
  Rendezvous& here = rendezvous_[warp][lowest_lane];
  const void* barrier = fences_.get() + 2 * max_blocks + 2 * (warp * warp_size + lowest_lane) + here.barriers % 2;
  sanitizers::release(barrier);
  collective(mask, 0, 0, where, [&](const uint64_t*, uint64_t*, const int*) { ++here.barriers; });
  sanitizers::acquire(barrier);
}

// ---- one block

void BlockRunner::prepare_shared_memory(size_t bytes) {
  // Allocates exactly the size that was asked for, so that AddressSanitizer notices an access after the last element.
  if (bytes != shared_bytes_) {
    void* memory = nullptr;
    if (bytes && posix_memalign(&memory, 1024, bytes) != 0) fatal("no memory for %zu bytes of shared memory", bytes);
    shared_.reset(static_cast<char*>(memory));
    shared_bytes_ = bytes;
  }
  if (order_ != Order::forward && bytes) std::memset(shared_.get(), 0xff, bytes);  // NaN
}

void* BlockRunner::shared_memory_of(int rank, void* shared) const {
  const ptrdiff_t offset = static_cast<char*>(shared) - shared_.get() - block_ * ptrdiff_t(shared_stride_);
  if (offset < 0 || offset >= ptrdiff_t(launch_->shared_bytes))
    refuse({}, "a block reaches memory of another that is not dynamic shared memory");
  if (rank >= blocks_) refuse({}, "reaches block %d of a cluster of %d", rank, blocks_);
  const bool* ended = ended_ + rank * block_threads_;
  if (std::all_of(ended, ended + block_threads_, std::identity()))
    refuse({}, "reaches shared memory of block %d of its cluster, which has ended", rank);
  return shared_.get() + rank * shared_stride_ + offset;
}

void BlockRunner::run_block(const Launch& launch, uint3 index, uint64_t seed) {
  current_runner = this;
  launch_ = &launch;
  order_ = schedule().order;
  blockIdx = index;
  blockDim = launch.block;
  gridDim = launch.grid;
  first_block_ = index.x;
  blocks_ = int(launch.cluster);
  block_ = 0;
  is_line_ = blocks_ == 1 && blockDim.y == 1 && blockDim.z == 1;
  block_threads_ = int(launch.block.x * launch.block.y * launch.block.z);
  threads_ = blocks_ * block_threads_;
  if (blocks_ > max_blocks || threads_ > max_threads)
    fatal("kernel %s: clusters of %d blocks of %d threads; the CPU device has room for %d blocks and %d threads",
          launch.kernel, blocks_, block_threads_, max_blocks, max_threads);
  warps_ = (threads_ + warp_size - 1) / warp_size;
  finished_ = 0;
  std::fill_n(at_barrier_, blocks_, 0);
  begin_asynchronous(blocks_);
  shared_stride_ = (launch.shared_bytes + 1023) / 1024 * 1024;
  prepare_shared_memory((blocks_ - 1) * shared_stride_ + launch.shared_bytes);

  set_current(0);
  plain_loop = order_ == Order::forward && !sanitizers::fiber_per_thread && blocks_ == 1;
  if (!plain_loop) leave_plain_loop();
  if (order_ != Order::forward) {  // even the first thread is chosen by the schedule
    random_ = Random(seed);
    std::iota(warp_priority_, warp_priority_ + warps_, 0);
    for (int i = warps_ - 1; i > 0; --i) std::swap(warp_priority_[i], warp_priority_[random_.below(i + 1)]);
    make_runnable(0, 1);
    set_current(pick());
  }
  std::vector<std::unique_ptr<Fiber>>& kept = sanitizers::fiber_per_thread ? fibers_of_block() : fibers_;
  if (sanitizers::fiber_per_thread) {  // created here, so that no CUDA thread seems to have started another
    fibers_.swap(kept);
    for (int i = 0; i < threads_; ++i) {
      if (i < int(fibers_.size())) fibers_[i]->begin(i, fiber_entry);
      else fibers_.push_back(std::make_unique<Fiber>(i, fiber_entry));
      idle_.push_back(fibers_[i].get());
    }
    sanitizers::release(&launch.grid);  // the host's accesses so far happen before all threads
  }
  counting::begin_block(shared_.get(), shared_bytes_, threads_);
  jump(idle_fiber());
  plain_loop = false;
  while (finished_ != threads_) {  // no thread can run
    const int works = background_work();
    if (works == 0) report_deadlock();
    do_background_work(order_ == Order::forward ? 0 : order_ == Order::reverse ? works - 1 : random_.below(works));
    if (const int next = pick(); next >= 0) switch_to(next);
  }
  counting::end_block();
  sanitizers::acquire(launch_);  // all accesses of the threads come before the block's memory is freed
  end_asynchronous();
  sanitizers::release(launch_);  // its writes, too, happen before the host's next accesses
  if (sanitizers::fiber_per_thread) {
    idle_.clear();
    fibers_.swap(kept);
  }
}

std::string BlockRunner::name_of(int thread) const {
  const dim3& size = blockDim;
  const unsigned x = first_block_ + thread / block_threads_;
  thread %= block_threads_;
  char text[128];
  std::snprintf(text, sizeof text, "block (%u,%u,%u), thread (%u,%u,%u)", x, blockIdx.y, blockIdx.z,
                thread % size.x, thread / size.x % size.y, thread / (size.x * size.y));
  return text;
}

// The lanes for which the warp collective of this thread waits; 0: the thread waits at a block barrier.
uint32_t BlockRunner::missing_lanes(int waiting) const {
  for (const Rendezvous& here : rendezvous_[waiting / warp_size])
    if (here.arrived >> waiting % warp_size & 1) return here.mask & ~here.arrived;
  return 0;
}

void BlockRunner::report_deadlock() const {
  int waiting = -1, ended = -1, other = -1;
  for (int t = threads_ - 1; t >= 0; --t) (ended_[t] ? ended : waiting) = t;
  for (int t = 0; t < threads_; ++t)
    if (!ended_[t] && where_[t].line() != where_[waiting].line()) other = t;
  auto waits = [&](int t) {
    return name_of(t) + " waits for " + waits_for_[t] + " at " + where_[t].file_name() + ":" +
           std::to_string(where_[t].line());
  };
  char lanes[64];
  std::snprintf(lanes, sizeof lanes, "; missing are lanes %#x of its warp", missing_lanes(waiting));
  std::string rest = missing_lanes(waiting) ? lanes : "";
  if (other >= 0) rest += "; " + waits(other);
  if (!missing_lanes(waiting) && !awaited_[waiting] && ended >= 0)
    rest += "; " + name_of(ended) + " has ended without reaching it";
  fatal("deadlock in kernel %s: %s (%d of %d threads wait, %d have ended)%s", launch_->kernel, waits(waiting).c_str(),
        threads_ - finished_, threads_, finished_, rest.c_str());
}

}  // namespace cpu
