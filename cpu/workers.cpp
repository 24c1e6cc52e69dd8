#include "cpu/workers.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/device.h"
#include "cpu/host_cpus.h"

namespace cpu {
namespace {

// OpenMP's runtime has counted the hardware threads of this process's affinity mask.
[[maybe_unused]] const bool is_limited = [] {
  if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(std::min(omp_get_max_threads(), group_cpus()));
  return true;
}();

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Workers {
 public:
  void run(size_t count, size_t chunk, size_t threads, const std::function<void(size_t)>& body) {
    try {
      while (threads_.size() + 1 < threads) threads_.emplace_back([this, number = threads_.size()] { work(number); });
    } catch (const std::system_error& error) {
      fatal("cannot start %zu threads: %s; give fewer OMP_NUM_THREADS, or raise ulimit -u", threads, error.what());
    }
    {
      std::lock_guard lock(mutex_);
      body_ = &body;
      count_ = count;
      chunk_ = chunk;
      helpers_ = threads - 1;
      next_ = 0;
      ++generation_;
    }
    if (sleeping_ > 0) start_.notify_all();
    take_chunks(body);
    // All chunks are taken. Workers that have joined finish their last one; workers that come now find no open job.
    std::unique_lock lock(mutex_);
    body_ = nullptr;
    for (int spins = 0; joined_ > 0 && spins < 2000; ++spins) {
      lock.unlock();
      relax();
      lock.lock();
    }
    finished_.wait(lock, [this] { return joined_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void take_chunks(const std::function<void(size_t)>& body) try {
    for (size_t first; (first = next_.fetch_add(chunk_)) < count_;)
      for (size_t i = first; i < std::min(first + chunk_, count_); ++i) body(i);
  } catch (...) {
    std::lock_guard lock(mutex_);
    next_ = count_;
    error_ = std::current_exception();
  }

  void work(size_t number) {
    // Signals are for the main thread, whose handler has a stack of its own. Products that oneDNN generates may keep their operands
    // below the stack pointer, where the kernel would put registers. If the main thread has a signal that it has not handled yet,
    // the next one may go to any other thread.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    omp_set_num_threads(1);
    for (uint64_t seen = 0;;) {
      seen = wait_after(seen);
      const std::function<void(size_t)>* body;
      {
        std::lock_guard lock(mutex_);
        body = body_;
        if (!body || number >= helpers_) continue;
        ++joined_;
      }
      take_chunks(*body);
      std::lock_guard lock(mutex_);
      if (--joined_ == 0) finished_.notify_one();
    }
  }

  // Waits until the generation is not `seen` any more, and returns it. Spins for about 50 µs, then sleeps.
  uint64_t wait_after(uint64_t seen) {
    for (int spins = 0; spins < 2000; ++spins) {
      if (generation_ != seen) return generation_;
      relax();
    }
    std::unique_lock lock(mutex_);
    ++sleeping_;
    start_.wait(lock, [&] { return generation_ != seen; });
    --sleeping_;
    return generation_;
  }

  std::mutex mutex_;
  std::condition_variable start_, finished_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<size_t> next_{0};
  const std::function<void(size_t)>* body_ = nullptr;  // null: no job is open
  size_t count_ = 0, chunk_ = 1, helpers_ = 0;
  int joined_ = 0;
  std::exception_ptr error_;  // the last that a body has thrown
  std::vector<std::thread> threads_;
};

}  // namespace

void parallel_for(size_t count, size_t chunk, const std::function<void(size_t)>& body) {
  static Workers& workers = *new Workers;  // never destroyed: its threads sleep until the process has ended
  const OneThread one_thread;
  workers.run(count, chunk, size_t(one_thread.threads), body);
}

}  // namespace cpu
