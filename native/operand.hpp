// The right-hand operand of a product weights · rows in the backward pass. Where a weight is 0, a NaN or an infinity in
// its row must not reach the sum, but 0·NaN is NaN. So numbers that are not finite are moved out of the rows, and added
// afterwards only where their weight is not 0.
#pragma once

#include "packing.hpp"

namespace clearhead {
namespace {

template <class M> struct Operand {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t per_cell = M::per_cell;

    const Cell* rows;  // (row / per_cell, columns): in place where products can read them there, else `copy`
    int64_t pitch, columns;
    Cell* copy;
    T* nonfinite;  // (row, columns): the numbers that are not finite, 0 elsewhere; unset where all are finite
    bool all_finite;

    static Operand in(Arena& arena, int64_t most, int64_t columns) {
        Cell* copy = arena.take<Cell>((most + per_cell - 1) / per_cell * columns);
        return {copy, columns, columns, copy, arena.take<T>(most * columns), true};
    }

    // Reads rows first … last of a matrix.
    void load_rows(const Matrix& from, int64_t first, int64_t last) {
        const bool direct = per_cell == 1 && from.d == columns && in_cells<M>(from);
        rows = direct ? reinterpret_cast<const Cell*>(from.row(first)) : copy;
        pitch = direct ? from.x.row : columns;
        if (!direct) pack_value_rows<M>(from, first, last, columns, copy);
        Vec<T> sum = {};
        for (int64_t r = 0; r < last - first; r += per_cell)
            for (int64_t c = 0; c < columns; c += kLanes<T>)
                sum = sum + nan_unless_finite(load<T>(rows + r / per_cell * pitch + c));
        all_finite = sum_of<T>(sum) == 0;
        if (!all_finite) separate_nonfinite(last - first);
    }

    // 0 where a cell is finite, else NaN.
    CLEARHEAD_INLINE Vec<T> nan_unless_finite(Vec<T> x) {
        if constexpr (per_cell == 1) return x - x;
        const Vec<T> low = (Vec<T>)((IntVec<T>)x << 16), high = (Vec<T>)((IntVec<T>)x >> 16 << 16);
        return (low - low) + (high - high);
    }

    void separate_nonfinite(int64_t count) {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < columns; ++c) {
                const Cell* from = rows + r / per_cell * pitch + c;
                Cell* to = copy + r / per_cell * columns + c;
                if (r % per_cell == 0) std::memcpy(to, from, sizeof *to);
                const T x = element_of<M>(to, r);
                const bool finite = x - x == 0;
                nonfinite[r * columns + c] = finite ? T(0) : x;
                if (!finite) clear_element<M>(to, r);
            }
        rows = copy;
        pitch = columns;
    }
};

// out[o] += Σ_k weights[o, k]·row k, first ≤ k < last, for up to kStrip rows of `out`. The cell of weight (o, k) lies
// at o·ROW + k / per_cell·STEP. Where first … last cuts a pair, the weight of its outer row must be 0.
template <class M, int64_t ROW, int64_t STEP> void add_products(const typename M::Cell* weights, int outs,
                                                                const Operand<M>& x, int64_t first, int64_t last,
                                                                typename M::T* out) {
    using T = typename M::T;
    const int64_t begin = first / M::per_cell, depth = (last + M::per_cell - 1) / M::per_cell - begin;
    T ones[kStrip];
    for (T& one : ones) one = 1;
    with_rows(outs, [&]<int R>() {
        weighted_sum<M, R, ROW, STEP>(weights, x.rows, x.pitch, begin, depth, ones, out, x.columns, x.columns);
    });
    for (int64_t k = first; !x.all_finite && k < last; ++k)
        for (int64_t c = 0; c < x.columns; ++c) {
            const T value = x.nonfinite[k * x.columns + c];
            for (int o = 0; value != 0 && o < outs; ++o) {
                const T weight = element_of<M>(weights + o * ROW + k / M::per_cell * STEP, k);
                if (weight != 0) out[o * x.columns + c] += weight * value;
            }
        }
}

#if defined(__AVX512BF16__)
// Rounds two rows of weights to bfloat16 and pairs them, row by row, in place of the first one. `by_row`, where given,
// receives each row's own cells, which pair neighbouring columns.
template <class M> void pair_rows(float* x, bool both, int first, int last, float* by_row) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    typedef uint32_t Words __attribute__((vector_size(64)));
    constexpr int n = kLanes<float>;
    const auto words = [](Vec<float> v) {
        return __builtin_convertvector((Halves)_mm512_cvtneps_pbh((__m512)v), Words);
    };
    for (int j = first; j < last; j += 2 * n) {
        const float* y = x + kPitch<float> + j;
        const Vec<float> a = load(x + j), b = load(x + j + n), c = both ? load(y) : Vec<float>{},
                         d = both ? load(y + n) : Vec<float>{};
        store(x + j, (Vec<float>)(words(a) | words(c) << 16));
        store(x + j + n, (Vec<float>)(words(b) | words(d) << 16));
        if (!by_row) continue;
        M::store_weights(by_row, j, a, b);
        M::store_weights(by_row + kPitch<float>, j, c, d);
    }
}
#endif

}  // namespace
}  // namespace clearhead
