// Hopper's instructions as the CPU device executes them. kernels/device/hopper.cuh has their contracts and includes this file.
#pragma once

using Barrier = cpu::Barrier;

inline void init_barrier(Barrier& barrier, int arrivals) { barrier = {int16_t(arrivals), int16_t(arrivals), 0, 0}; }
inline void share_barriers() {}
inline void arrive(Barrier& barrier) { cpu::arrive(barrier, 1, 0); }
inline void arrive_expecting(Barrier& barrier, int bytes) { cpu::arrive(barrier, 1, bytes); }
inline void wait(Barrier& barrier, unsigned parity, cpu::Location where = cpu::Location::current()) {
  cpu::wait(barrier, parity, where);
}

struct TensorMap {
  char* matrix;
  int rows, columns, box_rows;
};

template <class T>
TensorMap make_tensor_map(const T* matrix, int rows, int columns, int box_rows) {
  static_assert(sizeof(T) == 2);
  return {reinterpret_cast<char*>(const_cast<T*>(matrix)), rows, columns, box_rows};
}

inline char* permuted(uintptr_t address) { return reinterpret_cast<char*>(address ^ (address >> 3 & 0x70)); }

// For the access counters a box is moved by the thread that asks, a row in an access.
inline void count_box(cpu::counting::Event event, const TensorMap& map, int row, int column) {
  const int first = std::max(column, 0), columns = std::min(column + box_columns, map.columns) - first;
  for (int r = std::max(row, 0); r < std::min(row + map.box_rows, map.rows) && columns > 0; ++r)
    cpu::counting::record(event, map.matrix + 2 * (size_t(r) * map.columns + first), 2 * columns);
}

// Calls function(element of the box, element of the matrix; null outside).
template <class Function>
void for_each_in_box(const void* box, const TensorMap& map, int row, int column, Function function) {
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < box_columns; ++c) {
      const bool inside = row + r >= 0 && row + r < map.rows && column + c >= 0 && column + c < map.columns;
      const size_t index = size_t(row + r) * map.columns + column + c;
      function(permuted(shared_address(box) + 128 * r + 2 * c), inside ? map.matrix + 2 * index : nullptr);
    }
}

// The box is NaN at once, for those who still read or already read it; the elements arrive as late as they may.
inline void load_box(void* box, const TensorMap& map, int row, int column, Barrier& barrier) {
  std::memset(box, 0xff, map.box_rows * 128);
  count_box(cpu::counting::Event::load, map, row, column);
  cpu::do_in_background([=, &barrier] {
    const cpu::counting::Hidden hidden;
    for_each_in_box(box, map, row, column, [](char* to, const char* from) {
      if (from) std::memcpy(to, from, 2);
      else std::memset(to, 0, 2);
    });
    cpu::arrive(barrier, 0, -128 * map.box_rows);
  });
}

// Reads the box at once and again as late as it may: an element that has changed in between is stored as NaN.
inline void store_box(const TensorMap& map, int row, int column, const void* box) {
  const char* bytes = static_cast<const char*>(box);
  count_box(cpu::counting::Event::store, map, row, column);
  cpu::defer(cpu::Work::stores, [=, early = std::string(bytes, map.box_rows * 128)] {
    const cpu::counting::Hidden hidden;
    for_each_in_box(box, map, row, column, [&](const char* from, char* to) {
      const bool is_same = std::memcmp(from, &early[from - bytes], 2) == 0;
      if (to) std::memcpy(to, is_same ? from : "\xff\xff", 2);
    });
  });
}

inline void commit_stores() { cpu::commit(cpu::Work::stores); }

template <int groups>
void wait_for_stores() {
  cpu::finish(cpu::Work::stores, groups);
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

template <int J>
void wait_for_products(float (&)[J][4], cpu::Location where = cpu::Location::current()) {
  wait_for_products<0>(where);
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

template <class T, bool b_along_n, int J>
void multiply_m64k16(float (&sum)[J][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  cpu::counting::record(cpu::counting::Event::matrix_instruction, nullptr, 1);
  cpu::defer(cpu::Work::products, [&sum, a, b, add] {
    const cpu::counting::Hidden hidden;
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int k = 0; k < 16; ++k) {
      const float x[2] = {operand<T>(a, false, row, k), operand<T>(a, false, row + 8, k)};
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

template <int count>
void give_registers() {}

template <int count>
void take_registers() {}
