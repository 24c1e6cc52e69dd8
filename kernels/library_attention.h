// Which library does attention beside our own kernels: cuDNN in a GPU build that found it, none in all others.
// kernels/attention.cuh says what both files offer.
#pragma once

#if defined(GPT_CUDNN)
#include "kernels/cudnn/attention.h"
#else
#include "kernels/without_cudnn/attention.h"
#endif
