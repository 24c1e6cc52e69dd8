// Calls by which the CPU device reports accesses to memory to their counters (dev/ladders/cpu/access_counts.h). Only the
// build VARIANT=counts has counters; in all others these functions do nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpu {
namespace counting {

enum class Event { load, store, atomic, barrier, shuffle, matrix_instruction };

#if defined(CPU_COUNT_ACCESSES)

using Calls = std::vector<const void*>;  // return addresses of the functions that a fiber is in, outermost first

void begin_block(const void* shared, size_t shared_bytes, int threads);
void end_block();
void run_on(Calls& calls);                // the fiber with these calls goes on
void meet_block();                        // all threads are at a barrier
void meet_warp(int warp, uint32_t mask);  // these lanes are at a collective

// Records an event of the current thread. size: bytes, or the number of instructions that a GPU needs. caller: a return
// address in the kernel; null: the return address of this function, for code that is compiled with the kernel.
void record(Event event, const void* address, size_t size, const void* caller = nullptr);

// While an object of this class exists, accesses are not counted: a copy engine makes them, not a thread. No fiber may
// switch in that time.
struct Hidden {
  Hidden();
  ~Hidden();
};

// Hopper's engines see a thread's writes to shared memory only after share_with_engines().
void share_with_engines();
void engines_write(const void* p, size_t bytes);
bool engines_may_read(const void* p, size_t bytes);

#else

struct Calls {};
inline void begin_block(const void*, size_t, int) {}
inline void end_block() {}
inline void run_on(Calls&) {}
inline void meet_block() {}
inline void meet_warp(int, uint32_t) {}
inline void record(Event, const void*, size_t, const void* = nullptr) {}
struct Hidden {
  ~Hidden() {}
};
inline void share_with_engines() {}
inline void engines_write(const void*, size_t) {}
inline bool engines_may_read(const void*, size_t) { return true; }

#endif

}  // namespace counting
}  // namespace cpu
