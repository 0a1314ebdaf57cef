// The state of online softmax for a block of rows: what is known of them from the keys read so far, how a further block
// of keys changes it, and how the states of disjoint sets of keys merge.
//
// Weights are taken relative to the largest score so far, whose own weight is 1, as it is rounded to bfloat16 too. When
// a block raises the maximum, all sums so far are multiplied by the weight of the old one.
#pragma once

#include "rules.hpp"
#include "top.hpp"

namespace clearhead {
namespace {

// One row. Scores are q·k or logits: Scale::log2 turns either into logits in units of log₂.
template <class T> struct RowState {
    T maximum = -kInfinity<T>;   // the largest score
    T diagonal = -kInfinity<T>;  // the score of the key at the row's own position, -infinity while it is not seen
    double sum = 0;              // Σ weights
    double log2_sum = 0;         // Σ weights · log₂ weights, for the entropy
    double distance_sum = 0;     // Σ weights · distance

    // Merges a state with other keys into this one; returns what the weights of each are multiplied by.
    std::pair<double, double> merge(const RowState& later, const Scale<T>& scale) {
        const T largest = later.maximum > maximum ? later.maximum : maximum;
        const Exponent<T> by(largest * scale.logit, scale);
        // 2^shift is what the weights are multiplied by; their log₂ changes by shift.
        const double shift = by.between(maximum, largest), later_shift = by.between(later.maximum, largest);
        const double a = exp2(shift), b = exp2(later_shift);
        log2_sum = a * (log2_sum + sum * shift) + b * (later.log2_sum + later.sum * later_shift);
        sum = a * sum + b * later.sum;
        distance_sum = a * distance_sum + b * later.distance_sum;
        if (later.diagonal != -kInfinity<T>) diagonal = later.diagonal;
        maximum = largest;
        return {a, b};
    }
};

template <class T> struct SoftmaxState {
    Arena& arena;
    const RowJob& job;
    int64_t columns, k = job.top;
    RowState<T>* rows = arena.take<RowState<T>>(job.block_rows);
    T* top = arena.take<T>(job.block_rows * k);                      // (rows, k): the largest scores, falling
    int64_t* top_keys = arena.take<int64_t>(job.block_rows * k);     // (rows, k): their keys
    T* output = arena.take<T>((job.block_rows + kStrip) * columns);  // (rows, columns): Σ weights · values

    // The state of n rows before any key; the output only where it is not written first.
    void clear(int64_t n, bool with_output = true) {
        for (int64_t r = 0; r < n; ++r) rows[r] = {};
        for (int64_t i = 0; i < n * k; ++i) top[i] = -kInfinity<T>, top_keys[i] = -1;
        if (with_output) clear_output(0, n);
    }

    void clear_output(int64_t first, int64_t last) {
        for (int64_t i = first * columns; i < last * columns; ++i) output[i] = 0;
    }

    // Merges the state of later keys into this one, for the rows of a task: both are rescaled to the larger maximum.
    template <class Task> void merge(const SoftmaxState& later, const Task& task) {
        for (int64_t r = 0; r < task.count; ++r) {
            if (later.rows[r].maximum == -kInfinity<T> && later.rows[r].sum == 0) continue;
            const auto [a, b] = rows[r].merge(later.rows[r], task.scale_of(r));
            const Vec<T> factor = broadcast<T>(T(a)), later_factor = broadcast<T>(T(b));
            for (int64_t c = r * columns; c < (r + 1) * columns; c += kLanes<T>)
                store(output + c, fma(load(later.output + c), later_factor, load(output + c) * factor));
            for (int64_t i = r * k; i < (r + 1) * k && later.top_keys[i] >= 0; ++i)
                if (later.top[i] > top[r * k + k - 1])
                    insert(top + r * k, top_keys + r * k, k, later.top[i], later.top_keys[i]);
        }
    }
};

// How the sums of one strip's rows change when a block of keys has raised their maxima.
template <class T> struct Rescaling {
    static constexpr int padded_rows = (kStrip + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
    T maximum[padded_rows];  // set by the caller: the maxima that include the block
    T step[padded_rows], origin[padded_rows], unit[padded_rows];  // the block's weights: see Exponent
    T shift[padded_rows];                                         // log₂ of what the sums so far are multiplied by
    T factor[padded_rows];                                        // 2^shift

    // Moves rows n … n + count of a task's state to their new maxima and writes the factors to `rescale` too.
    template <class Task> void apply(const Task& task, int64_t n, int count, SoftmaxState<T>& state, T* rescale) {
        for (int r = 0; r < padded_rows; ++r) shift[r] = 0;
        for (int r = 0; r < count; ++r) {
            const Scale<T> scale = task.scale_of(n + r);
            const Exponent<T> by(maximum[r] * scale.logit, scale);
            T& old = state.rows[n + r].maximum;
            step[r] = by.step, unit[r] = by.unit;
            origin[r] = maximum[r] == -kInfinity<T> ? T(0) : maximum[r] * by.step;
            shift[r] = maximum[r] == old ? T(0) : by.between(old, maximum[r]);
            old = maximum[r];
        }
        for (int r = 0; r < padded_rows; r += kLanes<T>) store(factor + r, power_of_two<T>(load(shift + r)));
        for (int r = 0; r < count; ++r) rescale[r] = factor[r];
    }
};

}  // namespace
}  // namespace clearhead
