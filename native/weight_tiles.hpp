// The weights' tiles: a chunk of keys and a tile of queries at a time, q·k is computed again and the score rules are
// applied. What the scores become, and which sums they are added to, is up to the task (columns.hpp, others.hpp,
// effects.hpp).
#pragma once

#include "packing.hpp"
#include "rules.hpp"

namespace clearhead {
namespace {

// Some rows of a tile, and the columns of a block of keys that have scores.
struct TilePart {
    int64_t query;  // of the first row
    int row, rows;  // rows row … row + rows of the tile, at most a strip
    int64_t j0;     // the block
    int first, last;
};

template <class M> struct WeightTiles {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    int64_t head_index;
    Arena& arena;
    const Problem& p = job.problem;
    int64_t batch = head_index / p.heads, head = head_index % p.heads, depth = depth_of<M>(p.d_k);
    int64_t query_cells = kTile * depth + kLanes<T>, key_cells = job.key_chunk * depth;
    Rules<T> rules{p, batch, arena};
    Row* rows = arena.take<Row>(kTile);
    Cell* queries = arena.take<Cell>(query_cells);  // (strip, depth, kStrip)
    Cell* keys = arena.take<Cell>(key_cells);       // (blocks of the chunk, kBlock, depth) packed
    Cell* staging = arena.take<Cell>(staging_cells<M>(depth));
    T* tile = arena.take<T>(kTile * pitch);  // (kTile, pitch)

    // The keys that positions let some of the queries start … stop see.
    Strip seen_by(int64_t start, int64_t stop) const {
        Strip all{0, kNoLimit, 0};
        for (int64_t i = start; i < stop; ++i) {
            const Row row = row_at(p, batch, head, i);
            if (row.low >= row.high) continue;
            all.low = min_of(all.low, row.low);
            all.high = max_of(all.high, row.high);
        }
        return all;
    }

    // Packs keys first … last, a chunk.
    void load_keys(int64_t first, int64_t last) {
        pack_panels<M>(p.k, p.type, batch, head * p.kv_heads / p.heads, first, last, p.keys, p.d_k, staging, keys);
    }

    // For each tile of the queries start … stop that sees some of the loaded keys first … last, unless begin(i, count)
    // is false, and each block of these: finish(part) turns the scores of a strip, -infinity where they are hidden,
    // into the tile's numbers, all other numbers being 0; then add(i, count, j0, end) takes the tile's keys j0 … end,
    // after which positions hide all of the block.
    template <class Begin, class Finish, class Add>
    void each(int64_t start, int64_t stop, int64_t first, int64_t last, Begin begin, Finish finish, Add add) {
        for (int64_t i = start; i < stop; i += kTile) {
            const int count = int(min_of(kTile, stop - i));
            for (int r = 0; r < count; ++r) rows[r] = row_at(p, batch, head, i + r);
            const Strip all = strip_of(rows, count);
            if (max_of(all.low, first) >= min_of(all.high, last) || !begin(i, count)) continue;
            for (int s = 0; s < count; s += kStrip) {
                const int here = int(min_of(kStrip, count - s));
                pack_strip<M>(p.q, p.type, batch, head, i + s, here, p.d_k, rules.negated(rows + s, here), staging,
                              queries + s * depth);
            }
            for (int64_t j0 = first; j0 < last; j0 += kBlock) {
                const int64_t end = min_of(j0 + kBlock, last);
                if (max_of(all.low, j0) >= min_of(all.high, end)) continue;
                bool any = false;
                for (int s = 0; s < count; s += kStrip)
                    any |= add_strip(i, s, int(min_of(kStrip, count - s)), j0, end, first, finish);
                if (any) add(i, count, j0, min_of(end, all.high));
            }
        }
    }

    // The strip of rows s … of the tile; false where they see none of the block's keys.
    template <class Finish>
    bool add_strip(int64_t i, int s, int here, int64_t j0, int64_t end, int64_t first_key, Finish& finish) {
        const int width = int(up_to_multiple(end - j0, kPanel<T>));
        const Strip strip = strip_of(rows + s, here);
        T* x = tile + s * pitch;
        const int64_t low = max_of(strip.low, j0), high = min_of(strip.high, end);
        const Visibility visibility =
            low < high ? rules.content_visibility(rows + s, here, j0, low, high) : Visibility::none;
        if (visibility == Visibility::none) {
            for (int r = 0; r < here; ++r) clear(x + r * pitch, 0, width);
            return false;
        }
        const int from = int(low - j0) / kPanel<T>, to = int(high - j0 + kPanel<T> - 1) / kPanel<T>;
        const int first = from * kPanel<T>, last = to * kPanel<T>;
        const int64_t key = (j0 - first_key) * depth;
        with_rows(here, [&]<int R>() { score_panels<M, R>(queries + s * depth, keys + key, depth, from, to, x); });
        rules.apply(rows + s, here, j0, first, last, x);
        for (int r = 0; r < here; ++r) {
            rules.mask_row(rows[s + r], r, visibility, j0, first, last, x + r * pitch);
            clear(x + r * pitch, 0, first);
            clear(x + r * pitch, last, width);
        }
        finish(TilePart{i + s, s, here, j0, first, last});
        return true;
    }

    static void clear(T* x, int first, int last) {
        for (int j = first; j < last; ++j) x[j] = 0;
    }
};

}  // namespace
}  // namespace clearhead
