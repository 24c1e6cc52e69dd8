// The largest number that a launch writes, for the launch that casts the tensor to eight bits next (extensions/fp8/kernels/fp8.cuh).
//
// A kernel that can take it has an argument `seen`: it calls seen.see() with the numbers that a thread writes, and
// seen.raise() when the thread has written its last. The argument has one of two types: Unseen does nothing, and
// costs nothing; Largest<Float> raises *maximum, which the caller has set to zero. No number is read again, and no
// thread waits for another one.
//
// Numbers are compared by the bits of |x|, whose order is that of the numbers, NaN last: so the order of threads
// changes nothing. Rounding to Float does not change their order either: the largest number is rounded alone, and is
// the largest one that was written.
#pragma once

#include "kernels/device/common.cuh"

struct Unseen {
  template <int N>
  __device__ void see(const float (&)[N]) {}
  __device__ void raise() const {}
};

template <class Float>
struct Largest {
  float* maximum;      // of |x|
  uint32_t found = 0;  // by this thread

  template <int N>
  __device__ void see(const float (&x)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) found = max(found, __float_as_uint(x[k]) & 0x7fffffffu);
  }
  __device__ void raise() const {
    raise_maximum(reinterpret_cast<uint32_t*>(maximum), __float_as_uint(to_float(from_float<Float>(__uint_as_float(found)))));
  }
};

// Calls function(seen), for a launch that leaves its maximum in *maximum (null: nobody asks for it).
template <class Float, class Function>
void with_maximum(float* maximum, Function function) {
  if constexpr (std::is_same_v<Float, __nv_bfloat16>)  // which alone is cast to eight bits
    if (maximum) return function(Largest<Float>{maximum});
  function(Unseen());
}

// Calls function(N, the argument that with_maximum passes). N: the pack of type Packed if it divides `length`, else 1.
template <class Packed, class Float = Packed, class Function>
void with_pack(int length, float* maximum, Function function) {
  with_pack<Packed>(length, [&](auto N) { with_maximum<Float>(maximum, [&](auto choice) { function(N, choice); }); });
}
