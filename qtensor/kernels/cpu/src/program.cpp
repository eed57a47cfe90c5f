// Several kernels in one call, for tensors so small that a call takes longer than its arithmetic: quantize,
// decode, multiply, sum.
#include "denormals.h"
#include "row_arithmetic.h"
#include "threads.h"

namespace QT_NAMESPACE {
template <class D>
bool quantize_as(const CQuantizer& p, const QuantizeCall& c);
template <class D>
bool dequantize_as(const CQuantizer& p, const DequantizeCall& c);
template <class D>
void sum_rows_as(const NormCall& c);
bool few_rows(const CQuantizer& p, const LinearCall& c);

// ---- Structs that program.py writes, with 8 bytes a field. A field whose name ends in "_at" is an index
// into the table of addresses.
enum StepKind {
    QUANTIZE = 0,
    DECODE = 1,
    WIDEN = 2,
    MULTIPLY = 3,
    FINISH = 4,
    SUM_ROWS = 5,
    CLEAR = 6,
    FEW_ROWS = 7
};

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
struct MultiplyStep {  // c (m, n) = a @ b; a is (m, k), or (k, m) if transposed, b (k, n) or (n, k)
    i64 a_transposed, b_transposed, m, n, k, a_at, b_at, c_at;
};
struct FinishStep {  // y = x * (a * b) + bias, rounded once
    i64 x_at, rows, cols, a_at, b_at, bias_at, bias_dtype;
    i64 float_bias_at;  // scratch memory for the bias as floats
    i64 y_at, dtype;
};
struct SumStep {
    i64 x_at, dtype, rows, cols, y_at;
};
struct ClearStep {
    i64 at, bytes;
};
struct FewRowsStep {  // contiguous x (m, k) @ weight (n, k).T + a bias of floats
    const CQuantizer* quantizer;
    i64 x_at, x_dtype, m, k, n;
    i64 row_at[3], scale_inv_at, bias_at, y_at, dtype;
    i64 threaded;                   // whether to take all threads
    const CQuantizer* x_quantizer;  // null where x is plain; else x_at is scratch memory for floats
    i64 x_row_at[3], x_scale_inv_at;
    i64 x_factors_at;  // scratch memory for a factor of each row of x
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
        FewRowsStep few_rows;
    };
};
static_assert(sizeof(Step) == 200, "program.py writes 25 words");

// qt_sgemm of small_calls.cpp, which is torch.mm. These kernels do not link against torch.
using Sgemm = void (*)(const float* a, i64 a_transposed, const float* b, i64 b_transposed, float* c, i64 m,
                       i64 n, i64 k);
struct Program {
    i64 step_count;
    i64 passed_count;   // addresses that a call passes
    i64 scratch_count;  // pieces of scratch memory
    i64 scratch_bytes;
    Sgemm sgemm;
    const i64* scratch_offsets;
    const Step* steps;
};

// Indices in the table of addresses. From FIRST on come the addresses that the call passes, then those of
// scratch memory.
enum { NOTHING = 0, ONE = 1, FIRST = 2 };  // no address; the factor 1
constexpr int MAX_ADDRESSES = 96;

// Memory that grows to the largest size that was asked for.
class ScratchMemory {
    u8* memory = nullptr;
    i64 size = 0;

    void release() {
        if (memory) operator delete[](memory, std::align_val_t(64));
        memory = nullptr;
        size = 0;
    }

public:
    u8* at_least(i64 bytes) {
        if (size < bytes) {
            release();
            memory = new (std::align_val_t(64)) u8[size_t(bytes)];
            size = bytes;
        }
        return memory;
    }
    ~ScratchMemory() { release(); }
};

template <class D>
static void widen_as(const void* x, i64 n, float* y) {
    for (i64 i = 0; i < n; i++) y[i] = D::to_float(((const typename D::T*)x)[i]);
}
static void widen_any(const void* x, i64 dtype, i64 n, float* y) {
    with_type(dtype, [&](auto type) { widen_as<decltype(type)>(x, n, y); });
}

// Rounds n floats, at most GROUP, to D.
template <class D>
static void narrow_run(const float* x, i64 n, u16* y) {
    i64 i = 0;
    for (; i + W <= n; i += W) store_one<D>(y + i, load<VF>(x + i), false);
    for (; i < n; i++) put_element(y, i, D::id, x[i]);
}

struct ProgramRunner {
    const Program& program;
    void* at[MAX_ADDRESSES];

    template <class T>
    T* get(i64 index) const {
        return (T*)at[index];
    }
    Buffers buffers(const i64* indices) const {
        return {get<u8>(indices[0]), at[indices[1]], get<float>(indices[2]), nullptr};
    }
    bool quantize(const QuantizeStep& s) const {
        Buffers row = buffers(s.row_at), column = buffers(s.column_at);
        row.given = get<float>(s.row_at[3]);
        column.given = get<float>(s.column_at[3]);
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
        return with_type(s.dtype, [&](auto type) { return quantize_as<decltype(type)>(*s.quantizer, c); });
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
        return with_type(s.dtype, [&](auto type) { return dequantize_as<decltype(type)>(*s.quantizer, c); });
    }
    void multiply(const MultiplyStep& s) const {
        program.sgemm(get<float>(s.a_at), s.a_transposed, get<float>(s.b_at), s.b_transposed,
                      get<float>(s.c_at), s.m, s.n, s.k);
    }
    void finish(const FinishStep& s) const {
        const float *a = get<float>(s.a_at), *b = get<float>(s.b_at);
        float factor = 1.0f;
        if (a && b)
            factor = *a * *b;
        else if (a || b)
            factor = a ? *a : *b;
        const bool scaled = a || b;
        const float* x = get<float>(s.x_at);
        float* bias = get<float>(s.float_bias_at);
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
        c.x = at[s.x_at];
        c.rows = s.rows;
        c.cols = s.cols;
        c.stride = s.cols;
        c.y = at[s.y_at];
        c.threads = 1;
        with_type(s.dtype, [&](auto type) { sum_rows_as<decltype(type)>(c); });
    }
    struct RowFactors {
        const float* at = nullptr;  // one, or one a row (step 1)
        i64 step = 0;
    };
    // Decodes quantized x without the factors of its rows, which follow the sums.
    bool decode_x(const FewRowsStep& s, RowFactors& factors) const {
        CQuantizer q = *s.x_quantizer;
        Buffers row = buffers(s.x_row_at);
        const float one = 1.0f, divisor = q.global_divisor, *scale_inv = get<float>(s.x_scale_inv_at);
        if (q.family == TENSOR || q.family == ROW) {
            factors = {scale_inv, q.family == ROW};
            q.family = TENSOR;
            scale_inv = &one;
        } else if (row.amax) {
            float* own = get<float>(s.x_factors_at);
            for (i64 i = 0; i < (q.row_scaled ? s.m : 1); i++) own[i] = row.amax[i] / divisor;
            factors = {own, q.row_scaled};
            q.row_scaled = 0;
            row.amax = (float*)&divisor;
        }
        const DequantizeCall c{at[s.x_at], F32, 1, s.m, s.k, 0, s.m, row, {}, scale_inv};
        return dequantize_as<Float32>(q, c);
    }
    bool multiply_few_rows(const FewRowsStep& s) const {
        RowFactors factors;
        if (s.x_quantizer && !decode_x(s, factors)) return false;
        int threads = 1;
#ifdef _OPENMP
        if (s.threaded) threads = omp_get_max_threads();
#endif
        const LinearCall call{at[s.x_at],
                              i32(s.x_dtype),
                              s.k,
                              s.m,
                              s.k,
                              s.n,
                              buffers(s.row_at),
                              get<float>(s.scale_inv_at),
                              factors.at,
                              factors.step,
                              get<float>(s.bias_at),
                              at[s.y_at],
                              i32(s.dtype),
                              threads};
        return few_rows(*s.quantizer, call);
    }
    bool run() const {
        for (i64 i = 0; i < program.step_count; i++) {
            const Step& s = program.steps[i];
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
                case FEW_ROWS:
                    if (!multiply_few_rows(s.few_rows)) return false;
                    break;
                default:
                    memset(at[s.clear.at], 0, size_t(s.clear.bytes));
            }
        }
        return true;
    }
};

bool run_program(const Program& program, const void* addresses) {
    static thread_local ScratchMemory scratch;
    static const float one = 1.0f;
    ProgramRunner runner{program, {}};
    runner.at[ONE] = (void*)&one;
    memcpy(runner.at + FIRST, addresses, sizeof(void*) * size_t(program.passed_count));
    u8* memory = scratch.at_least(program.scratch_bytes);
    for (i64 i = 0; i < program.scratch_count; i++)
        runner.at[FIRST + program.passed_count + i] = memory + program.scratch_offsets[i];
    return runner.run();
}

}  // namespace QT_NAMESPACE

extern "C" {

// Runs a program over addresses (program.passed_count of them, at any alignment). Returns 0 if it is done, 1
// if a step has no kernel, and 2 if memory ran out.
int qt_run(const void* program, const void* addresses) {
    const QT_NAMESPACE::KeepDenormals scope;
    try {
        return QT_NAMESPACE::run_program(*(const QT_NAMESPACE::Program*)program, addresses) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}
}
