#include "cuda_runtime.h"
//
#include "../../../minisgl/kernel/csrc/gather.cu"
