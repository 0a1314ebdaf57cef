// The pass over effects of edges: contributions and cuts, computed a tile at a time and added to every requested sum
// and list. core/effects.py has the formulas.
//
// A task has a segment of the queries of one head and goes through all their keys. It writes results of one number per
// query itself. Its sums over queries are added to the head's, segment by segment in the order of the queries,
// whichever threads compute them, so the number of threads changes no bit. A product with the transposed matrix is cut
// into chunks of keys instead.
#pragma once

#include "columns.hpp"
#include "others.hpp"
#include "strongest.hpp"
#include "threads.hpp"

namespace clearhead {
namespace {

// One segment of the queries of a head, or one chunk of its keys for a product with the transposed matrix. The segments
// of a head come in order, so that a task waits for earlier ones only.
template <class M> struct EffectTask {
    using T = typename M::T;
    static constexpr int64_t pitch = kPitch<T>;

    const EffectJob& job;
    int64_t index;
    void* scratch;
    const Problem& p = job.problem;
    Arena arena{static_cast<char*>(scratch)};
    int64_t pieces = job.transposed ? job.key_chunks : job.segments;
    int64_t head_index = index / pieces, piece = index % pieces;
    int64_t start = job.transposed ? 0 : piece * job.segment_rows;  // queries start … stop
    int64_t stop = job.transposed ? p.queries : min_of(p.queries, start + job.segment_rows);
    EdgeTiles<M> edges{job, job.g, head_index, arena};
    ChunkSums<T> sums{job, head_index, arena};
    int64_t x_columns = up_to_multiple(job.x_columns, kLanes<T>);
    // the right-hand side of `product`, of one block; the product of one tile, (kTile, x_columns)
    Operand<Single<T>> x = Operand<Single<T>>::in(arena, job.product ? kBlock : 0, x_columns);
    T* product = arena.take<T>(job.product ? (kTile + kStrip) * x_columns : 0);
    Picture<T> picture{p, job.height, job.width, arena};
    T* ranks = arena.take<T>(kBlock);
    // what this segment adds to the head's sums; of a picture, the pixel rows from first_pixel on
    int64_t group_count = job.groups ? job.query_groups * job.key_groups : 0;
    double* by_key = arena.take<double>(job.received ? p.keys : 0);
    double* groups = arena.take<double>(group_count);
    int64_t first_pixel = 0;
    int64_t pixel_rows = job.image ? min_of(job.height, int64_t(double(job.segment_rows) / picture.tall.size) + 3) : 0;
    double* means = arena.take<double>(pixel_rows * job.width);
    StrongestList<T> strongest{arena.take<T>(job.strongest_count), arena.take<int64_t>(job.strongest_count),
                               job.strongest_count, 0};

    void run() { job.transposed ? run_chunk() : run_segment(); }

    void run_chunk() {
        const int64_t first = piece * job.key_chunk, last = min_of(p.keys, first + job.key_chunk);
        sums.clear_product(last - first);
        add_chunk(first, last);
        sums.write_product(first, last);
    }

    void run_segment() {
        clear();
        edges.weights.each_chunk(start, stop, [&](int64_t first, int64_t last) { add_chunk(first, last); });
        for (int64_t i = start; job.top && i < stop; ++i) list_of(i).finish();
        if (!job.turns) return;
        const Turn turn(job.turns + head_index, piece);
        add_to_head(piece == 0, piece + 1 == job.segments);
    }

    void add_chunk(int64_t first, int64_t last) {
        const auto finish = [&]<bool CUT, bool LISTS>(const TilePart& part) {
            for (int r = 0; r < part.rows; ++r) add_row<CUT, LISTS>(part, r);
        };
        const bool lists = job.top || job.strongest_count;
        edges.each(
            start, stop, first, last, [&](int64_t i, int count) { return sums.load_rows(i, count); },
            [&](const TilePart& part) {
                if (job.whole)
                    lists ? finish.template operator()<true, true>(part)
                          : finish.template operator()<true, false>(part);
                else
                    lists ? finish.template operator()<false, true>(part)
                          : finish.template operator()<false, false>(part);
            },
            [&](const Tile& tile) { add_tile(tile, first); });
    }

    // Row r of a part: its scores become effects, which enter the lists and the query's sum.
    template <bool CUT, bool LISTS> void add_row(const TilePart& part, int r) {
        const int64_t i = part.query + r, row = head_index * p.queries + i, j0 = part.seen.j0;
        const int first = part.seen.first, last = part.seen.last;
        T* e = edges.weights.tile + (part.row + r) * pitch;  // first scores
        const T* t = edges.terms + r * pitch;
        const Normalizer<T> normalizer(job.states, row, edges.weights.rules.scale_of(edges.weights.head));
        const Vec<T> whole = broadcast<T>(CUT ? static_cast<const T*>(job.whole)[row] : T(0));
        const Vec<T> one = broadcast<T>(1), hidden = broadcast<T>(-kInfinity<T>);
        // Only the strongest key's weight can be near 1.
        const int64_t alone = CUT && job.strongest[row] >= 0 ? job.strongest[row] - j0 : -1;
        Vec<T> sum = {}, high = hidden;
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> score = load(e + j), weight = normalizer.weight(score), term = load(t + j);
            Vec<T> effect = CUT ? weight / (one - weight) * (whole - term) : weight * term;
            if (CUT && alone >= j && alone < j + kLanes<T>)
                effect = cut_of_strongest(row, int(alone - j), weight, term, effect);
            effect = score == hidden ? Vec<T>{} : effect;
            sum = sum + effect;
            store(e + j, effect);
            if constexpr (LISTS) {
                const Vec<T> by = rank_of<T>(effect, score == hidden);
                high = larger(by, high);
                store(ranks + j, by);
            }
        }
        if (job.by_query) job.by_query[row] += double(sum_of<T>(sum));
        if constexpr (LISTS) {
            if (job.top && lanes_above<T>(high, list_of(i).rank[job.top - 1]))
                list_of(i).enter(ranks, e, j0, first, last, high);
            if (strongest.k && lanes_above<T>(high, strongest.below)) enter_strongest(part.seen, i, e);
        }
    }

    // The effects with that of the strongest key, in lane `lane`, by the answer of the others.
    Vec<T> cut_of_strongest(int64_t row, int lane, Vec<T> weight, Vec<T> term, Vec<T> effect) const {
        const Vec<T> others = broadcast<T>(static_cast<const T*>(job.others)[row]);
        return lanes<T>() == broadcast<T>(T(lane)) ? weight * (others - term) : effect;
    }

    FirstList<T> list_of(int64_t i) const {
        const int64_t from = (head_index * p.queries + i) * job.top;
        return {static_cast<T*>(job.top_values) + from, job.top_indices + from, job.top};
    }

    void enter_strongest(const Seen& seen, int64_t i, const T* e) {
        for (int j = seen.first; j < seen.last; j += kLanes<T>) {
            for (uint32_t above = lanes_above<T>(load(ranks + j), strongest.below); above; above &= above - 1) {
                const int at = j + __builtin_ctz(above);
                const int64_t place = i * p.keys + seen.j0 + at;
                strongest.enter(ranks[at], e[at] < 0 ? place | kNegative : place);
            }
        }
    }

    // Adds a tile of effects to every requested sum.
    void add_tile(const Tile& tile, int64_t first) {
        const T* effects = edges.weights.tile;
        sums.add(effects, tile, first, by_key + (job.received ? first : 0), groups);
        if (job.image) picture.add(effects, tile, first_pixel, means);
        if (job.product) add_product(tile);
    }

    // product[i] += Σ_j effects[i][j]·x[j] for the keys of one block.
    void add_product(const Tile& tile) {
        load_operand(x, job, head_index, p.keys, tile.key, tile.key + tile.columns);
        for (int64_t c = 0; c < tile.rows * x.columns; ++c) product[c] = 0;
        for (int s = 0; s < tile.rows; s += kStrip)
            add_products<Single<T>, pitch, 1>(edges.weights.tile + s * pitch, int(min_of(kStrip, tile.rows - s)), x, 0,
                                              tile.columns, product + s * x.columns);
        double* to = job.product + (head_index * p.queries + tile.query) * job.x_columns;
        for (int r = 0; r < tile.rows; ++r, to += job.x_columns)
            for (int64_t c = 0; c < job.x_columns; ++c) to[c] += double(product[r * x.columns + c]);
    }

    void clear() {
        for (int64_t i = start; job.top && i < stop; ++i) list_of(i).clear();
        if (strongest.k) strongest.clear();
        if (job.received) std::memset(by_key, 0, p.keys * sizeof(double));
        std::memset(groups, 0, group_count * sizeof(double));
        if (job.image) first_pixel = picture.tall.first_of(start);
        std::memset(means, 0, pixel_rows * job.width * sizeof(double));
    }

    void add_to_head(bool first, bool last) {
        double* keys = job.received ? job.received + head_index * p.keys : nullptr;
        for (int64_t j = 0; keys && j < p.keys; ++j) keys[j] += by_key[j];
        for (int64_t n = 0; n < group_count; ++n) job.groups[head_index * group_count + n] += groups[n];
        const int64_t pixel = (head_index * job.height + first_pixel) * job.width;
        const int64_t pixels = min_of(pixel_rows, job.height - first_pixel) * job.width;
        for (int64_t n = 0; n < pixels; ++n) job.image[pixel + n] += means[n];
        const int64_t from = head_index * strongest.k;
        StrongestList<T> all{static_cast<T*>(job.strongest_values) + from, job.strongest_indices + from, strongest.k,
                             0};
        if (first) all.clear();
        for (int64_t n = 0; n < strongest.k; ++n) all.enter(strongest.rank[n], strongest.place[n]);
        if (last) all.finish();
    }
};

template <class M> void fill(Kernel& kernel) {
    kernel.columns = pass_of<ColumnTask<M>, ColumnJob>();
    kernel.others = pass_of<OtherTask<M>, OtherJob>();
    kernel.effects = pass_of<EffectTask<M>, EffectJob>();
}

}  // namespace
}  // namespace clearhead
