#include "cuda_runtime.h"
//
#include "../../../minisgl/kernel/csrc/store.cu"
