// Gradients of a parameter store that are applied one step later (--delay).
#pragma once

#include "extensions/delay/delayed_gradients.cuh"
#include "extensions/delay/options.h"
#include "gpt/store_room.cuh"

template <class Float>
void delay_store(StoreParts<Float>& parts) {
  if (options_of<DelayOptions>(parts.options.rooms).is_on) parts.gradients = std::make_unique<DelayedGradients>(parts.shards, parts.kept, parts.zero);
}
