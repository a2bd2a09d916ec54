// CUDA's words for a C++ compiler: a launch runs all threads of all blocks one after the other, on the host. Right for
// kernels whose threads do not talk to each other. With it, tensors "on the GPU" are tensors of the CPU.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

#define kDLCUDA kDLCPU
#define __global__
#define __device__
#define __forceinline__ inline

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  unsigned x;
  explicit dim3(unsigned x = 1) : x(x) {}
};
inline dim3 blockIdx, threadIdx, blockDim;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  blockDim = config->blockDim;
  for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(arguments...);
  return cudaSuccess;
}
