// Python's door: arrays become pointers after their shapes are checked; no arithmetic.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "given.hpp"
#include "named.hpp"
#include "ragged.hpp"
#include "threads.hpp"

using namespace clearhead;
using namespace nb::literals;

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

// The fields of a problem that Python gives by name, each in a list: numbers, and arrays with how many numbers they
// have. `m.def` names them one by one: what Python forgets, or knows and this side does not, is a TypeError there.
// clang-format off
#define CLEARHEAD_NUMBERS(EACH)                                                                                      \
    EACH(int64_t, batch) EACH(int64_t, heads) EACH(int64_t, kv_heads) EACH(int64_t, queries) EACH(int64_t, keys)     \
    EACH(int64_t, d_k) EACH(int64_t, row_start) EACH(int64_t, row_step) EACH(int64_t, column_start)                  \
    EACH(int64_t, column_step) EACH(int64_t, left) EACH(int64_t, right) EACH(double, scale) EACH(double, softcap)    \
    EACH(bool, team)
#define CLEARHEAD_ARRAYS(EACH)                                                                                       \
    EACH(int64_t, query_offset, p.batch) EACH(int64_t, kv_lengths, p.batch) EACH(int64_t, query_lengths, p.batch)    \
    EACH(int64_t, query_segments, p.batch * p.queries) EACH(int64_t, kv_segments, p.batch * p.keys)                  \
    EACH(double, alibi_slopes, p.heads) EACH(double, sinks, p.heads) EACH(double, scales, p.heads)                   \
    EACH(int64_t, query_spans, p.batch * p.queries) EACH(int64_t, key_spans, p.batch * p.keys)
// clang-format on

#define CLEARHEAD_NUMBER(type, name) type name,
#define CLEARHEAD_ARRAY(type, name, count) std::optional<Input> name,
Described describe(CLEARHEAD_NUMBERS(CLEARHEAD_NUMBER) CLEARHEAD_ARRAYS(CLEARHEAD_ARRAY) int type, int bias_type,
                   std::optional<Input> span_table, std::optional<Input> bias, std::optional<Input> mask,
                   nb::object kept) {
    Described d;
    Problem& p = d.p;
    p.type = checked_type(type, "type");
    p.bias_type = checked_type(bias_type, "bias_type");
#define CLEARHEAD_SET_NUMBER(type, name) p.name = name;
    CLEARHEAD_NUMBERS(CLEARHEAD_SET_NUMBER)
    check(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, "heads");
    check(p.row_step != 0 && p.column_step != 0, "steps");
#define CLEARHEAD_SET_ARRAY(type, name, count) p.name = whole<type>(name, count, #name);
    CLEARHEAD_ARRAYS(CLEARHEAD_SET_ARRAY)
    check(p.query_offset || p.batch == 0, "query_offset");
    check(!p.query_segments == !p.kv_segments, "segments");
    check(!p.query_spans == !p.key_spans && !p.query_spans == !span_table, "spans");
    if (span_table) {
        check(span_table->ndim() == 4, "span_table");
        p.span_queries = int64_t(span_table->shape(2));
        p.span_keys = int64_t(span_table->shape(3));
        const int64_t batches = span_table->shape(0) == 1 ? 1 : p.batch,
                      heads = span_table->shape(1) == 1 ? 1 : p.heads;
        p.span_table =
            view(*span_table, p.type == Type::f64 ? 8 : 4, batches, heads, p.span_queries, p.span_keys, "span_table");
        if (batches == 1) p.span_table.batch = 0;  // one for all
        if (heads == 1) p.span_table.head = 0;
        check(p.span_table.column == 1 || p.span_keys <= 1 || p.batch * p.heads == 0, "span_table");
        check(p.span_keys < int64_t{1} << 31, "span_table");
        if (p.batch * p.heads > 0)
            p.type == Type::f64 ? read_table<double>(p, d.span_sets) : read_table<float>(p, d.span_sets);
        check_labels(p.query_spans, p.batch * p.queries, p.span_queries, "query_spans");
        check_labels(p.key_spans, p.batch * p.keys, p.span_keys, "key_spans");
    }
    if (bias) p.bias = view(*bias, bytes_of(p.bias_type), p.batch, p.heads, p.queries, p.keys, "bias");
    if (mask) p.mask = view(*mask, 1, p.batch, p.heads, p.queries, p.keys, "mask");
    d.kept = std::move(kept);
    return d;
}

#define CLEARHEAD_NAME(name) #name,
const char* const statistics[] = {
    CLEARHEAD_PER_QUERY(CLEARHEAD_NAME) "output", "top", "received", "peak", "image", "groups"};

void rows(int threads, const Described& d, const Input& q, const Input& k, std::optional<Input> v, nb::dict answers) {
    RowJob job{d.job(threads, q, k, v)};
    Named named(job.problem, answers);
    check(v || !named.has("output"), "v");
    take_rows(job, named);
    job.received = named.sums("received", named.heads * job.problem.keys);
    named.done();
    work(attend, {job});
}

// `known`: the rows' states, the labels of groups, x; `answers`: what is to be filled.
void columns(int threads, const Described& d, const Input& q, const Input& k, nb::dict known, nb::dict answers) {
    ColumnJob job{d.job(threads, q, k, {})};
    Named named(job.problem, answers, known);
    take_sums(job, named);
    job.peak = named.sums("peak", named.heads * job.problem.keys);
    named.done();
    work(observe, {job});
}

// `known`: the rows' states, and what is known of the loss (base.Upstream); `answers`: the derivatives.
void gradients(int threads, const Described& d, const Input& q, const Input& k, std::optional<Input> v, nb::dict known,
               nb::dict answers) {
    GradientJob job{d.job(threads, q, k, v)};
    const Problem& p = job.problem;
    Named named(p, answers, known);
    job.states = take_states(named);
    job.by_row = named.per_query("rows");
    job.by_key = named.numbers("keys", named.heads * p.keys);
    job.entropy = named.per_query("entropy");
    job.distance = named.per_query("distance");
    check(named.has("rows") && named.has("q") && named.has("k"), "rows, and q's and k's derivatives");
    const auto output = named.read("output");
    check(!output == !v && output.has_value() == named.has("v"), "output, v and v's derivative");
    if (output) job.output = view(*output, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "output");
    job.q = named.statistics("q", named.rows * p.d_k);
    job.k = named.statistics("k", p.batch * p.kv_heads * p.keys * p.d_k);
    job.v = named.statistics("v", p.batch * p.v_heads * p.keys * p.d_v);
    if (const auto by_bias = named.write("bias")) {
        check(by_bias->ndim() == 4, "bias's derivative");
        const int64_t size[] = {p.batch, p.heads, p.queries, p.keys};
        int64_t* stride[] = {&job.bias_batch, &job.bias_head, &job.bias_row, &job.bias_column};
        for (int i = 0; i < 4; ++i) {
            const int64_t size_of_bias = int64_t(by_bias->shape(i));
            check(size_of_bias == size[i] || size_of_bias == 1, "bias's derivative");
            *stride[i] = size_of_bias == 1 ? 0 : by_bias->stride(i);
        }
        job.bias = named.statistics("bias", int64_t(by_bias->size()));
    }
    job.span_table = named.sums("span_table", named.heads * p.span_queries * p.span_keys);
    check(!named.has("span_table") || p.query_spans, "spans");
    named.done();
    work(differentiate, job);
}

View view_of_g(const Problem& p, const Input& g) {
    return view(g, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "g");
}

void others(int threads, const Described& d, const Input& q, const Input& k, const Input& v, const Input& g,
            nb::dict answers) {
    OtherJob job{{d.job(threads, q, k, v)}};
    job.g = view_of_g(job.problem, g);
    Named named(job.problem, answers);
    job.strongest = named.indices("strongest", named.rows);
    const auto one = [&](double*& to, const char* name) {
        to = named.sums(name, named.rows);
        check(named.has(name), name);
    };
    one(job.logit, "logit"), one(job.term, "term"), one(job.largest, "largest");
    one(job.log_sum, "log_sum"), one(job.others, "others");
    check(named.has("strongest"), "strongest");
    named.done();
    work(find_others, job);
}

// `known`: as for columns, and what each row must know for a cut; `answers`: what is to be filled.
void effects(int threads, const Described& d, const Input& q, const Input& k, const Input& v, const Input& g,
             nb::dict known, nb::dict answers) {
    EffectJob job{{{d.job(threads, q, k, v)}}};
    const Problem& p = job.problem;
    job.g = view_of_g(p, g);
    Named named(p, answers, known);
    take_sums(job, named);
    job.whole = named.per_query("whole");
    job.others = named.per_query("others");
    job.strongest = named.all<int64_t>("strongest", named.rows);
    const bool cuts = named.has("whole");
    check(cuts == named.has("others") && cuts == named.has("strongest"), "whole, others and strongest");
    job.by_query = named.sums("by_query", named.rows);
    job.top = named.lists("top_values", "top_indices", named.rows, job.top_values, job.top_indices);
    job.strongest_count =
        named.lists("strongest_values", "strongest_indices", named.heads, job.strongest_values, job.strongest_indices);
    if (named.write("product")) {
        check(!job.transposed, "one product");
        take_operand(job, named, p.keys);
        job.product = named.sums("product", named.rows * job.x_columns);
    }
    named.done();
    work(find_effects, job);
}

struct PackingFacts {
    const char* name;
    int64_t numbers, bytes;  // of a block
};
#define CLEARHEAD_PACKING_FACTS(name, numbers, bytes) {#name, numbers, bytes},
const PackingFacts packings[] = {CLEARHEAD_PACKINGS(CLEARHEAD_PACKING_FACTS)};

// out (tokens, rows) = x·Wᵀ, or where `back`, out (tokens, columns) = x·W; W's rows are those of `data` in this order.
void product(int threads, int packing, const Input& data, std::optional<Input> order, int64_t columns, const Input& x,
             const Taken& out, bool back) {
    check(threads > 0 && packing >= 0 && packing < int(std::size(packings)), "packing");
    const PackingFacts& facts = packings[packing];
    check(data.ndim() == 2 && data.itemsize() == 1 && columns >= 0 && columns % facts.numbers == 0, "columns");
    check(int64_t(data.shape(1)) == columns / facts.numbers * facts.bytes && data.stride(1) == 1, "data");
    const int64_t stored = int64_t(data.shape(0)), rows = order ? int64_t(order->size()) : stored;
    const int64_t* places = whole<int64_t>(order, rows, "order");
    for (int64_t i = 0; places && i < rows; ++i) check(places[i] >= 0 && places[i] < stored, "order");
    const int64_t width = back ? rows : columns, tokens = width ? int64_t(x.size()) / width : 0;
    check(x.itemsize() == 4 && out.itemsize() == 4, "x");
    whole<float>(x, tokens * width, "x");
    check(int64_t(out.size()) == tokens * (back ? columns : rows), "out");
    const ProductJob job{Packing(packing),
                         static_cast<const uint8_t*>(data.data()),
                         data.stride(0),
                         places,
                         rows,
                         columns,
                         tokens,
                         static_cast<const float*>(x.data()),
                         static_cast<float*>(out.data()),
                         back,
                         std::max<int64_t>(64, facts.numbers),
                         threads};
    if (tokens == 0 || rows == 0 || columns == 0) return;
    bool done;
    last_look = std::chrono::steady_clock::now();
    {
        Released released;
        done = multiply(job, interrupted);
    }
    if (!done) throw nb::python_error();
}

void norm(const Input& x, const Input& weight, double epsilon, const Taken& out) {
    const int64_t width = int64_t(weight.size()), count = int64_t(out.size());
    const float *from = whole<float>(x, count, "x"), *by = whole<float>(weight, width, "weight");
    check(out.itemsize() == 4 && width > 0 && count % width == 0, "out");
    for (int64_t i = 0; i < count; i += width)
        rms_norm(from + i, by, width, epsilon, static_cast<float*>(out.data()) + i);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);
    nb::class_<Described>(m, "Described");
#define CLEARHEAD_NUMBER_NAME(type, name) nb::arg(#name),
#define CLEARHEAD_ARRAY_NAME(type, name, count) nb::arg(#name).none(),
    m.def("describe", &describe, nb::kw_only(),
          CLEARHEAD_NUMBERS(CLEARHEAD_NUMBER_NAME) CLEARHEAD_ARRAYS(CLEARHEAD_ARRAY_NAME) "type"_a, "bias_type"_a,
          "span_table"_a.none(), "bias"_a.none(), "mask"_a.none(), "kept"_a);
    m.def(
        "use_team",
        [](uintptr_t parallel, uintptr_t size) {
            use_team(reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel),
                     reinterpret_cast<int (*)()>(size));
        },
        "parallel"_a, "size"_a);
    m.def("signature", &signature);
    m.def("output", &output);
    m.def("step", &step, "threads"_a, "described"_a, "q"_a, "k"_a, "v"_a, "keys"_a, "values"_a, "place"_a,
          "turns"_a.none());
    m.def("engine_named", &engine_named);
    m.def("rows", &rows, "threads"_a, "described"_a, "q"_a, "k"_a, "v"_a.none(), "answers"_a);
    m.def("ragged", &ragged, "threads"_a, "described"_a, "q"_a, "k"_a, "v"_a, "cu_seq_q"_a, "cu_seq_k"_a.none(),
          "seqused_k"_a.none(), "block_table"_a.none(), "answers"_a, "least_queries"_a, "most_keys"_a);
    m.def("columns", &columns, "threads"_a, "described"_a, "q"_a, "k"_a, "known"_a, "answers"_a);
    m.def("gradients", &gradients, "threads"_a, "described"_a, "q"_a, "k"_a, "v"_a.none(), "known"_a, "answers"_a);
    m.def("others", &others);
    m.def("effects", &effects);
    m.def("product", &product, "threads"_a, "packing"_a, "data"_a, "order"_a.none(), "columns"_a, "x"_a, "out"_a,
          "back"_a);
    m.def("norm", &norm);
    m.def("packings", [] {
        nb::list names;
        for (const PackingFacts& facts : packings) names.append(facts.name);
        return names;
    });
    m.def("statistics", [] {
        nb::list names;
        for (const char* name : statistics) names.append(name);
        return names;
    });
    m.def("level", [] { return level() ? level()->name : ""; });
    m.def("levels", [] { return choice().names.c_str(); });
    m.def("compiled_levels", [] { return choice().compiled.c_str(); });
    m.def("all_levels", [] { return choice().all.c_str(); });
}
