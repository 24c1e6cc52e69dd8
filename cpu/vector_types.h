// CUDA's built-in vector types (int4, float2, dim3, ...) for the CPU device.
//
// Layout as in the CUDA C++ Programming Guide, table "Alignment Requirements": two and four components are
// aligned to their whole size, three components as one of them. Components are called x, y, z, w; make_NAME
// builds a value.
//
// Kernels read arrays of float or __nv_bfloat16 through an int4* or float4* pointer. nvcc allows that. In standard C++
// it breaks the aliasing rules, and g++ would reorder such accesses; `may_alias` makes them well defined.
#pragma once

#define CPU_VECTOR_TYPES(COMPONENT, NAME)                                                                    \
  struct alignas(2 * sizeof(COMPONENT)) [[gnu::may_alias]] NAME##2 {                                         \
    COMPONENT x, y;                                                                                          \
  };                                                                                                         \
  struct [[gnu::may_alias]] NAME##3 {                                                                        \
    COMPONENT x, y, z;                                                                                       \
  };                                                                                                         \
  struct alignas(4 * sizeof(COMPONENT)) [[gnu::may_alias]] NAME##4 {                                         \
    COMPONENT x, y, z, w;                                                                                    \
  };                                                                                                         \
  inline constexpr NAME##2 make_##NAME##2(COMPONENT x, COMPONENT y) { return {x, y}; }                       \
  inline constexpr NAME##3 make_##NAME##3(COMPONENT x, COMPONENT y, COMPONENT z) { return {x, y, z}; }       \
  inline constexpr NAME##4 make_##NAME##4(COMPONENT x, COMPONENT y, COMPONENT z, COMPONENT w) {              \
    return {x, y, z, w};                                                                                     \
  }

CPU_VECTOR_TYPES(int, int)
CPU_VECTOR_TYPES(unsigned int, uint)
CPU_VECTOR_TYPES(float, float)

#undef CPU_VECTOR_TYPES

// Extent of a grid or a block; components not given are 1.
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
