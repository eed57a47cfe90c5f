// A kernel library that computes on the CPU and remembers how it was called. It learns which kernel it is
// from the name of its file, so that one compilation serves all. Factors and majors are read as CUTLASS reads
// them.
#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "qt_gemm_abi.h"

namespace {

struct Spec {
    std::string name, json, recipe, a, b, d;
    bool a_m_major = false, b_n_major = false;
    int block_n = 0, per = 0;  // per: elements along K with a factor
};

Spec parse() {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&qt_gemm_describe), &info);
    std::string path = info.dli_fname;
    Spec s;
    s.name = path.substr(path.rfind('/') + 1);
    s.name = s.name.substr(0, s.name.rfind('_'));  // the digest
    std::string rest = s.name.substr(s.name.find('_', 5) + 1);
    for (char const* recipe : {"fp8_blockwise", "fp8", "mxfp8", "mxfp4", "nvfp4"})
        if (s.recipe.empty() && rest.rfind(std::string(recipe) + "_", 0) == 0) s.recipe = recipe;
    rest = rest.substr(s.recipe.size() + 1);
    for (std::string* out : {&s.a, &s.b, &s.d}) {
        *out = rest.substr(0, rest.find('_'));
        rest = rest.substr(out->size() + 1);
    }
    rest += "_";
    s.a_m_major = rest.find("_nt_") != std::string::npos;
    s.b_n_major = s.a_m_major || rest.find("_nn_") != std::string::npos;
    if (s.recipe == "fp8_blockwise") {
        s.per = 128;
        s.block_n = rest.find("_b1x128x128_") != std::string::npos ? 128 : 1;
    } else if (s.recipe != "fp8") {
        s.per = s.recipe == "nvfp4" ? 16 : 32;
    }
    s.json = "{\"d\": \"" + s.d + "\"}";
    return s;
}

Spec const& spec() {
    static Spec const s = parse();
    return s;
}

double minifloat(int code, int exponent_bits, int mantissa_bits, bool is_signed = true) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    int mantissa = code & ((1 << mantissa_bits) - 1),
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    double value = exponent ? std::ldexp(1.0 + std::ldexp(mantissa, -mantissa_bits), exponent - bias)
                            : std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return is_signed && (code >> (exponent_bits + mantissa_bits) & 1) ? -value : value;
}

double element(std::string const& kind, void const* data, int64_t index) {
    auto bytes = static_cast<uint8_t const*>(data);
    if (kind == "e2m1") return minifloat(bytes[index / 2] >> (index % 2 * 4) & 15, 2, 1);
    return kind == "e5m2" ? minifloat(bytes[index], 5, 2) : minifloat(bytes[index], 4, 3);
}

double factor(bool of_b, qt_gemm_args const& p, int row, int k) {
    Spec const& s = spec();
    void const* data = of_b ? p.sfb : p.sfa;
    if (!s.per) return 1;
    int rows = of_b ? p.n : p.m, block = k / s.per, blocks = (p.k + s.per - 1) / s.per;
    auto up4 = [](int n) { return (n + 3) / 4 * 4; };
    if (s.recipe == "fp8_blockwise") {
        bool square = of_b && s.block_n == 128;
        int64_t at = square ? int64_t(row / 128) * up4(blocks) + block : int64_t(block) * up4(rows) + row;
        return static_cast<float const*>(data)[at];
    }
    int64_t tile = int64_t(row / 128) * (up4(blocks) / 4) + block / 4;
    int code = static_cast<uint8_t const*>(data)[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4];
    return s.recipe == "nvfp4" ? minifloat(code, 4, 3) : std::ldexp(1.0, code - 127);
}

void store(std::string const& kind, void* out, int64_t index, float value) {
    if (kind == "f32") {
        static_cast<float*>(out)[index] = value;
        return;
    }
    if (kind == "f16") {
        static_cast<_Float16*>(out)[index] = static_cast<_Float16>(value);
        return;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    static_cast<uint16_t*>(out)[index] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

qt_gemm_args last;
qt_gemm_info info_;
int calls = 0, status_ = 0;
int64_t workspace_ = 0, bytes_ = 0;
void *stream_ = nullptr, *space_ = nullptr;

}  // namespace

extern "C" {

#define QT_TEST __attribute__((visibility("default")))
QT_TEST int qt_standin_calls() { return calls; }
QT_TEST void qt_standin_last(qt_gemm_args* out, void** stream, void** workspace, int64_t* bytes) {
    *out = last;
    *stream = stream_;
    *workspace = space_;
    *bytes = bytes_;
}
QT_TEST void qt_standin_set(int status, int64_t workspace) {
    status_ = status;
    workspace_ = workspace;
}

qt_gemm_info const* qt_gemm_describe(void) {
#ifndef QT_TEST_VERSION
#define QT_TEST_VERSION QT_GEMM_VERSION
#define QT_TEST_SIZE sizeof(qt_gemm_args)
#endif
    info_ = {QT_TEST_VERSION, uint32_t(QT_TEST_SIZE), spec().name.c_str(), spec().json.c_str()};
    return &info_;
}

int qt_gemm_can_implement(qt_gemm_args const* p) {
    return p->struct_size == sizeof(qt_gemm_args) && p->version == QT_GEMM_VERSION ? 0 : QT_GEMM_WRONG_CALLER;
}
int64_t qt_gemm_workspace(qt_gemm_args const*) { return workspace_; }
int qt_gemm_factor_counts(qt_gemm_args const*, int64_t* a, int64_t* b) {
    *a = *b = 0;
    return 0;
}
char const* qt_gemm_status(int status) {
    static thread_local std::string text;
    text = "CUDA error " + std::to_string(status - QT_GEMM_CUDA);
    return status == 7 ? "Error Internal" : status < QT_GEMM_CUDA ? "another status" : text.c_str();
}

int qt_gemm_run(qt_gemm_args const* p, void* workspace, int64_t bytes, void* stream) {
    ++calls;
    last = *p;
    stream_ = stream;
    space_ = workspace;
    bytes_ = bytes;
    if (status_) return status_;
    Spec const& s = spec();
    for (int l = 0; l < p->l; ++l)
        for (int i = 0; i < p->m; ++i)
            for (int j = 0; j < p->n; ++j) {
                double sum = 0;
                for (int k = 0; k < p->k; ++k) {
                    int64_t at_a = s.a_m_major ? int64_t(k) * p->m + i : (int64_t(l) * p->m + i) * p->k + k;
                    int64_t at_b = s.b_n_major ? int64_t(k) * p->n + j : (int64_t(l) * p->n + j) * p->k + k;
                    sum += element(s.a, p->a, at_a) * factor(false, *p, i, k) * element(s.b, p->b, at_b) *
                           factor(true, *p, j, k);
                }
                double y = p->alpha * sum;
                if (p->scale_a) y *= p->scale_a[p->scale_a_rows ? i : 0];
                if (p->scale_b) y *= p->scale_b[p->scale_b_columns ? j : 0];
                if (p->bias) y += p->bias[j];
                int64_t at = (int64_t(l) * p->m + i) * p->n + j;
                if (p->beta != 0) y += p->beta * static_cast<float const*>(p->c)[at];
                store(s.d, p->d, at, float(y));
            }
    return 0;
}

}  // extern "C"
