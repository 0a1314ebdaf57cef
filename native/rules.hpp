// The score rules on one strip of queries and one block of keys. core/visibility.py defines what they mean.
//
//   logit = softcap·tanh(scale·score / softcap) + bias - slope·distance + table[label of query, label of key], or
//   -infinity where the query may not see the key
//
// Positions (causal, window, lengths) leave each query one range of keys, which `row_at` computes. Content (mask,
// segments, a bias of -infinity) forbids single keys within that range, and so do spans (spans.hpp).
#pragma once

#include <cmath>

#include "packing.hpp"
#include "spans.hpp"

namespace clearhead {
namespace {

// 2^x and tanh by polynomials (minimax, relative error on [0, 1]; the constant term is fixed at 1: 2^0 is 1 exactly).

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;
// Logits beyond this are at least 64 apart.
template <class T> constexpr T kRounded = T(sizeof(T) == 4 ? 0x1p30 : 0x1p59);

// The coefficients of 2^r from the highest on: of degree 6 with an error of 2.0e-9, and of degree 11 with 3.2e-18.
template <class T> CLEARHEAD_INLINE Vec<T> power_of_fraction(Vec<T> r) {
    constexpr float singles[] = {0.00021612916166888432f,
                                 0.001246784620460968f,
                                 0.009675451577901754f,
                                 0.05548528062281933f,
                                 0.24022930554858887f,
                                 0.6931470444438645f,
                                 1.0f};
    constexpr double doubles[] = {6.263464628088627e-10, 6.559530193150301e-09, 1.0253212219093686e-07,
                                  1.320836731952627e-06, 1.525317505287072e-05, 0.00015403512309781895,
                                  0.0013333558629561105, 0.009618129099550928,  0.055504108665602236,
                                  0.2402265069590633,    0.693147180559946,     1.0};
    constexpr int count = sizeof(T) == 4 ? 7 : 12;
    const auto coefficient = [&](int i) { return broadcast<T>(sizeof(T) == 4 ? T(singles[i]) : T(doubles[i])); };
    Vec<T> y = coefficient(0);
#pragma GCC unroll 16
    for (int i = 1; i < count; ++i) y = fma(y, r, coefficient(i));
    return y;
}

// 2^x, for x at most a little above 0: exactly 0 at -infinity and far below 0, exactly 1 at 0, NaN at NaN.
template <class T> CLEARHEAD_INLINE Vec<T> power_of_two(Vec<T> x) {
#if defined(__AVX512DQ__)  // 0 is what is left of -infinity, and times_power rounds down by itself
    return times_power<T>(power_of_fraction<T>(above_whole<T>(x)), x);
#else
    x = larger(broadcast<T>(Simd<T>::lowest), x);  // NaN passes
    const Vec<T> whole = rounded_down<T>(x);
    return times_power<T>(power_of_fraction<T>(x - whole), whole);
#endif
}

// Within 3·2⁻²⁴ of itself. A difference from 1 cancels near 0, where an odd polynomial (minimax) is used.
CLEARHEAD_INLINE Vec<float> tanh_of(Vec<float> x) {
    const Vec<float> one = broadcast<float>(1.0f), s = x * x;
    Vec<float> size = larger(x, -x);
    size = size > 10.0f ? broadcast<float>(10.0f) : size;  // beyond it, tanh is ±1 in float
    const Vec<float> rest = broadcast<float>(2.0f) / (power_of_two<float>(size * float(2 * kLog2e)) + one);
    constexpr float coefficients[] = {0.0206390880048275f, -0.05373971536755562f, 0.13331441581249237f,
                                      -0.3333328068256378f};
    Vec<float> series = broadcast<float>(-0.005704987328499556f);
    for (float c : coefficients) series = fma(series, s, broadcast<float>(c));
    series = fma(series * s, x, x);
    return s < 0.390625f ? series : x < 0.0f ? rest - one : one - rest;
}

CLEARHEAD_INLINE Vec<double> tanh_of(Vec<double> x) {
    for (int i = 0; i < kLanes<double>; ++i) x[i] = ::tanh(double(x[i]));
    return x;
}

struct Row {
    int64_t head, query;
    int64_t low, high;  // the keys that positions let it see: low ≤ j < high
    int64_t position;   // of the query, in the key positions of the whole matrix
    LabelSets labels;
};

struct Strip {
    int rows;
    int64_t low, high;   // the keys that positions let at least one row see
    bool fresh = false;  // nothing has been added to their output
};

// How many of the looked-at (query, key) pairs the content rules leave visible.
enum class Visibility { none, partial, full };

// What a strip of rows may see of a block of keys.
struct Seen {
    Visibility visibility = Visibility::none;
    int64_t j0 = 0;             // the block's first key
    int64_t low = 0, high = 0;  // the keys that positions let some row see
    int first = 0, last = 0;    // the columns of the panels that have these
};

CLEARHEAD_INLINE int64_t floor_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }

// Query `query` of this problem with the keys that causal, window and lengths let it see.
CLEARHEAD_INLINE Row row_at(const Problem& p, int64_t batch, int64_t head, int64_t query) {
    const int64_t whole_query = p.row_start + query * p.row_step;  // its index in the whole matrix
    Row row{head, query, 0, p.keys, whole_query + p.query_offset[batch], {}};
    int64_t first = -kNoLimit, last = kNoLimit;  // keys of the whole matrix
    if (p.left < kNoLimit) first = row.position - p.left;
    if (p.right < kNoLimit) last = row.position + p.right;
    if (p.kv_lengths) last = min_of(last, p.kv_lengths[batch] - 1);
    if (p.query_lengths && whole_query >= p.query_lengths[batch]) last = -kNoLimit;
    const int64_t step = p.column_step;
    if (step < 0) {  // keys in falling order: negate their indices, so that they rise
        const int64_t swap = first;
        first = -last, last = -swap;
    }
    const int64_t start = step < 0 ? -p.column_start : p.column_start, stride = step < 0 ? -step : step;
    if (first > -kNoLimit) row.low = max_of(0, -floor_div(start - first, stride));
    if (last < kNoLimit) row.high = last == -kNoLimit ? 0 : min_of(p.keys, floor_div(last - start, stride) + 1);
    if (first == kNoLimit || row.high <= row.low) row.low = row.high = 0;
    if (p.query_spans) row.labels = label_sets(p, batch, head, query);
    return row;
}

CLEARHEAD_INLINE Strip strip_of(const Row* rows, int count) {
    Strip s{count, kNoLimit, 0};
    for (int r = 0; r < count; ++r) {
        if (rows[r].low >= rows[r].high) continue;
        s.low = min_of(s.low, rows[r].low);
        s.high = max_of(s.high, rows[r].high);
    }
    return s;
}

// As MOST_ADDED in core/rule_values.py: beyond ±2^127 a number counts as that; infinities stay.
template <class U> CLEARHEAD_INLINE U within_range(U x) {
    const U most = U(0x1p127);
    if (x > most && x < kInfinity<U>) return most;
    return x < -most && x > -kInfinity<U> ? -most : x;
}

// Reads numbers that are added to scores.
template <class T> void fetch_added(const char* row, int64_t stride, Type type, int64_t count, T* to) {
    if (sizeof(T) == 4 && type == Type::f64) {
        const double* from = reinterpret_cast<const double*>(row);
        for (int64_t i = 0; i < count; ++i) to[i] = T(within_range(from[i * stride]));
        return;
    }
    fetch(row, stride, type, count, to);
    for (int64_t i = 0; i < count; ++i) to[i] = within_range(to[i]);
}

// How one head's scores become logits. Where no rule but the scale and spans changes them, they stay q·k, and the
// factors include the scale.
template <class T> struct Scale {
    bool stays;   // the scores stay q·k
    bool negate;  // the factors must be positive, so the sign of a negative scale goes into the queries
    T scale;
    T logit;  // logit = score · logit
    T log2;   // logit · log₂e = score · log2
    T score;  // score = logit · score

    static Scale of(const Problem& p, double scale) {
        const double size = scale < 0 ? -scale : scale;
        const bool stays = size > 1e-30 && p.softcap == 0 && !p.bias.data && !p.alibi_slopes && !p.large_spans;
        const double logit = stays ? size : 1;
        return {stays, stays && scale < 0, T(scale), T(logit), T(logit * kLog2e), T(1 / logit)};
    }
};

template <class T> struct Rules {
    const Problem& p;
    int64_t batch;
    Arena& arena;
    Scale<T> common = Scale<T>::of(p, p.scale);                         // of all heads, unless each has its own
    bool has_content = p.mask.data || p.bias.data || p.query_segments;  // a rule other than positions and spans forbids
    // (kStrip, kBlock): what the content rules allow, for a block that they leave `partial`; the bias
    uint8_t* visible = has_content ? arena.take<uint8_t>(kStrip * kBlock) : nullptr;
    T* bias = p.bias.data ? arena.take<T>(kStrip * kBlock) : nullptr;
    Spans<T> spans{p, batch, arena};

    CLEARHEAD_INLINE_MEMBER Scale<T> scale_of(int64_t head) const {
        return p.scales ? Scale<T>::of(p, p.scales[head]) : common;
    }

    // Which of the rows' queries are packed with their signs changed, as bits.
    uint32_t negated(const Row* rows, int count) const {
        uint32_t bits = !p.scales && common.negate ? ~0u : 0;
        for (int r = 0; p.scales && r < count; ++r) bits |= uint32_t(scale_of(rows[r].head).negate) << r;
        return bits;
    }

    // What a strip may see of the keys j0 … end of a block; fills `visible` and `bias` for what the rest needs of it.
    Seen see(const Row* rows, const Strip& strip, int64_t j0, int64_t end) {
        const int64_t low = max_of(strip.low, j0), high = min_of(strip.high, end);
        const Visibility visibility =
            low < high ? content_visibility(rows, strip.rows, j0, low, high) : Visibility::none;
        if (visibility == Visibility::none) return {};
        const int first = int(low - j0) / kPanel<T> * kPanel<T>, last = int(up_to_multiple(high - j0, kPanel<T>));
        return {visibility, j0, low, high, first, last};
    }

    // What mask, segments and a bias of -infinity allow of keys first … last of the block that starts at j0.
    Visibility content_visibility(const Row* rows, int count, int64_t j0, int64_t first, int64_t last) {
        if (p.query_spans) {
            spans.read_labels(j0);
            bool none = true;
            for (int r = 0; r < count; ++r) none &= spans.sees_none(rows[r].labels);
            if (none) return Visibility::none;
        }
        if (!has_content) return Visibility::full;
        uint8_t any = 0, all = 1;
        for (int r = 0; r < count; ++r) {
            uint8_t* see = visible + r * kBlock - j0;
            for (int64_t j = first; j < last; ++j) see[j] = 1;
            if (p.query_segments) {
                const int64_t query_segment = p.query_segments[batch * p.queries + rows[r].query];
                const int64_t* key_segment = p.kv_segments + batch * p.keys;
                for (int64_t j = first; j < last; ++j) see[j] &= key_segment[j] == query_segment;
            }
            if (p.mask.data) {
                const uint8_t* mask = static_cast<const uint8_t*>(p.mask.data) + batch * p.mask.batch +
                                      rows[r].head * p.mask.head + rows[r].query * p.mask.row;
                if (p.mask.column == 1)
                    for (int64_t j = first; j < last; ++j) see[j] &= mask[j] != 0;
                else
                    for (int64_t j = first; j < last; ++j) see[j] &= mask[j * p.mask.column] != 0;
            }
            if (p.bias.data) {
                T* add = bias + r * kBlock - j0;
                const char* row = row_of(p.bias, p.bias_type, batch, rows[r].head, rows[r].query);
                fetch_added(row + first * p.bias.column * bytes_of(p.bias_type), p.bias.column, p.bias_type,
                            last - first, add + first);
                for (int64_t j = first; j < last; ++j) see[j] &= !(add[j] == -kInfinity<T>);
            }
            for (int64_t j = first; j < last; ++j) any |= see[j], all &= see[j];
        }
        return !any ? Visibility::none : all ? Visibility::full : Visibility::partial;
    }

    // Turns a strip's scores of the seen columns into logits, but for the rules of visibility and the factors of
    // `Scale`. Where `tanhs` is given, it receives the tanh of the softcap.
    void apply(const Row* rows, int count, const Seen& seen, T* scores, T* tanhs = nullptr) {
        for (int r = 0; r < count; ++r) {
            const Scale<T> scale = scale_of(rows[r].head);
            T* x = scores + r * kPitch<T>;
            if (!scale.stays) scale_and_add(rows[r], r, scale.scale, seen, x, tanhs);
            if (p.query_spans) spans.add(rows[r], seen.first, seen.last, scale.score, x);
        }
    }

    // Row r of a strip.
    void scale_and_add(const Row& row, int r, T scale, const Seen& seen, T* x, T* tanhs) {
        const T slope = p.alibi_slopes ? T(p.alibi_slopes[row.head]) : T(0);
        const int first = seen.first, last = seen.last;
        for (int j = first; j < last; j += kLanes<T>) {
            Vec<T> s = load(x + j) * broadcast<T>(scale);
            if (p.softcap != 0) {
                const Vec<T> tanh = tanh_of(s * broadcast<T>(T(1 / p.softcap)));
                if (tanhs) store(tanhs + r * kPitch<T> + j, tanh);
                s = tanh * broadcast<T>(T(p.softcap));
            }
            if (p.bias.data) s = s + load(bias + r * kBlock + j);
            if (p.alibi_slopes) s = s - distance(row, seen.j0 + j) * broadcast<T>(slope);
            store(x + j, s);
        }
    }

    // |query position − key position| for a vector of keys.
    CLEARHEAD_INLINE_MEMBER Vec<T> distance(const Row& row, int64_t j) const {
        const T to_first = T(row.position - p.column_start - j * p.column_step);
        const Vec<T> d = broadcast<T>(to_first) - lanes<T>() * broadcast<T>(T(p.column_step));
        return d < Vec<T>{} ? -d : d;
    }

    // Writes -infinity where row r of the strip may not see the key.
    void mask_row(const Row& row, int r, const Seen& seen, T* x) const {
        const int first = seen.first, last = seen.last;
        if (seen.visibility == Visibility::partial) {
            const uint8_t* see = visible + r * kBlock;
            for (int j = first; j < last; ++j) x[j] = see[j] ? x[j] : -kInfinity<T>;
        }
        const int64_t low = row.low - seen.j0, high = row.high - seen.j0;
        if (low <= first && high >= last) return;
        const Vec<T> from = broadcast<T>(T(max_of(low, -1))), to = broadcast<T>(T(min_of(high, kBlock)));
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> column = lanes<T>() + broadcast<T>(T(j));
            Vec<T> s = load(x + j);
            s = column < from ? broadcast<T>(-kInfinity<T>) : s;
            s = column >= to ? broadcast<T>(-kInfinity<T>) : s;
            store(x + j, s);
        }
    }
};

// How scores become exponents of 2 in a row with this largest logit: log₂ of a weight is (score·step - origin)·unit,
// with `origin` the score·step of the largest score. Every pass rounds logits beyond kRounded before it compares them:
// without that they would differ by less than a sum with them can represent.
template <class T> struct Exponent {
    bool rounds;
    T step, unit;

    Exponent(T logit, const Scale<T>& scale)
        : rounds((logit < 0 ? -logit : logit) > kRounded<T> && logit - logit == 0),
          step(rounds ? scale.logit : T(1)),
          unit(rounds ? T(kLog2e) : scale.log2) {}

    // log₂ of what weights relative to the score `from` are multiplied by to be relative to `to`; 2^-1e30 is 0.
    T between(T from, T to) const {
        const T shift = (from * step - to * step) * unit;
        return shift < T(-1e30) ? T(-1e30) : shift;
    }
};

// a·b - c in one rounding.
inline double difference(double a, double b, double c) { return __builtin_fma(a, b, -c); }

// Turns a row's scores into weights, exp((logit - m) - l) = 2^((score·step - origin)·unit - rest), by its final state.
// The origin is the score that gives m, as far as T can say it, so that scores near it differ from it exactly.
template <class T> struct Normalizer {
    Vec<T> step, origin, unit, minus_rest;
    bool rounds = false, is_nan = false;  // is_nan: the weights are NaN, but 0 for keys that the row may not see

    Normalizer() = default;
    Normalizer(const RowStates& states, int64_t index, const Scale<T>& scale)
        : Normalizer(static_cast<const T*>(states.largest)[index], static_cast<const T*>(states.log_sum)[index],
                     scale) {}

    Normalizer(T largest, T log_sum, const Scale<T>& scale) {
        if (!(largest - largest == 0)) largest = 0;
        const Exponent<T> by(largest, scale);
        T score = by.rounds ? largest : largest / scale.logit;
        score = score > kLargest<T> ? kLargest<T> : score < -kLargest<T> ? -kLargest<T> : score;
        const double moved = by.rounds ? 0 : difference(score, scale.logit, largest);  // from m to the origin
        rounds = by.rounds, is_nan = log_sum != log_sum;
        step = broadcast<T>(by.step), origin = broadcast<T>(score), unit = broadcast<T>(by.unit);
        minus_rest = broadcast<T>(T((moved - double(log_sum)) * kLog2e));
    }

    // log₂ of the weight.
    CLEARHEAD_INLINE_MEMBER Vec<T> exponent(Vec<T> score) const {
        return fma((rounds ? score * step : score) - origin, unit, minus_rest);
    }

    CLEARHEAD_INLINE_MEMBER Vec<T> weight(Vec<T> score) const {
        const Vec<T> weight = power_of_two<T>(exponent(score));
        if (is_nan) return score == broadcast<T>(-kInfinity<T>) ? Vec<T>{} : weight;
        return weight;
    }
};

}  // namespace
}  // namespace clearhead
