// Reads arrays of any type and strides, and packs them into the forms that the products in tiles.hpp read.
//
//   keys     (panel, depth, kPanel)     a panel is kPanel keys side by side; keys past the end are zeros
//   queries  (strip, depth, kStrip)     a strip is kStrip queries side by side
//   values   (key / per_cell, columns)  columns a multiple of the lanes
//
// `depth` is d_k counted in cells: a cell is one number, or a pair of bfloat16 numbers.
#pragma once

#include "attend.hpp"
#include "tiles.hpp"

namespace clearhead {
namespace {

// Allocates from one buffer, each piece on its own cache line. Without a buffer it only counts, so a task that is
// constructed without one tells how many bytes it needs.
struct Arena {
    char* start;
    int64_t bytes = 0;
    template <class U> U* take(int64_t count) {
        char* piece = start ? start + bytes : nullptr;
        bytes += (count * int64_t(sizeof(U)) + 63) / 64 * 64;
        return reinterpret_cast<U*>(piece);
    }
};

constexpr int kPackedRows = 8;  // value rows that are packed between two prefetches

CLEARHEAD_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
CLEARHEAD_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
CLEARHEAD_INLINE int64_t up_to_multiple(int64_t x, int64_t of) { return (x + of - 1) / of * of; }

CLEARHEAD_INLINE const char* row_of(const View& x, Type type, int64_t batch, int64_t head, int64_t row) {
    const int64_t place = x.runs ? x.runs[row / kRun] + row % kRun * x.row : batch * x.batch + row * x.row;
    return static_cast<const char*>(x.data) + (place + head * x.head) * bytes_of(type);
}

// Where the answers of a query of a head stand; heads count over all batches.
CLEARHEAD_INLINE int64_t answer_index(const Problem& p, int64_t head, int64_t query) {
    return p.ragged ? query * p.heads + head : head * p.queries + query;
}

// Reads `count` numbers of one row, converted to T.
template <class T> void fetch(const char* row, int64_t stride, Type type, int64_t count, T* to) {
    switch (type) {
        case Type::f64:
            for (int64_t i = 0; i < count; ++i) to[i] = T(reinterpret_cast<const double*>(row)[i * stride]);
            return;
        case Type::f32:
            if (stride == 1)
                for (int64_t i = 0; i < count; ++i) to[i] = T(reinterpret_cast<const float*>(row)[i]);
            else
                for (int64_t i = 0; i < count; ++i) to[i] = T(reinterpret_cast<const float*>(row)[i * stride]);
            return;
        default: {
            const uint16_t* from = reinterpret_cast<const uint16_t*>(row);
            const bool is_bf16 = type == Type::bf16;
            if constexpr (sizeof(T) == 4)
                if (stride == 1) return widen(from, to, count, is_bf16);
            for (int64_t i = 0; i < count; ++i)
                to[i] = T(is_bf16 ? from_bf16(from[i * stride]) : from_f16(from[i * stride]));
        }
    }
}

// Reads one row as cells; an odd last number is paired with 0.
template <class M> void fetch_cells(const char* row, int64_t stride, Type type, int64_t count, typename M::Cell* to) {
    if constexpr (M::per_cell == 1)
        fetch(row, stride, type, count, to);
    else {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(row);
        uint16_t* half = reinterpret_cast<uint16_t*>(to);
        if (stride == 1)
            std::memcpy(half, from, count * 2);
        else
            for (int64_t i = 0; i < count; ++i) half[i] = from[i * stride];
        if (count % 2) half[count] = 0;
    }
}

template <class M> CLEARHEAD_INLINE int64_t depth_of(int64_t d) { return (d + M::per_cell - 1) / M::per_cell; }

// Whether a row's bytes in memory are its cells, so that products can read them in place.
template <class M> CLEARHEAD_INLINE bool in_cells(const View& x, Type type, int64_t d) {
    const bool same = M::per_cell == 2 ? type == Type::bf16 : bytes_of(type) == int64_t(sizeof(typename M::T));
    return same && x.column == 1 && d % M::per_cell == 0;
}

// Cells that the functions below need for rows on their way into a panel or a strip.
template <class M> CLEARHEAD_INLINE int64_t staging_cells(int64_t depth) {
    return max_of(kPanel<typename M::T>, kStrip + 1) * up_to_multiple(depth, kLanes<typename M::T>);
}

// Row r's number in a cell that holds it, and the same set to 0. A pair holds an even row and the next.
template <class M> CLEARHEAD_INLINE typename M::T element_of(const typename M::Cell* cell, int64_t r) {
    if constexpr (M::per_cell == 1) return *cell;
    uint16_t half;
    std::memcpy(&half, reinterpret_cast<const char*>(cell) + r % M::per_cell * 2, 2);
    return from_bf16(half);
}

template <class M> CLEARHEAD_INLINE void clear_element(typename M::Cell* cell, int64_t r) {
    std::memset(reinterpret_cast<char*>(cell) + r % M::per_cell * 2, 0, sizeof *cell / M::per_cell);
}

// Packs rows first … first + kPanel of a matrix as one panel.
template <class M> void pack_panel(const View& x, Type type, int64_t batch, int64_t head, int64_t first, int64_t rows,
                                   int64_t d, typename M::Cell* staging, typename M::Cell* panel,
                                   Prefetch* prefetch = nullptr) {
    using T = typename M::T;
    constexpr int n = kLanes<T>, wide = kPanel<T>;
    const int64_t depth = depth_of<M>(d), pitch = up_to_multiple(depth, n);
    const T* row[wide];
    const bool direct = in_cells<M>(x, type, d);
    int64_t last_whole = depth / n * n;
    for (int j = 0; j < wide; ++j) {
        T* copy = staging + j * pitch;
        row[j] = copy;
        if (first + j >= rows)
            for (int64_t i = 0; i < depth; ++i) copy[i] = 0;
        else if (direct)
            row[j] = reinterpret_cast<const T*>(row_of(x, type, batch, head, first + j));
        else
            fetch_cells<M>(row_of(x, type, batch, head, first + j), x.column, type, d, copy);
    }
    for (int side = 0; side < 2; ++side)
        for (int64_t k = 0; k < last_whole; k += n) {
            Vec<T> square[n];
            load_columns<T>(row + side * n, k, square);
            if (prefetch) prefetch->issue<2>();
#pragma GCC unroll 16
            for (int i = 0; i < n; ++i) store(panel + (k + i) * wide + side * n, square[i]);
        }
    for (int64_t k = last_whole; k < depth; ++k)
        for (int j = 0; j < wide; ++j) std::memcpy(panel + k * wide + j, row[j] + k, sizeof(T));
}

// Packs rows first … last of a matrix, from the first of a panel on.
template <class M> void pack_panels(const View& x, Type type, int64_t batch, int64_t head, int64_t first, int64_t last,
                                    int64_t rows, int64_t d, typename M::Cell* staging, typename M::Cell* panels,
                                    Prefetch* prefetch = nullptr) {
    constexpr int wide = kPanel<typename M::T>;
    for (int64_t j = first; j < last; j += wide, panels += wide * depth_of<M>(d))
        pack_panel<M>(x, type, batch, head, j, rows, d, staging, panels, prefetch);
}

// Reads rows once in the order of the memory, before they are read side by side: with vectors of a whole cache line
// that alone would wait for a few lines at a time, which on AMD's Zen 4 gives a third of the memory's rate.
template <class T> CLEARHEAD_INLINE void touch(const T* const* row, int count, int64_t depth) {
    Vec<T> any = {};
    for (int i = 0; i < count; ++i)
        for (int64_t k = 0; k < depth; k += kLanes<T>) any = (Vec<T>)((IntVec<T>)any | (IntVec<T>)load(row[i] + k));
    asm volatile("" : : "m"(any));
}

// The scores of kLanes keys, read in place, with R queries. The sums are taken in the order of score_panels, to the
// same bits.
template <class M, int R> CLEARHEAD_INLINE void score_square(const typename M::Cell* queries,
                                                             const typename M::T* const* row, int64_t depth,
                                                             typename M::T* scores, Prefetch& prefetch) {
    using T = typename M::T;
    constexpr int n = kLanes<T>;
    static_assert(kDepthChunk % n == 0);
    static_assert(n % 2 == 0);
    Vec<T> total[R] = {}, even[R] = {}, odd[R] = {};
    if constexpr (kVectorBytes == 64) touch(row, n, depth);
    for (int64_t k = 0; k < depth; k += n) {
        prefetch.issue<2>();
        Vec<T> square[n];
        load_columns<T>(row, k, square);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int i = 0; i < n; i += 2) {
                const typename M::Cell* q = queries + (k + i) * kStrip + r;
                even[r] = M::multiply_add(broadcast<T>(q[0]), square[i], even[r]);
                odd[r] = M::multiply_add(broadcast<T>(q[kStrip]), square[i + 1], odd[r]);
            }
        if ((k + n) % kDepthChunk && k + n < depth) continue;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> sum = even[r] + odd[r];
            total[r] = k < kDepthChunk ? sum : total[r] + sum;
            even[r] = odd[r] = Vec<T>{};
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(scores + r * kPitch<T>, total[r]);
}

// Interleaves two rows of bfloat16 numbers to pairs, in whole vectors; returns how many columns that was.
CLEARHEAD_INLINE int64_t zip_rows(const uint16_t* a, const uint16_t* b, int64_t d, void* to) {
    constexpr int n = kVectorBytes / 2;
    int64_t c = 0;
    for (; c + n <= d; c += n) {
        Vec<float> low, high;
        pairs_of<float>(a + c, b + c, low, high);
        std::memcpy(static_cast<char*>(to) + 4 * c, &low, sizeof low);
        std::memcpy(static_cast<char*>(to) + 4 * c + kVectorBytes, &high, sizeof high);
    }
    return c;
}

// Packs value rows first … last as cells, with zeros up to `columns`, a multiple of the lanes. A pair holds two rows;
// an odd last row is paired with zeros.
template <class M> void pack_value_rows(const View& x, Type type, int64_t batch, int64_t head, int64_t first,
                                        int64_t last, int64_t d, int64_t columns, typename M::Cell* to,
                                        Prefetch* prefetch = nullptr) {
    if constexpr (M::per_cell == 1) {
        for (int64_t j = first; j < last; ++j, to += columns) {
            fetch(row_of(x, type, batch, head, j), x.column, type, d, to);
            for (int64_t c = d; c < columns; ++c) to[c] = 0;
        }
    } else {
        for (int64_t j = first; j < last; j += 2, to += columns) {
            const uint16_t* a = reinterpret_cast<const uint16_t*>(row_of(x, type, batch, head, j));
            const uint16_t* b = reinterpret_cast<const uint16_t*>(row_of(x, type, batch, head, j + 1));
            if (prefetch && j % kPackedRows == 0) prefetch->issue<2>();
            uint32_t* pair = reinterpret_cast<uint32_t*>(to);
            int64_t c = 0;
            if (j + 1 < last && x.column == 1) c = zip_rows(a, b, d, to);
            for (; c < d; ++c)
                pair[c] = uint32_t(a[c * x.column]) | (j + 1 < last ? uint32_t(b[c * x.column]) << 16 : 0);
            for (; c < columns; ++c) pair[c] = 0;
        }
    }
}

// Packs `count` rows, at most kStrip, as one strip with zeros for the rest; the bits of `negate` tell which rows change
// their signs. Whole vectors are stored, so kLanes cells after the strip are overwritten.
template <class M> void pack_strip(const char* const* from, int count, const View& x, Type type, int64_t d,
                                   uint32_t negate, typename M::Cell* staging, typename M::Cell* strip) {
    using T = typename M::T;
    constexpr int n = kLanes<T>, squares = (kStrip + n - 1) / n;
    const int64_t depth = depth_of<M>(d), pitch = up_to_multiple(depth, n), last_whole = depth / n * n;
    const T* row[squares * n];
    const bool direct = in_cells<M>(x, type, d);
    T* zeros = staging + kStrip * pitch;
    for (int64_t k = 0; k < depth; ++k) zeros[k] = 0;
    for (int r = 0; r < squares * n; ++r) {
        row[r] = zeros;
        if (r >= count) continue;
        row[r] = direct ? reinterpret_cast<const T*>(from[r]) : staging + r * pitch;
        if (!direct) fetch_cells<M>(from[r], x.column, type, d, staging + r * pitch);
    }
    const uint32_t halves = 0x80008000;  // the sign bits of a pair
    T minus = T(-0.0), signs[squares * n] = {};
    if constexpr (M::per_cell == 2) std::memcpy(&minus, &halves, 4);
    for (int r = 0; r < kStrip; ++r)
        if (negate >> r & 1) std::memcpy(signs + r, &minus, sizeof minus);
    // The last squares first: what they store past the strip's end are first cells of the next depth, stored again
    // later.
    for (int side = squares - 1; side >= 0; --side) {
        const Vec<T> sign = load(signs + side * n);
        for (int64_t k = 0; k < last_whole; k += n) {
            Vec<T> square[n];
            load_columns<T>(row + side * n, k, square);
#pragma GCC unroll 16
            for (int i = 0; i < n; ++i)
                store(strip + (k + i) * kStrip + side * n, (Vec<T>)((IntVec<T>)square[i] ^ (IntVec<T>)sign));
        }
    }
    for (int64_t k = last_whole; k < depth; ++k)
        for (int r = 0; r < kStrip; ++r) {
            T cell[n] = {row[r][k]};
            store(cell, (Vec<T>)((IntVec<T>)load(cell) ^ (IntVec<T>)broadcast<T>(signs[r])));
            std::memcpy(strip + k * kStrip + r, cell, sizeof(T));
        }
}

// The same for rows first … first + count of a matrix.
template <class M> void pack_strip(const View& x, Type type, int64_t batch, int64_t head, int64_t first, int count,
                                   int64_t d, uint32_t negate, typename M::Cell* staging, typename M::Cell* strip) {
    const char* from[kStrip];
    for (int r = 0; r < count; ++r) from[r] = row_of(x, type, batch, head, first + r);
    pack_strip<M>(from, count, x, type, d, negate, staging, strip);
}

template <class M> CLEARHEAD_INLINE int64_t value_columns(const Problem& p) {
    return up_to_multiple(p.d_v, kLanes<typename M::T>);
}

template <class M> int64_t packed_key_bytes(const Job& job) {
    using T = typename M::T;
    return up_to_multiple(job.problem.keys, kPanel<T>) * depth_of<M>(job.problem.d_k) * int64_t(sizeof(T));
}

template <class M> int64_t packed_value_bytes(const Job& job) {
    return depth_of<M>(job.problem.keys) * value_columns<M>(job.problem) * int64_t(sizeof(typename M::T));
}

template <class M> bool values_in_place(const Job& job) {
    const Problem& p = job.problem;
    return M::per_cell == 1 && !(p.v.runs && job.packed) && in_cells<M>(p.v, p.type, p.d_v) &&
           p.d_v == value_columns<M>(p);
}

CLEARHEAD_INLINE int64_t key_blocks(const Problem& p) { return (p.keys + kBlock - 1) / kBlock; }

template <class M> int64_t key_staging_bytes(const Job& job) {
    return staging_cells<M>(depth_of<M>(job.problem.d_k)) * int64_t(sizeof(typename M::Cell));
}

// Packs one block of keys of one head of the wave; heads count over all batches.
template <class M> void pack_keys(const Job& job, int64_t task, void* staging) {
    using T = typename M::T;
    const Problem& p = job.problem;
    const int64_t head = task / key_blocks(p), whole_head = job.first_key_head + head, depth = depth_of<M>(p.d_k);
    const int64_t start = task % key_blocks(p) * kBlock;
    T* panels = reinterpret_cast<T*>(job.packed_keys + head * packed_key_bytes<M>(job));
    pack_panels<M>(p.k, p.type, whole_head / p.kv_heads, whole_head % p.kv_heads, start, min_of(p.keys, start + kBlock),
                   p.keys, p.d_k, static_cast<T*>(staging), panels + start * depth);
}

template <class M> void pack_values(const Job& job, int64_t task, void*) {
    using T = typename M::T;
    const Problem& p = job.problem;
    const int64_t head = task / key_blocks(p), whole_head = job.first_value_head + head;
    const int64_t start = task % key_blocks(p) * kBlock, columns = value_columns<M>(p);
    T* values = reinterpret_cast<T*>(job.packed_values + head * packed_value_bytes<M>(job));
    pack_value_rows<M>(p.v, p.type, whole_head / p.v_heads, whole_head % p.v_heads, start,
                       min_of(p.keys, start + kBlock), p.d_v, columns, values + start / M::per_cell * columns);
}

}  // namespace
}  // namespace clearhead
