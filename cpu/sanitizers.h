// Tells AddressSanitizer and ThreadSanitizer about fibers. In a normal build these functions are empty.
//
// For ThreadSanitizer every CUDA thread is a thread of its own, on a stack of its own. It learns of an order between
// two of them only at __syncthreads, __syncwarp and __threadfence, and between a launch and its threads. Each block
// runs in a new thread, so that its __shared__ (thread_local) memory is new and blocks have no order, as on a GPU (but
// every fourth block, as their threads have the same fibers: new ones take most of a test's time). The device's
// own files are compiled without instrumentation, so that only kernels are checked.
#pragma once

#include <cstddef>

#if defined(CPU_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>

#include <atomic>
#include <thread>
#elif defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace cpu {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t stack_bytes = 256 * 1024;
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif

namespace sanitizers {

#if defined(CPU_THREAD_SANITIZER)

constexpr bool fiber_per_thread = true, one_worker = true;
inline void release(const void* object) { __tsan_release(const_cast<void*>(object)); }
inline void acquire(const void* object) { __tsan_acquire(const_cast<void*>(object)); }

// Runs `function` in a new thread, and waits for it by an atomic that the sanitizer does not see. A join would order
// this block before the next one and hide races between them.
template <class Function>
void run_isolated(Function function) {
  static std::atomic<int> done;  // static, because the thread may still be in notify_one after this call returns
  done = 0;
  auto run = [&] {
    function();
    done = 1;
    done.notify_one();
  };
  std::thread(run).detach();
  done.wait(0);
}

class FiberState {
 public:
  ~FiberState() {
    if (owned_) __tsan_destroy_fiber(fiber_);
  }
  void created(const void*, size_t) { fiber_ = __tsan_create_fiber(0), owned_ = true; }
  void leaving(FiberState& to) {
    if (!fiber_) fiber_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to.fiber_, __tsan_switch_to_fiber_no_sync);
  }
  void arrived() {}

 private:
  void* fiber_ = nullptr;
  bool owned_ = false;
};

#else

constexpr bool fiber_per_thread = false;
inline void release(const void*) {}
inline void acquire(const void*) {}

template <class Function>
void run_isolated(Function function) {
  function();
}

#if defined(__SANITIZE_ADDRESS__)

constexpr bool one_worker = true;  // __shared__ is plain static here: thread_local arrays get no red zones

class FiberState {
 public:
  void created(const void* bottom, size_t bytes) { bottom_ = bottom, bytes_ = bytes; }
  void leaving(FiberState& to) {
    to.from_ = this;
    __sanitizer_start_switch_fiber(&fake_stack_, to.bottom_, to.bytes_);
  }
  void arrived() {  // stores in from_ where its stack lies; so the worker's own stack becomes known
    __sanitizer_finish_switch_fiber(fake_stack_, &from_->bottom_, &from_->bytes_);
  }

 private:
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
  FiberState* from_ = nullptr;
};

#else

constexpr bool one_worker = false;

struct FiberState {
  void created(const void*, size_t) {}
  void leaving(FiberState&) {}
  void arrived() {}
};

#endif
#endif

}  // namespace sanitizers
}  // namespace cpu
