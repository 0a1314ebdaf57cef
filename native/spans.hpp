// The rule `spans`: keys and queries carry labels, and a table says what is added to the logit of each pair of labels.
//
// Most blocks of keys hold few labels. So each row of the table has sets of the labels that it forbids and of those
// that it adds something to, and the labels of a block make another such set. Together they tell without a look at a
// single key whether a row sees nothing of the block, or all of it as if there were no rule.
#pragma once

#include "packing.hpp"

namespace clearhead {
namespace {

template <class T> CLEARHEAD_INLINE const T* span_row(const View& t, int64_t batch, int64_t head, int64_t label) {
    return static_cast<const T*>(t.data) + batch * t.batch + head * t.head + label * t.row;
}

CLEARHEAD_INLINE int64_t query_label(const Problem& p, int64_t batch, int64_t query) {
    return p.query_spans[batch * p.queries + query];
}

CLEARHEAD_INLINE LabelSets label_sets(const Problem& p, int64_t batch, int64_t head, int64_t query) {
    const int64_t label = query_label(p, batch, query);
    return label < 0 ? LabelSets{} : p.span_sets[batch * p.span_sets_batch + head * p.span_sets_head + label];
}

template <class T> struct Spans {
    static constexpr int64_t kInRegisters = 4 * kLanes<T>;  // so many labels of keys are looked up in registers

    const Problem& p;
    int64_t batch;
    Arena& arena;
    // (kBlock,): labels of the present block's keys, of which -1 adds nothing; what a row of the table adds to them
    int32_t* labels = p.query_spans ? arena.take<int32_t>(kBlock) : nullptr;
    T* line = p.query_spans ? arena.take<T>(kBlock) : nullptr;
    struct Line {  // numbers of the table for columns of a block
        const T* row = nullptr;
        int64_t start = -1;
        int first = 0, last = 0;
        T factor = 0;
        bool operator==(const Line&) const = default;
    } in_line = {}, added_last = {};  // what `line` has, and what the last row that did not use it was given
    int64_t start = -1;               // its first key
    uint64_t present = 0;             // bits of its labels
    bool unlabelled = false;          // some of its keys have no label

    // Reads the labels of the block of keys that starts at j0.
    void read_labels(int64_t j0) {
        if (start == j0) return;
        start = j0, present = 0, unlabelled = false;
        const int64_t* from = p.key_spans + batch * p.keys + j0;
        const int64_t count = min_of(kBlock, p.keys - j0);
        for (int64_t j = 0; j < kBlock; ++j) {
            const int64_t label = j < count ? from[j] : -1;
            labels[j] = int32_t(label);
            if (label >= 0)
                present |= uint64_t{1} << (label % 64);
            else if (j < count)
                unlabelled = true;
        }
    }

    bool sees_none(const LabelSets& sets) const { return !unlabelled && !(present & ~sets.forbidden); }
    bool adds_none(const LabelSets& sets) const { return !(present & sets.added); }

    // x[j] += table · factor for columns first … last of the block; -infinity where the table says so, whatever the
    // score is. Numbers that a second row asks for are kept for the rows after it, which often have the same label.
    template <class Row> void add(const Row& row, int first, int last, T factor, T* x) {
        if (adds_none(row.labels)) return;
        const T* numbers = span_row<T>(p.span_table, batch, row.head, query_label(p, batch, row.query));
        const Line wanted = {numbers, start, first, last, factor};
        const bool hides = present & row.labels.hidden;
        if (wanted == in_line) return add_line(first, last, hides, x);
        if (in_registers() && !(wanted == added_last)) {
            added_last = wanted;
            return look_up(numbers, first, last, factor, [=](int j, Vec<T> more) { add_numbers(x + j, more, hides); });
        }
        look_up(numbers, first, last, factor, [this](int j, Vec<T> more) { store(line + j, more); });
        in_line = wanted;
        add_line(first, last, hides, x);
    }

    CLEARHEAD_INLINE_MEMBER void add_line(int first, int last, bool hides, T* x) const {
        for (int j = first; j < last; j += kLanes<T>) add_numbers(x + j, load(line + j), hides);
    }

    CLEARHEAD_INLINE_MEMBER static void add_numbers(T* x, Vec<T> more, bool hides) {
        const Vec<T> sum = load(x) + more;
        store(x, hides ? (more == broadcast<T>(-kInfinity<T>) ? more : sum) : sum);
    }

#if defined(__AVX512F__)
    bool in_registers() const { return sizeof(T) == 4 && p.span_keys <= kInRegisters; }
#else
    static bool in_registers() { return false; }
#endif

    // Calls use(j, numbers of the keys from j on) for the vectors of columns first … last.
    template <class Use> void look_up(const T* row, int first, int last, T factor, Use use) {
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4)
            if (in_registers()) return look_up_in_registers(row, first, last, factor, use);
#endif
        for (int j = first; j < last; j += kLanes<T>) {
            Vec<T> numbers;
            for (int lane = 0; lane < kLanes<T>; ++lane) {
                const int32_t label = labels[j + lane];
                numbers[lane] = label < 0 ? T(0) : row[label] * factor;
            }
            use(j, numbers);
        }
    }

#if defined(__AVX512F__)
    template <class Use> void look_up_in_registers(const float* row, int first, int last, float factor, Use use) {
        __m512 table[4];
        for (int i = 0; i < 4; ++i) {
            const int64_t left = max_of(0, min_of(16, p.span_keys - 16 * i));
            table[i] = _mm512_maskz_loadu_ps(__mmask16((1u << left) - 1), row + (left ? 16 * i : 0));
            table[i] = _mm512_mul_ps(table[i], _mm512_set1_ps(factor));
        }
        for (int j = first; j < last; j += 16) {
            const __m512i label = _mm512_load_si512(labels + j);
            __m512 more = _mm512_permutex2var_ps(table[0], label, table[1]);
            if (p.span_keys > 32)
                more = _mm512_mask_mov_ps(more, _mm512_test_epi32_mask(label, _mm512_set1_epi32(32)),
                                          _mm512_permutex2var_ps(table[2], label, table[3]));
            more = _mm512_maskz_mov_ps(_mm512_cmpge_epi32_mask(label, _mm512_setzero_si512()), more);
            use(j, (Vec<float>)more);
        }
    }
#endif
};

}  // namespace
}  // namespace clearhead
