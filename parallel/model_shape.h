// The sizes of a model.
#pragma once

struct ModelShape {
  // Upper limits: far larger than any model in use, and small enough that no number of bytes reaches 2^64.
  static constexpr int most_layers = 1000, most_channels = 100'000, most_vocabulary = 10'000'000,
                       most_positions = 1 << 24;
  int layers, heads, channels, vocabulary, positions;
  bool operator==(const ModelShape&) const = default;

  int head_size() const { return channels / heads; }
};

// Layers [first, first + count) of a model.
struct Layers {
  int first, count;
  int end() const { return first + count; }
};
