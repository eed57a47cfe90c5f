// The dot products of bfloat16 of AVX-512 (vdpbf16ps) in software, for a CPU without them: included
// before each source by native_cases.py. Two multiply-adds with one rounding each, of the high half of
// a dword first; subnormal numbers count as 0. The first cache level has 32 KiB, as with the first CPUs that
// have these instructions.
#pragma once
#include <immintrin.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

static inline float normal_or_zero(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

static inline float dot_step(float sum, uint32_t a, uint32_t b) {
    float x, y;
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
    return normal_or_zero(std::fma(normal_or_zero(x), normal_or_zero(y), normal_or_zero(sum)));
}

static inline __m512 dot_in_software(__m512 sum, __m512bh a, __m512bh b) {
    uint32_t x[16], y[16];
    float sums[16];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    memcpy(sums, &sum, 64);
    for (int i = 0; i < 16; i++) {
        sums[i] = dot_step(sums[i], x[i] & 0xffff0000, y[i] & 0xffff0000);
        sums[i] = dot_step(sums[i], x[i] << 16, y[i] << 16);
    }
    memcpy(&sum, sums, 64);
    return sum;
}

#define _mm512_dpbf16_ps dot_in_software
#define __builtin_cpu_supports(feature) true
#define __builtin_cpu_is(name) true
#define sysconf(name) (32 << 10)
