// Runs a kernel for another process, so that the kernels of another machine can be tested in an emulator.
// A call on stdin: the bytes of its arguments; the number of buffers; of each the offset of its address in
// the arguments, its bytes, and their contents. The last buffer is the result. The answer on stdout: its
// contents, or nothing if the kernel refuses the call.
#pragma once
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

static bool take(void* to, size_t count) {
    for (size_t done = 0; done < count;) {
        const ssize_t n = read(0, (char*)to + done, count - done);
        if (n <= 0) return false;
        done += size_t(n);
    }
    return true;
}

// Answers calls with arguments of this type until stdin ends; `kernel` returns whether it has served one.
template <class Arguments, class Kernel>
int serve(const Kernel& kernel) {
    Arguments arguments;
    int64_t count;
    while (take(&arguments, sizeof arguments) && take(&count, sizeof count)) {
        std::vector<std::vector<uint64_t>> buffers;
        int64_t facts[2] = {};
        for (int64_t i = 0; i < count; i++) {
            if (!take(facts, sizeof facts)) return 1;
            buffers.emplace_back(size_t(facts[1] + 7) / 8);
            if (!take(buffers.back().data(), size_t(facts[1]))) return 1;
            const void* address = buffers.back().data();
            memcpy((char*)&arguments + facts[0], &address, sizeof address);
        }
        if (!kernel(arguments)) return 2;
        fwrite(buffers.back().data(), 1, size_t(facts[1]), stdout);
        fflush(stdout);
    }
    return 0;
}
