// The product tilesᵀ·x for a chunk of keys: x (queries, columns) is read a tile of queries at a time.
#pragma once

#include "packing.hpp"

namespace clearhead {
namespace {

template <class T> struct TransposedProduct {
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    int64_t head_index;
    Arena& arena;
    const Problem& p = job.problem;
    const ColumnAnswers& want = job.columns;
    int64_t columns = want.transposed ? up_to_multiple(want.x_columns, kLanes<T>) : 0;
    T* x = arena.take<T>(kTile * columns);                           // (kTile, columns)
    T* product = arena.take<T>((job.key_chunk + kStrip) * columns);  // (chunk, columns)
    T* nonfinite = arena.take<T>(kTile * columns);  // as x: its numbers that are not finite, with separate_nonfinite
    bool separate_nonfinite = false;

    // Computes the product for keys first … last by add_queries(), which goes through all queries; once more where it
    // is not finite.
    template <class AddQueries> void run(int64_t first, int64_t last, AddQueries add_queries) {
        for (const bool again : {false, true}) {
            separate_nonfinite = again;
            for (int64_t i = 0; i < (last - first) * columns; ++i) product[i] = 0;
            add_queries();
            if (!want.transposed || write(first, last)) break;
        }
    }

    // Reads rows i … i + count of x, with zeros up to whole vectors; false when all are zero, as most are in attention
    // rollout.
    bool load_rows(int64_t i, int count) {
        T any = 0;
        for (int r = 0; r < count; ++r) {
            T* to = x + r * columns;
            fetch(
                row_of(want.x, want.x_type, head_index / p.heads, head_index % p.heads * want.x_heads / p.heads, i + r),
                want.x.column, want.x_type, want.x_columns, to);
            for (int64_t c = want.x_columns; c < columns; ++c) to[c] = 0;
            for (int64_t c = 0; c < want.x_columns; ++c) {
                any = to[c] == 0 ? any : T(1);
                if (!separate_nonfinite) continue;
                const bool finite = to[c] - to[c] == 0;
                nonfinite[r * columns + c] = finite ? T(0) : to[c];
                if (!finite) to[c] = 0;
            }
        }
        return any != 0;
    }

    // product[start + j] += Σ_r tile[r][j]·x[r] for the keys of one block.
    void add(const T* tile, int count, int64_t start, int64_t width) {
        for (int64_t j = 0; j < width; j += kStrip) {
            T* out = product + (start + j) * columns;
            with_rows(int(min_of(kStrip, width - j)), [&]<int R>() {
                weighted_sum<Single<T>, R, 1, pitch>(tile + j, x, columns, count, nullptr, out, columns, columns);
            });
        }
        if (!separate_nonfinite) return;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < want.x_columns; ++c) {
                const T value = nonfinite[r * columns + c];
                if (value == 0) continue;
                for (int64_t j = 0; j < width; ++j)
                    if (tile[r * pitch + j] != 0) product[(start + j) * columns + c] += tile[r * pitch + j] * value;
            }
    }

    // Writes the finished product of keys first … last; false where it is not finite.
    bool write(int64_t first, int64_t last) {
        T nonfinite_sum = 0;
        for (int64_t j = first; j < last; ++j) {
            const T* from = product + (j - first) * columns;
            T* to = static_cast<T*>(want.transposed) + (head_index * p.keys + j) * want.x_columns;
            for (int64_t c = 0; c < want.x_columns; ++c) to[c] = from[c], nonfinite_sum += from[c] - from[c];
        }
        return nonfinite_sum == 0;
    }
};

}  // namespace
}  // namespace clearhead
