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

// Scores are q·k or logits: Scale::log2 turns either into logits in units of log₂.
template <class T> struct SoftmaxState {
    T* maximum;            // the largest score
    double* sum;           // Σ weights
    double* log2_sum;      // Σ weights · log₂ weights, for the entropy
    double* distance_sum;  // Σ weights · distance
    T* diagonal;           // the score of the key at the row's own position, -infinity while it is not seen
    T* output;             // (rows, columns): Σ weights · values
    T* top;                // (rows, k): the largest scores, falling
    int64_t* top_keys;     // (rows, k): their keys

    static SoftmaxState in(Arena& arena, const Job& job, int64_t columns) {
        const int64_t n = job.block_rows;
        SoftmaxState s;
        s.maximum = arena.take<T>(n);
        s.sum = arena.take<double>(n);
        s.log2_sum = arena.take<double>(n);
        s.distance_sum = arena.take<double>(n);
        s.diagonal = arena.take<T>(n);
        s.top = arena.take<T>(n * job.rows.top);
        s.top_keys = arena.take<int64_t>(n * job.rows.top);
        s.output = arena.take<T>((n + kStrip) * columns);
        return s;
    }

    // The state of n rows before any key.
    void clear(const Job& job, int64_t n, int64_t columns) {
        for (int64_t r = 0; r < n; ++r) {
            maximum[r] = diagonal[r] = -kInfinity<T>;
            sum[r] = log2_sum[r] = distance_sum[r] = 0;
        }
        for (int64_t i = 0; i < n * job.rows.top; ++i) top[i] = -kInfinity<T>, top_keys[i] = -1;
        for (int64_t i = 0; i < n * columns; ++i) output[i] = 0;
    }

    // Merges the state of later keys into this one, for n rows: both are rescaled to the larger maximum. `scale_of`
    // says the Scale of each row.
    template <class ScaleOf>
    void merge(const SoftmaxState& later, const Job& job, int64_t n, int64_t columns, ScaleOf scale_of) {
        for (int64_t r = 0; r < n; ++r) {
            if (later.maximum[r] == -kInfinity<T> && later.sum[r] == 0) continue;
            const T largest = later.maximum[r] > maximum[r] ? later.maximum[r] : maximum[r];
            const Scale<T> scale = scale_of(r);
            const Exponent<T> by(largest * scale.logit, scale);
            // 2^shift is what the weights are multiplied by; their log₂ changes by shift.
            const double shift = by.between(maximum[r], largest), later_shift = by.between(later.maximum[r], largest);
            const double a = exp2(shift), b = exp2(later_shift);
            log2_sum[r] = a * (log2_sum[r] + sum[r] * shift) + b * (later.log2_sum[r] + later.sum[r] * later_shift);
            sum[r] = a * sum[r] + b * later.sum[r];
            distance_sum[r] = a * distance_sum[r] + b * later.distance_sum[r];
            if (later.diagonal[r] != -kInfinity<T>) diagonal[r] = later.diagonal[r];
            maximum[r] = largest;
            const Vec<T> factor = broadcast<T>(T(a)), later_factor = broadcast<T>(T(b));
            for (int64_t c = r * columns; c < (r + 1) * columns; c += kLanes<T>)
                store(output + c, fma(load(later.output + c), later_factor, load(output + c) * factor));
            const int64_t k = job.rows.top;
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

    // Moves rows n … n + count of `state` to their new maxima and writes the factors to `rescale` too.
    template <class ScaleOf> void apply(int64_t n, int count, SoftmaxState<T>& state, T* rescale, ScaleOf scale_of) {
        for (int r = 0; r < padded_rows; ++r) shift[r] = 0;
        for (int r = 0; r < count; ++r) {
            const Scale<T> scale = scale_of(r);
            const Exponent<T> by(maximum[r] * scale.logit, scale);
            T& old = state.maximum[n + r];
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
