// Runs a kernel for another process, so that the kernels of another machine can be tested in an emulator.
// A call on stdin: the bytes of its arguments; the number of buffers; of each the offset of its address in
// the arguments, its bytes, and their contents. The answer on stdout: the new contents of all buffers, or
// nothing if the kernel refuses the call.
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
        std::vector<size_t> sizes;
        for (int64_t i = 0; i < count; i++) {
            int64_t facts[2];
            if (!take(facts, sizeof facts)) return 1;
            sizes.push_back(size_t(facts[1]));
            buffers.emplace_back(size_t(facts[1] + 7) / 8);
            if (!take(buffers.back().data(), size_t(facts[1]))) return 1;
            const void* address = buffers.back().data();
            memcpy((char*)&arguments + facts[0], &address, sizeof address);
        }
        if (!kernel(arguments)) return 2;
        for (size_t i = 0; i < sizes.size(); i++) fwrite(buffers[i].data(), 1, sizes[i], stdout);
        fflush(stdout);
    }
    return 0;
}
