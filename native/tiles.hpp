// The register-tiled product that everything is made of: R rows by C vectors, each element one chain of multiply-adds in
// the order of the depth. So an element's bits do not depend on the shape of the tile it was computed in.
#pragma once

#include "simd.hpp"

namespace clearhead {
namespace {

// How cells multiply: one number a cell, or a pair of brain floats that the processor multiplies and adds at once.
template <class Number> struct Single {
    using T = Number;
    using Cell = Number;
    static constexpr int per_cell = 1;
    CLEARHEAD_INLINE Vec<T> multiply_add(Vec<T> a, Vec<T> b, Vec<T> sum) { return fma(a, b, sum); }
    CLEARHEAD_INLINE void store_weights(T* row, int j, Vec<T> a, Vec<T> b) {
        store(row + j, a);
        store(row + j + kLanes<T>, b);
    }
    CLEARHEAD_INLINE T weight_at(const T* row, int64_t j) { return row[j]; }
};

#if defined(__AVX512BF16__)
struct Paired {
    using T = float;
    using Cell = float;  // 32 bits that hold two brain floats, neighbours along the depth
    static constexpr int per_cell = 2;
    CLEARHEAD_INLINE Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> sum) {
        return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    // Weights are rounded to brain floats where they stand: the first half of the row's bytes holds them.
    CLEARHEAD_INLINE void store_weights(float* row, int j, Vec<float> a, Vec<float> b) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(reinterpret_cast<uint16_t*>(row) + j, &both, 64);
    }
    CLEARHEAD_INLINE float weight_at(const float* row, int64_t j) {
        uint16_t bits;
        std::memcpy(&bits, reinterpret_cast<const char*>(row) + 2 * j, 2);
        return from_bf16(bits);
    }
};
#endif

constexpr int kStrip = kRegisters == 32 ? 14 : 6;  // rows of the widest tile
constexpr int kTile = 8 * kStrip;                  // queries whose weights are kept side by side
constexpr int kBlock = 256;                        // keys between two looks at the maximum; blocks start at its multiples
constexpr int kSpan = 2048;                        // keys summed on their own before they join the rest
template <class T> constexpr int kPanel = 2 * kLanes<T>;                     // keys side by side in packed panels
template <class T> constexpr int kPitch = kBlock + 64 / int(sizeof(T));      // from row to row of a strip of scores

// sum[r][c] += Σ_k a[r·ROW + k·STEP] · b[k·pitch + c·lanes], k < depth; vectors lie in pairs, `apart` from pair to pair.
template <class M, int R, int C, int64_t ROW, int64_t STEP>
CLEARHEAD_INLINE void accumulate(const typename M::Cell* a, const typename M::Cell* b, int64_t pitch, int64_t apart,
                                 int64_t depth, Vec<typename M::T> (&sum)[R][C]) {
    using T = typename M::T;
    for (int64_t k = 0; k < depth; ++k) {
        Vec<T> right[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) right[c] = load(b + c / 2 * apart + c % 2 * kLanes<T>);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec<T> left = spread<T>(a[r * ROW]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r][c] = M::multiply_add(left, right[c], sum[r][c]);
        }
        a += STEP;
        b += pitch;
    }
}

// Calls work.template operator()<R>() with the smallest tile height that holds `rows`.
template <class Work> CLEARHEAD_INLINE void with_rows(int rows, Work work) {
    if (rows <= 1)
        work.template operator()<1>();
    else if (rows <= 2)
        work.template operator()<2>();
    else if (rows <= 4)
        work.template operator()<4>();
    else if (kStrip > 8 && rows <= 8)
        work.template operator()<8>();
    else
        work.template operator()<kStrip>();
}

// What will be read soon, asked for a few lines at a time between the products, so that it is near by then.
struct Ahead {
    struct Rows {
        const char* row = nullptr;
        int64_t bytes = 0, pitch = 0, left = 0, at = 0;
    } rows[2];  // the second when the first has been asked for
    int64_t bytes = 0;  // at a time

    void add(int which, const void* first, int64_t bytes_here, int64_t pitch, int64_t count) {
        const bool whole = bytes_here == pitch;
        rows[which] = {static_cast<const char*>(first), whole ? bytes_here * count : bytes_here, pitch, whole ? count > 0 : count, 0};
    }

    template <int LEVEL> CLEARHEAD_INLINE_MEMBER void ask() {
        for (int64_t more = bytes; more > 0;) {
            Rows& r = rows[rows[0].left == 0];
            if (r.left == 0) return;
            const char* from = r.row + r.at;
            const int64_t here = r.bytes - r.at < more ? r.bytes - r.at : more;
            for (int64_t i = 0; i < here; i += 64) __builtin_prefetch(from + i, 0, LEVEL);
            more -= here;
            r.at += here;
            if (r.at >= r.bytes) r.at = 0, r.row += r.pitch, --r.left;
        }
    }
};

constexpr int kClose = 16;  // depth summed on its own, evens and odds apart, before it joins the rest

// scores[r·kPitch + j] for the keys j of C / 2 panels: queries (depth, kStrip), panels (panel, depth, kPanel). Many short
// chains instead of one as long as the depth: one would lie further from the truth than the matrix-vector product that
// peers use for a single query. The sums so far wait in `scores`, since the next chains need the registers.
template <class M, int R, int C>
CLEARHEAD_INLINE void score(const typename M::Cell* queries, const typename M::Cell* panels, int64_t depth,
                            typename M::T* scores, Ahead* ahead) {
    using T = typename M::T;
    constexpr int64_t pitch = kPanel<T>;
    const int64_t apart = depth * pitch;
    for (int64_t start = 0; start < depth || start == 0; start += kClose) {  // once without depth: all scores are 0
        if (ahead) ahead->ask<2>();  // to the second cache
        Vec<T> even[R][C] = {}, odd[R][C] = {};
        const int64_t stop = depth - start < kClose ? depth : start + kClose;
        int64_t k = start;
        for (; k + 2 <= stop; k += 2) {
            accumulate<M, R, C, 1, kStrip>(queries + k * kStrip, panels + k * pitch, pitch, apart, 1, even);
            accumulate<M, R, C, 1, kStrip>(queries + (k + 1) * kStrip, panels + (k + 1) * pitch, pitch, apart, 1, odd);
        }
        if (k < stop) accumulate<M, R, C, 1, kStrip>(queries + k * kStrip, panels + k * pitch, pitch, apart, 1, even);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                T* to = scores + r * kPitch<T> + c * kLanes<T>;
                const Vec<T> sum = even[r][c] + odd[r][c];
                store(to, start ? load(to) + sum : sum);
            }
    }
}

template <class M, int R>
__attribute__((noinline)) void score_panels(const typename M::Cell* queries, const typename M::Cell* panels, int64_t depth,
                                            int first, int last, typename M::T* scores, Ahead* ahead = nullptr) {
    using T = typename M::T;
    constexpr int few = kRegisters < 32 || R > 2 ? 2 : 8 / R;  // vectors: few rows, more chains under way
    constexpr int high = R * 4 + 3 <= kRegisters ? R : R / 2;  // rows of a tile whose sums fit the registers
    static_assert(R % high == 0 && high * few * 2 <= kRegisters);
    int p = first;
    for (; p + few / 2 <= last; p += few / 2)
        for (int r = 0; r < R; r += high)
            score<M, high, few>(queries + r, panels + p * depth * kPanel<T>, depth, scores + r * kPitch<T> + p * kPanel<T>, ahead);
    for (; p < last; ++p)
        for (int r = 0; r < R; r += high)
            score<M, high, 2>(queries + r, panels + p * depth * kPanel<T>, depth, scores + r * kPitch<T> + p * kPanel<T>, ahead);
}

// out[r][c] = out[r][c]·shrink[r] + Σ_j weights[r][j]·values[j][c], for C vectors of columns.
template <class M, int R, int C, int64_t ROW, int64_t STEP>
CLEARHEAD_INLINE void mix_columns(const typename M::Cell* weights, const typename M::Cell* values, int64_t pitch,
                                  int64_t depth, const typename M::T* shrink, typename M::T* out, int64_t out_pitch,
                                  Ahead* ahead) {
    using T = typename M::T;
    Vec<T> sum[R][C] = {};
    if (ahead)
        for (int64_t k = 0; k < depth; k += kClose) {
            ahead->ask<3>();
            accumulate<M, R, C, ROW, STEP>(weights + k * STEP, values + k * pitch, pitch, 2 * kLanes<T>,
                                           depth - k < kClose ? depth - k : kClose, sum);
        }
    else
        accumulate<M, R, C, ROW, STEP>(weights, values, pitch, 2 * kLanes<T>, depth, sum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            T* to = out + r * out_pitch + c * kLanes<T>;
            store(to, shrink ? fma(load(to), spread<T>(shrink[r]), sum[r][c]) : load(to) + sum[r][c]);
        }
}

template <class M, int R, int64_t ROW, int64_t STEP>
__attribute__((noinline)) void mix_rows(const typename M::Cell* weights, const typename M::Cell* values, int64_t pitch,
                                        int64_t depth, const typename M::T* shrink, typename M::T* out,
                                        int64_t out_pitch, int64_t columns, Ahead* ahead = nullptr) {
    using T = typename M::T;
    constexpr int wide = kRegisters < 32 ? 2 : R <= 2 ? 8 : R <= 4 ? 4 : 2;  // few rows: more columns, so that enough chains are under way
    int64_t c = 0;
    for (; c + wide * kLanes<T> <= columns; c += wide * kLanes<T>)
        mix_columns<M, R, wide, ROW, STEP>(weights, values + c, pitch, depth, shrink, out + c, out_pitch, ahead);
    for (; c + 2 * kLanes<T> <= columns; c += 2 * kLanes<T>)
        mix_columns<M, R, 2, ROW, STEP>(weights, values + c, pitch, depth, shrink, out + c, out_pitch, ahead);
    for (; c < columns; c += kLanes<T>)
        mix_columns<M, R, 1, ROW, STEP>(weights, values + c, pitch, depth, shrink, out + c, out_pitch, ahead);
}

}  // namespace
}  // namespace clearhead
