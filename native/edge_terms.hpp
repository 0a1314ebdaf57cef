// The terms t_ij = g_i·v_j of single edges, beside the tiles of weights.
#pragma once

#include "weight_tiles.hpp"

namespace clearhead {
namespace {

template <class M> struct EdgeTerms {
    using T = typename M::T;
    using Cell = typename M::Cell;

    const Job& job;
    int64_t head_index;
    Arena& arena;
    const Problem& p = job.problem;
    const View& g = job.effects.g;
    int64_t batch = head_index / p.heads, head = head_index % p.heads, depth = depth_of<M>(p.d_v);
    Cell* values = arena.take<Cell>(job.key_chunk * depth);  // (blocks of the chunk, kBlock, depth) packed as keys are
    Cell* strips = arena.take<Cell>(kTile * depth + kLanes<T>);  // (strip, depth, kStrip): of the tile
    Cell* staging = arena.take<Cell>(staging_cells<M>(depth));
    T* terms = arena.take<T>(kStrip * kPitch<T>);  // (kStrip, kPitch): of the present part

    // Packs the values of keys first … last, a chunk.
    void load_values(int64_t first, int64_t last) {
        pack_panels<M>(p.v, p.type, batch, head * p.v_heads / p.heads, first, last, p.keys, p.d_v, staging, values);
    }

    void load_tile(int64_t i, int count) {
        for (int s = 0; s < count; s += kStrip)
            pack_strip<M>(g, p.type, batch, head, i + s, int(min_of(kStrip, count - s)), p.d_v, 0, staging,
                          strips + s * depth);
    }

    // The terms of a part of the tile; `first` is the chunk's first key.
    void multiply(const TilePart& part, int64_t first) {
        const Cell* panels = values + (part.j0 - first) * depth;
        with_rows(part.rows, [&]<int R>() {
            multiply_panels<M, R>(strips + part.row * depth, panels, depth, part.first / kPanel<T>,
                                  part.last / kPanel<T>, terms);
        });
    }
};

}  // namespace
}  // namespace clearhead
