// Quantizing what is made a few rows at a time, while they are in the cache. Where a maximum of the whole
// tensor comes first, it is found on the way, and the tensor kept and quantized then, or made once more where
// there is no room for it.
#pragma once
#include <functional>

#include "quantize_float8.h"
#include "quantize_tiles.h"
#include "scale_layout.h"

namespace QT_NAMESPACE {

constexpr i64 BAND_BYTES = i64(256) << 10;  // of produced rows, which stay in the second cache level

template <class D>
struct FusedQuantizer {
    using T = typename D::T;
    const CQuantizer& p;
    const QuantizeCall& c;  // x: where the produced tensor is kept, or null
    Producer& producer;
    const i64 height;  // rows of a band
    const bool stream;

    FusedQuantizer(const CQuantizer& quantizer, const QuantizeCall& call, Producer& made,
                   bool around_the_cache)
        : p(quantizer), c(call), producer(made), height(band_height()), stream(around_the_cache) {}

    // Whole blocks of what is cut along the rows, as many as the cache holds, enough bands for all threads.
    i64 band_height() const {
        i64 unit = 1;
        if (c.column.data || p.square) unit = p.family == BLOCK && !p.transposed ? 32 : 128;
        i64 fit = BAND_BYTES / (c.cols * i64(sizeof(T)));
        const i64 share = (c.rows + c.threads - 1) / c.threads;
        fit = fit < share ? fit : share;
        return fit < unit ? unit : fit / unit * unit;
    }

    // f(call for the band, call for the band alone) for each; `again`: the bands have been made before.
    using OnBand = std::function<void(const QuantizeCall& part, const QuantizeCall& alone)>;
    void bands(bool again, const OnBand& f) const {
        parallel((c.rows + height - 1) / height, 1, c.threads, [&](i64 a, i64 b) {
            T* kept = (T*)c.x;
            const Array<T> buffer(kept ? 0 : height * c.cols);
            for (i64 i = a; i < b; i++) {
                // What was read last is still in the cache.
                const i64 band = again ? a + b - 1 - i : i, begin = band * height,
                          end = begin + height < c.rows ? begin + height : c.rows;
                T* at = kept ? kept + begin * c.cols : (T*)buffer;
                producer.rows(begin, end, at, again);
                QuantizeCall part = c;
                part.stride = c.cols;
                part.threads = 1;
                part.begin = begin;
                part.end = end;
                part.x = (const void*)(uintptr_t(at) - uintptr_t(begin * c.cols) * sizeof(T));
                QuantizeCall alone = part;
                alone.x = at;
                alone.rows = end - begin;
                alone.begin = alone.end = 0;
                f(part, alone);
            }
            if (stream) fence();
        });
    }

    template <class E>
    void float8() {
        if (p.family == TENSOR)
            tensor<E>();
        else if (p.family == ROW)
            rows<E>();
        else
            columns<E>();
    }

    // The maxima of columns over all rows, as amax_columns finds them.
    void find_columns(const QuantizeCall& alone, bool finite, i32* out) const {
        const Array<i32> own(c.cols);
        amax_columns<D>(alone, finite, own);
        for (i64 k = 0; k < c.cols; k++) raise(out + k, own[k]);
    }

    template <class E>
    void columns() {
        using Float8 = Float8Quantizer<D, E>;
        const bool own = !c.scale && !c.row.given;
        if (own) {
            memset(c.scale_inv, 0, sizeof(float) * size_t(c.cols));
            bands(false, [&](const QuantizeCall&, const QuantizeCall& alone) {
                find_columns(alone, false, (i32*)c.scale_inv);
            });
        }
        Float8 all(p, c, stream);
        const typename Float8::ColumnScales scales(all);
        if (own && c.x) return all.encode_columns(scales, true);
        bands(own, [&](const QuantizeCall& part, const QuantizeCall&) {
            Float8(p, part, stream).encode_columns(scales, false);
        });
    }

    template <class E>
    void tensor() {
        i32 found = 0;
        const bool own = !c.scale && !c.row.given;
        if (own)
            bands(false, [&](const QuantizeCall&, const QuantizeCall& alone) {
                raise(&found, amax_tensor<D>(alone, false));
            });
        using Float8 = Float8Quantizer<D, E>;
        const float scale =
            c.scale ? *c.scale : Float8(p, c, false).scale_of(own ? found : bits<i32>(*c.row.given));
        *c.scale_inv = 1.0f / scale;
        const OneFactor<D, E> factor(scale, c.rows * c.cols);
        const typename Float8::FiniteCheck check{Float8::is_odd(scale) || found >= INF_BITS, !own};
        if (own && c.x) {
            Float8(p, c, stream).with_factor(factor, check, true);
            return;
        }
        bands(own, [&](const QuantizeCall& part, const QuantizeCall&) {
            const i32 met = Float8(p, part, stream).with_factor(factor, check, false);
            if (!own) raise(&found, met);
        });
        if (c.amax_out) *c.amax_out = bits<float>(found > INF_BITS ? 0x7fc00000 : found);
    }

    template <class E>
    void rows() {
        Float8Quantizer<D, E>(p, c, stream).given_rows();
        bands(false, [&](const QuantizeCall& part, const QuantizeCall&) {
            Float8Quantizer<D, E>(p, part, stream).encode_rows();
        });
    }

    template <class E, int B, int Codes>
    struct Quantizer : BlockQuantizer<D, E, B, Codes> {
        NOINLINE Quantizer(const CQuantizer& p, const QuantizeCall& c, bool stream)
            : BlockQuantizer<D, E, B, Codes>(p, c, scale_layout_of(p, c.row, c.rows, c.cols, false),
                                             scale_layout_of(p, c.column, c.cols, c.rows, true), stream) {}
    };

    template <class E, int B, int Codes>
    void blocks() {
        if constexpr (B == NV)
            two_levels<E, B, Codes>();
        else
            bands(false, [&](const QuantizeCall& part, const QuantizeCall&) {
                Quantizer<E, B, Codes>(p, part, stream).encode();
            });
    }

    // NVFP4: the maxima behind the second level come first.
    template <class E, int B, int Codes>
    void two_levels() {
        using Band = Quantizer<E, B, Codes>;
        // Square blocks have one maximum, whichever direction asks.
        const bool row = p.square || c.row.data, column = !p.square && c.column.data;
        const Buffers& first = p.square && !c.row.amax ? c.column : c.row;
        i32 of_rows = 0, of_columns = 0;
        if (column && p.row_scaled && !c.column.given)
            memset(c.column.amax, 0, sizeof(float) * size_t(c.cols));
        const bool wanted = (row && !first.given && !p.row_scaled) || (column && !c.column.given);
        if (wanted)
            bands(false, [&](const QuantizeCall& part, const QuantizeCall& alone) {
                Band band(p, part, stream);
                if (row && !first.given && !p.row_scaled)
                    raise(&of_rows, band.row.rotate ? band.rotated(false) : amax_tensor<D>(alone, true));
                if (column && !c.column.given && p.row_scaled)
                    find_columns(alone, true, (i32*)c.column.amax);
                else if (column && !c.column.given)
                    raise(&of_columns, band.column.rotate ? band.rotated(true) : amax_tensor<D>(alone, true));
            });
        GlobalScale along_rows{}, along_columns{};
        if (row && p.row_scaled) {
            if (first.given) memcpy(first.amax, first.given, sizeof(float) * size_t(c.rows));
        } else if (row) {
            *first.amax = first.given ? *first.given : bits<float>(of_rows);
            along_rows = along_columns = nvfp4_global(*first.amax, p.e4m3_max);
            if (p.square && c.row.amax && c.column.amax)
                *c.column.amax = c.column.given ? *c.column.given : *c.row.amax;
        }
        if (column && p.row_scaled) {
            if (c.column.given) memcpy(c.column.amax, c.column.given, sizeof(float) * size_t(c.cols));
        } else if (column) {
            *c.column.amax = c.column.given ? *c.column.given : bits<float>(of_columns);
            along_columns = nvfp4_global(*c.column.amax, p.e4m3_max);
        }
        // `alone`: the rows of the band, whose maxima each row has of its own.
        const auto encode = [&](Band&& band, const QuantizeCall& alone, i64 begin) {
            band.row.global = along_rows;
            band.column.global = along_columns;
            if (row && p.row_scaled) {
                if (!first.given) amax_rows<D>(alone, true, (i32*)first.amax + begin);
                band.row.line_amax = first.amax;
            }
            if (column && p.row_scaled) band.column.line_amax = c.column.amax;
            band.encode();
        };
        if (wanted && c.x) return encode(Band(p, c, stream), c, 0);
        bands(wanted, [&](const QuantizeCall& part, const QuantizeCall& alone) {
            encode(Band(p, part, stream), alone, part.begin);
        });
    }
};

}  // namespace QT_NAMESPACE
