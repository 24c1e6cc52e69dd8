// The one function of the CUDA driver that the program asks of every device.
#pragma once

enum CUresult { CUDA_SUCCESS = 0 };
enum CUmoduleLoadingMode { CU_MODULE_EAGER_LOADING = 1, CU_MODULE_LAZY_LOADING = 2 };

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode);  // the environment's, at the first CUDA call
