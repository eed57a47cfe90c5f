// Temporary memory of a kernel: freed when it goes out of scope, also when an allocation elsewhere fails.
// Sizes of caches.
#pragma once
#include <unistd.h>

#include <memory>
#include <new>

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

// Elements of an output that would push everything else out of the cache: stores of more go around it.
constexpr i64 STREAMED = i64(8) << 20;

// `count` uninitialised elements of a type without a destructor, at a multiple of 64 bytes. 0 elements are a
// null pointer.
template <class T>
class Array {
    T* elements;

public:
    explicit Array(i64 count)
        : elements(count > 0 ? (T*)operator new(sizeof(T) * size_t(count), std::align_val_t(64)) : nullptr) {}
    ~Array() { operator delete(elements, std::align_val_t(64)); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    operator T*() const { return elements; }
};

}  // namespace QT_NAMESPACE
