// The matrix products, tiled by registers: a tile is R rows by C vectors, and each of its elements is one chain of
// multiply-adds along the depth, in order. So an element's bits do not depend on the shape of the tile.
#pragma once

#include "amx.hpp"

namespace clearhead {
namespace {

// What a cell is and how cells multiply: one number, or a pair of bfloat16 numbers, of which one instruction multiplies
// and adds both.
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
    using Cell = float;  // 32 bits that hold two bfloat16 numbers, neighbours along the depth
    static constexpr int per_cell = 2;
    CLEARHEAD_INLINE Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> sum) {
        return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    // Weights are rounded to bfloat16 in place: afterwards the first half of the row's bytes holds them.
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

constexpr int kStrip = kRegisters == 32 ? 14 : 6;     // rows of the widest tile
constexpr int kDirectRows = kStrip > 8 ? 8 : kStrip;  // up to so many queries read the keys where they lie
constexpr int kTile = 8 * kStrip;                     // queries of which the column pass keeps the weights at a time
constexpr int kBlock = 256;  // keys between two updates of the maximum; blocks start at its multiples
constexpr int kSpan = 2048;  // keys that are summed separately before they are merged; spans start at its multiples
template <class T> constexpr int kPanel = 2 * kLanes<T>;                 // keys side by side in packed panels
template <class T> constexpr int kPitch = kBlock + 64 / int(sizeof(T));  // from row to row of a strip of scores

// sum[r][c] += Σ_k a[r·ROW + k·STEP] · b[k·pitch + vector c], k < depth. Vectors lie in pairs side by side, and
// `pair_stride` cells lie between a pair and the next.
template <class M, int R, int C, int64_t ROW, int64_t STEP>
CLEARHEAD_INLINE void accumulate(const typename M::Cell* a, const typename M::Cell* b, int64_t pitch,
                                 int64_t pair_stride, int64_t depth, Vec<typename M::T> (&sum)[R][C]) {
    using T = typename M::T;
    for (int64_t k = 0; k < depth; ++k) {
        Vec<T> right[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) right[c] = load(b + c / 2 * pair_stride + c % 2 * kLanes<T>);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec<T> left = broadcast<T>(a[r * ROW]);
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
    else if (kStrip > 8 && rows <= 6)
        work.template operator()<6>();
    else if (kStrip > 8 && rows <= 8)
        work.template operator()<8>();
    else
        work.template operator()<kStrip>();
}

// The same for the rows of a task of few: exactly as many.
template <int R = 1, class Work> CLEARHEAD_INLINE void with_few_rows(int rows, Work work) {
    if constexpr (R < kDirectRows)
        if (rows > R) return with_few_rows<R + 1>(rows, work);
    work.template operator()<R>();
}

// Prefetches memory that will be read soon, a few cache lines at a time between the products.
struct Prefetch {
    struct Rows {
        const char* row = nullptr;
        int64_t bytes = 0, pitch = 0, left = 0, done = 0;  // of a row; to the next; rows; bytes of the present row
        const char* pages = nullptr;                       // where their first element is
        const int64_t* run = nullptr;                      // in pages: the run after the present one, as View::runs
        int64_t in_run = 0, size = 0;                      // rows of the present run that are done; bytes of an element
        int64_t per_run = kRun;                            // 1 where the rows of a run are read as one
    } rows[3];                                             // one after the other
    int64_t bytes = 0;                                     // at a time
    int present = 0;                                       // of `rows`

    void add(int which, const void* first, int64_t bytes_here, int64_t pitch, int64_t count) {
        const bool whole = bytes_here == pitch;
        rows[which] = {static_cast<const char*>(first), whole ? bytes_here * count : bytes_here, pitch,
                       whole ? count > 0 : count, 0};
    }

    template <int LEVEL> CLEARHEAD_INLINE_MEMBER void issue() {
        Rows& r = rows[present];
        if (r.done + bytes > r.bytes) return issue_from_more<LEVEL>();
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(r.row + r.done + i, 0, LEVEL);
        r.done += bytes;
    }

    // The same where the present row has fewer bytes left, apart from the products' loops.
    template <int LEVEL> __attribute__((noinline)) void issue_from_more() {
        for (int64_t more = bytes; more > 0;) {
            Rows& r = rows[present];
            if (r.left == 0) {
                if (present == 2) return void(bytes = 0);
                ++present;
                continue;
            }
            const char* from = r.row + r.done;
            const int64_t here = r.bytes - r.done < more ? r.bytes - r.done : more;
            for (int64_t i = 0; i < here; i += 64) __builtin_prefetch(from + i, 0, LEVEL);
            more -= here;
            r.done += here;
            if (r.done < r.bytes) continue;
            r.done = 0, r.row += r.pitch;
            if (--r.left == 0) r.bytes = 0;
            if (r.run && ++r.in_run == r.per_run) r.in_run = 0, r.row = r.pages + *r.run++ * r.size;
        }
    }
};

// Values in pages: where the runs of a block begin, and the first row that is read, in the block.
struct Runs {
    const char* start[kBlock / kRun];
    int64_t first, pitch;  // bytes to the next row

    template <class Cell> CLEARHEAD_INLINE_MEMBER const Cell* row(int64_t k) const {
        return reinterpret_cast<const Cell*>(start[(first + k) / kRun] + (first + k) % kRun * pitch);
    }
};

constexpr int kPrefetchCells = 4;  // of values, between two prefetches: with more, they wait for each other
constexpr int kDepthChunk = 16;    // cells of the depth that are summed separately, even and odd ones apart
static_assert(!kHasTiles || kDepthChunk == kTileCells);
// Rows of a strip (packing.hpp) lie a cell further apart than their numbers are many, in different banks of the cache.
constexpr int kStripRow = kDepthChunk + 1, kStripChunk = kStrip * kStripRow;

// Where cell k of a strip's first row lies.
CLEARHEAD_INLINE int64_t in_strip(int64_t k) { return k / kDepthChunk * kStripChunk + k % kDepthChunk; }

// Whether products of these cells are computed in tile registers.
template <class M> CLEARHEAD_INLINE bool in_tiles() { return kHasTiles && M::per_cell == 2 && multiplies_in_tiles; }

#if defined(__AMX_BF16__)
// As score_panels and multiply_panels below.
template <int R> __attribute__((noinline)) void tile_panels(const float* strip, const float* panels, int64_t depth,
                                                            int first, int last, float* products, Prefetch* prefetch) {
    constexpr int64_t most = 8, wide = kPanel<float>, pitch = kPitch<float>;  // most: chunks at a time
    for (int r = 0; depth == 0 && r < R; ++r)
        for (int64_t j = first * wide; j < last * wide; ++j) products[r * pitch + j] = 0;
    for (int64_t k = 0, cells, chunks; k < depth; k += chunks * cells) {
        cells = depth - k < kTileCells ? depth - k : kTileCells;
        chunks = (depth - k) / cells < most ? (depth - k) / cells : most;
        configure_tiles(R, int(cells));
        TileProduct product{strip + in_strip(k), kStripRow,    kStripChunk, nullptr, wide,
                            wide * kTileCells,   depth * wide, chunks};
        for (int p = first; p < last; p += 2) {
            for (int64_t i = 0; prefetch && i < chunks; ++i) prefetch->issue<2>();  // to the second-level cache
            product.right = panels + (p * depth + k) * wide;
            if (p + 1 < last)
                product.operator()<4>(products + p * wide, pitch, k > 0);
            else
                product.operator()<2>(products + p * wide, pitch, k > 0);
        }
    }
    _tile_release();
}

// As weighted_sum_tile below, of C tiles of columns.
template <int R, int C, int64_t ROW>
CLEARHEAD_INLINE void tile_sum(const float* weights, const float* values, int64_t pitch, int64_t begin, int64_t depth,
                               const float* rescale, float* out, int64_t out_pitch, int64_t& configured) {
    alignas(64) float sums[R][C * kTileCells];
    for (int64_t k = begin, stop = begin + depth, cells, chunks; k < stop; k += chunks * cells) {
        const int64_t room = kTileCells - k % kTileCells;
        cells = stop - k < room ? stop - k : room;
        chunks = cells == kTileCells ? (stop - k) / cells : 1;
        if (cells != configured) configure_tiles(R, int(configured = cells));
        const TileProduct product{weights + k,    ROW,   kTileCells, values + k * pitch, pitch, pitch * kTileCells,
                                  2 * kTileCells, chunks};
        product.template operator()<C>(sums[0], C * kTileCells, k > begin);
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C * kTileCells; c += kTileCells) {
            float* to = out + r * out_pitch + c;
            const Vec<float> sum = load(&sums[r][c]);
            store(to, rescale ? fma(load(to), broadcast<float>(rescale[r]), sum) : sum);
        }
}

// As weighted_sum below.
template <int R, int64_t ROW>
__attribute__((noinline)) void tile_sums(const float* weights, const float* values, int64_t pitch, int64_t begin,
                                         int64_t depth, const float* rescale, float* out, int64_t out_pitch,
                                         int64_t columns, Prefetch* prefetch) {
    int64_t c = 0, configured = 0;
    for (int64_t i = 0; prefetch && i < depth; i += kPrefetchCells) prefetch->issue<2>();
    const auto add = [&]<int C>() {
        for (; c + 16 * C <= columns && depth; c += 16 * C)
            tile_sum<R, C, ROW>(weights, values + c, pitch, begin, depth, rescale, out + c, out_pitch, configured);
    };
    add.template operator()<4>(), add.template operator()<2>(), add.template operator()<1>();
    _tile_release();
}
#endif

// Adds `cells` of the depth to the scores of a tile, or sets them to these products alone: the chains of even and of
// odd cells are summed first.
template <class M, int R, int C> CLEARHEAD_INLINE void score_chunk(const typename M::Cell* queries,
                                                                   const typename M::Cell* panels, int64_t pair_stride,
                                                                   int64_t cells, bool add, typename M::T* scores) {
    using T = typename M::T;
    constexpr int64_t pitch = kPanel<T>;
    Vec<T> even[R][C] = {}, odd[R][C] = {};
    int64_t k = 0;
#pragma GCC unroll 8  // a whole chunk: processors do not foresee where so short a loop ends
    for (; k + 2 <= cells; k += 2) {
        accumulate<M, R, C, kStripRow, 1>(queries + k, panels + k * pitch, pitch, pair_stride, 1, even);
        accumulate<M, R, C, kStripRow, 1>(queries + k + 1, panels + (k + 1) * pitch, pitch, pair_stride, 1, odd);
    }
    if (k < cells) accumulate<M, R, C, kStripRow, 1>(queries + k, panels + k * pitch, pitch, pair_stride, 1, even);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            T* to = scores + r * kPitch<T> + c * kLanes<T>;
            const Vec<T> sum = even[r][c] + odd[r][c];
            store(to, add ? load(to) + sum : sum);
        }
}

// scores[r·kPitch + j] = q_r·k_j for the keys j of C / 2 panels: a strip of queries, panels (panel, depth, kPanel).
// Many short chains are more accurate than one as long as the depth, which would have a larger error than the
// matrix-vector product that other libraries use for a single query. The sums so far stay in `scores`, since the next
// chains need the registers.
template <class M, int R, int C> CLEARHEAD_INLINE void score_tile(const typename M::Cell* queries,
                                                                  const typename M::Cell* panels, int64_t depth,
                                                                  typename M::T* scores, Prefetch* prefetch) {
    using T = typename M::T;
    const int64_t pair_stride = depth * kPanel<T>;  // a pair of vectors is a row of a panel
    int64_t k = 0;
    for (; k + kDepthChunk <= depth; k += kDepthChunk) {
        if (prefetch) prefetch->issue<2>();  // to the second-level cache
        score_chunk<M, R, C>(queries + in_strip(k), panels + k * kPanel<T>, pair_stride, kDepthChunk, k > 0, scores);
    }
    if (k < depth || k == 0)  // without depth all scores are 0
        score_chunk<M, R, C>(queries + in_strip(k), panels + k * kPanel<T>, pair_stride, depth - k, k > 0, scores);
}

// The scores of R queries with the keys of panels first … last.
template <class M, int R> __attribute__((noinline)) void score_panels(const typename M::Cell* queries,
                                                                      const typename M::Cell* panels, int64_t depth,
                                                                      int first, int last, typename M::T* scores,
                                                                      Prefetch* prefetch = nullptr) {
    using T = typename M::T;
#if defined(__AMX_BF16__)
    if constexpr (M::per_cell == 2)
        if (in_tiles<M>()) return tile_panels<R>(queries, panels, depth, first, last, scores, prefetch);
#endif
    // A tile with few rows has more vectors, so that enough chains run at the same time; all sums fit the registers.
    constexpr int vectors = kRegisters < 32 || R > 2 ? 2 : 8 / R;
    constexpr int tile_rows = R * 4 + 3 <= kRegisters ? R : R / 2;
    static_assert(R % tile_rows == 0 && tile_rows * vectors * 2 <= kRegisters);
    int p = first;
    const auto score = [&]<int C>() {
        for (; p + C / 2 <= last; p += C / 2)
            for (int r = 0; r < R; r += tile_rows)
                score_tile<M, tile_rows, C>(queries + r * kStripRow, panels + p * depth * kPanel<T>, depth,
                                            scores + r * kPitch<T> + p * kPanel<T>, prefetch);
    };
    score.template operator()<vectors>(), score.template operator()<2>();
}

// products[r·kPitch + j] = row_r · key_j for the keys j of panels first … last; the rows are a strip.
// It sums kDepthChunk cells of the depth at a time, since one long chain of additions is less accurate. It is faster
// than score_panels, but the scores need that one's order of additions, which the log-sum-exp was computed with.
template <class M, int R> __attribute__((noinline)) void multiply_panels(const typename M::Cell* strip,
                                                                         const typename M::Cell* panels, int64_t depth,
                                                                         int first, int last, typename M::T* products) {
    using T = typename M::T;
#if defined(__AMX_BF16__)
    if constexpr (M::per_cell == 2)
        if (in_tiles<M>()) return tile_panels<R>(strip, panels, depth, first, last, products, nullptr);
#endif
    for (int p = first; p < last; ++p) {
        const typename M::Cell* panel = panels + p * depth * kPanel<T>;
        for (int64_t k = 0; k == 0 || k < depth; k += kDepthChunk) {
            Vec<T> sum[R][2] = {};
            accumulate<M, R, 2, kStripRow, 1>(strip + in_strip(k), panel + k * kPanel<T>, kPanel<T>, 0,
                                              depth - k < kDepthChunk ? depth - k : kDepthChunk, sum);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int c = 0; c < 2; ++c) {
                    T* to = products + r * kPitch<T> + p * kPanel<T> + c * kLanes<T>;
                    store(to, k ? load(to) + sum[r][c] : sum[r][c]);
                }
        }
    }
}

// Vectors of columns: with few rows more, so that enough chains run at the same time.
constexpr int columns_at_once(int rows) { return kRegisters < 32 ? 2 : rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

// out[r][c] = out[r][c]·rescale[r] + Σ_j weights[r][j]·values[j][c] for R rows and C vectors of columns; without
// `rescale`, the sum alone. Row r's weight j lies at r·ROW + j·STEP. Values in pages lie in runs of kRun rows.
template <class M, int R, int C, int64_t ROW, int64_t STEP>
CLEARHEAD_INLINE void weighted_sum_tile(const typename M::Cell* weights, const typename M::Cell* values, int64_t pitch,
                                        int64_t depth, const typename M::T* rescale, typename M::T* out,
                                        int64_t out_pitch, Prefetch* prefetch, const Runs* runs, int64_t column) {
    using T = typename M::T;
    Vec<T> sum[R][C] = {};
    if (prefetch || runs)
        for (int64_t k = 0, here; k < depth; k += here) {
            here = kPrefetchCells - (runs ? (runs->first + k) % kPrefetchCells : 0);
            if (depth - k < here) here = depth - k;
            if (prefetch) prefetch->issue<2>();
            const typename M::Cell* from = runs ? runs->row<typename M::Cell>(k) : values + k * pitch;
            accumulate<M, R, C, ROW, STEP>(weights + k * STEP, from + column, pitch, 2 * kLanes<T>, here, sum);
        }
    else
        accumulate<M, R, C, ROW, STEP>(weights, values + column, pitch, 2 * kLanes<T>, depth, sum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            T* to = out + r * out_pitch + c * kLanes<T>;
            store(to, rescale ? fma(load(to), broadcast<T>(rescale[r]), sum[r][c]) : sum[r][c]);
        }
}

// The same for all columns, of the cells begin … begin + depth. `weights` and `values` are those of cell 0, or null are
// the values in pages.
template <class M, int R, int64_t ROW, int64_t STEP>
__attribute__((noinline)) void weighted_sum(const typename M::Cell* weights, const typename M::Cell* values,
                                            int64_t pitch, int64_t begin, int64_t depth, const typename M::T* rescale,
                                            typename M::T* out, int64_t out_pitch, int64_t columns,
                                            Prefetch* prefetch = nullptr, const Runs* runs = nullptr) {
    using T = typename M::T;
#if defined(__AMX_BF16__)
    if constexpr (M::per_cell == 2 && STEP == 1)
        if (in_tiles<M>())
            return tile_sums<R, ROW>(weights, values, pitch, begin, depth, rescale, out, out_pitch, columns, prefetch);
#endif
    weights += begin * STEP;
    if (values) values += begin * pitch;
    constexpr int wide = columns_at_once(R);
    int64_t c = 0;
    const auto add = [&]<int C>() {
        for (; c + C * kLanes<T> <= columns; c += C * kLanes<T>)
            weighted_sum_tile<M, R, C, ROW, STEP>(weights, values, pitch, depth, rescale, out + c, out_pitch, prefetch,
                                                  runs, c);
    };
    add.template operator()<wide>();
    if constexpr (wide > 4) add.template operator()<4>();
    add.template operator()<2>(), add.template operator()<1>();
}

// The cells of two neighbouring rows of bfloat16 numbers, a vector's bytes of each: pairs in the order of the columns.
template <class T> CLEARHEAD_INLINE void pairs_of(const uint16_t* a, const uint16_t* b, Vec<T>& low, Vec<T>& high) {
    typedef uint16_t Halves __attribute__((vector_size(kVectorBytes)));
    using Order = std::make_integer_sequence<int, kVectorBytes / 2>;
    Halves x, y;
    std::memcpy(&x, a, sizeof x);
    std::memcpy(&y, b, sizeof y);
    low = (Vec<T>)zip_low(x, y, Order{}), high = (Vec<T>)zip_high(x, y, Order{});
}

// As weighted_sum_tile for C vectors of columns of bfloat16 values that are paired as they are read, to the same bits.
// Row j of `values` lies at j·pitch numbers; of the last pair, only the first row is read if `count` is odd.
template <class M, int R, int C, int64_t ROW>
CLEARHEAD_INLINE void weighted_rows_tile(const typename M::Cell* weights, const uint16_t* values, int64_t pitch,
                                         int64_t count, const typename M::T* rescale, typename M::T* out,
                                         int64_t out_pitch, Prefetch& prefetch) {
    using T = typename M::T;
    static const uint16_t zeros[C * kLanes<T>] = {};
    Vec<T> sum[R][C] = {};
    for (int64_t j = 0; j < count; j += 2, values += 2 * pitch) {
        if (j / 2 % kPrefetchCells == 0) prefetch.issue<2>();
        const uint16_t* second = j + 1 < count ? values + pitch : zeros;
        Vec<T> right[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c += 2)
            pairs_of<T>(values + c * kLanes<T>, second + c * kLanes<T>, right[c], right[c + 1]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> left = broadcast<T>(weights[r * ROW + j / 2]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r][c] = M::multiply_add(left, right[c], sum[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            T* to = out + r * out_pitch + c * kLanes<T>;
            store(to, rescale ? fma(load(to), broadcast<T>(rescale[r]), sum[r][c]) : sum[r][c]);
        }
}

// The same for all columns, a multiple of two vectors.
template <class M, int R, int64_t ROW>
__attribute__((noinline)) void weighted_rows(const typename M::Cell* weights, const uint16_t* values, int64_t pitch,
                                             int64_t count, const typename M::T* rescale, typename M::T* out,
                                             int64_t out_pitch, int64_t columns, Prefetch& prefetch) {
    using T = typename M::T;
    constexpr int wide = columns_at_once(R);
    int64_t c = 0;
    const auto add = [&]<int C>() {
        for (; c + C * kLanes<T> <= columns; c += C * kLanes<T>)
            weighted_rows_tile<M, R, C, ROW>(weights, values + c, pitch, count, rescale, out + c, out_pitch, prefetch);
    };
    add.template operator()<wide>();
    if constexpr (wide > 4) add.template operator()<4>();
    add.template operator()<2>();
}

}  // namespace
}  // namespace clearhead
