// Several kernels in one call, for tensors so small that calls take longer than numbers: quantize, decode,
// multiply, add up.
#include "denormals.h"
#include "row_arithmetic.h"

namespace QT_NAMESPACE {
template <class D>
bool quantize_as(const CQuantizer& p, const QuantizeCall& c);
template <class D>
bool dequantize_as(const CQuantizer& p, const DequantizeCall& c);
template <class D>
void sum_rows_as(const NormCall& c);

// ---- what program.py writes: 8 bytes a field. "at" a name: a place in the table of addresses
enum Kind { QUANTIZE = 0, DECODE = 1, WIDEN = 2, MULTIPLY = 3, FINISH = 4, SUM_ROWS = 5, CLEAR = 6 };

struct QuantizeStep {
    const CQuantizer* quantizer;
    i64 x_at, dtype, rows, cols;
    i64 row_at[4], column_at[4], scale_inv_at, scale_at, amax_at, seed_at;
};
struct DecodeStep {
    const CQuantizer* quantizer;
    i64 y_at, dtype, rows, cols;
    i64 row_at[3], column_at[3], scale_inv_at;
};
struct WidenStep {
    i64 x_at, dtype, count, y_at;
};
struct MultiplyStep {  // column-major, as BLAS has it
    i64 a_turned, b_turned, m, n, k, a_at, lda, b_at, ldb, c_at, ldc;
};
struct FinishStep {  // y = x * (a * b) + bias, rounded once
    i64 x_at, rows, cols, a_at, b_at, bias_at, bias_dtype, line_at, y_at,
        dtype;  // line: memory for a row of floats
};
struct SumStep {
    i64 x_at, dtype, rows, cols, y_at;
};
struct ClearStep {
    i64 at, bytes;
};
struct Step {
    i64 kind;
    union {
        i64 words[24];
        QuantizeStep quantize;
        DecodeStep decode;
        WidenStep widen;
        MultiplyStep multiply;
        FinishStep finish;
        SumStep sum;
        ClearStep clear;
    };
};
static_assert(sizeof(Step) == 200, "program.py writes 25 words");

// A BLAS of either width reads these integers.
using Sgemm = void (*)(const char*, const char*, const i64*, const i64*, const i64*, const float*,
                       const float*, const i64*, const float*, const i64*, const float*, float*, const i64*);
struct Program {
    i64 steps, given, scratch, bytes;
    Sgemm sgemm;
    const i64* offsets;  // of each piece of scratch memory
    const Step* step;
};

constexpr int PLACES = 96;
enum {
    NOTHING = 0,
    ONE = 1,
    FIRST = 2
};  // places: no address; the factor 1; the addresses given, then those of scratch memory

struct Arena {
    u8* p = nullptr;
    i64 size = 0;
    u8* at_least(i64 bytes) {
        if (size < bytes) {
            release();
            p = new (std::align_val_t(64)) u8[size_t(bytes)];
            size = bytes;
        }
        return p;
    }
    void release() {
        if (p) operator delete[](p, std::align_val_t(64));
        p = nullptr, size = 0;
    }
    ~Arena() { release(); }
};

template <class D>
static void widen_as(const void* x, i64 n, float* y) {
    for (i64 i = 0; i < n; i++) y[i] = D::to_float(((const typename D::T*)x)[i]);
}
static void widen_any(const void* x, i64 dtype, i64 n, float* y) {
    dtype == F32    ? widen_as<Float32>(x, n, y)
    : dtype == BF16 ? widen_as<Bfloat16>(x, n, y)
                    : widen_as<Float16>(x, n, y);
}

// n floats, at most GROUP.
template <class D>
static void narrow_run(const float* x, i64 n, u16* y) {
    i64 i = 0;
    for (; i + W <= n; i += W) store_one<D>(y + i, load<VF>(x + i), false);
    for (; i < n; i++) put_element(y, i, D::id, x[i]);
}

struct Runner {
    const Program& program;
    void* at[PLACES];

    template <class T>
    T* get(i64 place) const {
        return (T*)at[place];
    }
    Buffers buffers(const i64* place) const {
        return {get<u8>(place[0]), at[place[1]], get<float>(place[2]), nullptr};
    }
    bool quantize(const QuantizeStep& s) const {
        Buffers row = buffers(s.row_at), column = buffers(s.column_at);
        row.given = get<float>(s.row_at[3]), column.given = get<float>(s.column_at[3]);
        const i64* seed = get<i64>(s.seed_at);
        const QuantizeCall c{at[s.x_at],
                             i32(s.dtype),
                             1,
                             s.rows,
                             s.cols,
                             s.cols,
                             row,
                             column,
                             get<float>(s.scale_inv_at),
                             get<float>(s.scale_at),
                             get<float>(s.amax_at),
                             seed ? *seed : 0,
                             0,
                             0};
        return s.dtype == F32    ? quantize_as<Float32>(*s.quantizer, c)
               : s.dtype == BF16 ? quantize_as<Bfloat16>(*s.quantizer, c)
                                 : quantize_as<Float16>(*s.quantizer, c);
    }
    bool decode(const DecodeStep& s) const {
        const DequantizeCall c{at[s.y_at],
                               i32(s.dtype),
                               1,
                               s.rows,
                               s.cols,
                               0,
                               s.rows,
                               buffers(s.row_at),
                               buffers(s.column_at),
                               get<float>(s.scale_inv_at)};
        return s.dtype == F32    ? dequantize_as<Float32>(*s.quantizer, c)
               : s.dtype == BF16 ? dequantize_as<Bfloat16>(*s.quantizer, c)
                                 : dequantize_as<Float16>(*s.quantizer, c);
    }
    void multiply(const MultiplyStep& s) const {
        const float one = 1.0f, zero = 0.0f;
        program.sgemm(s.a_turned ? "t" : "n", s.b_turned ? "t" : "n", &s.m, &s.n, &s.k, &one,
                      get<float>(s.a_at), &s.lda, get<float>(s.b_at), &s.ldb, &zero, get<float>(s.c_at),
                      &s.ldc);
    }
    void finish(const FinishStep& s) const {
        const float *a = get<float>(s.a_at), *b = get<float>(s.b_at);
        const float factor = a && b ? *a * *b : a ? *a : b ? *b : 1.0f;
        const bool scaled = a || b;
        const float* x = get<float>(s.x_at);
        float* bias = get<float>(s.line_at);
        if (s.bias_at != NOTHING) widen_any(at[s.bias_at], s.bias_dtype, s.cols, bias);
        float line[GROUP];
        for (i64 r = 0; r < s.rows; r++)
            for (i64 k = 0; k < s.cols; k += GROUP) {
                const i64 n = s.cols - k < GROUP ? s.cols - k : GROUP, first = r * s.cols + k;
                for (i64 i = 0; i < n; i++) line[i] = x[first + i];
                if (scaled)
                    for (i64 i = 0; i < n; i++) line[i] = line[i] * factor;
                if (s.bias_at != NOTHING)
                    for (i64 i = 0; i < n; i++) line[i] = line[i] + bias[k + i];
                if (s.dtype == F32)
                    memcpy(get<float>(s.y_at) + first, line, sizeof(float) * size_t(n));
                else if (s.dtype == BF16)
                    narrow_run<Bfloat16>(line, n, get<u16>(s.y_at) + first);
                else
                    narrow_run<Float16>(line, n, get<u16>(s.y_at) + first);
            }
    }
    void sum(const SumStep& s) const {
        NormCall c{};
        c.x = at[s.x_at], c.rows = s.rows, c.cols = s.cols, c.stride = s.cols, c.y = at[s.y_at],
        c.threads = 1;
        s.dtype == F32    ? sum_rows_as<Float32>(c)
        : s.dtype == BF16 ? sum_rows_as<Bfloat16>(c)
                          : sum_rows_as<Float16>(c);
    }
    bool run() const {
        for (i64 i = 0; i < program.steps; i++) {
            const Step& s = program.step[i];
            switch (s.kind) {
                case QUANTIZE:
                    if (!quantize(s.quantize)) return false;
                    break;
                case DECODE:
                    if (!decode(s.decode)) return false;
                    break;
                case WIDEN:
                    widen_any(at[s.widen.x_at], s.widen.dtype, s.widen.count, get<float>(s.widen.y_at));
                    break;
                case MULTIPLY:
                    multiply(s.multiply);
                    break;
                case FINISH:
                    finish(s.finish);
                    break;
                case SUM_ROWS:
                    sum(s.sum);
                    break;
                default:
                    memset(at[s.clear.at], 0, size_t(s.clear.bytes));
            }
        }
        return true;
    }
};

bool run_program(const Program& program, const void* addresses) {
    static thread_local Arena arena;
    static const float one = 1.0f;
    Runner runner{program, {}};
    runner.at[ONE] = (void*)&one;
    memcpy(runner.at + FIRST, addresses, sizeof(void*) * size_t(program.given));
    u8* memory = arena.at_least(program.bytes);
    for (i64 i = 0; i < program.scratch; i++)
        runner.at[FIRST + program.given + i] = memory + program.offsets[i];
    return runner.run();
}

}  // namespace QT_NAMESPACE

extern "C" {

// Runs a program over addresses (program.given of them, at any address). 0: done; 1: a step has no kernel.
// 2: out of memory.
int qt_run(const void* program, const void* addresses) {
    const QT_NAMESPACE::KeepDenormals scope;
    try {
        return QT_NAMESPACE::run_program(*(const QT_NAMESPACE::Program*)program, addresses) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}
}
