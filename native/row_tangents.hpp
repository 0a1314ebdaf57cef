// What the row pass computes beside the scores and weights along a direction (core/directions.py): the tangents of the
// logits and their sums, which are rescaled as the weights' own sums are.
//
// Pairs of bfloat16 numbers hold weight·(tangent of logit - mean over the block), since what rounding takes from
// weight·tangent of logit does not cancel where few keys have all the weight. So each block's sum lacks the mean times
// its weights·values, which `lend` takes from the sums before the block is added to them, and `repay` gives back.
#pragma once

#include <optional>

#include "key_blocks.hpp"
#include "score_tangents.hpp"
#include "softmax_state.hpp"

namespace clearhead {
namespace {

// Without a direction it is empty, and each of its functions returns at once.
template <class M> struct RowTangents {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;
    static constexpr bool rounds = M::per_cell == 2;

    const Job& job;
    Rules<T>& rules;
    std::optional<KeyBlocks<M>> blocks;      // of the tangents of keys and values
    std::optional<ScoreTangents<M>> scores;  // their tangents are multiplied by the weights in place
    Cell* queries = nullptr;                 // (strip, depth, kStrip): the tangents of queries
    T* weights = nullptr;                    // (kBlock,): of the present row, where rounding overwrites them
    T* exponents = nullptr;                  // (kBlock,): log₂ weights of the present row, where they are needed
    T* means = nullptr;                      // (kStrip,): of the present block's tangents of logits
    Vec<T>*sums = nullptr, *log2_sums, *distance_sums;  // of each row over the present span, lane by lane

    RowTangents(const Job& j, Rules<T>& all, int64_t batch, int64_t first_head, int64_t rows, Arena& arena)
        : job(j), rules(all) {
        if (!job.moving) return;
        blocks.emplace(KeyBlocks<M>{*job.moving, batch, first_head, rows, arena});
        scores.emplace(ScoreTangents<M>{job, all, arena});
        queries = arena.take<Cell>(up_to_multiple(job.block_rows, kStrip) * blocks->depth + kLanes<T>);
        if (rounds) weights = arena.take<T>(kBlock);
        exponents = arena.take<T>(kBlock);
        means = arena.take<T>(kStrip);
        sums = arena.take<Vec<T>>(job.block_rows);
        log2_sums = arena.take<Vec<T>>(job.block_rows);
        distance_sums = arena.take<Vec<T>>(job.block_rows);
    }

    explicit operator bool() const { return blocks.has_value(); }
    T* tanhs() const { return scores ? scores->tanhs : nullptr; }
    void separate_nonfinite() {
        if (blocks) blocks->separate_nonfinite = true;
    }
    void load_block(int64_t j0, int64_t first, int64_t last) {
        if (blocks) blocks->load(j0, first, last);
    }

    void start_span(int64_t count) {
        if (!blocks) return;
        for (int64_t r = 0; r < count; ++r) sums[r] = log2_sums[r] = distance_sums[r] = Vec<T>{};
        blocks->reset();
    }

    void finish_span(int64_t count, SoftmaxState<T>& state) const {
        for (int64_t r = 0; blocks && r < count; ++r) {
            state.moved_sum[r] = double(sum_of<T>(sums[r]));
            state.moved_log2_sum[r] = double(sum_of<T>(log2_sums[r]));
            state.moved_distance_sum[r] = double(sum_of<T>(distance_sums[r]));
        }
    }

    // The tangents of the logits of strip s, whose queries and scores are given.
    void compute_scores(int s, const Cell* strip_queries, const Cell* keys, const Row* rows, int count, int64_t j0,
                        int from, int to) {
        if (!blocks) return;
        const Cell* moving = job.along.q.data ? queries + s * kStrip * blocks->depth : nullptr;
        scores->compute({strip_queries, keys, moving, blocks->keys}, rows, count, j0, from, to);
    }

    // Row n of the task, row r of its strip: multiplies the tangents of its logits by its weights, and adds to its
    // sums. Where a weight is 0, so is the product.
    void multiply(int64_t n, int r, const Row& row, int64_t j0, int first, int last, const T* row_weights,
                  const Rescaling<T>& rescaling) {
        if (!blocks) return;
        const T* by = rounds ? weights : row_weights;
        T* x = scores->tangents + r * pitch;
        Vec<T> sum = {}, mass = {}, log2_sum = {}, distance_sum = {};
        const bool statistics = job.rows.entropy || job.rows.distance;
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> weight = load(by + j), moved = weight == Vec<T>{} ? Vec<T>{} : weight * load(x + j);
            if constexpr (rounds)
                mass = mass + weight;
            else
                store(x + j, moved);
            sum = sum + moved;
            if (!statistics) continue;
            log2_sum = fma(moved, load(exponents + j), log2_sum);
            if (job.rows.distance) distance_sum = fma(moved, rules.distance(row, j0 + j), distance_sum);
        }
        if constexpr (rounds) {
            const T whole = sum_of<T>(mass);
            means[r] = whole == 0 ? T(0) : sum_of<T>(sum) / whole;
            centre(first, last, by, broadcast<T>(means[r]), x);
        }
        const Vec<T> factor = broadcast<T>(rescaling.factor[r]), shift = broadcast<T>(rescaling.shift[r]);
        log2_sums[n] = fma(fma(sums[n], shift, log2_sums[n]), factor, log2_sum);
        distance_sums[n] = fma(distance_sums[n], factor, distance_sum);
        sums[n] = fma(sums[n], factor, sum);
    }

    static void centre(int first, int last, const T* by, Vec<T> mean, T* x) {
        for (int j = first; j < last; j += 2 * kLanes<T>) {
            const Vec<T> a = load(by + j), b = load(by + j + kLanes<T>), none = {};
            const Vec<T> left = a * (load(x + j) - mean), right = b * (load(x + j + kLanes<T>) - mean);
            M::store_weights(x, j, a == none ? none : left, b == none ? none : right);
        }
    }

    // For rows of a strip: moved = moved·rescale + moved weights · values + weights · tangents of values, over keys
    // low … high of the task's block.
    template <class Task>
    void add_values(const Task& task, int count, int64_t j0, int64_t low, int64_t high, T* moved) {
        if (!blocks) return;
        const int64_t begin = (low - j0) / M::per_cell, columns = task.blocks.columns;  // in cells, as below
        const int64_t cells = (high - j0 + M::per_cell - 1) / M::per_cell - begin;
        with_rows(count, [&]<int R>() {
            const auto add = [&](const T* factors, const KeyBlocks<M>& of, const T* rescale) {
                weighted_sum<M, R, pitch, 1>(reinterpret_cast<const Cell*>(factors), of.values, of.value_pitch(), begin,
                                             cells, rescale, moved, columns, columns);
            };
            add(scores->tangents, task.blocks, task.rescale);
            if (blocks->has_values) add(task.scores, *blocks, nullptr);
        });
        if (!task.blocks.separate_nonfinite) return;
        const int first = int(low - j0), last = int(high - j0);
        task.add_nonfinite(task.blocks.nonfinite, scores->tangents, count, first, last, moved);
        if (blocks->has_values) task.add_nonfinite(blocks->nonfinite, task.scores, count, first, last, moved);
    }

    // For rows of a strip: subtracts from the tangents' sums, or adds to them, the means times the outputs'.
    void lend(int count, const T* output, T* moved) const { add_means(count, output, moved, T(-1)); }
    void repay(int count, const T* output, T* moved) const { add_means(count, output, moved, T(1)); }

    void add_means(int count, const T* output, T* moved, T sign) const {
        const int64_t columns = value_columns<M>(job.problem);
        for (int r = 0; rounds && blocks && r < count; ++r)
            for (int64_t c = r * columns; c < (r + 1) * columns; c += kLanes<T>)
                store(moved + c, fma(broadcast<T>(sign * means[r]), load(output + c), load(moved + c)));
    }
};

}  // namespace
}  // namespace clearhead
