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
    } in_line = {};           // what `line` has
    int64_t start = -1;       // the block's first key
    uint64_t present = 0;     // bits of its labels
    bool unlabelled = false;  // some of its keys have no label

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
    // score is. The numbers are kept for the rows after it, which often have the same label.
    template <class Row> void add(const Row& row, int first, int last, T factor, T* x) {
        if (adds_none(row.labels)) return;
        const T* numbers = span_row<T>(p.span_table, batch, row.head, query_label(p, batch, row.query));
        const Line wanted = {numbers, start, first, last, factor};
        const bool hides = present & row.labels.hidden;
        if (!(wanted == in_line)) {
            for (int j = first; j < last; j += kLanes<T>)
                for (int i = j; i < j + kLanes<T>; ++i) line[i] = labels[i] < 0 ? T(0) : numbers[labels[i]] * factor;
            in_line = wanted;
        }
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> more = load(line + j), sum = load(x + j) + more;
            store(x + j, hides ? (more == broadcast<T>(-kInfinity<T>) ? more : sum) : sum);
        }
    }
};

}  // namespace
}  // namespace clearhead
