// The weights' tiles: a chunk of keys and a tile of queries at a time, q·k is computed again and the score rules are
// applied. What the scores become, and which sums they are added to, is up to the task (columns.hpp, others.hpp,
// effects.hpp).
#pragma once

#include "rules.hpp"

namespace clearhead {
namespace {

// A tile of the matrix: so many queries and keys from these on.
struct Tile {
    int64_t query;
    int rows;
    int64_t key;
    int columns;
};

// Rows row … row + rows of a tile, at most a strip, and what they see of the block of keys.
struct TilePart {
    int64_t query;  // of the first row
    int row, rows;
    Seen seen;
};

template <class M> struct WeightTiles {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;

    const TileJob& job;
    int64_t head_index;
    Arena& arena;
    const Problem& p = job.problem;
    int64_t batch = head_index / p.heads, head = head_index % p.heads, depth = depth_of<M>(p.d_k);
    Rules<T> rules{p, batch, arena};
    Row* rows = arena.take<Row>(kTile);
    Cell* queries = arena.take<Cell>(kTile / kStrip * strip_cells(depth));
    Cell* keys = arena.take<Cell>(job.key_chunk * depth);  // (blocks of the chunk, kBlock, depth) packed
    Cell* staging = arena.take<Cell>(staging_cells<M>(depth));
    T* tile = arena.take<T>(kTile * pitch);  // (kTile, pitch)

    // Calls work(first, last) for each chunk of the keys that positions let some of the queries start … stop see.
    template <class Work> void each_chunk(int64_t start, int64_t stop, Work work) const {
        int64_t low = kNoLimit, high = 0;
        for (int64_t i = start; i < stop; ++i) {
            const Row row = row_at(p, batch, head, i);
            if (row.low >= row.high) continue;
            low = min_of(low, row.low);
            high = max_of(high, row.high);
        }
        for (int64_t first = low / kBlock * kBlock; first < high; first += job.key_chunk)
            work(first, min_of(p.keys, first + job.key_chunk));
    }

    // Packs keys first … last, a chunk.
    void load_keys(int64_t first, int64_t last) {
        pack_panels<M>(keys_of(p, batch, head * p.kv_heads / p.heads), first, last, staging, keys);
    }

    // For each tile of the queries start … stop that sees some of the loaded keys first … last, unless begin(i, count)
    // is false, and each block of these: finish(part) turns the scores of a strip, -infinity where they are hidden,
    // into the tile's numbers, all other numbers being 0; then add(tile) takes the numbers of the block, but for the
    // keys at its end that positions hide from all.
    template <class Begin, class Finish, class Add>
    void each(int64_t start, int64_t stop, int64_t first, int64_t last, Begin begin, Finish finish, Add add) {
        for (int64_t i = start; i < stop; i += kTile) {
            const int count = int(min_of(kTile, stop - i));
            for (int r = 0; r < count; ++r) rows[r] = row_at(p, batch, head, i + r);
            const Strip all = strip_of(rows, count);
            if (max_of(all.low, first) >= min_of(all.high, last) || !begin(i, count)) continue;
            for (int s = 0; s < count; s += kStrip) {
                const int here = int(min_of(kStrip, count - s));
                pack_strip<M>(queries_of(p, batch, head), i + s, here, rules.negated(rows + s, here),
                              queries + s / kStrip * strip_cells(depth));
            }
            for (int64_t j0 = first; j0 < last; j0 += kBlock) {
                const int64_t end = min_of(j0 + kBlock, last);
                if (max_of(all.low, j0) >= min_of(all.high, end)) continue;
                bool any = false;
                for (int s = 0; s < count; s += kStrip)
                    any |= add_strip(i, s, int(min_of(kStrip, count - s)), j0, end, first, finish);
                if (any) add(Tile{i, count, j0, int(min_of(end, all.high) - j0)});
            }
        }
    }

    // The strip of rows s … of the tile; false where they see none of the block's keys.
    template <class Finish>
    bool add_strip(int64_t i, int s, int here, int64_t j0, int64_t end, int64_t first_key, Finish& finish) {
        const int width = int(up_to_multiple(end - j0, kPanel<T>));
        const Seen seen = rules.see(rows + s, strip_of(rows + s, here), j0, end);
        T* x = tile + s * pitch;
        for (int r = 0; r < here; ++r) {
            clear(x + r * pitch, 0, seen.first);
            clear(x + r * pitch, seen.last, width);
        }
        if (seen.visibility == Visibility::none) return false;
        const Cell* block = keys + (j0 - first_key) * depth;
        with_rows(here, [&]<int R>() {
            score_panels<M, R>(queries + s / kStrip * strip_cells(depth), block, depth, seen.first / kPanel<T>,
                               seen.last / kPanel<T>, x);
        });
        rules.apply(rows + s, here, seen, x);
        for (int r = 0; r < here; ++r) rules.mask_row(rows[s + r], r, seen, x + r * pitch);
        finish(TilePart{i + s, s, here, seen});
        return true;
    }

    static void clear(T* x, int first, int last) {
        for (int j = first; j < last; ++j) x[j] = 0;
    }
};

// Sums of a tile of `count` queries for the keys of one block, (count, kPitch); `line` has room for one row.

// line[j] = Σ_r tile[r][j], first ≤ r < last.
template <class T> void sum_rows(const T* tile, int first, int last, int64_t width, T* line) {
    for (int64_t j = 0; j < width; j += kLanes<T>) {
        Vec<T> sum = {};
        for (int r = first; r < last; ++r) sum = sum + load(tile + r * kPitch<T> + j);
        store(line + j, sum);
    }
}

template <class T> void add_to_keys(const T* tile, int count, int64_t width, T* line, double* sums) {
    for (int s = 0; s < count; s += kStrip) {
        sum_rows(tile, s, int(min_of(count, s + kStrip)), width, line);
        for (int64_t j = 0; j < width; ++j) sums[j] += double(line[j]);
    }
}

// Adds to the sums of (query group, key group); neighbouring queries of one group are added up first. `from` and `to`
// are the labels of the tile's queries and keys.
template <class T> void add_to_groups(const T* tile, int count, int64_t width, const int64_t* from, const int64_t* to,
                                      T* line, double* groups, int64_t key_groups) {
    for (int r = 0; r < count;) {
        int stop = r + 1;
        while (stop < count && from[stop] == from[r]) ++stop;
        if (from[r] >= 0) {
            double* total = groups + from[r] * key_groups;
            sum_rows(tile, r, stop, width, line);
            for (int64_t j = 0; j < width; ++j)
                if (to[j] >= 0) total[to[j]] += double(line[j]);
        }
        r = stop;
    }
}

}  // namespace
}  // namespace clearhead
