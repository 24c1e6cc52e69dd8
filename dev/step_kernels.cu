// Our own kernels of a training step in bf16, for dev/machine_code.py. Only its object is made, no program:
//
//   make DEVICE=gpu ARCHS=90a build/gpu/step_kernels.o
#include "dev/step_kernels.cuh"

void instantiate_step_kernels() {
  for_each_operation(shapes[0], [](int, double, auto launch) { launch(); });
}
