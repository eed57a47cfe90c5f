// Prints the offsets of block factors by CUTLASS's own layout code, on the host alone.
// sf_layout KIND M N K VM VN: int32 rows, blocks and size of A, the same of B, then the offsets of A and of
// B.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"

using cute::GMMA::Major;

struct Grid {
    int rows, row_step, blocks, block_step;
};

template <class Layout>
void append(std::vector<int32_t>& out, Layout const& layout, Grid grid) {
    for (int r = 0; r < grid.rows; ++r)
        for (int c = 0; c < grid.blocks; ++c)
            out.push_back(int(layout(r * grid.row_step, c * grid.block_step, 0)));
}

template <class Config>
void print(int m, int n, int k, int vm, int vn, int vk) {
    auto const shape = cute::make_shape(m, n, k, 1);
    auto const a = Config::tile_atom_to_shape_SFA(shape);
    auto const b = Config::tile_atom_to_shape_SFB(shape);
    int const blocks = (k + vk - 1) / vk;
    Grid const ga{(m + vm - 1) / vm, vm, blocks, vk}, gb{(n + vn - 1) / vn, vn, blocks, vk};
    std::vector<int32_t> out{ga.rows, blocks, int(cute::cosize(cute::filter_zeros(a))),
                             gb.rows, blocks, int(cute::cosize(cute::filter_zeros(b)))};
    append(out, a, ga);
    append(out, b, gb);
    fwrite(out.data(), sizeof(int32_t), out.size(), stdout);
}

template <Major A, Major B>
void blockwise(int m, int n, int k, int vm, int vn) {
    namespace detail = cutlass::detail;
    if (vm == 128)
        print<detail::Sm90BlockwiseScaleConfig<128, 128, 128, A, B>>(m, n, k, vm, vn, 128);
    else if (vn == 128)
        print<detail::Sm90BlockwiseScaleConfig<1, 128, 128, A, B>>(m, n, k, vm, vn, 128);
    else
        print<detail::Sm90BlockwiseScaleConfig<1, 1, 128, A, B>>(m, n, k, vm, vn, 128);
}

int main(int count, char** words) {
    if (count != 7) return 2;
    std::string const kind = words[1];
    int v[5];
    for (int i = 0; i < 5; ++i) v[i] = atoi(words[i + 2]);
    if (kind == "bs16")
        print<cutlass::detail::Sm1xxBlockScaledConfig<16>>(v[0], v[1], v[2], 1, 1, 16);
    else if (kind == "bs32")
        print<cutlass::detail::Sm1xxBlockScaledConfig<32>>(v[0], v[1], v[2], 1, 1, 32);
    else if (kind == "blk_mn")
        blockwise<Major::MN, Major::MN>(v[0], v[1], v[2], v[3], v[4]);
    else if (kind == "blk_mk")
        blockwise<Major::MN, Major::K>(v[0], v[1], v[2], v[3], v[4]);
    else if (kind == "blk_kk")
        blockwise<Major::K, Major::K>(v[0], v[1], v[2], v[3], v[4]);
    else
        return 2;
}
