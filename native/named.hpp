// What Python gives by name, and what the functions of several passes read of it.
#pragma once

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.hpp"

namespace clearhead {

// What Python gives by name. `done` refuses a name that nobody asked for, so that no answer is forgotten.
class Named {
  public:
    explicit Named(const nb::dict& arguments) {
        for (auto [name, value] : arguments) items.push_back({nb::cast<const char*>(name), value});
    }

    std::optional<Given> read(const char* name) { return cast<Given>(name); }
    std::optional<Taken> write(const char* name) { return cast<Taken>(name); }
    int number(const char* name) { return cast<int>(name).value_or(-1); }

    void done() const {
        for (const Item& item : items)
            if (!item.asked) throw std::invalid_argument("the kernel has no " + std::string(item.name));
    }

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
inline void take_values(Problem& p, const std::optional<Given>& v) {
    check(v && v->ndim() == 4, "v");
    p.v_heads = int64_t(v->shape(1));
    p.d_v = int64_t(v->shape(3));
    check(p.v_heads > 0 ? p.heads % p.v_heads == 0 : p.heads == 0, "v's heads");
    p.v = view(*v, bytes_of(p.type), p.batch, p.v_heads, p.keys, p.d_v, "v");
}

// So many numbers in the statistics' type; null where they are not given.
inline const void* numbers(Named& arguments, const Problem& p, const char* name, int64_t count) {
    const auto x = arguments.read(name);
    return p.type == Type::f64 ? static_cast<const void*>(whole<double>(x, count, name))
                               : static_cast<const void*>(whole<float>(x, count, name));
}

inline const void* per_query(Named& arguments, const Problem& p, const char* name) {
    return numbers(arguments, p, name, p.batch * p.heads * p.queries);
}

// The right-hand side x of a product, with so many rows.
inline void take_operand(ColumnAnswers& want, Named& arguments, const Problem& p, int64_t rows) {
    const auto x = arguments.read("x");
    const int x_type = arguments.number("x_type");
    check(x && x->ndim() == 4 && x_type >= 0 && x_type < 4, "x");
    want.x_heads = int64_t(x->shape(1));
    check(want.x_heads > 0 ? p.heads % want.x_heads == 0 : p.heads == 0, "x's heads");
    want.x_type = Type(x_type);
    want.x_columns = int64_t(x->shape(3));
    want.x = view(*x, bytes_of(want.x_type), p.batch, want.x_heads, rows, want.x_columns, "x");
}

inline void take_picture(ColumnAnswers& want, const Taken& image) {
    check(image.ndim() == 4 && image.shape(2) > 0 && image.shape(3) > 0, "image");
    want.height = int64_t(image.shape(2));
    want.width = int64_t(image.shape(3));
}

// What the column pass and the pass over effects both need and answer: the log-sum-exp, the labels of groups, x.
inline void take_columns(Job& job, Named& arguments, Named& named) {
    const Problem& p = job.problem;
    ColumnAnswers& want = job.columns;
    const int64_t heads = p.batch * p.heads, wide = p.type == Type::f64 ? 8 : 4;
    want.logsumexp = per_query(arguments, p, "logsumexp");
    check(want.logsumexp || heads * p.queries == 0, "logsumexp");
    want.received = static_cast<double*>(room(named.write("received"), heads * p.keys, 8, "received"));
    want.query_labels = whole<int64_t>(arguments.read("query_labels"), p.batch * p.queries, "query labels");
    want.key_labels = whole<int64_t>(arguments.read("key_labels"), p.batch * p.keys, "key labels");
    if (const auto groups = named.write("groups")) {
        check(groups->ndim() == 4 && want.query_labels && want.key_labels, "labels");
        want.query_groups = int64_t(groups->shape(2));
        want.key_groups = int64_t(groups->shape(3));
        want.groups = static_cast<double*>(room(groups, heads * want.query_groups * want.key_groups, 8, "groups"));
        for (int64_t i = 0; i < p.batch * p.queries; ++i)
            check(want.query_labels[i] < want.query_groups, "query labels");
        for (int64_t j = 0; j < p.batch * p.keys; ++j) check(want.key_labels[j] < want.key_groups, "key labels");
    }
    want.weights = room(named.write("weights"), heads * p.queries * p.keys, wide, "weights");
    if (const auto transposed = named.write("transposed")) {
        take_operand(want, arguments, p, p.queries);
        want.transposed = room(transposed, heads * p.keys * want.x_columns, wide, "transposed");
    }
}

}  // namespace clearhead
