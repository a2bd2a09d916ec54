// Launching a kernel on the caller's stream, early where the GPU can. Knows no kernel.
//
// Early (programmatic dependent launch, Hopper and later): the kernel is put on the GPU while the one before it still
// runs. It then has to `wait` before it reads what others wrote, or writes what others read; and it should
// `let_next_start` as soon as it can, so that the next one is there early too.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "check.h"

namespace minisgl {

template <bool Early>
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (Early) asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <bool Early>
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (Early) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// On the stream that is current for whoever called from Python (torch.cuda.current_stream()).
template <bool Early, typename... Parameters>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, DLDevice device,
            Parameters... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  config.attrs = &early;
  config.numAttrs = Early ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess)
    TVM_FFI_THROW(RuntimeError) << "launch on " << words(device) << ": " << cudaGetErrorString(error);
}

}  // namespace minisgl
