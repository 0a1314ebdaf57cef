// What Python gives by name, and what the functions of several passes read of it.
#pragma once

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.hpp"

namespace clearhead {

// What Python gives by name for a problem. `done` refuses a name that nobody asked for, so that no answer is forgotten.
class Named {
  public:
    Named(const nb::dict& arguments, const Problem& problem) : p(problem), wide(p.type == Type::f64 ? 8 : 4) {
        for (auto [name, value] : arguments) items.push_back({nb::cast<const char*>(name), value});
    }

    std::optional<Input> read(const char* name) { return cast<Input>(name); }
    std::optional<Taken> write(const char* name) { return cast<Taken>(name); }
    int number(const char* name) { return cast<int>(name).value_or(-1); }
    Type type(const char* name) { return checked_type(number(name), name); }

    // So many numbers to read: of type T, or in the statistics' type. Null where they are not given, as all below.
    template <class T> const T* all(const char* name, int64_t count) { return whole<T>(read(name), count, name); }
    const void* numbers(const char* name, int64_t count) {
        return wide == 8 ? static_cast<const void*>(all<double>(name, count)) : all<float>(name, count);
    }
    const void* per_query(const char* name) { return numbers(name, p.batch * p.heads * p.queries); }

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
    const int64_t wide;  // bytes of a number of the statistics

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

// Reads v (batch, heads, keys, d_v) into the problem.
inline void take_values(Problem& p, const std::optional<Input>& v) {
    check(v && v->ndim() == 4, "v");
    p.v_heads = int64_t(v->shape(1));
    p.d_v = int64_t(v->shape(3));
    check(p.v_heads > 0 ? p.heads % p.v_heads == 0 : p.heads == 0, "v's heads");
    p.v = view(*v, bytes_of(p.type), p.batch, p.v_heads, p.keys, p.d_v, "v");
}

// The right-hand side x of a product, with so many rows.
inline void take_operand(ColumnAnswers& want, Named& arguments, int64_t rows) {
    const Problem& p = arguments.p;
    const auto x = arguments.read("x");
    want.x_type = arguments.type("x_type");
    check(x && x->ndim() == 4, "x");
    want.x_heads = int64_t(x->shape(1));
    check(want.x_heads > 0 ? p.heads % want.x_heads == 0 : p.heads == 0, "x's heads");
    want.x_columns = int64_t(x->shape(3));
    want.x = view(*x, bytes_of(want.x_type), p.batch, want.x_heads, rows, want.x_columns, "x");
}

inline void take_picture(ColumnAnswers& want, const Taken& image) {
    check(image.ndim() == 4 && image.shape(2) > 0 && image.shape(3) > 0, "image");
    want.height = int64_t(image.shape(2));
    want.width = int64_t(image.shape(3));
}

// The state of every row.
inline RowStates take_states(Named& arguments) {
    const Problem& p = arguments.p;
    const RowStates states{arguments.per_query("largest"), arguments.per_query("log_sum")};
    check((states.largest && states.log_sum) || p.batch * p.heads * p.queries == 0, "largest and log_sum");
    return states;
}

// What the column pass and the pass over effects both need and answer: the rows' states, the labels of groups, x.
inline void take_columns(ColumnAnswers& want, Named& arguments, Named& named) {
    const Problem& p = named.p;
    const int64_t heads = p.batch * p.heads;
    want.states = take_states(arguments);
    want.received = named.sums("received", heads * p.keys);
    want.query_labels = arguments.all<int64_t>("query_labels", p.batch * p.queries);
    want.key_labels = arguments.all<int64_t>("key_labels", p.batch * p.keys);
    if (const auto groups = named.write("groups")) {
        check(groups->ndim() == 4 && want.query_labels && want.key_labels, "labels");
        want.query_groups = int64_t(groups->shape(2));
        want.key_groups = int64_t(groups->shape(3));
        want.groups = named.sums("groups", heads * want.query_groups * want.key_groups);
        check_labels(want.query_labels, p.batch * p.queries, want.query_groups, "query labels");
        check_labels(want.key_labels, p.batch * p.keys, want.key_groups, "key labels");
    }
    want.weights = named.statistics("weights", heads * p.queries * p.keys);
    if (named.write("transposed")) {
        take_operand(want, arguments, p.queries);
        want.transposed = named.statistics("transposed", heads * p.keys * want.x_columns);
    }
}

}  // namespace clearhead
