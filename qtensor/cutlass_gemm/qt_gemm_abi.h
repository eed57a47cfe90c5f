// The C interface of every generated GEMM library. Plain C: no torch, no CUTLASS types.
//
//   D[m,n] = ((alpha * acc) * scale_a) * scale_b + bias[n] + beta * C[m,n],   acc = A[m,k] @ B[n,k]^T
//
// where acc includes the block factors sfa and sfb. launch.py holds the same struct; both sides
// compare its size and the version, so a library of another release is refused before it is called.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define QT_GEMM_VERSION 1
#define QT_GEMM_WRONG_CALLER 100  // status: the caller's struct has another size or version
#define QT_GEMM_CUDA 1000         // status: this plus a cudaError_t

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qt_gemm_args {
    uint32_t struct_size;            // sizeof(qt_gemm_args)
    uint32_t version;                // QT_GEMM_VERSION
    int32_t m, n, k, l;              // l is the batch size; matrices of a batch are contiguous
    float alpha, beta;               // C is read if beta != 0, by kernels with a float32 output
    const void *a, *b;               // codes; A is (m, k) and B (n, k), major as in the kernel's layout
    const void *sfa, *sfb;           // block factors, or null
    const float *scale_a, *scale_b;  // one float, or m and n of them; null is 1
    const float* bias;               // n, or null
    const void* c;                   // (m, n), row-major; may be equal to d
    void* d;                         // (m, n), row-major
    int32_t scale_a_rows, scale_b_columns;  // 1: scale_a has m entries, scale_b n
    int32_t device, sm_count;               // sm_count 0: ask the runtime
} qt_gemm_args;

typedef struct qt_gemm_info {
    uint32_t version, args_size;
    const char* name;
    const char* spec;  // JSON
} qt_gemm_info;

// The build hides all other symbols.
#define QT_GEMM_API __attribute__((visibility("default")))
QT_GEMM_API const qt_gemm_info* qt_gemm_describe(void);
// Returns 0 if the kernel can run. Needs no device if sm_count is given.
QT_GEMM_API int qt_gemm_can_implement(const qt_gemm_args*);
// Returns the bytes of the workspace, or minus a status.
QT_GEMM_API int64_t qt_gemm_workspace(const qt_gemm_args*);
// Writes how many block factors of A and B are read.
QT_GEMM_API int qt_gemm_factor_counts(const qt_gemm_args*, int64_t* sfa, int64_t* sfb);
// Returns 0 if the kernel was launched.
QT_GEMM_API int qt_gemm_run(const qt_gemm_args*, void* workspace, int64_t bytes, void* stream);
QT_GEMM_API const char* qt_gemm_status(int);

#ifdef __cplusplus
}
#endif
