// The worker threads of the CPU device: as many as OMP_NUM_THREADS says, else one a core.
//
// A pool of its own and not OpenMP's: libgomp's threads meet at a barrier after every region and spin there for
// milliseconds, so that on a machine with other work every launch waits for a thread that is not running (measured: a
// training step 4 times slower). Here a worker that comes late is not waited for, and one without work soon sleeps.
#pragma once

#include <cstddef>
#include <functional>

namespace cpu {

// Calls body(i) once for each i < count, on the calling thread and the workers, `chunk` numbers at a time. Inside,
// OpenMP regions (oneDNN's) have one thread. Not to be nested.
void parallel_for(size_t count, size_t chunk, const std::function<void(size_t)>& body);

}  // namespace cpu
