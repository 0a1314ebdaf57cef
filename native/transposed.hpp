// The product tilesᵀ·x for a chunk of keys: x (queries, columns) is read a tile of queries at a time.
#pragma once

#include "operand.hpp"

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
    Operand<Single<T>> x = Operand<Single<T>>::in(arena, kTile, columns);  // the tile's rows
    T* product = arena.take<T>((job.key_chunk + kStrip) * columns);        // (chunk, columns)

    void clear(int64_t keys) {
        for (int64_t i = 0; i < keys * columns; ++i) product[i] = 0;
    }

    // Reads rows i … i + count of x; false when all are zero, as most are in attention rollout.
    bool load_rows(int64_t i, int count) {
        const int64_t batch = head_index / p.heads, head = head_index % p.heads * want.x_heads / p.heads;
        x.load_rows(want.x, want.x_type, batch, head, i, i + count, want.x_columns);
        bool any = !x.all_finite;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < columns; ++c) any |= x.rows[r * x.pitch + c] != 0;
        return any;
    }

    // product[start + j] += Σ_r tile[r][j]·x[r] for the keys of one block.
    void add(const T* tile, int count, int64_t start, int64_t width) {
        for (int64_t j = 0; j < width; j += kStrip)
            add_products<Single<T>, 1, pitch>(tile + j, int(min_of(kStrip, width - j)), x, 0, count,
                                              product + (start + j) * columns);
    }

    // Writes the finished product of keys first … last.
    void write(int64_t first, int64_t last) const {
        T* to = static_cast<T*>(want.transposed) + (head_index * p.keys + first) * want.x_columns;
        for (int64_t j = 0; j < last - first; ++j)
            std::memcpy(to + j * want.x_columns, product + j * columns, want.x_columns * sizeof(T));
    }
};

}  // namespace
}  // namespace clearhead
