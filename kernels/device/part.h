// Which elements of a tensor lie in an array, when several ranks split the tensor. Kernels know no ranks: these structs
// describe their elements.
#pragma once

#include <cstddef>
#include <cstdint>

// Which elements of a whole tensor an array holds: runs of `width` elements, `stride` apart, the first of them from
// element `first` on. Without values it holds the tensor from its first element on.
//
// Example: the columns of c_attn.weight (C,3C) belong to q, k and v, and two ranks share the heads. So rank 1 has
// the second half of each of these three blocks in every row:
//
//   element     0                    C                     2C                    3C
//   whole       [q of 0 | q of 1 ]   [ k of 0 | k of 1 ]   [ v of 0 | v of 1 ]   next row ...
//   the part              [C/2 .. C)            [3C/2 .. 2C)          [5C/2 .. 3C)
//
// width = C/2, stride = C, first = C/2. A part by rows is one run: rows [a, b) of (rows, C) have width (b−a)·C and
// first a·C, and the stride does not matter.
struct Part {
  size_t width = SIZE_MAX, stride = 0, first = 0;
  // The number in the whole tensor of the array's element `local`.
  constexpr size_t in_whole(size_t local) const { return local / width * stride + first + local % width; }
};

// Which rows of the token embedding, so which tokens, an array holds: token v is its row v − first.
struct VocabularyShard {
  int first, rows;
  constexpr bool has(int token) const { return token >= first && token - first < rows; }
};
