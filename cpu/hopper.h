// Hopper's instructions as the CPU device executes them. extensions/hopper/kernels/hopper.cuh has their contracts and includes
// this file.
#pragma once

#include <atomic>
#include <thread>

inline bool has_wgmma_code() { return true; }

using Barrier = cpu::Barrier;

inline void init_barrier(Barrier& barrier, int arrivals) { barrier = {int16_t(arrivals), int16_t(arrivals), 0, 0}; }
inline void share_barriers() {}

// The race detector sees this read, and finds that a barrier is used by a thread that may run before it is made.
inline Barrier& made(Barrier& barrier) {
  if (barrier.arrivals <= 0) cpu::refuse({}, "an mbarrier is used before it is made, or was made for no arrivals");
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

// Throws where the driver's encoder refuses.
template <class T>
TensorMap make_tensor_map(const MatrixStack<T>& stack, int box_rows) {
  static_assert(sizeof(T) == 2);
  auto* data = reinterpret_cast<char*>(const_cast<std::remove_const_t<T>*>(stack.data));
  const MatrixStack<char> m{data, stack.rows, stack.columns, stack.inner, stack.outer, 2 * stack.row_stride,
                            2 * stack.inner_stride, 2 * stack.outer_stride};
  bool fits = box_rows >= 1 && box_rows <= 256 && shared_address(m.data) % 16 == 0 &&
              std::min({m.rows, m.columns, m.inner, m.outer}) >= 1;
  for (int64_t bytes : {m.row_stride, m.inner_stride, m.outer_stride})
    fits &= bytes >= 0 && bytes < int64_t(1) << 40 && bytes % 16 == 0;
  if (!fits)
    throw std::runtime_error("a tensor map of " + std::to_string(m.rows) + " rows, " + std::to_string(m.row_stride) +
                             " bytes apart, in boxes of " + std::to_string(box_rows) + ": give strides and an " +
                             "address that are multiples of 16 bytes, sizes from 1 on, and boxes of 1 to 256 rows");
  return {m, box_rows};
}

template <class T>
TensorMap make_tensor_map(const T* matrix, int rows, int columns, int box_rows) {
  return make_tensor_map(MatrixStack<const T>{matrix, rows, columns, 1, 1, columns, 0, 0}, box_rows);
}

inline char* permuted(uintptr_t address) { return reinterpret_cast<char*>(address ^ (address >> 3 & 0x70)); }

// The address of an element in the matrix that `at` names.
inline char* element(const MatrixStack<char>& stack, const StackPlace& at, int row, int column) {
  return stack.data + at.outer * stack.outer_stride + at.inner * stack.inner_stride + row * stack.row_stride +
         2 * column;
}

// Counts the accesses of a box: to the counters, the thread that asks moves it, one row in each access.
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

// A GPU ends the kernel with an illegal instruction where the copy engine can't take a box's place. (That it does so at a
// negative column of a store was seen on an H200; a negative row alone has not been tried, and nothing needs one.)
inline void check_box(const void* box, const StackPlace& at, bool is_store) {
  if (shared_address(box) % 1024 != 0) cpu::refuse({}, "a box does not begin at a multiple of 1,024 bytes: align it");
  if (at.column % 8 != 0) cpu::refuse({}, "a box begins at column %d; give a multiple of 8 (16 bytes)", at.column);
  if (is_store && (at.row < 0 || at.column < 0))
    cpu::refuse({}, "a box is stored from row %d, column %d on; give none below 0", at.row, at.column);
}

// The box is NaN at once, for threads that still read it or read it too early; the elements arrive as late as they may.
inline void start_load(void* box, const TensorMap& map, StackPlace at, Barrier& barrier) {
  check_box(box, at, false);
  std::memset(box, 0xff, map.box_rows * 128);
  cpu::counting::engines_write(box, map.box_rows * 128);
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

// Reads shared memory at once and, when it is waited for, again: an element that has changed in between becomes NaN.
// Calls write(the elements it has read) as late as it may: nobody sees the result before finish_stores().
template <class Element, class Write>
void start_store(const void* shared, int bytes, Write write) {
  if (!cpu::counting::engines_may_read(shared, bytes))
    cpu::refuse({}, "the copy engine reads what threads have written without share_with_engines(): call it after");
  const auto* elements = static_cast<const Element*>(shared);
  std::vector<Element> read(elements, elements + bytes / sizeof(Element));
  cpu::defer(cpu::Deferred::stores, [write, elements, read = std::move(read)]() mutable {
    const cpu::counting::Hidden hidden;
    for (size_t i = 0; i < read.size(); ++i)
      if (std::memcmp(&read[i], elements + i, sizeof(Element)) != 0) std::memset(&read[i], 0xff, sizeof(Element));
    cpu::defer(cpu::Deferred::writes, [write, read = std::move(read)] {
      const cpu::counting::Hidden hidden;
      write(read.data());
    });
    cpu::commit(cpu::Deferred::writes);
  });
}

inline void store_box(const TensorMap& map, StackPlace at, const void* box) {
  check_box(box, at, true);
  count_box(cpu::counting::Event::store, map, at);
  start_store<uint16_t>(box, map.box_rows * 128, [=](const uint16_t* read) {
    for_each_in_box(box, map, at, [&](const char* from, char* to) {
      if (to) std::memcpy(to, &read[(from - static_cast<const char*>(box)) / 2], 2);
    });
  });
}

inline void store_box(const TensorMap& map, int row, int column, const void* box) {
  store_box(map, {0, 0, row, column}, box);
}

inline void commit_stores() { cpu::commit(cpu::Deferred::stores); }

// The others go first: if one of them already writes to the shared memory, its stores become NaN.
template <int groups>
void wait_for_stores(cpu::Location where = cpu::Location::current()) {
  cpu::let_others_run(where);
  cpu::finish(cpu::Deferred::stores, groups);
}

inline void store_floats(float* to, const float* from, int bytes, bool adds) {
  const int count = bytes / int(sizeof(float));
  if ((shared_address(to) | shared_address(from) | uintptr_t(bytes)) % 16 != 0)
    cpu::refuse({}, "%d bytes of floats go from %p to %p; give multiples of 16", bytes, (void*)from, (void*)to);
  for (int i = 0; i < count; i += 32)
    cpu::counting::record(adds ? cpu::counting::Event::atomic : cpu::counting::Event::store, to + i,
                          int(sizeof(float)) * std::min(32, count - i));
  start_store<float>(from, bytes, [=](const float* read) {
    for (int i = 0; i < count; ++i) to[i] = adds ? to[i] + read[i] : read[i];
  });
}
inline void store_floats(float* to, const float* from, int bytes) { store_floats(to, from, bytes, false); }
inline void add_floats(float* to, const float* from, int bytes) { store_floats(to, from, bytes, true); }

inline void finish_stores(cpu::Location where = cpu::Location::current()) {
  wait_for_stores<0>(where);
  cpu::finish(cpu::Deferred::writes, 0);
}

inline void count_up(unsigned* counter, cpu::Location where = cpu::Location::current()) {
  if (cpu::is_unfinished(cpu::Deferred::stores) || cpu::is_unfinished(cpu::Deferred::writes))
    cpu::refuse(where, "counts stores that are not finished: call finish_stores() before");
  __threadfence();
  atomicAdd(counter, 1u);
}

// The threads that are waited for are in this block, run on other workers, or have ended.
inline void wait_for_count(unsigned* counter, unsigned count, cpu::Location where = cpu::Location::current()) {
  while (std::atomic_ref(*counter).load() != count) {
    cpu::let_others_run(where);
    std::this_thread::yield();
  }
  __threadfence();
}

inline void share_with_engines() { cpu::counting::share_with_engines(); }

constexpr int first_dynamic_place = 1024;  // where an SM has a block's dynamic shared memory

inline uint32_t address_for_engines(const void* shared) {
  const auto place = static_cast<const char*>(shared) - static_cast<char*>(cpu::dynamic_shared_memory());
  if (place < 0 || place >= int64_t(cpu::dynamic_shared_bytes()))
    cpu::refuse({}, "describes a box that is not in dynamic shared memory of the block");
  return uint32_t(cpu::block_in_cluster()) << 24 | uint32_t(first_dynamic_place + place);
}

inline void order_registers() { cpu::order_registers(); }
inline void commit_products() { cpu::commit(cpu::Deferred::products); }

// Each thread does its own part of the products; the warp is done when all lanes are.
template <int groups>
void wait_for_products(cpu::Location where = cpu::Location::current()) {
  cpu::finish(cpu::Deferred::products, groups);
  cpu::sync_warp(0xffffffffu, where);
}

template <int groups = 0, int J>
void wait_for_products(float (&)[J][4], cpu::Location where = cpu::Location::current()) {
  wait_for_products<groups>(where);
}

// An operand, at the addresses that the tensor cores compute from the fields of its descriptor. `lines` are rows of a
// or columns of b.
struct Operand {
  Operand(MatrixDescriptor matrix, bool along_k, int lines, cpu::Location where) : is_along_k(along_k) {
    const auto bytes = [&](int first_bit) { return int(matrix.bits >> first_bit & 0x3fff) << 4; };
    to_next_box = bytes(16);
    to_next_8_rows = bytes(32);
    const int start = bytes(0) - first_dynamic_place, end = start + offset(lines - 1, 15) + 2;
    const bool is_permuted = matrix.bits >> 62 == 1, is_first_row = start % 1024 < 128;
    if (start < 0 || end > int(cpu::dynamic_shared_bytes()) || !is_permuted || !is_first_row)
      cpu::refuse(where, "a product reads bytes %d to %d of dynamic shared memory by mode %d: give a box of this "
                         "block, at a multiple of 1,024 bytes, and mode 1", start, end, int(matrix.bits >> 62));
    data = static_cast<char*>(cpu::dynamic_shared_memory()) + start;
    for (int i = threadIdx.x % 128; i < lines * 16; i += 128)  // each thread looks at a part
      if (!cpu::counting::engines_may_read(place(i / 16, i % 16), 2))
        cpu::refuse(where, "a product reads what threads have written without share_with_engines(): call it after");
  }

  template <class T>
  float element(int line, int k) const {
    uint16_t bits;
    std::memcpy(&bits, place(line, k), sizeof bits);
    return T::from_bits(bits);
  }

  int offset(int line, int k) const {
    if (is_along_k) return line / 8 * to_next_8_rows + line % 8 * 128 + k * 2;
    return line / box_columns * to_next_box + line % box_columns * 2 + k / 8 * to_next_8_rows + k % 8 * 128;
  }
  const char* place(int line, int k) const { return permuted(shared_address(data + offset(line, k))); }

  const char* data;
  int to_next_box, to_next_8_rows;
  bool is_along_k;
};

// a(half, k): element k of this lane's row, or of the row 8 further down, when the product is done.
template <class T, bool b_along_n, int J, class Left>
void start_product(float (&sum)[J][4], Left a, MatrixDescriptor b, bool add, cpu::Location where) {
  cpu::counting::record(cpu::counting::Event::matrix_instruction, nullptr, 1);
  cpu::defer(cpu::Deferred::products, [&sum, a, b = Operand(b, !b_along_n, 8 * J, where), add] {
    const cpu::counting::Hidden hidden;
    float x[2][16];
    for (int k = 0; k < 16; ++k) x[0][k] = a(0, k), x[1][k] = a(1, k);
    for (int j = 0; j < J; ++j)
      for (int c = 0; c < 2; ++c)
        for (int k = 0; k < 16; ++k) {
          const float y = b.template element<T>(8 * j + threadIdx.x % 4 * 2 + c, k);
          for (int half = 0; half < 2; ++half) {
            float& total = sum[j][2 * half + c];
            total = (add || k > 0 ? total : 0) + x[half][k] * y;
          }
        }
  });
}

template <class T, bool b_along_n, bool a_along_m = false, int J>
void multiply_m64k16(float (&sum)[J][4], MatrixDescriptor a, MatrixDescriptor b, bool add,
                     cpu::Location where = cpu::Location::current()) {
  cpu::start_product({a.bits, b.bits, uint64_t(8 * J + 4 * add + 2 * b_along_n + a_along_m)}, where);
  const auto left = [a = Operand(a, !a_along_m, 64, where)](int half, int k) {
    return a.template element<T>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half, k);
  };
  start_product<T, b_along_n>(sum, left, b, add, where);
}

// A row's elements are spread over the four lanes of its quad, which exchange them now. The tensor cores may read the
// registers until the product is done.
template <class T, bool b_along_n, int J>
void multiply_m64k16(float (&sum)[J][4], const uint32_t (&a)[4], MatrixDescriptor b, bool add,
                     cpu::Location where = cpu::Location::current()) {
  struct Quad {
    uint16_t rows[2][16];
  } quad;
  static_assert(sizeof(Quad) == 64);
  cpu::start_product({0, b.bits, uint64_t(8 * J + 4 * add + 2 * b_along_n)}, where);
  std::memcpy(&quad, a, sizeof a);
  cpu::warp_instruction(quad, [](Quad (&lanes)[32]) {
    uint16_t own[32][8];
    for (int l = 0; l < 32; ++l) std::memcpy(own[l], &lanes[l], sizeof own[l]);
    for (int l = 0; l < 32; ++l)
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 16; ++k)
          lanes[l].rows[half][k] = own[l / 4 * 4 + k % 8 / 2][2 * (half + 2 * (k / 8)) + k % 2];
  }, where);
  start_product<T, b_along_n>(sum, [quad](int half, int k) { return float(T::from_bits(quad.rows[half][k])); }, b, add,
                              where);
  cpu::defer(cpu::Deferred::products, [&a, where, early = std::to_array(a)] {
    if (std::memcmp(a, early.data(), sizeof a) != 0)
      cpu::refuse(where, "registers of a have changed before their product was done: wait for it first");
  });
}

template <int count>
void give_registers(cpu::Location where = cpu::Location::current()) {
  cpu::set_registers(count, registers_at_launch(int(blockDim.x)), true, where);
}

template <int count>
void take_registers(cpu::Location where = cpu::Location::current()) {
  cpu::set_registers(count, registers_at_launch(int(blockDim.x)), false, where);
}
