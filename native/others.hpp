// Each row's key of the largest logit, and what all its other keys answer: their own online softmax, with their own
// maximum, so that nothing is lost where the largest logit lies far above them (core/effects.py, Others).
#pragma once

#include "weight_tiles.hpp"

namespace clearhead {
namespace {

// The terms t_ij = g_i·v_j of single edges, beside the tiles of weights.
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

template <class M> struct OtherTask {
    using T = typename M::T;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    int64_t head_index;
    void* scratch;
    const Problem& p = job.problem;
    Arena arena{static_cast<char*>(scratch)};
    WeightTiles<M> tiles{job, head_index, arena};
    EdgeTerms<M> terms{job, head_index, arena};
    OtherState<T>* rows = arena.take<OtherState<T>>(job.segment_rows);

    void run(int64_t start, int64_t stop) {
        for (int64_t i = start; i < stop; ++i) rows[i - start] = {};
        const Strip seen = tiles.seen_by(start, stop);
        for (int64_t first = seen.low / kBlock * kBlock; first < seen.high; first += job.key_chunk) {
            const int64_t last = min_of(p.keys, first + job.key_chunk);
            tiles.load_keys(first, last);
            terms.load_values(first, last);
            tiles.each(
                start, stop, first, last, [&](int64_t i, int count) { return terms.load_tile(i, count), true; },
                [&](const TilePart& part) {
                    terms.multiply(part, first);
                    for (int r = 0; r < part.rows; ++r)
                        add(rows[part.query + r - start], part, tiles.tile + (part.row + r) * pitch,
                            terms.terms + r * pitch);
                },
                [](int64_t, int, int64_t, int64_t) {});
        }
        for (int64_t i = start; i < stop; ++i) write(rows[i - start], head_index * p.queries + i);
    }

    // Adds a row's scores x of one block, with their terms t. The strongest key's score is overwritten.
    void add(OtherState<T>& row, const TilePart& part, T* x, const T* t) {
        const T log2_scale = tiles.rules.scale_of(tiles.head).log2, hidden = -kInfinity<T>;
        T high = largest_of<T>(largest_lanes(x, part.first, part.last));
        if (high > row.best) {
            int j = part.first;
            while (x[j] != high) ++j;
            row.replace(part.j0 + j, high, t[j], double(log2_scale));
            x[j] = hidden;
            high = largest_of<T>(largest_lanes(x, part.first, part.last));
        }
        if (high == hidden) return;
        if (high > row.maximum) row.raise(high, double(log2_scale));
        const Vec<T> maximum = broadcast<T>(row.maximum), scale = broadcast<T>(log2_scale);
        Vec<T> sum = {}, weighted = {};
        for (int j = part.first; j < part.last; j += kLanes<T>) {
            const Vec<T> score = load(x + j), weight = power_of_two<T>((score - maximum) * scale);
            sum = sum + weight;
            weighted = weighted + (score == broadcast<T>(hidden) ? Vec<T>{} : weight * load(t + j));
        }
        row.sum += double(sum_of<T>(sum));
        row.terms += double(sum_of<T>(weighted));
    }

    void write(const OtherState<T>& row, int64_t index) const {
        const OtherAnswers& want = job.others;
        const double to_logit = double(tiles.rules.scale_of(tiles.head).logit);
        want.strongest[index] = row.strongest;
        want.logit[index] = row.strongest < 0 ? -kInfinity<double> : double(row.best) * to_logit;
        want.term[index] = double(row.term);
        want.largest[index] = row.sum == 0 ? -kInfinity<double> : double(row.maximum) * to_logit;
        want.log_sum[index] = row.sum == 0 ? 0 : log(row.sum);
        want.others[index] = row.sum == 0 ? 0 : row.terms / row.sum;
    }
};

template <class M> int64_t other_scratch_bytes(const Job& job) { return OtherTask<M>{job, 0, nullptr}.arena.bytes; }

// The queries of one segment of one head.
template <class M> void others(const Job& job, int64_t index, void* scratch) {
    const int64_t start = index % job.segments * job.segment_rows;
    OtherTask<M>{job, index / job.segments, scratch}.run(start, min_of(job.problem.queries, start + job.segment_rows));
}

}  // namespace
}  // namespace clearhead
