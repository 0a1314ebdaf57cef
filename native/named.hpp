// Arguments that Python gives by name, and how the functions of several passes read them.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.hpp"

namespace clearhead {

// Python's named arguments for a problem. `done` refuses a name that nobody read, so that no result is forgotten.
class Named {
  public:
    Named(const Problem& problem, const nb::dict& answers, const nb::dict& known = {})
        : p(problem), heads(p.batch * p.heads), rows(heads * p.queries), wide(p.type == Type::f64 ? 8 : 4) {
        for (const nb::dict* given : {&answers, &known})
            for (auto [name, value] : *given) items.push_back({nb::cast<const char*>(name), value});
    }

    bool has(const char* name) const {
        return std::ranges::any_of(items, [&](const Item& item) { return std::strcmp(item.name, name) == 0; });
    }

    std::optional<Input> read(const char* name) { return cast<Input>(name); }
    std::optional<Taken> write(const char* name) { return cast<Taken>(name); }
    int number(const char* name) { return cast<int>(name).value_or(-1); }
    Type type(const char* name) { return checked_type(number(name), name); }

    // `count` numbers to read, of type T or of the statistics' type; null if not given, as all below.
    template <class T> const T* all(const char* name, int64_t count) { return whole<T>(read(name), count, name); }
    const void* numbers(const char* name, int64_t count) {
        return wide == 8 ? static_cast<const void*>(all<double>(name, count)) : all<float>(name, count);
    }
    const void* per_query(const char* name) { return numbers(name, rows); }

    // Room for so many numbers: in the statistics' type, in double, or indices.
    void* statistics(const char* name, int64_t count) { return room(write(name), count, wide, name); }
    double* sums(const char* name, int64_t count) { return static_cast<double*>(room(write(name), count, 8, name)); }
    int64_t* indices(const char* name, int64_t count) {
        return static_cast<int64_t*>(room(write(name), count, 8, name));
    }
    // Room for `count` lists, their numbers and their indices, (…, k) each; returns k, 0 where they are not given.
    int64_t lists(const char* values, const char* places, int64_t count, void*& to, int64_t*& to_places) {
        const auto x = write(values), y = write(places);
        const int64_t k = x ? int64_t(x->shape(x->ndim() - 1)) : 0;
        check(!x == !y && (!x || k > 0), values);
        to = statistics(values, count * k);
        to_places = indices(places, count * k);
        return k;
    }

    void done() const {
        for (const Item& item : items)
            if (!item.asked) throw std::invalid_argument("the kernel has no " + std::string(item.name));
    }

    const Problem& p;
    const int64_t heads, rows, wide;  // over all batches; bytes of a number of the statistics

  private:
    struct Item {
        const char* name;
        nb::handle value;
        bool asked = false;
    };

    template <class T> std::optional<T> cast(const char* name) {
        for (Item& item : items) {
            if (std::strcmp(item.name, name) != 0) continue;
            item.asked = true;
            T x;
            if (!nb::try_cast(item.value, x, false)) throw nb::type_error(name);
            return x;
        }
        return std::nullopt;
    }

    std::vector<Item> items;
};

// The results that the row pass is asked for.
inline void take_rows(RowJob& job, Named& named) {
    const Problem& p = job.problem;
    const auto output = named.write("output");
    job.keep_float32 = output && bytes_of(p.type) == 2 && output->itemsize() == 4;
    job.output = room(output, named.rows * p.d_v, job.keep_float32 ? 4 : bytes_of(p.type), "output");
#define CLEARHEAD_TAKE(name) job.name = named.statistics(#name, named.rows);
    CLEARHEAD_PER_QUERY(CLEARHEAD_TAKE)
    check(!job.largest == !job.log_sum, "largest and log_sum");
    check(!named.has("received") || named.has("largest"), "received needs the rows' states");
    job.top = named.lists("top_weights", "top_indices", named.rows, job.top_weights, job.top_indices);
}

// The state of every row.
inline RowStates take_states(Named& named) {
    const RowStates states{named.per_query("largest"), named.per_query("log_sum")};
    check((states.largest && states.log_sum) || named.rows == 0, "largest and log_sum");
    return states;
}

// The right-hand side x of a product, with so many rows.
inline void take_operand(SumJob& job, Named& named, int64_t rows) {
    const Problem& p = job.problem;
    const auto x = named.read("x");
    job.x_type = named.type("x_type");
    check(x && x->ndim() == 4, "x");
    job.x_heads = int64_t(x->shape(1));
    check(job.x_heads > 0 ? p.heads % job.x_heads == 0 : p.heads == 0, "x's heads");
    job.x_columns = int64_t(x->shape(3));
    job.x = view(*x, bytes_of(job.x_type), p.batch, job.x_heads, rows, job.x_columns, "x");
}

// The inputs and results that the column pass and the pass over effects share.
inline void take_sums(SumJob& job, Named& named) {
    const Problem& p = job.problem;
    job.states = take_states(named);
    job.received = named.sums("received", named.heads * p.keys);
    job.query_labels = named.all<int64_t>("query_labels", p.batch * p.queries);
    job.key_labels = named.all<int64_t>("key_labels", p.batch * p.keys);
    if (const auto groups = named.write("groups")) {
        check(groups->ndim() == 4 && job.query_labels && job.key_labels, "labels");
        job.query_groups = int64_t(groups->shape(2));
        job.key_groups = int64_t(groups->shape(3));
        job.groups = named.sums("groups", named.heads * job.query_groups * job.key_groups);
        check_labels(job.query_labels, p.batch * p.queries, job.query_groups, "query labels");
        check_labels(job.key_labels, p.batch * p.keys, job.key_groups, "key labels");
    }
    if (const auto picture = named.write("image")) {
        check(picture->ndim() == 4 && picture->shape(2) > 0 && picture->shape(3) > 0, "image");
        job.height = int64_t(picture->shape(2));
        job.width = int64_t(picture->shape(3));
        job.image = named.sums("image", named.heads * job.height * job.width);
    }
    job.matrix = named.statistics("weights", named.rows * p.keys);
    if (named.write("transposed")) {
        take_operand(job, named, p.queries);
        job.transposed = named.statistics("transposed", named.heads * p.keys * job.x_columns);
    }
}

}  // namespace clearhead
