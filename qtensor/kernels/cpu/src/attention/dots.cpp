// Products with the bfloat16 dot products of AVX-512; compiled with their instructions.
#include "codes_avx512.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
Products dot_products(const StoredRows& s, bool in_registers) {
    return in_registers ? products_of_codes<DotSteps>(s) : products_of<PairTile<DotSteps>>();
}
#endif

}  // namespace QT_NAMESPACE
