// Denormal numbers count in every kernel, whatever mode the caller has set (torch.set_flush_denormal).
#pragma once
#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace QT_NAMESPACE {

// Clears flush-to-zero and denormals-are-zero of this thread until the end of the scope.
class KeepDenormals {
public:
#if defined(__x86_64__) || defined(_M_X64)
    KeepDenormals() : mode_(_mm_getcsr()) {
        if (mode_ & kFlush) _mm_setcsr(mode_ & ~kFlush);
    }
    ~KeepDenormals() {
        if (mode_ & kFlush) _mm_setcsr(mode_);
    }

private:
    static constexpr unsigned kFlush = 0x8040;
    const unsigned mode_;
#elif defined(__aarch64__)
    KeepDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(mode_));
        if (mode_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(mode_ & ~kFlush));
    }
    ~KeepDenormals() {
        if (mode_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(mode_));
    }

private:
    static constexpr unsigned long kFlush = 1ul << 24;
    unsigned long mode_;
#else
    KeepDenormals() {}
#endif
public:
    KeepDenormals(const KeepDenormals&) = delete;
    KeepDenormals& operator=(const KeepDenormals&) = delete;
};

}  // namespace QT_NAMESPACE
