// Facts of the CPU that decide between kernels of one instruction set.
#pragma once
#include <unistd.h>

#include "structs.h"

namespace QT_NAMESPACE {

// Return the size of the first data cache level in bytes, or 32 KiB if the system does not report it.
static inline i64 first_cache_bytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
    static const i64 bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
    static const i64 bytes = 0;
#endif
    return bytes > 0 ? bytes : 32 << 10;
}

#if QT_ISA == 512
// Whether to use dot products of bfloat16 pairs (AVX512-BF16): 1 where the CPU has them, 0 never, -1 where
// they are also faster than multiply-adds of float32. Intel's processors take two cycles for a dot product,
// and have two units for multiply-adds.
static inline bool uses_pairs(i64 wanted) {
    if (!wanted || !__builtin_cpu_supports("avx512bf16")) return false;
    return wanted > 0 || __builtin_cpu_is("amd");
}
#endif

}  // namespace QT_NAMESPACE
