// The tangents of a strip's logits along a direction (core/directions.py), where its queries see a block of keys:
//
//   softcap'·scale·(tangent of q · k + q · tangent of k) + tangent of the bias + tangent of the table of spans
//
// Where a query may not see a key, they are anything, NaN included.
#pragma once

#include "rules.hpp"

namespace clearhead {
namespace {

// The two sides of q·k, a strip and the block's panels, and their tangents; null where one is zero.
template <class M> struct MovingScores {
    const typename M::Cell *queries, *keys, *moving_queries, *moving_keys;
};

template <class M> struct ScoreTangents {
    using T = typename M::T;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    Rules<T>& rules;
    Arena& arena;
    bool second = false;
    const Problem& p = job.problem;
    const Along& along = job.along;
    int64_t depth = depth_of<M>(p.d_k);
    T* tangents = arena.take<T>(kStrip * pitch);                          // (kStrip, pitch), as the next two
    T* tanhs = p.softcap != 0 ? arena.take<T>(kStrip * pitch) : nullptr;  // of the softcap, from Rules::apply
    // the tangent of the softcap's derivative; null unless asked for by `second`
    T* curvatures = p.softcap != 0 && second ? arena.take<T>(kStrip * pitch) : nullptr;
    T* line = arena.take<T>(kBlock);

    // For the panels from … to of the block that starts at j0, after Rules::apply.
    void compute(const MovingScores<M>& x, const Row* rows, int count, int64_t j0, int from, int to) {
        const int first = from * kPanel<T>, last = to * kPanel<T>;
        with_rows(count, [&]<int R>() {
            if (x.moving_queries) multiply_panels<M, R>(x.moving_queries, x.keys, depth, from, to, tangents);
            if (x.moving_keys)
                multiply_panels<M, R>(x.queries, x.moving_keys, depth, from, to, tangents, x.moving_queries);
        });
        for (int r = 0; r < count; ++r) {
            T* t = tangents + r * pitch;
            if (x.moving_queries || x.moving_keys)
                scale_row(rows[r], r, first, last, t);
            else
                clear(r, first, last, t);
            if (along.bias.data) add_bias(rows[r], j0, first, last, t);
            if (along.span_table.data) add_spans(rows[r], j0, first, last, t);
        }
    }

    void scale_row(const Row& row, int r, int first, int last, T* t) const {
        const Scale<T> scale = rules.scale_of(row.head);
        const Vec<T> factor = broadcast<T>(scale.negate ? -scale.scale : scale.scale);  // queries were packed negated
        for (int j = first; j < last; j += kLanes<T>) {
            Vec<T> x = load(t + j) * factor;
            if (tanhs) {
                const Vec<T> tanh = load(tanhs + r * pitch + j);
                x = x * (broadcast<T>(T(1)) - tanh * tanh);
                if (curvatures) store(curvatures + r * pitch + j, broadcast<T>(T(-2 / p.softcap)) * tanh * x);
            }
            store(t + j, x);
        }
    }

    void clear(int r, int first, int last, T* t) const {
        for (int j = first; j < last; ++j) t[j] = 0;
        for (int j = first; curvatures && j < last; ++j) curvatures[r * pitch + j] = 0;
    }

    void add_bias(const Row& row, int64_t j0, int first, int last, T* t) {
        const int64_t stop = min_of(last, p.keys - j0);
        const char* from = row_of(along.bias, along.bias_type, rules.batch, row.head, row.query);
        fetch(from + (j0 + first) * along.bias.column * bytes_of(along.bias_type), along.bias.column, along.bias_type,
              stop - first, line + first);
        for (int64_t j = first; j < stop; ++j) t[j] += line[j];
    }

    void add_spans(const Row& row, int64_t j0, int first, int last, T* t) {
        const int64_t label = query_label(p, rules.batch, row.query);
        if (label < 0) return;
        const T* numbers = span_row<T>(along.span_table, rules.batch, row.head, label);
        rules.spans.read_labels(j0);
        rules.spans.look_up(numbers, first, last, T(1), [=](int j, Vec<T> more) { store(t + j, load(t + j) + more); });
    }
};

}  // namespace
}  // namespace clearhead
