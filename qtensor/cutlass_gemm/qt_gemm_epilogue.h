// The epilogue of every kernel: scale factors (per tensor, row or column), bias, and accumulation
// into C.
//
// One kernel serves per-tensor and per-row factors: the broadcast nodes take stride 0 or 1 at run
// time.
#pragma once
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/functional.h"

namespace qt {

namespace fusion = cutlass::epilogue::fusion;
using cute::_0;
using cute::_1;
static constexpr auto kNearest = cutlass::FloatRoundStyle::round_to_nearest;

template <class CtaTile>
struct EpilogueNodes {
    using Alpha = fusion::Sm90ScalarBroadcast<float>;
    using ScaleA = fusion::Sm90ColBroadcast<0, CtaTile, float, float, cute::Stride<bool, _0, int64_t>>;
    using ScaleB = fusion::Sm90RowBroadcast<0, CtaTile, float, float, cute::Stride<_0, bool, int64_t>>;
    using Bias = fusion::Sm90RowBroadcast<0, CtaTile, float, float, cute::Stride<_0, _1, int64_t>>;
    using Times = fusion::Sm90Compute<cutlass::multiplies, float, float, kNearest>;
    // The order matters for NVFP4: alpha reduces acc before the large amax factors multiply it.
    using Scaled = fusion::Sm90EVT<Times, ScaleA, fusion::Sm90EVT<Times, Alpha, fusion::Sm90AccFetch>>;
    template <class Element>
    using Biased =
        fusion::Sm90EVT<fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Element, float, kNearest>,
                        ScaleB, Scaled, Bias>;
};

template <class CtaTile, class ElementD>
using Epilogue = typename EpilogueNodes<CtaTile>::template Biased<ElementD>;

// beta * C + ...; C is not read if beta is 0.
template <class CtaTile, class ElementD, class ElementC>
using AccumulatingEpilogue =
    fusion::Sm90EVT<fusion::Sm90Compute<cutlass::homogeneous_multiply_add, ElementD, float, kNearest>,
                    fusion::Sm90ScalarBroadcast<float>, fusion::Sm90SrcFetch<ElementC>,
                    typename EpilogueNodes<CtaTile>::template Biased<float>>;

}  // namespace qt
