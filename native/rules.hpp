// The score rules on one strip of queries and one block of keys. visibility.py is their meaning.
#pragma once

#include "exponential.hpp"
#include "packing.hpp"

namespace clearhead {
namespace {

struct Row {
    int64_t head, query;
    int64_t low, high;  // the keys it may see by position: low ≤ j < high
    int64_t position;   // where it stands among the keys of the whole matrix
};

struct Strip {
    int rows;
    int64_t low, high;              // keys that some row may see by position
    int64_t inner_low, inner_high;  // keys that every row may see by position
};

enum class Sight { nobody, some, everybody };

CLEARHEAD_INLINE int64_t floor_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }

// Query `query` of this problem, and which keys its position lets it see: causal, window, lengths.
CLEARHEAD_INLINE Row row_at(const Problem& p, int64_t batch, int64_t head, int64_t query) {
    const int64_t whole = p.row_start + query * p.row_step;
    Row row{head, query, 0, p.keys, whole + p.offset[batch]};
    int64_t first = -kNoLimit, last = kNoLimit;
    if (p.left < kNoLimit) first = row.position - p.left;
    if (p.right < kNoLimit) last = row.position + p.right;
    if (p.kv_lengths) last = least(last, p.kv_lengths[batch] - 1);
    if (p.query_lengths && whole >= p.query_lengths[batch]) last = -kNoLimit;
    const int64_t step = p.column_step;
    if (step < 0) {  // count from the other end
        const int64_t swap = first;
        first = -last, last = -swap;
    }
    const int64_t start = step < 0 ? -p.column_start : p.column_start, stride = step < 0 ? -step : step;
    if (first > -kNoLimit) row.low = most(0, -floor_div(start - first, stride));
    if (last < kNoLimit) row.high = last == -kNoLimit ? 0 : least(p.keys, floor_div(last - start, stride) + 1);
    if (first == kNoLimit || row.high <= row.low) row.low = row.high = 0;
    return row;
}

CLEARHEAD_INLINE Strip strip_of(const Row* rows, int count) {
    Strip s{count, kNoLimit, 0, 0, kNoLimit};
    for (int r = 0; r < count; ++r) {
        if (rows[r].low < rows[r].high) {
            s.low = least(s.low, rows[r].low);
            s.high = most(s.high, rows[r].high);
        }
        s.inner_low = most(s.inner_low, rows[r].low);
        s.inner_high = least(s.inner_high, rows[r].high);
    }
    return s;
}

template <class T> struct Rules {
    const Problem& p;
    int64_t batch;
    bool plain;    // nothing but a scale: scores stay as they are, and `natural` and `factor` do the rest
    bool negated;  // queries were negated, since a plain scale must be positive
    bool content;  // something but positions forbids
    T natural;     // logit = score · natural
    T factor;      // logit · log₂e = score · factor
    uint8_t* seen; // (kStrip, kBlock): the content's part of visibility, where it is `some`
    T* bias;       // (kStrip, kBlock)

    Rules(const Problem& problem, int64_t batch_, Arena& arena) : p(problem), batch(batch_) {
        plain = p.scale != 0 && p.softcap == 0 && !p.bias.data && !p.alibi_slopes;
        negated = plain && p.scale < 0;
        content = p.mask.data || p.bias.data || p.query_segments;
        natural = plain ? T(p.scale < 0 ? -p.scale : p.scale) : T(1);
        factor = plain ? T((p.scale < 0 ? -p.scale : p.scale) * kLog2e) : T(kLog2e);
        seen = content ? arena.take<uint8_t>(kStrip * kBlock) : nullptr;
        bias = p.bias.data ? arena.take<T>(kStrip * kBlock) : nullptr;
    }

    // What mask, segments and a bias of -infinity leave of keys first … last, for the block that starts at j0.
    Sight look(const Row* rows, int count, int64_t j0, int64_t first, int64_t last) {
        if (!content) return Sight::everybody;
        uint8_t any = 0, all = 1;
        for (int r = 0; r < count; ++r) {
            uint8_t* see = seen + r * kBlock - j0;
            for (int64_t j = first; j < last; ++j) see[j] = 1;
            if (p.query_segments) {
                const int64_t own = p.query_segments[batch * p.queries + rows[r].query];
                const int64_t* theirs = p.kv_segments + batch * p.keys;
                for (int64_t j = first; j < last; ++j) see[j] &= theirs[j] == own;
            }
            if (p.mask.data) {
                const uint8_t* may = static_cast<const uint8_t*>(p.mask.data) + batch * p.mask.batch +
                                     rows[r].head * p.mask.head + rows[r].query * p.mask.row;
                if (p.mask.column == 1)
                    for (int64_t j = first; j < last; ++j) see[j] &= may[j] != 0;
                else
                    for (int64_t j = first; j < last; ++j) see[j] &= may[j * p.mask.column] != 0;
            }
            if (p.bias.data) {
                T* add = bias + r * kBlock - j0;
                const char* row = row_of(p.bias, p.bias_type, batch, rows[r].head, rows[r].query);
                fetch(row + first * p.bias.column * bytes_of(p.bias_type), p.bias.column, p.bias_type, last - first, add + first);
                for (int64_t j = first; j < last; ++j) see[j] &= !(add[j] == -kInfinity<T>);
            }
            for (int64_t j = first; j < last; ++j) any |= see[j], all &= see[j];
        }
        return !any ? Sight::nobody : all ? Sight::everybody : Sight::some;
    }

    // Scores of columns first … last (of the block, whole vectors) become what the softmax sees; `slopes`, where given,
    // what the cap leaves of a small change, 1 - tanh².
    void apply(const Row* rows, int count, int64_t j0, int first, int last, T* scores, T* slopes = nullptr) {
        if (plain) return;
        for (int r = 0; r < count; ++r) {
            T* x = scores + r * kPitch<T>;
            const T slope = p.alibi_slopes ? T(p.alibi_slopes[rows[r].head]) : T(0);
            for (int j = first; j < last; j += kLanes<T>) {
                Vec<T> s = load(x + j) * spread<T>(T(p.scale));
                if (p.softcap != 0) {
                    const Vec<T> bent = tanh_of(s * spread<T>(T(1 / p.softcap)));
                    if (slopes) store(slopes + r * kPitch<T> + j, spread<T>(T(1)) - bent * bent);
                    s = bent * spread<T>(T(p.softcap));
                }
                if (p.bias.data) s = s + load(bias + r * kBlock + j);
                if (p.alibi_slopes) s = s - distance(rows[r], j0 + j) * spread<T>(slope);
                store(x + j, s);
            }
        }
    }

    // |query position - key position| for a vector of keys.
    CLEARHEAD_INLINE_MEMBER Vec<T> distance(const Row& row, int64_t j) const {
        const T ahead = T(row.position - p.column_start - j * p.column_step);
        const Vec<T> d = spread<T>(ahead) - lanes<T>() * spread<T>(T(p.column_step));
        return d < Vec<T>{} ? -d : d;
    }

    // -infinity where row r may not see; `some` means that `seen` has a say.
    void forbid(const Row& row, int r, Sight sight, int64_t j0, int first, int last, T* x) const {
        if (sight == Sight::some) {
            const uint8_t* see = seen + r * kBlock;
            for (int j = first; j < last; ++j) x[j] = see[j] ? x[j] : -kInfinity<T>;
        }
        const int64_t low = row.low - j0, high = row.high - j0;
        if (low <= first && high >= last) return;
        const Vec<T> from = spread<T>(T(most(low, -1))), to = spread<T>(T(least(high, kBlock)));
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> at = lanes<T>() + spread<T>(T(j));
            Vec<T> s = load(x + j);
            s = at < from ? spread<T>(-kInfinity<T>) : s;
            s = at >= to ? spread<T>(-kInfinity<T>) : s;
            store(x + j, s);
        }
    }
};

// A row's weights from its log-sum-exp, which comes in two parts so that its rounding to log₂ units adds no error.
template <class T> struct Normal {
    Vec<T> factor, high, low;
    bool lost;  // the row saw NaN: its weights are NaN, but none goes to a key that it may not see

    Normal(T logsumexp, T factor_) : factor(spread<T>(factor_)) {
        const double exact = logsumexp == -kInfinity<T> ? 0 : double(logsumexp) * kLog2e;
        high = spread<T>(-T(exact));
        low = spread<T>(exact - exact == 0 ? T(exact - double(T(exact))) : T(0));
        lost = logsumexp != logsumexp;
    }

    CLEARHEAD_INLINE_MEMBER Vec<T> weight(Vec<T> score) const {
        const Vec<T> weight = power_of_two<T>(fma(score, factor, high) - low);
        return lost ? (score == spread<T>(-kInfinity<T>) ? Vec<T>{} : weight) : weight;
    }
};

}  // namespace
}  // namespace clearhead
