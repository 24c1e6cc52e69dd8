// The CPU device: how one kernel launch runs on a machine without a GPU.
//
// A grid is spread over worker threads (cpu/workers.h); each worker runs one block at a time. The threads of a block
// run one after another on one fiber as long as none of them waits, so a kernel without barriers is a plain loop. The
// first thread that waits (__syncthreads, a shuffle, a vote) keeps the fiber, the threads after it run on another one,
// and from then on a scheduler chooses which thread runs next. Threads switch only where one waits, so a run is
// reproducible.
//
//   GPT_CPU_SCHEDULE=forward       lowest runnable thread of the warp first, then the next warp (default)
//   GPT_CPU_SCHEDULE=reverse       highest thread first; blocks run in descending order, too
//   GPT_CPU_SCHEDULE=random:SEED   random order of warps, lanes, blocks, and independent streams
//
// A correct kernel gives the same result under each schedule; a kernel with a missing barrier does not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "cpu/counting.h"
#include "cpu/switches.h"
#include "cpu/vector_types.h"

typedef struct CUstream_st* cudaStream_t;

extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;

namespace cpu {

using Location = std::source_location;

struct Launch {
  const char* kernel;
  const void* code;  // tells the kernel from others: its address or, if that is unknown, something in its place
  dim3 grid, block;
  size_t shared_bytes;
  unsigned cluster;  // number of blocks, neighbours along x, that run together
  cudaStream_t stream;
  void (*run_threads)(const void* body) = nullptr;  // runs threads on the calling fiber until none is left for it
  const void* body = nullptr;
};

// True while the threads of this worker's block run as a plain loop: forward order, and none has waited yet.
extern constinit thread_local bool plain_loop;

bool next_thread_slow();

// Makes the next thread that this fiber runs the current one. Returns false if there is none.
inline bool next_thread() {
  if (plain_loop && ++threadIdx.x < blockDim.x) return true;
  return next_thread_slow();
}

void run_grid(const Launch& launch);
inline std::function<void(const Launch&)> rehearsal;  // if set, grids are not run, but given to it (dev/launches.cu)
bool is_device_memory(const void* p);  // does p point into memory that cudaMalloc returned?
bool check_launch(const Launch& launch);  // false: the launch is impossible; sets cudaGetLastError's value
bool is_foreign(const void* p);  // does p point into the memory of another device than this thread's?

// Called before a kernel or a library's product is issued. Under GPT_CPU_LAZY=1 it waits for the device when that is
// the first time: on a GPU a kernel that is loaded at its first launch may do so. variant: which variant of
// `code`.
void load(const void* code, size_t variant);

// Dynamic shared memory: the bytes that a kernel may have if nobody has asked for more (cudaFuncSetAttribute), and the
// most that anybody can ask for, as on Hopper.
constexpr size_t usual_shared_bytes = 48 * 1024, most_shared_bytes = 227 * 1024;
size_t& allowed_shared_bytes(const void* kernel);
bool may_have_its_shared_memory(const Launch& launch);  // if it may not, but might, says so

// An operation that is issued to a stream runs at once, or stays in the stream's queue for later (streams.cpp);
// enqueue decides. `poll` starts or continues it, and returns true when it has finished.
bool streams_are_deferred();
bool runs_at_once(cudaStream_t stream);
void keep(cudaStream_t stream, std::function<bool()> poll);
void enqueue(cudaStream_t stream, std::function<bool()> poll);
int number_of(cudaStream_t stream);  // in the log

// Counts of this thread's calls to the device so far.
struct Counts {
  size_t launches = 0, products = 0;  // kernel launches, matrix products
  size_t copies = 0, copied_bytes = 0, memsets = 0;
  size_t waits = 0;  // calls in which the host waits for the device
  size_t allocations = 0, allocated_bytes = 0;
  size_t graphs = 0;  // graph launches; the operations in them are counted, too
  size_t events = 0, records = 0, event_waits = 0;  // events that were made, and recorded; streams that were made to wait
  size_t queries = 0;                               // whether an event or a stream is done, and times between events

  friend Counts operator+(const Counts& a, const Counts& b) { return combine(a, b, std::plus<>()); }
  friend Counts operator-(const Counts& a, const Counts& b) { return combine(a, b, std::minus<>()); }

 private:
  template <class Operation>
  static Counts combine(const Counts& a, const Counts& b, Operation of) {
    return {of(a.launches, b.launches), of(a.products, b.products), of(a.copies, b.copies),
            of(a.copied_bytes, b.copied_bytes), of(a.memsets, b.memsets), of(a.waits, b.waits),
            of(a.allocations, b.allocations), of(a.allocated_bytes, b.allocated_bytes), of(a.graphs, b.graphs),
            of(a.events, b.events), of(a.records, b.records), of(a.event_waits, b.event_waits), of(a.queries, b.queries)};
  }
};
inline thread_local constinit Counts counts;

// ranks: the number of ranks on this host. From now on this process may use its part of the memory that is free now.
void share_memory(size_t ranks);

void* dynamic_shared_memory();
size_t dynamic_shared_bytes();
[[noreturn]] void fatal(const char* format, ...) __attribute__((format(printf, 1, 2)));

constexpr auto address_of = []<class... Parameters>(void (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
};
// The launcher's `body` and `address` of a kernel. The address is null if template arguments are left out.
#define CPU_KERNEL(...)                                                                                             \
  [=](auto... cpu_arguments) { __VA_ARGS__(cpu_arguments...); }, [=](auto cpu_address_of) -> const void* {          \
    if constexpr (requires { cpu_address_of(__VA_ARGS__); }) return cpu_address_of(__VA_ARGS__); else return nullptr; \
  }(::cpu::address_of)

// Ends the program as fatal() does. The message begins with the kernel, the thread and, if it is given, the caller's
// line.
[[noreturn]] void refuse(Location where, const char* format, ...) __attribute__((format(printf, 2, 3)));

template <class Argument>
bool is_foreign_pointer(const Argument& argument) {
  if constexpr (std::is_pointer_v<Argument>) return is_foreign(argument);
  else return false;
}

// The source filter replaces `kernel<<<grid, block, shared, stream>>>` by a call of this; `(arguments...)` follows.
// Each thread of the grid calls body(arguments...).
template <class Body>
auto launcher(const char* kernel, Body body, const void* address, dim3 grid, dim3 block, size_t shared_bytes = 0,
              cudaStream_t stream = nullptr, unsigned cluster = 1) {
  return [=](auto... arguments) {
    Launch launch{kernel, address ? address : &typeid(Body), grid, block, shared_bytes, cluster, stream};
    if (!check_launch(launch)) return;
    if (switches().devices > 1 && (is_foreign_pointer(arguments) || ...))
      fatal("kernel %s: an argument points into the memory of another device: set the device to which it belongs", kernel);
    auto run = [=]() mutable {
      auto thread = [&] { body(arguments...); };
      launch.body = &thread;
      launch.run_threads = [](const void* pointer) {
        const auto& run_thread = *static_cast<const decltype(thread)*>(pointer);
        do run_thread();
        while (next_thread());
      };
      run_grid(launch);
      return true;
    };
    if (runs_at_once(stream)) run();
    else keep(stream, run);
  };
}

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory());
}

// Block barrier. `where` is the caller's line, for the deadlock report.
void sync_threads(Location where);

template <class T>
uint64_t to_bits(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Clusters: the block's number in its own, a barrier of all threads, and the address of `shared`, in this block's
// dynamic shared memory, in that of block `rank`.
int block_in_cluster();
void sync_cluster(Location where);
void* shared_memory_of(int rank, void* shared);

// Warp collectives: each lane in `mask` gives a value, waits for the others, and gets its result.
void sync_warp(uint32_t mask, Location where);
uint64_t exchange(uint32_t mask, uint64_t value, int source_lane, Location where);
uint32_t ballot(uint32_t mask, bool predicate, Location where);

enum class Reduction { sum, max, min, bit_and, bit_or, bit_xor };
template <class T>
T reduce(uint32_t mask, T value, Reduction reduction, Location where);  // float, int, unsigned

template <class T>
T shuffle(uint32_t mask, T value, int source_lane, Location where) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move at most 8 bytes");
  counting::record(counting::Event::shuffle, nullptr, (sizeof(T) + 3) / 4);
  return from_bits<T>(exchange(mask, to_bits(value), source_lane, where));
}

// An instruction of the whole warp: execute(lanes) gets the `lane` structs of all 32 lanes, and may change them. It
// runs once, in the last lane to arrive. It works on copies, because the instruction does not order accesses to memory.
// execute must have no captures.
void warp_instruction(void* lane, size_t bytes, void (*execute)(void* lanes), Location where);

template <class Lane, class Execute>
void warp_instruction(Lane& lane, Execute, Location where) {
  static_assert(std::is_trivially_copyable_v<Lane> && sizeof(Lane) % 4 == 0 && sizeof(Lane) <= 64);
  warp_instruction(&lane, sizeof lane, [](void* lanes) { Execute()(*static_cast<Lane(*)[32]>(lanes)); }, where);
}

// ---- asynchronous work: a kernel starts it and waits for it later. It is done as late as is allowed.

// Work of one kind, in groups: `defer` adds work to the open group, `commit` ends the group, and `finish` does all
// groups of this thread, in order, except for the last `but` groups. Stores read shared memory, and leave a piece of
// work that writes the read values to global memory; at the block's end all of these are done.
enum class Deferred { copies, stores, writes, products };
void defer(Deferred kind, std::function<void()> work);
void commit(Deferred kind);
void finish(Deferred kind, size_t but = 0);
bool is_unfinished(Deferred kind);  // of this thread
void let_others_run(Location where);

// Work that belongs to no thread. It is done when no thread can run; then it arrives at a barrier for which threads
// wait.
void do_in_background(std::function<void()> work);

// The 8 bytes of an mbarrier (extensions/hopper/kernels/hopper.cuh). A phase ends when no arrivals and no bytes are pending.
struct Barrier {
  int16_t arrivals;  // number of arrivals in each phase
  int16_t pending_arrivals;
  int32_t pending_bytes : 22;
  uint32_t phase : 10;  // that is under way; its last bit is the parity
};
constexpr int most_pending_bytes = (1 << 20) - 1;
void arrive(Barrier& barrier, int arrivals, int expected_bytes);
void wait(Barrier& barrier, unsigned parity, Location where);  // waits until the phase of this parity has ended

constexpr int numbered_barriers = 16, cluster_barrier = -1;  // a kernel's have the numbers 1 to 15
void meet_at(int number, int threads, bool waits, Location where);  // comes to a numbered barrier

// Warpgroups of 128 threads. A product is its descriptors and its shape.
using Product = std::array<uint64_t, 3>;
void order_registers();
void start_product(const Product& product, Location where);
// Gives back registers of the thread above `count`, or waits until it can have `count`.
void set_registers(int count, int at_launch, bool gives, Location where);

inline int thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline int lane() { return thread_rank() & 31; }

}  // namespace cpu
