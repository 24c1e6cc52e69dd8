// Hopper's asynchronous instructions, each in one function: of a copy engine (TMA) and of tensor cores (wgmma),
// which both work at the same time as the threads, and of barriers in shared memory, by which threads wait for them.
// Only this file and kernels/device/instructions.cuh ask which device they are compiled for. The code exists only for
// sm_90a: in other code each function stops the kernel (trap), so the host asks has_wgmma() before it launches a kernel
// that calls one. The CPU device has all of them.
//
// Barriers (PTX ISA, "mbarrier"). A barrier counts arrivals of threads and bytes of copies. When none of either is
// pending, its phase ends and the next begins, which expects as many arrivals again. Phases have parity 0, 1, 0, ... A
// thread waits until the phase of a parity has ended; at a new barrier it does not wait for parity 1. In a ring of
// stages each stage has a barrier `full` (its copies have arrived) and a barrier `empty` (its readers are done with
// it). In round r of the ring the consumer waits for `full` with parity r % 2, and the producer for `empty` with the
// other parity.
//
// Numbered barriers (PTX ISA, "bar"), 1 to 15; __syncthreads uses number 0. `threads`, a multiple of 32, come to one:
// some wait there until all have come, the others only announce themselves and go on. Then it begins anew.
//
// Boxes (PTX ISA, "cp.async.bulk.tensor"; CUDA driver API, "Tensor Map Object Management"). One thread has the copy
// engine move a box of box_rows × 64 elements between shared memory and a row-major matrix; (row, column) is the box's
// first element in the matrix. `column` is a multiple of 8 (16 bytes), and a store's place is not negative. Elements
// outside the matrix arrive as zeros, and are not stored; their bytes count. Row r of a box is the 128 bytes from byte 128·r, its 8 chunks of 16 bytes permuted, so that one column of chunks covers
// all banks:
//
//   chunk c of row r is at place c xor (r mod 8)
//
// The matrix may be one of many (MatrixStack): then a box's place is given by the number of its matrix, too.
//
// The hardware takes r mod 8 from the address (bits 7 to 9 change bits 4 to 6), so boxes begin at multiples of 1,024
// bytes. The copy engine and the tensor cores see writes of threads to shared memory only after share_with_engines()
// and then a barrier.
//
// Clusters (PTX ISA, "Cluster of Cooperative Thread Arrays"). Blocks of a cluster run at the same time on neighbouring
// SMs, and reach each other's shared memory. A box can be loaded to several of them at once (multicast): L2 gives it
// once, and a barrier in each counts its bytes. All blocks wait in sync_cluster() after they have made their barriers,
// and again at their end: until then others may reach their shared memory.
//
// Products (PTX ISA, "wgmma.mma_async"). The 128 threads of a warpgroup, the first a multiple of 128, together start
//
//   sum (64 × N, float) = or += a (64 × 16) · b (16 × N)
//
// a and b, 16-bit numbers, are read from boxes (a also from registers, where each warp has its 16 rows as the left
// operand of multiply_m16n8k16). A box is described by 64 bits ("Matrix descriptor"; bytes in units of 16):
//
//   bits  0..13  address of the first element      bits 32..45  bytes from 8 rows of the box to the next 8: 1,024
//   bits 16..29  bytes from box to box             bits 62..63  1: rows of 128 bytes, permuted as above
//
//   along_k      a row of the box is 64 of k: it holds a (M,K), or the transpose (N,K) of b. Its rows are rows of m or
//                n. One box has all 16 of k of a product, so bits 16..29 are not used.
//   along_n      a row of the box is 64 of n: it holds b (K,N). Its rows are rows of k; box n / 64 has column n.
//   along_m      a row of the box is all 64 of m: it holds the transpose (K,M) of a. Its rows are rows of k.
//
// So the next 16 of k are 32 bytes further along_k, and 16 rows, 2,048 bytes, further along_n and along_m. Lane l of
// warp w (lane: a thread's number in its warp) holds
//
//   sum[j][i]    row 16·w + l/4 + 8·(i/2), column 8·j + 2·(l%4) + i%2
//
// for each warp the same as after multiply_m16n8k16. Between the start of a product and the wait for it, no thread may
// touch its sum, a and b. The order of calls: order_registers, products, commit_products (they are a group now), and
// wait_for_products<groups that may still be under way>.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/device/common.cuh"
#include "kernels/device/driver.cuh"

constexpr int box_columns = 64;                // of 2 bytes
constexpr int bytes_of_8_rows = 8 * 128;       // of a box, after which the permutation repeats
constexpr int bytes_of_16_along_k = 16 * 2;    // from one product's operand to the next one's
constexpr int bytes_of_16_along_n = 16 * 128;

// Matrices of the same shape: matrix (inner, outer), row r, column c is data[inner·inner_stride + outer·outer_stride +
// r·row_stride + c]. Strides and address are multiples of 16 bytes.
template <class T>
struct MatrixStack {
  T* data;
  int rows, columns, inner, outer;
  int64_t row_stride, inner_stride, outer_stride;
};
struct StackPlace {
  int outer, inner, row, column;
};

// The 64 bits of a box above.
struct MatrixDescriptor {
  uint64_t bits;
};

// The registers that a thread has at first, in a kernel of __launch_bounds__(threads, 1) that uses all 65,536.
constexpr int registers_at_launch(int threads) { return threads < 256 ? 256 : 65536 / threads / 8 * 8; }

#if defined(__CUDACC__)

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_ASM(...) __trap()
constexpr int probe_threads = 32;
#else
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
constexpr int probe_threads = 64;
#endif

// Would this card run the code of sm_90a? A program may have none of it, or PTX of an older architecture. The
// attributes of this kernel show it: in other code it has another limit of threads.
static __global__ void __launch_bounds__(probe_threads) wgmma_probe() {}
inline bool has_wgmma_code() {
  cudaFuncAttributes attributes;
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, wgmma_probe));
  return attributes.maxThreadsPerBlock == 64;
}

// ---- barriers

struct Barrier {
  uint64_t state;
};

__device__ inline void init_barrier(Barrier& barrier, int arrivals) {
  HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// To be called by the thread that has made barriers, before the __syncthreads after which others, and the copy engine,
// use them.
__device__ inline void share_barriers() { HOPPER_ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(Barrier& barrier) {
  HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&barrier)) : "memory");
}

// Arrives, and adds bytes that copies will bring to the phase.
__device__ inline void arrive_expecting(Barrier& barrier, int bytes) {
  HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
             :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// try_wait itself sleeps for a while.
__device__ inline void wait(Barrier& barrier, unsigned parity) {
  HOPPER_ASM("{\n"
             ".reg .pred ended;\n"
             "again:\n"
             "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
             "@!ended bra again;\n"
             "}" :: "r"(shared_address(&barrier)), "r"(parity) : "memory");
}

// ---- clusters

__device__ inline int block_in_cluster() {
  int number = 0;
  HOPPER_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(number));
  return number;
}

// Waits for all threads of all blocks, and sees their earlier writes.
__device__ inline void sync_cluster() {
  HOPPER_ASM("barrier.cluster.arrive.release;\n"
             "barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at this barrier of a block of the cluster, its own or another: to say that this thread has read the data that
// copies may overwrite now. None of its writes is meant for the other block, so no memory has to be ordered for the
// cluster: its reads are complete before the thread goes on (wait_for_products), and no later write can change them.
// The other block waits as at a barrier of its own. (CUTLASS's ClusterBarrier does the same.)
__device__ inline void arrive_at(Barrier& barrier, int block) {
  HOPPER_ASM("{\n"
             ".reg .b32 there;\n"
             "mapa.shared::cluster.u32 there, %0, %1;\n"
             "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
             "}" :: "r"(shared_address(&barrier)), "r"(block) : "memory");
}

// ---- numbered barriers

__device__ inline void wait_at(int number, int threads) {
  HOPPER_ASM("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

__device__ inline void announce_at(int number, int threads) {
  HOPPER_ASM("bar.arrive %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

// ---- boxes

using TensorMap = CUtensorMap;  // a kernel takes it as `const __grid_constant__ TensorMap`

// `rank` dimensions, the innermost first; strides, in bytes, from the second on.
template <class T>
TensorMap encode_tensor_map(const T* tensor, int rank, const cuuint64_t* size, const cuuint64_t* stride,
                            const cuuint32_t* box) {
  static_assert(sizeof(T) == 2);
  static const auto encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  constexpr auto type =
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t step[] = {1, 1, 1, 1};
  TensorMap map;
  const CUresult result = encode(&map, type, rank, const_cast<std::remove_const_t<T>*>(tensor), size, stride, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled refuses rows of " + std::to_string(size[0]) + " elements, " +
                             std::to_string(stride[0]) + " bytes apart (error " + std::to_string(result) +
                             "): give strides and an address that are multiples of 16 bytes");
  return map;
}

// The map of the row-major `matrix`, cut into boxes of box_rows (at most 256) × 64. Its rows are multiples of 16 bytes.
template <class T>
TensorMap make_tensor_map(const T* matrix, int rows, int columns, int box_rows) {
  const cuuint64_t size[] = {cuuint64_t(columns), cuuint64_t(rows)}, stride[] = {columns * sizeof(T)};
  const cuuint32_t box[] = {box_columns, cuuint32_t(box_rows)};
  return encode_tensor_map(matrix, 2, size, stride, box);
}

// The map of all matrices of a stack. A box lies in one of them.
template <class T>
TensorMap make_tensor_map(const MatrixStack<T>& stack, int box_rows) {
  const cuuint64_t size[] = {cuuint64_t(stack.columns), cuuint64_t(stack.inner), cuuint64_t(stack.rows),
                             cuuint64_t(stack.outer)};
  const cuuint64_t stride[] = {stack.inner_stride * sizeof(T), stack.row_stride * sizeof(T),
                               stack.outer_stride * sizeof(T)};
  const cuuint32_t box[] = {box_columns, 1, cuuint32_t(box_rows), 1};
  return encode_tensor_map(stack.data, 4, size, stride, box);
}

// Starts a copy to `box`. When it is done, the barrier has counted box_rows · 128 bytes.
__device__ inline void load_box(void* box, const TensorMap& map, int row, int column, Barrier& barrier) {
  HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
             :: "r"(shared_address(box)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)) : "memory");
}

__device__ inline void load_box(void* box, const TensorMap& map, StackPlace at, Barrier& barrier) {
  HOPPER_ASM("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
             "[%0], [%1, {%2, %3, %4, %5}], [%6];"
             :: "r"(shared_address(box)), "l"(&map), "r"(at.column), "r"(at.inner), "r"(at.row), "r"(at.outer),
                "r"(shared_address(&barrier)) : "memory");
}

// Bit i of `blocks`: to block i of the cluster, where box and barrier have the same place as here.
__device__ inline void load_box(void* box, const TensorMap& map, int row, int column, Barrier& barrier,
                                unsigned blocks) {
  HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
             "[%0], [%1, {%2, %3}], [%4], %5;"
             :: "r"(shared_address(box)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)),
                "h"(uint16_t(blocks)) : "memory");
}

__device__ inline void store_box(const TensorMap& map, StackPlace at, const void* box) {
  HOPPER_ASM("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
             :: "l"(&map), "r"(at.column), "r"(at.inner), "r"(at.row), "r"(at.outer), "r"(shared_address(box))
             : "memory");
}

__device__ inline void store_box(const TensorMap& map, int row, int column, const void* box) {
  HOPPER_ASM("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
             :: "l"(&map), "r"(column), "r"(row), "r"(shared_address(box)) : "memory");
}

__device__ inline void commit_stores() { HOPPER_ASM("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the boxes of all but this thread's last `groups` have been read, so that they may be written again.
template <int groups>
__device__ inline void wait_for_stores() {
  HOPPER_ASM("cp.async.bulk.wait_group.read %0;" :: "n"(groups) : "memory");
}

// The copy engine stores floats of shared memory, or adds them to those that are there. Addresses and `bytes` are
// multiples of 16.
__device__ inline void store_floats(float* to, const float* from, int bytes) {
  HOPPER_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
             :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ inline void add_floats(float* to, const float* from, int bytes) {
  HOPPER_ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
             :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// Waits until this thread's stores are done, and can be counted.
__device__ inline void finish_stores() { HOPPER_ASM("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Stores of several blocks to the same memory, one after the other: each counts when its stores are finished, and first
// waits until as many have counted as come before it. Two fences order them (PTX ISA 9.0):
//
//   in count_up        release. Finished stores are visible to the thread that has waited for them, as if it had written
//                      itself ("Async Proxy": their completion is followed by an implicit fence between proxies). So a
//                      thread that acquires the count sees them, too ("Causality Order").
//   in wait_for_count  acquire, then a fence between proxies: the copy engine sees from now on all that the thread sees.
//                      It is needed in global memory alone.
__device__ inline void count_up(unsigned* counter) {
  HOPPER_ASM("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
}
__device__ inline void wait_for_count(unsigned* counter, unsigned count) {
  HOPPER_ASM("{\n"
             ".reg .pred early;\n"
             ".reg .b32 now;\n"
             "again:\n"
             "ld.acquire.gpu.global.u32 now, [%0];\n"
             "setp.ne.u32 early, now, %1;\n"
             "@early bra again;\n"
             "fence.proxy.async.global;\n"
             "}" :: "l"(counter), "r"(count) : "memory");
}

__device__ inline void share_with_engines() { HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- products

// The engines' address of shared memory: bits 0..23 are the place in a block's shared memory, bits 24.. the block of
// the cluster.
__device__ inline uint32_t address_for_engines(const void* shared) { return shared_address(shared); }

__device__ inline void order_registers() { HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last `groups` are done: the shared memory that they read is free.
template <int groups>
__device__ inline void wait_for_products() {
  HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" :: "n"(groups) : "memory");
}

// The same for a product that is done then. The compiler learns that `sum` has changed, and does not read it before.
template <int groups = 0, int J>
__device__ inline void wait_for_products(float (&sum)[J][4]) {
  wait_for_products<groups>();
#pragma unroll
  for (int j = 0; j < J; ++j) asm volatile("" : "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3]));
}

// NUMBERS(7) is "%70, ..., %79". The operands of an asm: %0 to %(N/2 - 1) are sum, then come add, a and b.
#define NUMBERS(tens) "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
                      "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9"
#define NUMBERS_32 NUMBERS() ", " NUMBERS(1) ", " NUMBERS(2) ", %30, %31"
#define NUMBERS_60 NUMBERS() ", " NUMBERS(1) ", " NUMBERS(2) ", " NUMBERS(3) ", " NUMBERS(4) ", " NUMBERS(5)
#define NUMBERS_64 NUMBERS_60 ", %60, %61, %62, %63"
#define NUMBERS_128 NUMBERS_60 ", " NUMBERS(6) ", " NUMBERS(7) ", " NUMBERS(8) ", " NUMBERS(9) ", " NUMBERS(10) ", " \
                    NUMBERS(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUM_4(j) "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
#define SUM_16(j) SUM_4(j), SUM_4(j + 1), SUM_4(j + 2), SUM_4(j + 3)
#define SUM_32(j) SUM_16(j), SUM_16(j + 4)
#define SUM_64(j) SUM_32(j), SUM_32(j + 8)
#define MULTIPLY_TYPE(type, shape, numbers, add_number, a_and_b, ...)                                     \
  HOPPER_ASM("{\n"                                                                                        \
             ".reg .pred accumulate;\n"                                                                   \
             "setp.ne.b32 accumulate, " add_number ", 0;\n"                                               \
             "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" numbers "}, " a_and_b ";\n" \
             "}" : __VA_ARGS__ : "memory")
#define MULTIPLY(...)                                                       \
  if constexpr (std::is_same_v<T, __half>) MULTIPLY_TYPE("f16", __VA_ARGS__); \
  else MULTIPLY_TYPE("bf16", __VA_ARGS__)
// Operands are times 1, 1, and from boxes perhaps transposed.
#define FROM_BOXES "r"(int(add)), "l"(a.bits), "l"(b.bits), "n"(int(a_along_m)), "n"(int(b_along_n))
#define FROM_REGISTERS "r"(int(add)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(int(b_along_n))

template <class T, bool b_along_n, bool a_along_m = false, int J>
__device__ inline void multiply_m64k16(float (&sum)[J][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  static_assert(J == 8 || J == 16 || J == 32, "N is 64, 128 or 256");
  if constexpr (J == 8) {
    MULTIPLY("m64n64k16", NUMBERS_32, "%32", "%33, %34, accumulate, 1, 1, %35, %36", SUM_32(0) : FROM_BOXES);
  } else if constexpr (J == 16) {
    MULTIPLY("m64n128k16", NUMBERS_64, "%64", "%65, %66, accumulate, 1, 1, %67, %68", SUM_64(0) : FROM_BOXES);
  } else {
    MULTIPLY("m64n256k16", NUMBERS_128, "%128", "%129, %130, accumulate, 1, 1, %131, %132",
             SUM_64(0), SUM_64(16) : FROM_BOXES);
  }
}

template <class T, bool b_along_n, int J>
__device__ inline void multiply_m64k16(float (&sum)[J][4], const uint32_t (&a)[4], MatrixDescriptor b, bool add) {
  static_assert(J == 8 || J == 16, "N is 64 or 128");
  if constexpr (J == 8) {
    MULTIPLY("m64n64k16", NUMBERS_32, "%32", "{%33, %34, %35, %36}, %37, accumulate, 1, 1, %38",
             SUM_32(0) : FROM_REGISTERS);
  } else {
    MULTIPLY("m64n128k16", NUMBERS_64, "%64", "{%65, %66, %67, %68}, %69, accumulate, 1, 1, %70",
             SUM_64(0) : FROM_REGISTERS);
  }
}

#undef FROM_REGISTERS
#undef FROM_BOXES
#undef MULTIPLY
#undef MULTIPLY_TYPE
#undef SUM_64
#undef SUM_32
#undef SUM_16
#undef SUM_4
#undef NUMBERS_128
#undef NUMBERS_64
#undef NUMBERS_60
#undef NUMBERS_32
#undef NUMBERS

// ---- registers: a warpgroup gives back those above `count` per thread, or waits until it can have `count`. The
// kernel has __launch_bounds__(threads, 1).

template <int count>
__device__ inline void give_registers() {
  HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(count));
}

template <int count>
__device__ inline void take_registers() {
  HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(count));
}

#undef HOPPER_ASM

#else
#include "cpu/hopper.h"
#endif

// Makes all barriers of an array, as init_barrier() makes one.
template <int count>
__device__ inline void init_barriers(Barrier (&barriers)[count], int arrivals) {
  for (Barrier& barrier : barriers) init_barrier(barrier, arrivals);
}

// Do the card and the program have the instructions of this file?
inline bool has_wgmma() {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0 && has_wgmma_code();
}

// The number of the thread's warpgroup in its block. All lanes take lane 0's number, so that the compiler knows that
// values computed from it are the same for the whole warp.
__device__ inline int warpgroup_index() { return __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0); }

// The address is cut to its 14 bits: those above are the block's number in the cluster. An offset that is known when
// this is compiled costs one addition, because both halves are computed for themselves.
__device__ inline MatrixDescriptor describe(const void* box, int offset, int bytes_to_next_box) {
  const uint32_t start = (address_for_engines(box) & 0x3ffff) >> 4;
  const uint32_t lower = start + (offset >> 4) + (bytes_to_next_box >> 4 << 16);
  const uint32_t upper = bytes_of_8_rows >> 4 | 1u << 30;
  return {uint64_t(upper) << 32 | lower};
}

// ---- the ways in which an operand's box, or its row of boxes, can lie; `offset` in bytes

// (64 or N rows) × 64 of k: the rows of a, or the columns of b.
__device__ inline MatrixDescriptor along_k(const void* box, int offset) { return describe(box, offset, 0); }

// Some rows of k × 64 rows of a.
__device__ inline MatrixDescriptor along_m(const void* box, int offset) { return describe(box, offset, 0); }

// box_rows of k × 64 columns of b; the boxes of the next 64 columns follow each other.
template <int box_rows>
__device__ inline MatrixDescriptor along_n(const void* boxes, int offset) {
  return describe(boxes, offset, box_rows * 128);
}
