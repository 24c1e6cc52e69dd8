// The counters of access_counts.h, in three steps: the compiler's calls become events of threads, events of lanes
// become requests of warps, requests become counts.
#include "dev/ladders/cpu/access_counts.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <unordered_map>

#include "cpu/block.h"
#include "cpu/cuda_runtime.h"

namespace cpu {
namespace {

using counting::Calls, counting::Event;

// The counters, by memory space (global, shared) and event. Events from Event::barrier on have no space.
constexpr MemoryCounts AccessCounts::*memory_fields[2][3] = {
    {&AccessCounts::global_loads, &AccessCounts::global_stores, &AccessCounts::global_atomics},
    {&AccessCounts::shared_loads, &AccessCounts::shared_stores, &AccessCounts::shared_atomics}};
constexpr int64_t AccessCounts::*instruction_fields[3] = {&AccessCounts::barriers, &AccessCounts::shuffles,
                                                          &AccessCounts::matrix_instructions};

int64_t transactions(const AccessCounts& counts) {
  int64_t sum = 0;
  for (const auto& space : memory_fields)
    for (auto field : space) sum += (counts.*field).transactions;
  return sum;
}

}  // namespace

MemoryCounts& MemoryCounts::operator+=(const MemoryCounts& other) {
  for (auto field : {&MemoryCounts::requests, &MemoryCounts::threads, &MemoryCounts::bytes, &MemoryCounts::transactions,
                     &MemoryCounts::ideal})
    this->*field += other.*field;
  return *this;
}

AccessCounts& AccessCounts::operator+=(const AccessCounts& other) {
  for (const auto& space : memory_fields)
    for (auto field : space) this->*field += other.*field;
  for (auto field : instruction_fields) this->*field += other.*field;
  return *this;
}

namespace {

// ---- requests become counts

struct Request {
  uint32_t lanes = 0;
  uintptr_t addresses[warp_size];
};

// Calls visit(number) once for each unit of `unit` bytes of memory that lanes [first, first + count) touch.
template <class Visit>
void for_each_unit(const Request& request, int first, int count, size_t size, size_t unit, Visit visit) {
  std::vector<uintptr_t> addresses;
  for (int lane = first; lane < first + count; ++lane)
    if (request.lanes >> lane & 1) addresses.push_back(request.addresses[lane]);
  std::ranges::sort(addresses);
  uintptr_t next = 0;
  for (uintptr_t address : addresses)
    for (next = std::max(next, address / unit); next <= (address + size - 1) / unit; ++next) visit(next);
}

int64_t count_units(const Request& request, size_t size, size_t unit) {
  int64_t count = 0;
  for_each_unit(request, 0, warp_size, size, unit, [&](uintptr_t) { ++count; });
  return count;
}

constexpr size_t sector = 32, banks = 32, word = 4;

// Returns the number of wavefronts, and the number that would be needed without bank conflicts.
std::pair<int64_t, int64_t> wavefronts(const Request& request, size_t size) {
  const int lanes_at_once = int(std::min<size_t>(warp_size, banks * word / size));
  int64_t needed = 0, ideal = 0;
  for (int first = 0; first < warp_size; first += lanes_at_once) {
    int64_t words[banks] = {};  // number of words that each bank has to give
    for_each_unit(request, first, lanes_at_once, size, word, [&](uintptr_t w) { ++words[w % banks]; });
    const int64_t most = *std::ranges::max_element(words);
    needed += most;
    ideal += most > 0;
  }
  return {needed, ideal};
}

// Returns the number of sectors that are touched, and the number that could hold the same bytes.
std::pair<int64_t, int64_t> sectors(const Request& request, size_t size) {
  return {count_units(request, size, sector), (count_units(request, size, 1) + int64_t(sector) - 1) / int64_t(sector)};
}

// The accesses of one instruction in one warp of a block.
struct Instruction {
  Event event = Event::load;
  bool shared = false;
  size_t size = 0;                 // bytes of an access, or the number of instructions that it counts as
  Calls calls;                     // the calls that led here, then its own return address
  int executions[warp_size] = {};  // number of executions by each lane since the lanes last met
  std::vector<Request> requests;   // since the lanes last met: request n has the n-th execution of each lane
  AccessCounts counts;

  void count(const Request& request) {
    if (event >= Event::barrier) {
      counts.*instruction_fields[int(event) - int(Event::barrier)] += int64_t(size);
      return;
    }
    const int64_t threads = std::popcount(request.lanes);
    const auto [transactions, ideal] = shared ? wavefronts(request, size) : sectors(request, size);
    counts.*memory_fields[shared][int(event)] += {1, threads, threads * int64_t(size), transactions, ideal};
  }

  void lanes_meet() {
    for (const Request& request : requests) count(request);
    requests.clear();
    std::ranges::fill(executions, 0);
  }
};

using Instructions = std::unordered_map<uint64_t, Instruction>;  // the key is a hash of calls, event, space and size

std::atomic<bool> is_on = false;
std::mutex all_mutex;
Instructions all;  // the instructions of all blocks that have ended

// ---- events become requests

struct Range {
  const char* begin = nullptr;
  size_t bytes = 0;
  bool contains(const void* p) const { return size_t(static_cast<const char*>(p) - begin) < bytes; }
};

template <class T>
Range range_of(const T& variable) {
  return {reinterpret_cast<const char*>(&variable), sizeof variable};
}

// This program as it is loaded: the first module.
struct Program {
  uintptr_t address = 0;
  Range thread_locals;  // the calling thread's copies of all thread_local variables

  Program() {
    auto visit = [](dl_phdr_info* module, size_t, void* self) { return static_cast<Program*>(self)->read(*module); };
    dl_iterate_phdr(visit, this);
  }
  int read(const dl_phdr_info& module) {
    address = module.dlpi_addr;
    for (int i = 0; i < module.dlpi_phnum; ++i)
      if (module.dlpi_phdr[i].p_type == PT_TLS)
        thread_locals = {static_cast<const char*>(module.dlpi_tls_data), module.dlpi_phdr[i].p_memsz};
    return 1;  // end the iteration: the first module is this program
  }
};

// The block that a worker runs.
struct Block {
  const Range thread_locals = Program().thread_locals;
  // The thread_local variables that kernels read but that are not __shared__.
  const Range not_shared[5] = {range_of(threadIdx), range_of(blockIdx), range_of(blockDim), range_of(gridDim),
                               range_of(plain_loop)};
  Range dynamic_shared;
  int threads = 0, hidden = 0;
  Calls* calls = nullptr;  // the calls of the running fiber
  Instructions warps[max_warps];

  bool is_shared(const void* p) const {
    return dynamic_shared.contains(p) ||
           (thread_locals.contains(p) && std::ranges::none_of(not_shared, [p](Range r) { return r.contains(p); }));
  }

  uint64_t hash(Event event, bool shared, size_t size, const void* caller) const {
    uint64_t hash = size << 8 | uint64_t(event) << 1 | uint64_t(shared);
    auto mix = [&](const void* p) {
      hash = std::rotl(hash ^ reinterpret_cast<uintptr_t>(p), 32) * 0x9e3779b97f4a7c15u;
    };
    for (const void* call : *calls) mix(call);
    mix(caller);
    return hash;
  }

  void warp_meets(int warp) {
    for (auto& [hash, instruction] : warps[warp]) instruction.lanes_meet();
  }
};

constinit thread_local Block* block = nullptr;  // null: this worker counts nothing now

// Who wrote the bytes of the block's shared memory last, whether accesses are counted or not. A thread gets another
// stamp whenever it shares its writes with Hopper's engines, so a byte whose stamp is still its writer's has not been
// shared.
struct Writers {
  const Range thread_locals = Program().thread_locals;
  Range dynamic_shared;
  std::vector<uint64_t> of_dynamic, of_thread_locals = std::vector<uint64_t>(thread_locals.bytes);
  uint64_t stamps[max_threads] = {}, last = 0;
  int hidden = 0;

  void begin(Range shared, int threads) {
    dynamic_shared = shared;
    of_dynamic.resize(std::max(of_dynamic.size(), shared.bytes));
    for (int t = 0; t < threads; ++t) renew(t);
  }
  void renew(int thread) { stamps[thread] = ++last * max_threads + uint64_t(thread); }

  // The stamps of memory from p on; null: it is not shared.
  uint64_t* at(const void* p) {
    const char* byte = static_cast<const char*>(p);
    if (dynamic_shared.contains(p)) return &of_dynamic[size_t(byte - dynamic_shared.begin)];
    return thread_locals.contains(p) ? &of_thread_locals[size_t(byte - thread_locals.begin)] : nullptr;
  }
};

constinit thread_local Writers* writers = nullptr;  // null: this worker runs no block

}  // namespace

namespace counting {

void begin_block(const void* shared, size_t shared_bytes, int threads) {
  thread_local Writers writers_of_worker;
  writers = &writers_of_worker;
  writers->begin({static_cast<const char*>(shared), shared_bytes}, threads);
  if (!is_on) return;
  thread_local Block instance;
  block = &instance;
  block->dynamic_shared = {static_cast<const char*>(shared), shared_bytes};
  block->threads = threads;
}

void end_block() {
  writers = nullptr;
  if (!block) return;
  meet_block();
  std::lock_guard lock(all_mutex);
  for (Instructions& warp : block->warps) {
    for (auto& [hash, instruction] : warp) {
      auto [entry, is_new] = all.try_emplace(hash, instruction);
      if (!is_new) entry->second.counts += instruction.counts;
    }
    warp.clear();
  }
  block = nullptr;
}

void run_on(Calls& calls) {
  if (block) block->calls = &calls;
}

void meet_block() {
  for (int warp = 0; block && warp * warp_size < block->threads; ++warp) block->warp_meets(warp);
}

void meet_warp(int warp, uint32_t mask) {
  if (!block) return;
  const uint64_t lanes = (uint64_t(1) << std::min(warp_size, block->threads - warp * warp_size)) - 1;
  if ((mask & lanes) == lanes) block->warp_meets(warp);
}

Hidden::Hidden() {
  if (block) ++block->hidden;
  if (writers) ++writers->hidden;
}
Hidden::~Hidden() {
  if (block) --block->hidden;
  if (writers) --writers->hidden;
}

void share_with_engines() { writers->renew(current_runner->running_thread()); }

void engines_write(const void* p, size_t bytes) {
  if (uint64_t* stamps = writers->at(p)) std::fill_n(stamps, bytes, 0);
}

bool engines_may_read(const void* p, size_t bytes) {
  const uint64_t* stamps = writers->at(p);
  return !stamps || std::none_of(stamps, stamps + bytes, [](uint64_t stamp) {
    return stamp == writers->stamps[stamp % max_threads];
  });
}

void record(Event event, const void* address, size_t size, const void* caller) {
  if (writers && !writers->hidden && event == Event::store)
    if (uint64_t* stamps = writers->at(address))
      std::fill_n(stamps, size, writers->stamps[current_runner->running_thread()]);
  if (!block || block->hidden) return;
  if (!caller) caller = __builtin_return_address(0);
  const bool is_access = event < Event::barrier, shared = is_access && block->is_shared(address);
  if (is_access && !shared && !is_device_memory(address)) return;
  const int thread = current_runner->running_thread(), lane = thread % warp_size;
  auto [entry, is_new] = block->warps[thread / warp_size].try_emplace(block->hash(event, shared, size, caller));
  Instruction& instruction = entry->second;
  if (is_new) {
    instruction.event = event;
    instruction.shared = shared;
    instruction.size = size;
    instruction.calls = *block->calls;
    instruction.calls.push_back(caller);
  }
  const size_t n = size_t(instruction.executions[lane]++);
  if (n == instruction.requests.size()) instruction.requests.emplace_back();
  instruction.requests[n].lanes |= 1u << lane;
  instruction.requests[n].addresses[lane] = reinterpret_cast<uintptr_t>(address);
}

}  // namespace counting

// ---- functions that programs call

void start_counting() {
  cudaDeviceSynchronize();
  all.clear();
  is_on = true;
}

AccessCounts stop_counting() {
  cudaDeviceSynchronize();
  is_on = false;
  AccessCounts sum;
  for (const auto& [hash, instruction] : all) sum += instruction.counts;
  return sum;
}

namespace {

struct Line {
  std::string file;
  int number;
  auto operator<=>(const Line&) const = default;

  bool is_helper() const {
    return number == 0 || file.starts_with('/') || file.starts_with("cpu/") || file == "kernels/device/common.cuh" ||
           file == "kernels/device/instructions.cuh";
  }
};

// Finds the source lines of the instructions before these return addresses: first the line itself, then the line that
// it was inlined into, and so on outward.
std::map<const void*, std::vector<Line>> find_lines(const std::vector<const void*>& return_addresses) {
  std::string command = "addr2line -a -i -e '" + std::filesystem::read_symlink("/proc/self/exe").string() + "'";
  for (const void* p : return_addresses) {
    char text[32];
    std::snprintf(text, sizeof text, " %#zx", reinterpret_cast<uintptr_t>(p) - Program().address - 1);
    command += text;
  }
  std::map<const void*, std::vector<Line>> lines;
  FILE* output = popen((command + " 2>/dev/null").c_str(), "r");
  auto next = return_addresses.begin();
  for (char text[4096]; output && std::fgets(text, sizeof text, output);) {
    const std::string line = text;
    const size_t colon = line.rfind(':');
    const std::filesystem::path file = line.substr(0, colon);
    if (colon == line.npos) ++next;  // option -a prints the address before its lines
    else lines[next[-1]].push_back({file.lexically_normal(), std::atoi(&text[colon + 1])});
  }
  if (output) pclose(output);
  return lines;
}

}  // namespace

std::vector<LineCounts> counts_by_line() {
  std::vector<const void*> return_addresses;
  for (const auto& [hash, instruction] : all)
    return_addresses.insert(return_addresses.end(), instruction.calls.begin(), instruction.calls.end());
  auto lines = find_lines(return_addresses);
  std::map<Line, AccessCounts> counts;
  for (const auto& [hash, instruction] : all) {
    std::vector<Line> outward;
    for (auto call = instruction.calls.rbegin(); call != instruction.calls.rend(); ++call)
      outward.insert(outward.end(), lines[*call].begin(), lines[*call].end());
    const auto where = std::ranges::find_if_not(outward, &Line::is_helper);
    counts[where == outward.end() ? Line{"??", 0} : *where] += instruction.counts;
  }
  std::vector<LineCounts> result;
  for (const auto& [line, of_line] : counts) result.push_back({line.file, line.number, of_line});
  std::ranges::stable_sort(result, std::greater(), [](const LineCounts& line) { return transactions(line.counts); });
  return result;
}

// Records an access to a struct that is larger than a GPU's widest access, or is aligned to less than its size. It is
// split into pieces as wide as the alignment of the address. In a struct of at most 16 bytes they are at most 4 bytes
// wide: with a larger alignment it would have been one access.
static void record_pieces(Event event, char* p, size_t bytes, const void* caller) {
  const size_t alignment = size_t(1) << std::countr_zero(reinterpret_cast<uintptr_t>(p) | bytes);
  const size_t piece = std::min<size_t>(alignment, bytes <= 16 ? 4 : 16);
  for (size_t i = 0; i < bytes; i += piece) counting::record(event, p + i, piece, caller);
}

// ---- functions that the compiler calls

extern "C" {

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}

void __tsan_func_entry(void* caller) {
  if (block) block->calls->push_back(caller);
}

void __tsan_func_exit() {
  if (block) block->calls->pop_back();
}

#define CPU_ACCESSES(NAME, EVENT)                                                                                     \
  void __tsan_##NAME##1(void* p) { counting::record(Event::EVENT, p, 1, __builtin_return_address(0)); }               \
  void __tsan_##NAME##2(void* p) { counting::record(Event::EVENT, p, 2, __builtin_return_address(0)); }               \
  void __tsan_##NAME##4(void* p) { counting::record(Event::EVENT, p, 4, __builtin_return_address(0)); }               \
  void __tsan_##NAME##8(void* p) { counting::record(Event::EVENT, p, 8, __builtin_return_address(0)); }               \
  void __tsan_##NAME##16(void* p) { counting::record(Event::EVENT, p, 16, __builtin_return_address(0)); }             \
  void __tsan_##NAME##_range(char* p, size_t bytes) {                                                                 \
    record_pieces(Event::EVENT, p, bytes, __builtin_return_address(0));                                               \
  }
CPU_ACCESSES(read, load)
CPU_ACCESSES(write, store)

// Atomics are only carried out: where a GPU has an instruction there may be a loop of these, so cuda_runtime.h counts.
#define CPU_ATOMICS(BITS, T)                                                                                          \
  T __tsan_atomic##BITS##_load(const T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }                      \
  void __tsan_atomic##BITS##_store(T* p, T value, int) { __atomic_store_n(p, value, __ATOMIC_SEQ_CST); }              \
  T __tsan_atomic##BITS##_exchange(T* p, T value, int) { return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST); }    \
  T __tsan_atomic##BITS##_fetch_add(T* p, T value, int) { return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }    \
  T __tsan_atomic##BITS##_fetch_sub(T* p, T value, int) { return __atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST); }    \
  bool __tsan_atomic##BITS##_compare_exchange_strong(T* p, T* expected, T value, int, int) {                          \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
  }                                                                                                                   \
  bool __tsan_atomic##BITS##_compare_exchange_weak(T* p, T* expected, T value, int, int) {                            \
    return __atomic_compare_exchange_n(p, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
  }
CPU_ATOMICS(8, uint8_t)
CPU_ATOMICS(32, uint32_t)
CPU_ATOMICS(64, uint64_t)
}

}  // namespace cpu
