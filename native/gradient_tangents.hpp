// What the backward pass computes beside the gradients along a direction: it answers their tangents
// (core/directions.py). Each product x·y of the backward pass becomes moved x·y + x·moved y. The task keeps the
// tangents in the places of the numbers themselves, so that its products are the first term; here is what the second
// term needs.
//
//   moved weight = weight · (tangent of the logit - tangent of the log-sum-exp)
//   dlogit = weight · slope,   moved dlogit = moved weight · slope + weight · moved slope
//   slope  = doutput·value + what a row has of it, by the entropy, the distance and its own key
#pragma once

#include <optional>

#include "operand.hpp"
#include "score_tangents.hpp"

namespace clearhead {
namespace {

// Without a direction it is empty, and each of its functions returns at once.
template <class M> struct GradientTangents {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    Rules<T>& rules;
    int64_t block_keys;
    Arena& arena;
    const Problem& p = job.problem;
    const GradientAnswers& want = job.gradients;
    const Along& along = job.along;
    bool moves_q = along.q.data, moves_k = along.k.data, moves_v = want.v && along.v.data,
         moves_output = want.v && along.output_gradient.data;
    int64_t depth_k = depth_of<M>(p.d_k), depth_v = depth_of<M>(p.d_v);
    std::optional<ScoreTangents<M>> scores = scores_of(along.used);
    // of the block's tangents; null where they are zero, as the next two
    Cell* key_panels = cells(moves_k, block_keys* depth_k);
    Cell* value_panels = cells(moves_v, block_keys* depth_v);
    // (depth, kStrip): of the tangents of queries and of doutput
    Cell* query_strip = cells(moves_q, kStrip* depth_k + kLanes<T>);
    Cell* output_strip = cells(moves_output, kStrip* depth_v + kLanes<T>);
    Operand<M> queries = operand(moves_q, kTile, p.d_k);       // the tile's tangents
    Operand<M> outputs = operand(moves_output, kTile, p.d_v);  // those of its doutput
    Operand<M> keys = operand(moves_k, block_keys, p.d_k);     // the block's
    T* weights = arena.take<T>(scores ? kTile * pitch : 0);    // (kTile, pitch): not moved, as the next
    T* score_grads = arena.take<T>(scores ? kTile * pitch : 0);
    T* products = arena.take<T>(scores ? kStrip * pitch : 0);  // (kStrip, pitch): the tangents of doutput·value

    std::optional<ScoreTangents<M>> scores_of(bool used) {
        if (!used) return std::nullopt;
        return ScoreTangents<M>{job, rules, arena, true};
    }
    Cell* cells(bool moves, int64_t count) { return moves ? arena.take<Cell>(count) : nullptr; }
    Operand<M> operand(bool moves, int64_t rows, int64_t d) {
        return Operand<M>::in(arena, moves ? rows : 0, up_to_multiple(d, kLanes<T>));
    }

    explicit operator bool() const { return scores.has_value(); }
    T* tanhs_or(T* usual) const { return scores ? scores->tanhs : usual; }

    void load_keys(int64_t batch, int64_t head, int64_t j0, int64_t end, Cell* staging) {
        if (!key_panels) return;
        pack_panels<M>(along.k, p.type, batch, head, j0, end, p.keys, p.d_k, staging, key_panels);
        keys.load_rows(along.k, p.type, batch, head, j0, end, p.d_k);
    }

    void load_values(int64_t batch, int64_t head, int64_t j0, int64_t end, Cell* staging) {
        if (value_panels) pack_panels<M>(along.v, p.type, batch, head, j0, end, p.keys, p.d_v, staging, value_panels);
    }

    void load_tile(int64_t batch, int64_t head, int64_t i, int count) {
        if (query_strip) queries.load_rows(along.q, p.type, batch, head, i, i + count, p.d_k);
        if (output_strip) outputs.load_rows(along.output_gradient, p.type, batch, head, i, i + count, p.d_v);
    }

    void clear(int s, int count, int first, int last) {
        for (int r = s; scores && r < s + count; ++r)
            for (int j = first; j < last; ++j) weights[r * pitch + j] = score_grads[r * pitch + j] = 0;
    }

    // The tangents of the logits and of doutput·value of the strip of rows s …, whose own strips and panels are given.
    void multiply(const Row* rows, int64_t i, int s, int count, int64_t j0, int from, int to, const Cell* strip,
                  const Cell* panels, const Cell* doutputs, const Cell* values, Cell* staging) {
        if (!scores) return;
        const int64_t batch = rules.batch, head = rows[s].head;
        if (query_strip)
            pack_strip<M>(along.q, p.type, batch, head, i + s, count, p.d_k, rules.negated(rows + s, count), staging,
                          query_strip);
        scores->compute({strip, panels, query_strip, key_panels}, rows + s, count, j0, from, to);
        if (output_strip)
            pack_strip<M>(along.output_gradient, p.type, batch, head, i + s, count, p.d_v, 0, staging, output_strip);
        if (!output_strip && !value_panels)
            for (int r = 0; r < count; ++r)
                for (int j = from * kPanel<T>; j < to * kPanel<T>; ++j) products[r * pitch + j] = 0;
        with_rows(count, [&]<int R>() {
            if (output_strip) multiply_panels<M, R>(output_strip, values, depth_v, from, to, products);
            if (value_panels) multiply_panels<M, R>(doutputs, value_panels, depth_v, from, to, products, output_strip);
        });
    }

    // One row of the tile, row r of the strip: `a` has scores and becomes moved weights, `d` has doutput·value and
    // becomes moved dlogit; `weights` and `score_grads` receive what does not move. All are 0 where the row may not see
    // the key.
    template <bool VALUES>
    void differentiate(const Row& row, int64_t index, int64_t j0, int s, int r, int first, int last, T* a, T* d) {
        const auto number = [&](const void* x) { return broadcast<T>(x ? static_cast<const T*>(x)[index] : T(0)); };
        const T logsumexp = static_cast<const T*>(want.logsumexp)[index];
        const Scale<T> scale = rules.scale_of(row.head);
        const Normalizer<T> normalizer(logsumexp, scale.log2);
        const Vec<T> hidden = broadcast<T>(-kInfinity<T>), logit_scale = broadcast<T>(scale.logit);
        const Vec<T> minus_lse = broadcast<T>(-logsumexp), middle = number(along.kept);
        const Vec<T> by_row = number(want.rows), moved_by_row = number(along.rows);
        const Vec<T> entropy = number(want.entropy), moved_entropy = number(along.entropy_gradient);
        const Vec<T> distance = number(want.distance), moved_distance = number(along.distance_gradient);
        const Vec<T> diagonal = number(want.diagonal), moved_diagonal = number(along.diagonal_gradient);
        const bool by_entropy = want.entropy || along.entropy_gradient;
        const bool by_distance = want.distance || along.distance_gradient || want.diagonal || along.diagonal_gradient;
        T *still = weights + (s + r) * pitch, *still_grads = score_grads + (s + r) * pitch;
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> score = load(a + j), weight = normalizer.weight(score);
            const Vec<T> away = load(scores->tangents + r * pitch + j) - middle;
            Vec<T> slope = by_row, moved_slope = moved_by_row;
            if constexpr (VALUES) {
                slope = slope + load(d + j);
                moved_slope = moved_slope + load(products + r * pitch + j);
            }
            if (by_entropy) {
                const Vec<T> log_weight = fma(score, logit_scale, minus_lse);
                slope = slope - entropy * log_weight;
                moved_slope = moved_slope - moved_entropy * log_weight - entropy * away;
            }
            if (by_distance) {
                const Vec<T> far = rules.distance(row, j0 + j), none = {};
                slope = slope + distance * far + (far == none ? diagonal : none);
                moved_slope = moved_slope + moved_distance * far + (far == none ? moved_diagonal : none);
            }
            const Vec<T> moved = weight == Vec<T>{} ? weight : weight * away;
            store(still + j, weight);
            store(still_grads + j, score == hidden ? Vec<T>{} : weight * slope);
            store(a + j, score == hidden ? Vec<T>{} : moved);
            store(d + j, score == hidden ? Vec<T>{} : fma(moved, slope, weight * moved_slope));
        }
    }

    // Rounds what does not move of the strip of rows s … to pairs of bfloat16 numbers, as pair_rows does; returns each
    // row's own cells of the gradients by scores, in the place of `products`.
    const T* pair(int s, int count, int first, int last) {
        if constexpr (M::per_cell == 2)
            for (int r = 0; r < count; r += 2) {
                T *still = weights + (s + r) * pitch, *still_grads = score_grads + (s + r) * pitch;
                if (output_strip) pair_rows<M>(still, r + 1 < count, first, last, nullptr);
                pair_rows<M>(still_grads, r + 1 < count, first, last, products + r * pitch);
            }
        return products;
    }

    // Gradients by logits become gradients by scores, through the softcap, for row r of the strip of rows s ….
    void through_softcap(int s, int r, int first, int last, T* d) {
        T* still = score_grads + (s + r) * pitch;
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> tanh = load(scores->tanhs + r * pitch + j), factor = broadcast<T>(T(1)) - tanh * tanh;
            const Vec<T> curvature = load(scores->curvatures + r * pitch + j), grad = load(still + j),
                         moved = load(d + j);
            const Vec<T> none = {};  // where 0·NaN would be NaN
            store(d + j, (moved == none ? none : moved * factor) + (grad == none ? none : grad * curvature));
            store(still + j, grad == none ? none : grad * factor);
        }
    }
};

}  // namespace
}  // namespace clearhead
