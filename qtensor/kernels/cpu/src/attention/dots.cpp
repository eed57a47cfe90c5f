// Products with the bfloat16 dot products of AVX-512; compiled with their instructions.
#include "products.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
extern const Products dot_products;
const Products dot_products = products_of<DotTile>();
#endif

}  // namespace QT_NAMESPACE
