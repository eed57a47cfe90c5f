// few_rows.cpp with the bfloat16 dot products of AVX-512.
#include "few_rows_avx512.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
bool few_rows_bfloat16(const CQuantizer& p, const FewRows& f) { return multiply_few_rows<u16>(p, f); }
#endif

}  // namespace QT_NAMESPACE
