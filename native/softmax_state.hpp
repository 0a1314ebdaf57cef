// The state of online softmax for a block of rows: what is known of them from the keys read so far, how a further block
// of keys changes it, and how the states of disjoint sets of keys merge.
//
// Weights are taken relative to the largest score so far: near 0, to its rounded product with the scale, which takes one
// multiply-add, and else as `Exponent` says. When a block raises the maximum, all sums so far are multiplied by the
// weight of the old one.
#pragma once

#include "rules.hpp"
#include "top.hpp"

namespace clearhead {
namespace {

// Scores are q·k or logits: Scale::log2 turns either into logits in units of log₂.
template <class T> struct SoftmaxState {
    T* maximum;            // the largest score
    T* reference;          // maximum · log2_scale: near 0, a weight is 2^(score·log2_scale - reference)
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
        s.reference = arena.take<T>(n);
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
            maximum[r] = reference[r] = diagonal[r] = -kInfinity<T>;
            sum[r] = log2_sum[r] = distance_sum[r] = 0;
        }
        for (int64_t i = 0; i < n * job.rows.top; ++i) top[i] = -kInfinity<T>, top_keys[i] = -1;
        for (int64_t i = 0; i < n * columns; ++i) output[i] = 0;
    }

    // Merges the state of later keys into this one, for n rows: both are rescaled to the larger maximum. `scale_of` says
    // the Scale of each row.
    template <class ScaleOf>
    void merge(const SoftmaxState& later, const Job& job, int64_t n, int64_t columns, ScaleOf scale_of) {
        for (int64_t r = 0; r < n; ++r) {
            if (later.reference[r] == -kInfinity<T> && later.sum[r] == 0) continue;
            const bool raises = later.maximum[r] > maximum[r];
            const T new_maximum = raises ? later.maximum[r] : maximum[r];
            const T new_reference = raises ? later.reference[r] : reference[r];
            // 2^shift is what the weights are multiplied by; their log₂ changes by shift.
            const auto shift_of = [&](const SoftmaxState& part) {
                if (part.reference[r] == -kInfinity<T>) return 0.0;
                if (!is_far(new_reference)) return double(part.reference[r]) - double(new_reference);
                const Scale<T> scale = scale_of(r);
                const Exponent<T> by(new_maximum, scale.logit, scale.log2);
                return double(part.maximum[r] * by.step - by.origin) * double(by.unit);
            };
            const double shift = shift_of(*this), later_shift = shift_of(later);
            const double a = reference[r] == -kInfinity<T> ? 0 : exp2_of(shift);
            const double b = later_shift == 0 ? 1 : exp2_of(later_shift);
            log2_sum[r] = a * (log2_sum[r] + sum[r] * shift) + b * (later.log2_sum[r] + later.sum[r] * later_shift);
            sum[r] = a * sum[r] + b * later.sum[r];
            distance_sum[r] = a * distance_sum[r] + b * later.distance_sum[r];
            if (later.diagonal[r] != -kInfinity<T>) diagonal[r] = later.diagonal[r];
            maximum[r] = new_maximum;
            reference[r] = new_reference;
            add_scaled(output + r * columns, a, later.output + r * columns, b, columns);
            merge_top(later, r, job.rows.top);
        }
    }

    // Is a reference's own rounding too large for the weights? So far from 0 are the scores of some models, and of a row
    // that a mask of -10¹⁰ forbids as a whole.
    static bool is_far(T reference) {
        const T size = reference < 0 ? -reference : reference;
        return size > kNear<T> && size < kInfinity<T>;
    }

    // out = out·a + add·b.
    static void add_scaled(T* out, double a, const T* add, double b, int64_t columns) {
        const Vec<T> out_factor = broadcast<T>(T(a)), add_factor = broadcast<T>(T(b));
        for (int64_t c = 0; c < columns; c += kLanes<T>)
            store(out + c, fma(load(add + c), add_factor, load(out + c) * out_factor));
    }

    void merge_top(const SoftmaxState& later, int64_t r, int64_t k) {
        for (int64_t i = r * k; i < (r + 1) * k && later.top_keys[i] >= 0; ++i)
            if (later.top[i] > top[r * k + k - 1])
                insert(top + r * k, top_keys + r * k, k, later.top[i], later.top_keys[i]);
    }
};

// How the sums of one strip's rows change when a block of keys has raised their maxima. All rows are computed at once,
// in vectors.
template <class T> struct Rescaling {
    static constexpr int padded_rows = (kStrip + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
    T maximum[padded_rows];          // set by the caller: the maxima that include the block
    T log2_scale[padded_rows], logit_scale[padded_rows];  // set by the caller: Scale::log2 and ::logit of each row
    T minus_reference[padded_rows];  // the block's weights are 2^(score·log2_scale + minus_reference), unless it is far
    T shift[padded_rows];            // log₂ of what the sums so far are multiplied by
    T factor[padded_rows];           // 2^shift

    bool is_far(int r) const { return SoftmaxState<T>::is_far(minus_reference[r]); }
    Exponent<T> exponent(int r) const { return {maximum[r], logit_scale[r], log2_scale[r]}; }

    // Moves rows n … n + count of `state` to their new maxima and writes the factors to `rescale` too.
    void apply(int64_t n, int count, SoftmaxState<T>& state, T* rescale) {
        T old_maximum[padded_rows], reference[padded_rows];
        for (int r = 0; r < padded_rows; ++r) {
            old_maximum[r] = state.maximum[n + (r < count ? r : 0)];
            reference[r] = state.reference[n + (r < count ? r : 0)];
            if (r >= count) maximum[r] = old_maximum[r], log2_scale[r] = 1;
        }
        for (int r = 0; r < padded_rows; r += kLanes<T>) {
            const Vec<T> high = load(maximum + r), old = load(reference + r), none = broadcast<T>(-kInfinity<T>);
            const auto same = high == load(old_maximum + r);
            const Vec<T> product = high * load(log2_scale + r), most = broadcast<T>(kLargest<T>);
            const Vec<T> bounded = product > most ? most : product < -most ? -most : product;
            const Vec<T> next = same ? old : high - high == Vec<T>{} ? bounded : product;
            const Vec<T> down = same || old == none ? Vec<T>{} : larger(broadcast<T>(T(-1e30)), old - next);
            store(shift + r, down);
            store(factor + r, !same && old == none ? Vec<T>{} : power_of_two<T>(down));
            store(minus_reference + r, next == none ? Vec<T>{} : -next);
            store(reference + r, next);
        }
        for (int r = 0; r < count; ++r) {
            if (is_far(r) && maximum[r] != old_maximum[r] && old_maximum[r] > -kInfinity<T>) {
                const Exponent<T> by = exponent(r);
                shift[r] = (old_maximum[r] * by.step - by.origin) * by.unit;
                shift[r] = shift[r] < T(-1e30) ? T(-1e30) : shift[r];
                factor[r] = power_of_two<T>(broadcast<T>(shift[r]))[0];
            }
            state.maximum[n + r] = maximum[r];
            state.reference[n + r] = reference[r];
            rescale[r] = factor[r];
        }
    }
};

}  // namespace
}  // namespace clearhead
