// Reads arrays of any type and strides, and packs them into the forms that the products in tiles.hpp read.
//
//   keys     (panel, depth, kPanel)     a panel is kPanel keys side by side; keys past the end are zeros
//   queries  (strip, depth / kDepthChunk, kStrip, kStripRow)  a strip is kStrip queries, a piece of each at a time
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

// The pass whose tasks are Tasks: of a job, by their number, in work memory.
template <class Task, class J> Pass<J> pass_of() {
    return {[](const J& job) { return Task{job, 0, nullptr}.arena.bytes; },
            [](const J& job, int64_t index, void* scratch) { Task{job, index, scratch}.run(); }};
}

constexpr int kPackedRows = 8;  // value rows that are packed between two prefetches

CLEARHEAD_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
CLEARHEAD_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
CLEARHEAD_INLINE int64_t up_to_multiple(int64_t x, int64_t of) { return (x + of - 1) / of * of; }

CLEARHEAD_INLINE const char* row_of(const View& x, Type type, int64_t batch, int64_t head, int64_t row) {
    const int64_t place = x.runs ? x.runs[row / kRun] + row % kRun * x.row : batch * x.batch + row * x.row;
    return static_cast<const char*>(x.data) + (place + head * x.head) * bytes_of(type);
}

// One head of an array: `rows` rows of d numbers.
struct Matrix {
    const View& x;
    Type type;
    int64_t batch, head, rows, d;

    CLEARHEAD_INLINE_MEMBER const char* row(int64_t i) const { return row_of(x, type, batch, head, i); }
};

CLEARHEAD_INLINE Matrix keys_of(const Problem& p, int64_t batch, int64_t kv_head) {
    return {p.k, p.type, batch, kv_head, p.keys, p.d_k};
}
CLEARHEAD_INLINE Matrix values_of(const Problem& p, int64_t batch, int64_t v_head) {
    return {p.v, p.type, batch, v_head, p.keys, p.d_v};
}
CLEARHEAD_INLINE Matrix queries_of(const Problem& p, int64_t batch, int64_t head) {
    return {p.q, p.type, batch, head, p.queries, p.d_k};
}
// One number per value and query: the derivatives by the output, or g.
CLEARHEAD_INLINE Matrix like_output(const Problem& p, const View& x, int64_t batch, int64_t head) {
    return {x, p.type, batch, head, p.queries, p.d_v};
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
template <class M> CLEARHEAD_INLINE bool in_cells(const Matrix& m) {
    const bool same = M::per_cell == 2 ? m.type == Type::bf16 : bytes_of(m.type) == int64_t(sizeof(typename M::T));
    return same && m.x.column == 1 && m.d % M::per_cell == 0;
}

// Cells that the functions below need for rows on their way into a panel.
template <class M> CLEARHEAD_INLINE int64_t staging_cells(int64_t depth) {
    return kPanel<typename M::T> * up_to_multiple(depth, kLanes<typename M::T>);
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

// Packs `count` rows side by side as a panel, with zeros for the rows that it lacks. `like` says of which kind they
// are.
template <class M> void pack_panel(const char* const* from, int count, const Matrix& like, typename M::Cell* staging,
                                   typename M::Cell* to, Prefetch* prefetch) {
    using T = typename M::T;
    constexpr int n = kLanes<T>, wide = kPanel<T>;
    constexpr int some = kColumns<T>;
    const int64_t depth = depth_of<M>(like.d), pitch = up_to_multiple(depth, n), last_whole = depth / some * some;
    const T* row[wide];
    const bool direct = in_cells<M>(like);
    T* zeros = staging + count * pitch;
    for (int64_t k = 0; count < wide && k < depth; ++k) zeros[k] = 0;
    for (int r = 0; r < wide; ++r) {
        row[r] = zeros;
        if (r >= count) continue;
        row[r] = direct ? reinterpret_cast<const T*>(from[r]) : staging + r * pitch;
        if (!direct) fetch_cells<M>(from[r], like.x.column, like.type, like.d, staging + r * pitch);
    }
    for (int side = 0; side < wide; side += n)
        for (int64_t k = 0; k < last_whole; k += some) {
            Vec<T> columns[some];
            load_columns<T>(row + side, k, columns);
            if (prefetch && k % kDepthChunk == 0) prefetch->issue<2>();
#pragma GCC unroll 8
            for (int i = 0; i < some; ++i) store(to + (k + i) * wide + side, columns[i]);
        }
    for (int64_t k = last_whole; k < depth; ++k)
        for (int r = 0; r < wide; ++r) std::memcpy(to + k * wide + r, row[r] + k, sizeof(T));
}

// Packs rows first … last as panels, from the first of a panel on.
template <class M> void pack_panels(const Matrix& from, int64_t first, int64_t last, typename M::Cell* staging,
                                    typename M::Cell* panels, Prefetch* prefetch = nullptr) {
    constexpr int wide = kPanel<typename M::T>;
    for (int64_t j = first; j < last; j += wide, panels += wide * depth_of<M>(from.d)) {
        const char* rows[wide];
        const int count = int(min_of(wide, from.rows - j));
        for (int r = 0; r < count; ++r) rows[r] = from.row(j + r);
        pack_panel<M>(rows, count, from, staging, panels, prefetch);
    }
}

// The cells of a strip.
CLEARHEAD_INLINE int64_t strip_cells(int64_t depth) { return in_strip(up_to_multiple(depth, kDepthChunk)); }

template <class M>
CLEARHEAD_INLINE void pack_row(const char* row, const Matrix& like, bool negate, int r, typename M::Cell* strip) {
    using Cell = typename M::Cell;
    const int64_t depth = depth_of<M>(like.d), step = like.x.column, bytes = M::per_cell * step * bytes_of(like.type);
    Cell* to = strip + r * kStripRow;
    int64_t k = 0;
    if (in_cells<M>(like))
        for (; k + kDepthChunk <= depth; k += kDepthChunk, to += kStripChunk)
            for (int i = 0; i < kDepthChunk; i += kLanes<Cell>)
                store(to + i, load(reinterpret_cast<const Cell*>(row) + k + i));
    for (; k < depth; k += kDepthChunk, to += kStripChunk)
        fetch_cells<M>(row + k * bytes, step, like.type, min_of(kDepthChunk * M::per_cell, like.d - k * M::per_cell),
                       to);
    constexpr int size = sizeof(Cell) / M::per_cell;
    for (k = 0, to = strip + r * kStripRow; negate && k < depth; k += kDepthChunk, to += kStripChunk)
        for (int i = size - 1; i < int(kDepthChunk * sizeof(Cell)); i += size)  // both numbers of a pair
            reinterpret_cast<uint8_t*>(to)[i] ^= 0x80;
}

// Packs `count` rows, at most kStrip, as a strip, with zeros for the rows that it lacks. `like` says of which kind they
// are, and the bits of `negate` which of them change their signs.
template <class M>
void pack_strip(const char* const* from, int count, const Matrix& like, uint32_t negate, typename M::Cell* strip) {
    for (int r = 0; r < count; ++r) pack_row<M>(from[r], like, negate >> r & 1, r, strip);
    for (int64_t k = 0; count < kStrip && k < depth_of<M>(like.d); k += kDepthChunk)
        std::memset(strip + in_strip(k) + count * kStripRow, 0, (kStrip - count) * kStripRow * sizeof *strip);
}

// Packs rows first … first + count.
template <class M>
void pack_strip(const Matrix& from, int64_t first, int count, uint32_t negate, typename M::Cell* strip) {
    const char* rows[kStrip];
    for (int r = 0; r < count; ++r) rows[r] = from.row(first + r);
    pack_strip<M>(rows, count, from, negate, strip);
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
    constexpr int some = kColumns<T>;
    static_assert(kDepthChunk % some == 0 && some % 2 == 0);
    Vec<T> total[R] = {};
    if constexpr (kVectorBytes == 64) touch(row, kLanes<T>, depth);
    for (int64_t chunk = 0; chunk < depth; chunk += kDepthChunk) {
        prefetch.issue<2>();
        Vec<T> even[R] = {}, odd[R] = {};
        const auto add = [&](int64_t k) __attribute__((always_inline)) {
            Vec<T> columns[some];
            load_columns<T>(row, chunk + k, columns);
#pragma GCC unroll 4
            for (int i = 0; i < some; i += 2)
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const typename M::Cell* q = queries + in_strip(chunk) + k + r * kStripRow + i;
                    even[r] = M::multiply_add(broadcast<T>(q[0]), columns[i], even[r]);
                    odd[r] = M::multiply_add(broadcast<T>(q[1]), columns[i + 1], odd[r]);
                }
        };
        if (depth - chunk >= kDepthChunk)
#pragma GCC unroll 8
            for (int k = 0; k < kDepthChunk; k += some) add(k);
        else
            for (int64_t k = 0; k < depth - chunk; k += some) add(k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> sum = even[r] + odd[r];
            total[r] = chunk ? total[r] + sum : sum;
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
template <class M> void pack_value_rows(const Matrix& from, int64_t first, int64_t last, int64_t columns,
                                        typename M::Cell* to, Prefetch* prefetch = nullptr) {
    const int64_t d = from.d, step = from.x.column;
    if constexpr (M::per_cell == 1) {
        for (int64_t j = first; j < last; ++j, to += columns) {
            fetch(from.row(j), step, from.type, d, to);
            for (int64_t c = d; c < columns; ++c) to[c] = 0;
        }
    } else {
        for (int64_t j = first; j < last; j += 2, to += columns) {
            const uint16_t* a = reinterpret_cast<const uint16_t*>(from.row(j));
            const uint16_t* b = reinterpret_cast<const uint16_t*>(from.row(j + 1));
            if (prefetch && j % kPackedRows == 0) prefetch->issue<2>();
            uint32_t* pair = reinterpret_cast<uint32_t*>(to);
            int64_t c = 0;
            if (j + 1 < last && step == 1) c = zip_rows(a, b, d, to);
            for (; c < d; ++c) pair[c] = uint32_t(a[c * step]) | (j + 1 < last ? uint32_t(b[c * step]) << 16 : 0);
            for (; c < columns; ++c) pair[c] = 0;
        }
    }
}

template <class M> CLEARHEAD_INLINE int64_t value_columns(const Problem& p) {
    return up_to_multiple(p.d_v, kLanes<typename M::T>);
}

template <class M> int64_t packed_key_bytes(const Problem& p) {
    using T = typename M::T;
    return up_to_multiple(p.keys, kPanel<T>) * depth_of<M>(p.d_k) * int64_t(sizeof(T));
}

template <class M> int64_t packed_value_bytes(const Problem& p) {
    return depth_of<M>(p.keys) * value_columns<M>(p) * int64_t(sizeof(typename M::T));
}

template <class M> bool values_in_place(const RowJob& job) {
    const Problem& p = job.problem;
    return M::per_cell == 1 && !(p.v.runs && job.packed) && in_cells<M>(values_of(p, 0, 0)) &&
           p.d_v == value_columns<M>(p);
}

CLEARHEAD_INLINE int64_t key_blocks(const Problem& p) { return (p.keys + kBlock - 1) / kBlock; }

template <class M> int64_t key_staging_bytes(const RowJob& job) {
    return staging_cells<M>(depth_of<M>(job.problem.d_k)) * int64_t(sizeof(typename M::Cell));
}

// Packs one block of keys of one head of the wave, or of values; heads count over all batches.
template <class M> void pack_keys(const RowJob& job, int64_t task, void* staging) {
    using Cell = typename M::Cell;
    const Problem& p = job.problem;
    const int64_t head = task / key_blocks(p), start = task % key_blocks(p) * kBlock, all = job.first_key_head + head;
    Cell* panels = reinterpret_cast<Cell*>(job.packed_keys + head * packed_key_bytes<M>(p));
    pack_panels<M>(keys_of(p, all / p.kv_heads, all % p.kv_heads), start, min_of(p.keys, start + kBlock),
                   static_cast<Cell*>(staging), panels + start * depth_of<M>(p.d_k));
}

template <class M> void pack_values(const RowJob& job, int64_t task, void*) {
    const Problem& p = job.problem;
    const int64_t head = task / key_blocks(p), start = task % key_blocks(p) * kBlock, all = job.first_value_head + head;
    const int64_t columns = value_columns<M>(p);
    auto* values = reinterpret_cast<typename M::Cell*>(job.packed_values + head * packed_value_bytes<M>(p));
    pack_value_rows<M>(values_of(p, all / p.v_heads, all % p.v_heads), start, min_of(p.keys, start + kBlock), columns,
                       values + start / M::per_cell * columns);
}

}  // namespace
}  // namespace clearhead
