// The rule `spans` as Python gives it: what the kernel reads of its table, and its arrays in a repeated call, in which
// nothing of Python has looked at them (core/spans.py does in a first call).
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "binding.hpp"

namespace clearhead {
namespace {

// The sets of labels for every row of the problem's table, and whether its numbers are large.
template <class T> void read_table(Problem& p, std::vector<LabelSets>& entries) {
    const View& table = p.span_table;
    const int64_t batches = table.batch ? p.batch : 1, heads = table.head ? p.heads : 1;
    p.span_sets_head = table.head ? p.span_queries : 0;
    p.span_sets_batch = table.batch ? heads * p.span_queries : 0;
    for (int64_t i = 0; i < batches * heads * p.span_queries; ++i) {
        const int64_t label = i % p.span_queries, head = i / p.span_queries % heads, batch = i / p.span_queries / heads;
        const T* row = static_cast<const T*>(table.data) + batch * table.batch + head * table.head + label * table.row;
        LabelSets sets;
        uint64_t visible = 0;
        for (int64_t g = 0; g < p.span_keys; ++g) {
            const uint64_t bit = uint64_t{1} << (g % 64);
            const bool forbidden = row[g] == -std::numeric_limits<T>::infinity();
            (forbidden ? sets.hidden : visible) |= bit;
            if (row[g] != 0) sets.added |= bit;
            p.large_spans |= !forbidden && std::abs(row[g]) > T(1e30);
        }
        sets.forbidden = ~visible;
        entries.push_back(sets);
    }
    p.span_sets = entries.data();
}

// Arrays of a repeated call: NumPy's, labels of one axis as int64, a table of two axes as float32 or float64.
struct RepeatedSpans {
    using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

    std::vector<int64_t> query_labels, key_labels;
    std::vector<float> narrow;
    std::vector<double> wide;
    std::vector<LabelSets> sets;

    // Copies the arrays, and lets the problem read the copies. False where they are others than these, or wrong.
    bool take(const nb::tuple& spans, Problem& p) {
        Array queries, keys, table;
        if (!nb::try_cast(spans[0], queries, false) || !nb::try_cast(spans[1], keys, false) ||
            !nb::try_cast(spans[2], table, false))
            return false;
        if (table.ndim() != 2 || table.size() > kMost) return false;
        p.span_queries = int64_t(table.shape(0));
        p.span_keys = int64_t(table.shape(1));
        if (!take_labels(queries, p.queries, p.span_queries, p.batch, query_labels) ||
            !take_labels(keys, p.keys, p.span_keys, p.batch, key_labels))
            return false;
        p.query_spans = query_labels.data();
        p.key_spans = key_labels.data();
        const auto taken = [&]<class T>(std::vector<T>& numbers) {
            const bool fits = table.dtype() == nb::dtype<double>()  ? take_table<double>(table, numbers)
                              : table.dtype() == nb::dtype<float>() ? take_table<float>(table, numbers)
                                                                    : false;
            p.span_table = {numbers.data(), 0, 0, p.span_keys, 1};
            if (fits) read_table<T>(p, sets);
            return fits;
        };
        return p.type == Type::f64 ? taken(wide) : taken(narrow);
    }

  private:
    static constexpr size_t kMost = 1 << 14;  // numbers of a table that are copied in every call

    static bool take_labels(const Array& x, int64_t size, int64_t most, int64_t batch, std::vector<int64_t>& entries) {
        if (x.ndim() != 1 || int64_t(x.shape(0)) != size || x.dtype() != nb::dtype<int64_t>()) return false;
        const int64_t* from = static_cast<const int64_t*>(x.data());
        for (int64_t i = 0; i < size; ++i)
            if (from[i] >= most) return false;
        for (int64_t b = 0; b < batch; ++b) entries.insert(entries.end(), from, from + size);
        return true;
    }

    template <class From, class T> static bool take_table(const Array& x, std::vector<T>& entries) {
        const From* from = static_cast<const From*>(x.data());
        entries.reserve(x.size());
        for (size_t i = 0; i < x.size(); ++i) {
            if (!(from[i] < std::numeric_limits<From>::infinity())) return false;
            entries.push_back(T(from[i]));
        }
        return true;
    }
};

}  // namespace
}  // namespace clearhead
