// Rows that a product adds up, weighed. A weight of 0 does not stop NaN in such a sum; so what is not finite is taken out of
// the rows, and goes only to where its weight is another.
#pragma once

#include "packing.hpp"

namespace clearhead {
namespace {

template <class M> struct Operand {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t per_cell = M::per_cell;

    const Cell* rows;  // (row / per_cell, columns): where they lie, if products can read them there, or `own`
    int64_t pitch, columns;
    Cell* own;
    T* poison;  // (row, columns): what is not finite, else 0; where not all is `fine`
    bool fine;

    static Operand in(Arena& arena, int64_t most, int64_t columns) {
        Cell* own = arena.take<Cell>((most + per_cell - 1) / per_cell * columns);
        return {own, columns, columns, own, arena.take<T>(most * columns), true};
    }

    void take(const View& x, Type type, int64_t batch, int64_t head, int64_t first, int64_t last, int64_t d) {
        const bool direct = per_cell == 1 && d == columns && in_cells<M>(x, type, d);
        rows = direct ? reinterpret_cast<const Cell*>(row_of(x, type, batch, head, first)) : own;
        pitch = direct ? x.row : columns;
        if (!direct) pack_value_rows<M>(x, type, batch, head, first, last, d, columns, own);
        Vec<T> bad = {};
        for (int64_t r = 0; r < last - first; r += per_cell)
            for (int64_t c = 0; c < columns; c += kLanes<T>) bad = bad + doubt(load<T>(rows + r / per_cell * pitch + c));
        fine = sum_of<T>(bad) == 0;
        if (!fine) separate(last - first);
    }

    // NaN where a cell is not finite, else 0.
    CLEARHEAD_INLINE Vec<T> doubt(Vec<T> x) {
        if constexpr (per_cell == 1) return x - x;
        const Vec<T> low = (Vec<T>)((IntVec<T>)x << 16), high = (Vec<T>)((IntVec<T>)x >> 16 << 16);
        return (low - low) + (high - high);
    }

    void separate(int64_t count) {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < columns; ++c) {
                const Cell* from = rows + r / per_cell * pitch + c;
                Cell* to = own + r / per_cell * columns + c;
                if (r % per_cell == 0) std::memcpy(to, from, sizeof *to);
                const T x = part(to, r);
                poison[r * columns + c] = x - x == 0 ? T(0) : x;
                if (!(x - x == 0)) std::memset(reinterpret_cast<char*>(to) + r % per_cell * 2, 0, sizeof *to / per_cell);
            }
        rows = own;
        pitch = columns;
    }

    // The number of row r in a cell that holds it.
    CLEARHEAD_INLINE T part(const Cell* cell, int64_t r) {
        if constexpr (per_cell == 1) return *cell;
        uint16_t half;
        std::memcpy(&half, reinterpret_cast<const char*>(cell) + r % per_cell * 2, 2);
        return from_bf16(half);
    }
};

// out[o] += Σ_k weights[o, k]·row k, first ≤ k < last, for up to kStrip rows of `out`. The cell of (o, k) lies at
// o·ROW + k / per_cell·STEP; weights of a pair's other row, outside first … last, are 0.
template <class M, int64_t ROW, int64_t STEP>
void add_products(const typename M::Cell* weights, int outs, const Operand<M>& x, int64_t first, int64_t last, typename M::T* out) {
    using T = typename M::T;
    const int64_t begin = first / M::per_cell, depth = (last + M::per_cell - 1) / M::per_cell - begin;
    with_rows(outs, [&]<int R>() {
        mix_rows<M, R, ROW, STEP>(weights + begin * STEP, x.rows + begin * x.pitch, x.pitch, depth, nullptr, out, x.columns, x.columns);
    });
    for (int64_t k = first; !x.fine && k < last; ++k)
        for (int64_t c = 0; c < x.columns; ++c) {
            const T bad = x.poison[k * x.columns + c];
            for (int o = 0; bad != 0 && o < outs; ++o) {
                const T weight = Operand<M>::part(weights + o * ROW + k / M::per_cell * STEP, k);
                if (weight != 0) out[o * x.columns + c] += weight * bad;
            }
        }
}

#if defined(__AVX512BF16__)
// Two rows of weights become one of pairs, in the first one's place; `along`, where given, gets the rows' cells themselves.
template <class M> void pair_rows(float* x, bool both, int first, int last, float* along) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    typedef uint32_t Words __attribute__((vector_size(64)));
    constexpr int n = kLanes<float>;
    const auto words = [](Vec<float> v) { return __builtin_convertvector((Halves)_mm512_cvtneps_pbh((__m512)v), Words); };
    for (int j = first; j < last; j += 2 * n) {
        const float* y = x + kPitch<float> + j;
        const Vec<float> a = load(x + j), b = load(x + j + n), c = both ? load(y) : Vec<float>{}, d = both ? load(y + n) : Vec<float>{};
        store(x + j, (Vec<float>)(words(a) | words(c) << 16));
        store(x + j + n, (Vec<float>)(words(b) | words(d) << 16));
        if (!along) continue;
        M::store_weights(along, j, a, b);
        M::store_weights(along + kPitch<float>, j, c, d);
    }
}
#endif

}  // namespace
}  // namespace clearhead
