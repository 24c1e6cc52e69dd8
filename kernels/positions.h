// The position of each row of a batch in its sample. One rank has all rows of a sample; ranks that split samples get two runs of
// neighbouring rows each.
#pragma once

#include <algorithm>

struct Positions {
  int length;         // rows of a sample on this rank
  int half;           // rows of the first run; the others are the second run
  int first, second;  // position of each run's first row

  // The position of row `row` of a batch, whose samples come one after another.
  constexpr int of_row(int row) const {
    const int i = row % length;
    return i < half ? first + i : second + i - half;
  }

  // The row of a sample that stands at this position; -1: none on this rank.
  constexpr int row_at(int position) const {
    if (position >= first && position < first + half) return position - first;
    if (position >= second && position < second + length - half) return position - second + half;
    return -1;
  }

  // The number of rows of a sample before this position.
  int before(int position) const {
    return std::clamp(position - first, 0, half) + std::clamp(position - second, 0, length - half);
  }
};

// `length` rows from position `first` on.
inline Positions neighbours(int length, int first = 0) { return {length, length, first, first + length}; }
