// Asynchronous and grouped work of a block's threads: copies, stores and products, mbarriers and numbered barriers, and
// the registers of Hopper's warpgroups. cpu/block.cpp has the scheduler.
//
// A GPU does not report the errors that are found here: it computes wrong numbers, or hangs, now and then.
#include <algorithm>
#include <cstdlib>
#include <functional>

#include "cpu/block.h"

namespace cpu {
namespace {

// Asynchronous work of one kind that a thread has not waited for.
struct DeferredWork {
  using Group = std::vector<std::function<void()>>;
  Group open;
  std::vector<Group> committed;
};

constexpr int warpgroup_size = 128;

// A thread's part in the work of its warpgroup.
struct Member {
  size_t products = 0;      // started so far
  bool is_ordered = false;  // it has called order_registers() for its open group of products
  int given = 0;            // registers that it has less than at launch
};

// The pending work of the block, or cluster of blocks, that this worker runs.
struct Asynchronous {
  DeferredWork deferred[max_threads][4];
  int pending = 0;  // number of deferred pieces of work, of all threads
  std::vector<std::function<void()>> background;
  Barrier numbered[max_blocks][numbered_barriers];
  bool has_warpgroups = false;  // else the members below have their initial values
  Member members[max_threads];
  std::vector<Product> products[max_threads / warpgroup_size];  // the first thread to start the n-th defines it
  int free_registers[max_blocks] = {};
};
thread_local Asynchronous state;

int thread() { return current_runner->running_thread(); }
DeferredWork& deferred(Deferred kind) { return state.deferred[thread()][size_t(kind)]; }
Member& member() { return state.has_warpgroups = true, state.members[thread()]; }

// Called at the block's end: checks that warpgroups have started the same products, and forgets them.
void end_warpgroups() {
  for (int t = 0; t < current_runner->threads(); ++t)
    if (const size_t all = state.products[t / warpgroup_size].size(), own = state.members[t].products; own != all)
      fatal("kernel %s, %s: started %zu products, and others of its warpgroup %zu: all 128 threads start the same",
            current_runner->launch().kernel, current_runner->name_of(t).c_str(), own, all);
  std::ranges::fill(state.members, Member());
  for (auto& products : state.products) products.clear();
  std::ranges::fill(state.free_registers, 0);
  state.has_warpgroups = false;
}

}  // namespace

// ---- asynchronous work

void begin_asynchronous(int blocks) {
  if (sanitizers::fiber_per_thread) {  // so that no CUDA thread frees memory of another
    state.background.reserve(256);
    for (auto& products : state.products) products.reserve(4096);
  }
  for (int block = 0; block < blocks; ++block)
    for (Barrier& barrier : state.numbered[block]) barrier = {};
}

// Called at the block's end. Only the writes of stores may be left: a thread waits for their shared memory alone.
void end_asynchronous() {
  for (int t = 0; state.pending && t < current_runner->threads(); ++t)
    for (auto& group : state.deferred[t][size_t(Deferred::writes)].committed)
      for (; !group.empty(); group.erase(group.begin()), --state.pending) group.front()();
  if (state.pending || !state.background.empty())
    fatal("kernel %s: a thread ends without waiting for its asynchronous work", current_runner->launch().kernel);
  if (state.has_warpgroups) end_warpgroups();
}

void defer(Deferred kind, std::function<void()> work) {
  deferred(kind).open.push_back(std::move(work));
  ++state.pending;
}

void commit(Deferred kind) {
  DeferredWork& work = deferred(kind);
  work.committed.push_back(std::move(work.open));
  work.open.clear();
  if (kind == Deferred::products) member().is_ordered = false;
}

void finish(Deferred kind, size_t but) {
  auto& groups = deferred(kind).committed;
  for (; groups.size() > but; groups.erase(groups.begin())) {
    for (auto& work : groups.front()) work();
    state.pending -= int(groups.front().size());
  }
}

bool is_unfinished(Deferred kind) { return !deferred(kind).open.empty() || !deferred(kind).committed.empty(); }

void let_others_run(Location where) { current_runner->let_others_run(where); }

void do_in_background(std::function<void()> work) {
  sanitizers::release(&state.background);
  state.background.push_back(std::move(work));
}

int background_work() { return int(state.background.size()); }

void do_background_work(int number) {
  const auto work = std::move(state.background[number]);
  state.background.erase(state.background.begin() + number);
  sanitizers::acquire(&state.background);
  work();
}

// ---- barriers

void arrive(Barrier& barrier, int arrivals, int expected_bytes) {
  sanitizers::release(&barrier);
  const int bytes = barrier.pending_bytes + expected_bytes;
  if (barrier.pending_arrivals < arrivals)
    refuse({}, "more arrivals at an mbarrier than the %d it was made for", barrier.arrivals);
  if (std::abs(bytes) > most_pending_bytes)
    refuse({}, "an mbarrier expects %d bytes; give at most %d", bytes, most_pending_bytes);
  barrier.pending_arrivals -= arrivals;
  barrier.pending_bytes = bytes;
  if (barrier.pending_arrivals || barrier.pending_bytes) return;
  barrier.pending_arrivals = barrier.arrivals;
  ++barrier.phase;
  current_runner->wake(&barrier);
}

// On a GPU a waiting thread polls the parity. If a second phase ends before it polls, it goes on waiting; after a third
// phase it goes on with that phase's data.
void wait(Barrier& barrier, unsigned parity, Location where) {
  const unsigned phase = barrier.phase;
  if (phase % 2 == parity) {
    current_runner->wait(where, "an mbarrier", &barrier);
    const unsigned ended = (barrier.phase - phase) % (1u << 10);
    if (ended > 1)
      refuse(where, "waited for a phase of an mbarrier while %u ended: let its other threads wait for this one", ended);
  }
  sanitizers::acquire(&barrier);
}

// A numbered barrier, or the cluster's. The first thread sets the number of threads. Lanes of a warp come together.
void meet_at(int number, int threads, bool waits, Location where) {
  const bool is_cluster = number == cluster_barrier;
  if (!is_cluster) {
    if (number < 1 || number >= numbered_barriers || threads < 1 || threads % warp_size)
      refuse(where, "barrier %d is for %d threads; give a number from 1 to 15, and a multiple of 32", number, threads);
    current_runner->collective(0xffffffffu, 0, 0, where, [](auto...) {});
  }
  Barrier& barrier = is_cluster ? state.numbered[0][0] : state.numbered[current_runner->block_in_cluster()][number];
  if (barrier.arrivals == barrier.pending_arrivals) barrier.arrivals = barrier.pending_arrivals = int16_t(threads);
  if (barrier.arrivals != threads)
    refuse(where, "barrier %d is for %d threads, before it was for %d", number, threads, barrier.arrivals);
  const unsigned parity = barrier.phase % 2;
  arrive(barrier, 1, 0);
  if (waits) wait(barrier, parity, where);
}

// ---- warpgroups

void order_registers() { member().is_ordered = true; }

void start_product(const Product& product, Location where) {
  auto& products = state.products[thread() / warpgroup_size];
  if (const unsigned threads = blockDim.x * blockDim.y * blockDim.z; threads % warpgroup_size)
    refuse(where, "starts a product in a block of %u threads; give whole warpgroups of %d", threads, warpgroup_size);
  if (!member().is_ordered)
    refuse(where, "starts a group of products without order_registers(): call it before the first");
  const size_t number = member().products++;
  if (number == products.size()) products.push_back(product);
  if (products[number] != product)
    refuse(where, "product %zu of this thread is not its warpgroup's: all 128 threads start the same", number);
}

void set_registers(int count, int at_launch, bool gives, Location where) {
  int &given = member().given, &free = state.free_registers[current_runner->block_in_cluster()];
  const int now = at_launch - given, more = count - now;
  if (gives ? more > 0 : more < 0)
    refuse(where, "a thread that has %d registers %s %d", now, gives ? "gives back those above" : "takes up to", count);
  while (more > free) current_runner->wait(where, "registers that other threads give back", &free);
  free -= more;
  given -= more;
  if (gives) current_runner->wake(&free);
}

}  // namespace cpu
