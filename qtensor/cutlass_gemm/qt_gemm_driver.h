// Exports the C interface of one kernel: converts the plain C arguments to CUTLASS's and launches.
//
// emit.py includes this file after it has defined: the types QtKernel and, with block factors,
// QtScaleConfig; the strings QT_NAME and QT_SPEC; QT_FACTORS (0 none, 1 tiles of 128x4, 2 rows);
// QT_ACCUMULATES (0 or 1); QT_SFB_K_MAJOR (0 or 1, if QT_FACTORS is 2).
#pragma once
#include <algorithm>

#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/util/packed_stride.hpp"
#include "qt_gemm_abi.h"

namespace qt {

using Gemm = cutlass::gemm::device::GemmUniversalAdapter<QtKernel>;
static constexpr int kUp4 = 4;
static constexpr int kBlock = 128;

inline int up4(int n) { return (n + kUp4 - 1) / kUp4 * kUp4; }

#if QT_FACTORS == 1
inline auto factor_shape(qt_gemm_args const& p) { return cute::make_shape(p.m, p.n, p.k, 1); }
#elif QT_FACTORS == 2
// TMA needs leading dims of a multiple of 4 floats, so these are the shapes of the padded buffers.
inline auto factor_shape_a(qt_gemm_args const& p) { return cute::make_shape(up4(p.m), p.n, p.k, 1); }
inline auto factor_shape_b(qt_gemm_args const& p) {
#if QT_SFB_K_MAJOR
    return cute::make_shape(p.m, p.n, up4((p.k + kBlock - 1) / kBlock) * kBlock, 1);
#else
    return cute::make_shape(p.m, up4(p.n), p.k, 1);
#endif
}
#endif

inline typename Gemm::Arguments arguments(qt_gemm_args const& p) {
    using Kernel = QtKernel;
    typename Gemm::Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = cute::make_shape(p.m, p.n, p.k, p.l);
    auto& main = args.mainloop;
    main.ptr_A = static_cast<decltype(main.ptr_A)>(p.a);
    main.ptr_B = static_cast<decltype(main.ptr_B)>(p.b);
    main.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {p.m, p.k, p.l});
    main.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {p.n, p.k, p.l});
#if QT_FACTORS
    main.ptr_SFA = static_cast<decltype(main.ptr_SFA)>(p.sfa);
    main.ptr_SFB = static_cast<decltype(main.ptr_SFB)>(p.sfb);
#if QT_FACTORS == 1
    main.layout_SFA = QtScaleConfig::tile_atom_to_shape_SFA(factor_shape(p));
    main.layout_SFB = QtScaleConfig::tile_atom_to_shape_SFB(factor_shape(p));
#else
    main.layout_SFA = QtScaleConfig::tile_atom_to_shape_SFA(factor_shape_a(p));
    main.layout_SFB = QtScaleConfig::tile_atom_to_shape_SFB(factor_shape_b(p));
#endif
#endif
    auto& out = args.epilogue;
    out.ptr_D = static_cast<decltype(out.ptr_D)>(p.d);
    out.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {p.m, p.n, p.l});
    int64_t const rows = p.scale_a_rows ? p.m : 0, columns = p.scale_b_columns ? p.n : 0;
    auto const scaled_arguments = [&] {
        using Nodes = EpilogueNodes<QtCtaTile>;
        typename Nodes::Scaled::Arguments scaled{{p.scale_a, 1.f, {bool(p.scale_a_rows), cute::_0{}, rows}},
                                                 {{{p.alpha}, {nullptr}, {}}, {}, {}},
                                                 {}};
        return scaled;
    }();
    using Broadcast = cute::Stride<cute::_0, bool, int64_t>;
    using BiasStride = cute::Stride<cute::_0, cute::_1, int64_t>;
    Broadcast const scale_b{cute::_0{}, bool(p.scale_b_columns), columns};
    BiasStride const bias{};
#if QT_ACCUMULATES
    // TMA needs an address even if beta is 0.
    out.ptr_C = static_cast<decltype(out.ptr_C)>(p.c ? p.c : p.d);
    out.dC = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {p.m, p.n, p.l});
    out.thread = {{{p.beta}, {nullptr}, {}},
                  {},
                  {{p.scale_b, 1.f, scale_b}, scaled_arguments, {p.bias, 0.f, bias}, {}},
                  {}};
#else
    out.thread = {{p.scale_b, 1.f, scale_b}, scaled_arguments, {p.bias, 0.f, bias}, {}};
#endif
    args.hw_info.device_id = p.device;
    args.hw_info.sm_count = p.sm_count > 0
                                ? p.sm_count
                                : cutlass::KernelHardwareInfo::query_device_multiprocessor_count(p.device);
    return args;
}

inline bool is_ours(qt_gemm_args const* p) {
    return p->struct_size == sizeof(qt_gemm_args) && p->version == QT_GEMM_VERSION;
}

// Make a device current in the library's own CUDA runtime. The caller has made it current in its own, and
// makes the earlier one current again: to do that here would create a context on a device that the process
// does not use.
inline cudaError_t make_current(int device) {
    int now = -1;
    cudaError_t const error = cudaGetDevice(&now);
    return error != cudaSuccess || now == device ? error : cudaSetDevice(device);
}

// Returns a status of CUTLASS; if CUDA has said why, that.
inline int reason(cutlass::Status status) {
    if (status == cutlass::Status::kSuccess || last_error == cudaSuccess) return int(status);
    return QT_GEMM_CUDA + int(last_error);
}

}  // namespace qt

static qt_gemm_info const kInfo{QT_GEMM_VERSION, sizeof(qt_gemm_args), QT_NAME, QT_SPEC};

extern "C" {

qt_gemm_info const* qt_gemm_describe(void) { return &kInfo; }

int qt_gemm_can_implement(qt_gemm_args const* p) {
    if (!qt::is_ours(p)) return QT_GEMM_WRONG_CALLER;
    return int(qt::Gemm::can_implement(qt::arguments(*p)));
}

int64_t qt_gemm_workspace(qt_gemm_args const* p) {
    if (int const status = qt_gemm_can_implement(p)) return -status;
    return int64_t(qt::Gemm::get_workspace_size(qt::arguments(*p)));
}

int qt_gemm_factor_counts(qt_gemm_args const* p, int64_t* sfa, int64_t* sfb) {
    if (!qt::is_ours(p)) return QT_GEMM_WRONG_CALLER;
    *sfa = *sfb = 0;
#if QT_FACTORS
    auto const args = qt::arguments(*p);
    *sfa = cute::cosize(cute::filter_zeros(args.mainloop.layout_SFA));
    *sfb = cute::cosize(cute::filter_zeros(args.mainloop.layout_SFB));
#endif
    return 0;
}

int qt_gemm_run(qt_gemm_args const* p, void* workspace, int64_t bytes, void* stream) {
    if (!qt::is_ours(p)) return QT_GEMM_WRONG_CALLER;
    if (cudaError_t const error = qt::make_current(p->device)) return QT_GEMM_CUDA + int(error);
    auto const args = qt::arguments(*p);
    auto status = qt::Gemm::can_implement(args);
    if (status != cutlass::Status::kSuccess) return int(status);
    if (bytes < int64_t(qt::Gemm::get_workspace_size(args))) return int(cutlass::Status::kErrorWorkspaceNull);
    qt::Gemm gemm;
    cudaGetLastError();  // an error of an earlier launch is not this one's
    qt::last_error = cudaSuccess;
    status = gemm.initialize(args, workspace, static_cast<cudaStream_t>(stream));
    if (status == cutlass::Status::kSuccess) status = gemm.run(static_cast<cudaStream_t>(stream));
    return qt::reason(status);
}

char const* qt_gemm_status(int status) {
    if (status == QT_GEMM_WRONG_CALLER) return "the caller has another version of the interface";
    if (status >= QT_GEMM_CUDA) return cudaGetErrorString(static_cast<cudaError_t>(status - QT_GEMM_CUDA));
    return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));
}

}  // extern "C"
