// Hopper's instructions as the CPU device executes them. kernels/device/hopper.cuh has their contracts and includes this
// file.
#pragma once

#include <atomic>
#include <thread>

using Barrier = cpu::Barrier;

inline void init_barrier(Barrier& barrier, int arrivals) { barrier = {int16_t(arrivals), int16_t(arrivals), 0, 0}; }
inline void share_barriers() {}

// The race detector sees this read, and finds that a barrier is used by a thread that may run before it is made.
inline Barrier& made(Barrier& barrier) {
  if (barrier.arrivals <= 0) cpu::fatal("an mbarrier is used before it is made");
  return barrier;
}
inline void arrive(Barrier& barrier) { cpu::arrive(made(barrier), 1, 0); }
inline void arrive_expecting(Barrier& barrier, int bytes) { cpu::arrive(made(barrier), 1, bytes); }
inline void wait(Barrier& barrier, unsigned parity, cpu::Location where = cpu::Location::current()) {
  cpu::wait(made(barrier), parity, where);
}

inline int block_in_cluster() { return cpu::block_in_cluster(); }
inline void sync_cluster(cpu::Location where = cpu::Location::current()) { cpu::sync_cluster(where); }
template <class T>
T& shared_of(int block, T& shared) {
  return *static_cast<T*>(cpu::shared_memory_of(block, &shared));
}
inline void arrive_at(Barrier& barrier, int block) {
  const cpu::counting::Hidden hidden;  // no access to the shared memory of this SM
  arrive(shared_of(block, barrier));
}
inline void wait_for_cluster(Barrier& barrier, unsigned parity, cpu::Location where = cpu::Location::current()) {
  cpu::wait(made(barrier), parity, where);
}

inline void wait_at(int number, int threads, cpu::Location where = cpu::Location::current()) {
  cpu::meet_at(number, threads, true, where);
}
inline void announce_at(int number, int threads, cpu::Location where = cpu::Location::current()) {
  cpu::meet_at(number, threads, false, where);
}

struct TensorMap {
  MatrixStack<char> stack;  // strides in bytes
  int box_rows;
};

template <class T>
TensorMap make_tensor_map(const MatrixStack<T>& stack, int box_rows) {
  static_assert(sizeof(T) == 2);
  auto* data = reinterpret_cast<char*>(const_cast<std::remove_const_t<T>*>(stack.data));
  return {{data, stack.rows, stack.columns, stack.inner, stack.outer, 2 * stack.row_stride, 2 * stack.inner_stride,
           2 * stack.outer_stride}, box_rows};
}

template <class T>
TensorMap make_tensor_map(const T* matrix, int rows, int columns, int box_rows) {
  return make_tensor_map(MatrixStack<const T>{matrix, rows, columns, 1, 1, columns, 0, 0}, box_rows);
}

inline char* permuted(uintptr_t address) { return reinterpret_cast<char*>(address ^ (address >> 3 & 0x70)); }

// Of the matrix that `at` names.
inline char* element(const MatrixStack<char>& stack, const StackPlace& at, int row, int column) {
  return stack.data + at.outer * stack.outer_stride + at.inner * stack.inner_stride + row * stack.row_stride +
         2 * column;
}

// For the access counters a box is moved by the thread that asks, a row in an access.
inline void count_box(cpu::counting::Event event, const TensorMap& map, const StackPlace& at) {
  const MatrixStack<char>& m = map.stack;
  const int first = std::max(at.column, 0), columns = std::min(at.column + box_columns, m.columns) - first;
  for (int r = std::max(at.row, 0); r < std::min(at.row + map.box_rows, m.rows) && columns > 0; ++r)
    cpu::counting::record(event, element(m, at, r, first), 2 * columns);
}

// Calls function(element of the box, element of the matrix; null outside).
template <class Function>
void for_each_in_box(const void* box, const TensorMap& map, const StackPlace& at, Function function) {
  const MatrixStack<char>& m = map.stack;
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < box_columns; ++c) {
      const int row = at.row + r, column = at.column + c;
      const bool inside = row >= 0 && row < m.rows && column >= 0 && column < m.columns;
      function(permuted(shared_address(box) + 128 * r + 2 * c), inside ? element(m, at, row, column) : nullptr);
    }
}

// The box is NaN at once, for those who still read or already read it; the elements arrive as late as they may.
inline void start_load(void* box, const TensorMap& map, StackPlace at, Barrier& barrier) {
  std::memset(box, 0xff, map.box_rows * 128);
  cpu::do_in_background([=, &barrier] {
    const cpu::counting::Hidden hidden;
    for_each_in_box(box, map, at, [](char* to, const char* from) {
      if (from) std::memcpy(to, from, 2);
      else std::memset(to, 0, 2);
    });
    cpu::arrive(barrier, 0, -128 * map.box_rows);
  });
}

inline void load_box(void* box, const TensorMap& map, StackPlace at, Barrier& barrier) {
  count_box(cpu::counting::Event::load, map, at);
  start_load(box, map, at, barrier);
}

inline void load_box(void* box, const TensorMap& map, int row, int column, Barrier& barrier) {
  load_box(box, map, {0, 0, row, column}, barrier);
}

inline void load_box(void* box, const TensorMap& map, int row, int column, Barrier& barrier, unsigned blocks) {
  const StackPlace at{0, 0, row, column};
  count_box(cpu::counting::Event::load, map, at);
  for (int block = 0; blocks >> block; ++block)
    if (blocks >> block & 1)
      start_load(&shared_of(block, *static_cast<char*>(box)), map, at, made(shared_of(block, barrier)));
}

// Reads the box at once and again as late as it may: an element that has changed in between is stored as NaN.
inline void store_box(const TensorMap& map, StackPlace at, const void* box) {
  const char* bytes = static_cast<const char*>(box);
  count_box(cpu::counting::Event::store, map, at);
  cpu::defer(cpu::Work::stores, [=, early = std::string(bytes, map.box_rows * 128)] {
    const cpu::counting::Hidden hidden;
    for_each_in_box(box, map, at, [&](const char* from, char* to) {
      const bool is_same = std::memcmp(from, &early[from - bytes], 2) == 0;
      if (to) std::memcpy(to, is_same ? from : "\xff\xff", 2);
    });
  });
}

inline void store_box(const TensorMap& map, int row, int column, const void* box) {
  store_box(map, {0, 0, row, column}, box);
}

inline void commit_stores() { cpu::commit(cpu::Work::stores); }

template <int groups>
void wait_for_stores() {
  cpu::finish(cpu::Work::stores, groups);
}

// Reads the floats at once and again as late as it may, as store_box does.
inline void store_floats(float* to, const float* from, int bytes, bool adds) {
  const int count = bytes / int(sizeof(float));
  for (int i = 0; i < count; i += 32)
    cpu::counting::record(adds ? cpu::counting::Event::atomic : cpu::counting::Event::store, to + i,
                          int(sizeof(float)) * std::min(32, count - i));
  cpu::defer(cpu::Work::stores, [=, early = std::string(reinterpret_cast<const char*>(from), bytes)] {
    const cpu::counting::Hidden hidden;
    for (int i = 0; i < count; ++i) {
      const bool is_same = std::memcmp(from + i, &early[sizeof(float) * i], sizeof(float)) == 0;
      to[i] = !is_same ? NAN : adds ? to[i] + from[i] : from[i];
    }
  });
}
inline void store_floats(float* to, const float* from, int bytes) { store_floats(to, from, bytes, false); }
inline void add_floats(float* to, const float* from, int bytes) { store_floats(to, from, bytes, true); }

inline void finish_stores() { cpu::finish(cpu::Work::stores, 0); }

inline void count_up(unsigned* counter) {
  __threadfence();
  atomicAdd(counter, 1u);
}

// Those who are waited for run on other workers, or have ended.
inline void wait_for_count(unsigned* counter, unsigned count) {
  while (std::atomic_ref(*counter).load() != count) std::this_thread::yield();
  __threadfence();
}

inline void share_with_engines() {}

struct MatrixDescriptor {
  uintptr_t start;
  int bytes_to_next_box;
};

inline MatrixDescriptor describe(const void* box, int offset, int bytes_to_next_box) {
  return {shared_address(box) + offset, bytes_to_next_box};
}

inline void order_registers() {}
inline void commit_products() { cpu::commit(cpu::Work::products); }

// Each thread does its own part of the products; the warp is done when all lanes are.
template <int groups>
void wait_for_products(cpu::Location where = cpu::Location::current()) {
  cpu::finish(cpu::Work::products, groups);
  cpu::sync_warp(0xffffffffu, where);
}

template <int groups = 0, int J>
void wait_for_products(float (&)[J][4], cpu::Location where = cpu::Location::current()) {
  wait_for_products<groups>(where);
}

// Element k of row, or column, `line` of an operand.
template <class T>
float operand(const MatrixDescriptor& matrix, bool along_n, int line, int k) {
  const int offset = along_n ? line / box_columns * matrix.bytes_to_next_box + line % box_columns * 2 + k * 128
                             : line * 128 + k * 2;
  uint16_t bits;
  std::memcpy(&bits, permuted(matrix.start + offset), sizeof bits);
  return T::from_bits(bits);
}

// a(half, k): element k of this lane's row, or of the row 8 further down, when the product is done.
template <class T, bool b_along_n, int J, class Left>
void start_product(float (&sum)[J][4], Left a, MatrixDescriptor b, bool add) {
  cpu::counting::record(cpu::counting::Event::matrix_instruction, nullptr, 1);
  cpu::defer(cpu::Work::products, [&sum, a, b, add] {
    const cpu::counting::Hidden hidden;
    const int column = threadIdx.x % 4 * 2;
    for (int k = 0; k < 16; ++k) {
      const float x[2] = {a(0, k), a(1, k)};
      for (int j = 0; j < J; ++j)
        for (int c = 0; c < 2; ++c) {
          const float y = operand<T>(b, b_along_n, 8 * j + column + c, k);
          for (int half = 0; half < 2; ++half) {
            float& total = sum[j][2 * half + c];
            total = (add || k > 0 ? total : 0) + x[half] * y;
          }
        }
    }
  });
}

template <class T, bool b_along_n, bool a_along_m = false, int J>
void multiply_m64k16(float (&sum)[J][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  start_product<T, b_along_n>(sum, [a](int half, int k) {
    return operand<T>(a, a_along_m, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half, k);
  }, b, add);
}

// A row's elements are spread over the four lanes of its quad, which exchange them now. That the registers stay as they
// are until the product is done is not checked.
template <class T, bool b_along_n, int J>
void multiply_m64k16(float (&sum)[J][4], const uint32_t (&a)[4], MatrixDescriptor b, bool add,
                     cpu::Location where = cpu::Location::current()) {
  struct Quad {
    uint16_t rows[2][16];
  } quad;
  static_assert(sizeof(Quad) == 64);
  std::memcpy(&quad, a, sizeof a);
  cpu::warp_instruction(quad, [](Quad (&lanes)[32]) {
    uint16_t own[32][8];
    for (int l = 0; l < 32; ++l) std::memcpy(own[l], &lanes[l], sizeof own[l]);
    for (int l = 0; l < 32; ++l)
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 16; ++k)
          lanes[l].rows[half][k] = own[l / 4 * 4 + k % 8 / 2][2 * (half + 2 * (k / 8)) + k % 2];
  }, where);
  start_product<T, b_along_n>(sum, [quad](int half, int k) { return float(T::from_bits(quad.rows[half][k])); }, b, add);
}

template <int count>
void give_registers() {}

template <int count>
void take_registers() {}
