// What a parameter store is told of late updates.
#pragma once

struct DelayOptions {
  bool is_on = false;  // an update applies the gradients of the step before (delayed_gradients.cuh)
};
