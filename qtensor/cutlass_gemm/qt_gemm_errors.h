// Keeps the CUDA error that CUTLASS reads, and so clears, before it returns kErrorInternal.
//
// emit.py includes this file before all headers of CUTLASS, whose calls of cudaGetLastError arrive here.
#pragma once
#include <cuda_runtime_api.h>

namespace qt {

inline thread_local cudaError_t last_error = cudaSuccess;

inline cudaError_t read_error() {
    cudaError_t const error = cudaGetLastError();
    if (error != cudaSuccess) last_error = error;
    return error;
}

}  // namespace qt

#define cudaGetLastError qt::read_error
