// Runs few_rows for another process, so that the kernel of another machine can be tested in an emulator.
// A call on stdin: the words of the arguments of qt_linear; the number of buffers; of each the word that is
// its address, its bytes, and their contents. The last buffer is the result. The answer on stdout: its
// contents, or nothing if the kernel refuses the call.
#include "structs.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace qt_baseline {
bool few_rows(const CQuantizer& quantizer, const LinearCall& call);
}

static bool take(void* to, size_t count) {
    for (size_t done = 0; done < count;) {
        const ssize_t n = read(0, (char*)to + done, count - done);
        if (n <= 0) return false;
        done += size_t(n);
    }
    return true;
}

int main() {
    constexpr int WORDS = 18;
    int64_t words[WORDS], count;
    while (take(words, sizeof words) && take(&count, sizeof count)) {
        std::vector<std::vector<uint64_t>> buffers;
        std::vector<int64_t> sizes;
        for (int64_t i = 0; i < count; i++) {
            int64_t facts[2];
            if (!take(facts, sizeof facts)) return 1;
            buffers.emplace_back(size_t(facts[1] + 7) / 8);
            sizes.push_back(facts[1]);
            if (!take(buffers.back().data(), size_t(facts[1]))) return 1;
            words[facts[0]] = (int64_t)buffers.back().data();
        }
        const auto at = [&](int word) { return (void*)words[word]; };
        const LinearCall call{at(1),
                              i32(words[2]),
                              words[3],
                              words[4],
                              words[5],
                              words[6],
                              {(u8*)at(8), at(9), (float*)at(10), nullptr},
                              (float*)at(11),
                              (float*)at(12),
                              words[13],
                              (float*)at(14),
                              at(15),
                              i32(words[16]),
                              1};
        if (!qt_baseline::few_rows(*(const CQuantizer*)at(0), call)) return 2;
        fwrite(buffers.back().data(), 1, size_t(sizes.back()), stdout);
        fflush(stdout);
    }
    return 0;
}
