// What a parameter store is told of compression.
#pragma once

struct CompressionOptions {
  int bits = 0;          // of each gradient on its way to other ranks, 8 or 4; 0: they are not sent as codes
  int low_rank = 0;      // R of the factors that gradients travel as (low_rank.cuh); 0: they do not
  bool weights = false;  // weights are gathered in eight bits, too
};
