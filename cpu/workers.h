// The worker threads of the CPU device: as many as OMP_NUM_THREADS says, else one for each hardware thread that this process may use
// (host_cpus.h), divided by the ranks that share them (nccl.cpp).
//
// This pool is used instead of OpenMP's. libgomp's threads meet at a barrier after every region and spin there for
// milliseconds, so on a machine with other work every launch waits for a thread that is not running (measured: a
// training step takes 4 times as long). Here nothing waits for a worker that comes late, and a worker without work soon
// sleeps.
#pragma once

#include <omp.h>

#include <cstddef>
#include <functional>

namespace cpu {

// While an object of this class exists, OpenMP regions that this thread begins have one thread.
struct OneThread {
  const int threads = omp_get_max_threads();  // before
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(threads); }
};

// Calls body(i) once for each i < count, on the calling thread and the workers, `chunk` numbers at a time. OpenMP
// regions (oneDNN's) inside body have one thread. Calls must not be nested. What a body throws, this throws.
void parallel_for(size_t count, size_t chunk, const std::function<void(size_t)>& body);

}  // namespace cpu
