// Loops over several threads: torch's own OpenMP pool, with as many threads as torch uses.
#pragma once
#include <atomic>
#include <new>

#include "denormals.h"
#include "structs.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace QT_NAMESPACE {

// Runs f(first, end) over equal parts of 0 .. n in whole units; one part a thread.
// An exception must not leave an OpenMP region: an allocation that fails in a thread throws after all have
// ended.
template <class F>
static inline void parallel(i64 n, i64 unit, int threads, const F& f) {
    const i64 units = (n + unit - 1) / unit;
    if (threads > units) threads = int(units);
#ifdef _OPENMP
    if (threads > 1) {
        std::atomic<bool> out_of_memory{false};
#pragma omp parallel num_threads(threads)
        {
            const KeepDenormals scope;
            const i64 count = omp_get_num_threads(), part = omp_get_thread_num();
            const i64 first = units * part / count * unit, end = units * (part + 1) / count * unit;
            try {
                if (first < n) f(first, end < n ? end : n);
            } catch (const std::bad_alloc&) {
                out_of_memory = true;
            }
        }
        if (out_of_memory) throw std::bad_alloc();
        return;
    }
#endif
    if (n > 0) f(i64(0), n);
}

// Raises *top to `value` if that is larger; several threads may do so at once. Without a lock: a process may
// fork while another of its threads is here, and the child would wait for that thread for ever.
static inline void raise(i32* top, i32 value) {
    i32 current = __atomic_load_n(top, __ATOMIC_RELAXED);
    while (current < value &&
           !__atomic_compare_exchange_n(top, &current, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// The largest f(first, end) of all parts; none is negative.
template <class F>
static inline i32 parallel_max(i64 n, i64 unit, int threads, const F& f) {
    i32 top = 0;
    parallel(n, unit, threads, [&](i64 first, i64 end) { raise(&top, f(first, end)); });
    return top;
}

}  // namespace QT_NAMESPACE
