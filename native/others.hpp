// Finds each row's key with the largest logit, and runs an online softmax over all its other keys, with their own
// maximum, so that no digits are lost where the largest logit lies far above them (core/effects.py, Others).
#pragma once

#include "weight_tiles.hpp"

namespace clearhead {
namespace {

// Tiles of weights with the terms t_ij = g_i·v_j of their edges.
template <class M> struct EdgeTiles {
    using T = typename M::T;
    using Cell = typename M::Cell;

    const TileJob& job;
    const View& g;
    int64_t head_index;
    Arena& arena;
    const Problem& p = job.problem;
    WeightTiles<M> weights{job, head_index, arena};
    int64_t depth = depth_of<M>(p.d_v);
    Cell* values = arena.take<Cell>(job.key_chunk * depth);  // (blocks of the chunk, kBlock, depth) packed as keys are
    Cell* strips = arena.take<Cell>(kTile / kStrip * strip_cells(depth));  // of the tile
    Cell* staging = arena.take<Cell>(staging_cells<M>(depth));
    T* terms = arena.take<T>(kStrip * kPitch<T>);  // (kStrip, kPitch): of the present part

    // As WeightTiles::each for a chunk of keys, which are loaded here; finish(part) finds the part's terms in `terms`.
    template <class Begin, class Finish, class Add>
    void each(int64_t start, int64_t stop, int64_t first, int64_t last, Begin begin, Finish finish, Add add) {
        const int64_t batch = weights.batch, head = weights.head;
        weights.load_keys(first, last);
        pack_panels<M>(values_of(p, batch, head * p.v_heads / p.heads), first, last, staging, values);
        const auto load_tile = [&](int64_t i, int count) {
            if (!begin(i, count)) return false;
            for (int s = 0; s < count; s += kStrip)
                pack_strip<M>(like_output(p, g, batch, head), i + s, int(min_of(kStrip, count - s)), 0,
                              strips + s / kStrip * strip_cells(depth));
            return true;
        };
        const auto multiply = [&](const TilePart& part) {
            const Cell* panels = values + (part.seen.j0 - first) * depth;
            with_rows(part.rows, [&]<int R>() {
                multiply_panels<M, R>(strips + part.row / kStrip * strip_cells(depth), panels, depth,
                                      part.seen.first / kPanel<T>, part.seen.last / kPanel<T>, terms);
            });
            finish(part);
        };
        weights.each(start, stop, first, last, load_tile, multiply, add);
    }
};

// A row so far. Scores are as in SoftmaxState.
template <class T> struct OtherState {
    int64_t strongest = -1;
    T best = -kInfinity<T>, term = 0;  // the strongest key's score and t
    T maximum = -kInfinity<T>;         // of the others' scores
    double sum = 0, terms = 0;         // Σ weights and Σ weights·t of the others, relative to the maximum

    void raise(T to, double log2_scale) {
        const double factor = maximum == -kInfinity<T> ? 0 : exp2((double(maximum) - double(to)) * log2_scale);
        sum *= factor, terms *= factor, maximum = to;
    }

    // Makes another key the strongest, with a larger score; the one before joins the others, of which it is the first.
    void replace(int64_t key, T score, T its_term, double log2_scale) {
        if (strongest >= 0) {
            raise(best, log2_scale);
            sum += 1, terms += double(term);
        }
        strongest = key, best = score, term = its_term;
    }
};

// The queries of one segment of one head.
template <class M> struct OtherTask {
    using T = typename M::T;
    static constexpr int64_t pitch = kPitch<T>;

    const OtherJob& job;
    int64_t index;
    void* scratch;
    const Problem& p = job.problem;
    Arena arena{static_cast<char*>(scratch)};
    int64_t head_index = index / job.segments, start = index % job.segments * job.segment_rows;
    EdgeTiles<M> edges{job, job.g, head_index, arena};
    Scale<T> scale = edges.weights.rules.scale_of(edges.weights.head);
    OtherState<T>* rows = arena.take<OtherState<T>>(job.segment_rows);

    void run() {
        const int64_t stop = min_of(p.queries, start + job.segment_rows);
        for (int64_t i = start; i < stop; ++i) rows[i - start] = {};
        const auto add_part = [&](const TilePart& part) {
            for (int r = 0; r < part.rows; ++r)
                add(rows[part.query + r - start], part.seen, edges.weights.tile + (part.row + r) * pitch,
                    edges.terms + r * pitch);
        };
        edges.weights.each_chunk(start, stop, [&](int64_t first, int64_t last) {
            edges.each(start, stop, first, last, [](int64_t, int) { return true; }, add_part, [](const Tile&) {});
        });
        for (int64_t i = start; i < stop; ++i) write(rows[i - start], head_index * p.queries + i);
    }

    // Adds a row's scores x of one block, with their terms t. The strongest key's score is overwritten.
    void add(OtherState<T>& row, const Seen& seen, T* x, const T* t) {
        const int first = seen.first, last = seen.last;
        const T hidden = -kInfinity<T>;
        T high = largest_of<T>(largest_lanes(x, first, last));
        if (high > row.best) {
            int j = first;
            while (x[j] != high) ++j;
            row.replace(seen.j0 + j, high, t[j], double(scale.log2));
            x[j] = hidden;
            high = largest_of<T>(largest_lanes(x, first, last));
        }
        if (high == hidden) return;
        if (high > row.maximum) row.raise(high, double(scale.log2));
        const Vec<T> maximum = broadcast<T>(row.maximum), log2_scale = broadcast<T>(scale.log2);
        Vec<T> sum = {}, weighted = {};
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> score = load(x + j), weight = power_of_two<T>((score - maximum) * log2_scale);
            sum = sum + weight;
            weighted = weighted + (score == broadcast<T>(hidden) ? Vec<T>{} : weight * load(t + j));
        }
        row.sum += double(sum_of<T>(sum));
        row.terms += double(sum_of<T>(weighted));
    }

    void write(const OtherState<T>& row, int64_t to) const {
        const double to_logit = double(scale.logit);
        job.strongest[to] = row.strongest;
        job.logit[to] = row.strongest < 0 ? -kInfinity<double> : double(row.best) * to_logit;
        job.term[to] = double(row.term);
        job.largest[to] = row.sum == 0 ? -kInfinity<double> : double(row.maximum) * to_logit;
        job.log_sum[to] = row.sum == 0 ? 0 : log(row.sum);
        job.others[to] = row.sum == 0 ? 0 : row.terms / row.sum;
    }
};

}  // namespace
}  // namespace clearhead
