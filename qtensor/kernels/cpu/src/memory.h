// Temporary memory of a kernel: given back when it goes out of scope, also when an allocation elsewhere
// fails.
#pragma once
#include <memory>
#include <new>
#include <utility>

#include "structs.h"

namespace QT_NAMESPACE {

// Elements of an output that would push everything else out of the cache: stores of more go around it.
constexpr i64 STREAMED = i64(8) << 20;

// Memory that a thread keeps for its next calls. The system hands out large blocks as new pages, and the
// first access to a page takes longer than most kernels need for what lies in it.
class KeptMemory {
    static constexpr int SLOTS = 8;
    static constexpr size_t LEAST = size_t(1) << 16;  // bytes of a block
#ifdef __SANITIZE_ADDRESS__
    static constexpr size_t MOST = 0;  // a block of another size would hide accesses behind its end
#else
    static constexpr size_t MOST = size_t(32) << 20;  // bytes of all blocks
#endif
    struct Block {
        void* memory = nullptr;
        size_t bytes = 0;
    };
    Block blocks[SLOTS];
    size_t total = 0;

    static void free(void* memory) { operator delete(memory, std::align_val_t(64)); }

public:
    ~KeptMemory() {
        for (const Block& b : blocks) free(b.memory);
    }
    // Returns the smallest block of at least so many bytes, and raises `bytes` to its size.
    [[gnu::noinline]] void* take(size_t& bytes) {
        Block* best = nullptr;
        for (Block& b : blocks)
            if (bytes >= LEAST && b.bytes >= bytes && (!best || b.bytes < best->bytes)) best = &b;
        if (!best) return operator new(bytes, std::align_val_t(64));
        bytes = best->bytes;
        total -= bytes;
        return std::exchange(*best, Block()).memory;
    }
    // Keeps a block in the place of the smallest one, or frees it.
    [[gnu::noinline]] void give(void* memory, size_t bytes) {
        Block* least = blocks;
        for (Block& b : blocks)
            if (b.bytes < least->bytes) least = &b;
        const size_t others = total - least->bytes;
        if (bytes < LEAST || bytes <= least->bytes || others + bytes > MOST) return free(memory);
        free(least->memory);
        *least = {memory, bytes};
        total = others + bytes;
    }
};
inline thread_local KeptMemory kept_memory;

// `count` uninitialised elements of a type without a destructor, at a multiple of 64 bytes. 0 elements are a
// null pointer.
template <class T>
class Array {
    size_t bytes;
    T* elements;

public:
    explicit Array(i64 count)
        : bytes(count > 0 ? sizeof(T) * size_t(count) : 0),
          elements(bytes ? (T*)kept_memory.take(bytes) : nullptr) {}
    ~Array() {
        if (elements) kept_memory.give(elements, bytes);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    operator T*() const { return elements; }
};

}  // namespace QT_NAMESPACE
