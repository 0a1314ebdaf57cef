// Python's door: arrays become pointers after their shapes are checked; no arithmetic.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
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
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    RowAnswers& want = job.rows;
    Named named(answers, p);
    const int64_t n = p.batch * p.heads * p.queries;
    const auto output = named.write("output");
    if (output) take_values(p, v);
    want.keep_float32 = output && bytes_of(p.type) == 2 && output->itemsize() == 4;
    want.output = room(output, n * p.d_v, want.keep_float32 ? 4 : bytes_of(p.type), "output");
#define CLEARHEAD_TAKE(name) want.name = named.statistics(#name, n);
    CLEARHEAD_PER_QUERY(CLEARHEAD_TAKE)
    check(!want.largest == !want.log_sum, "largest and log_sum");
    want.top = named.lists("top_weights", "top_indices", n, want.top_weights, want.top_indices);
    want.received = named.sums("received", p.batch * p.heads * p.keys);
    check(!answers.contains("received") || answers.contains("largest"), "received needs the rows' states");
    named.done();
    work(attend, {job}, threads);
}

// `known`: the rows' states, the labels of groups, x; `answers`: what is to be filled.
void columns(int threads, const Described& d, const Input& q, const Input& k, nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    const Problem& p = job.problem;
    Named inputs(known, p), named(answers, p);
    ColumnAnswers& want = job.columns;
    take_columns(want, inputs, named);
    if (const auto image = named.write("image")) take_picture(want, *image);
    want.image = named.sums("image", p.batch * p.heads * want.height * want.width);
    want.peak = named.sums("peak", p.batch * p.heads * p.keys);
    inputs.done();
    named.done();
    work(observe, {job}, threads);
}

// `known`: the rows' states, v, and what is known of the loss (base.Upstream); `answers`: the derivatives.
void gradients(int threads, const Described& d, const Input& q, const Input& k, nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    GradientAnswers& want = job.gradients;
    Named inputs(known, p), named(answers, p);
    const int64_t heads = p.batch * p.heads;
    want.states = take_states(inputs);
    want.rows = inputs.per_query("rows");
    want.keys = inputs.numbers("keys", heads * p.keys);
    want.entropy = inputs.per_query("entropy");
    want.distance = inputs.per_query("distance");
    check(known.contains("rows"), "rows");
    const auto output = inputs.read("output"), v = inputs.read("v");
    check(!output == !v && output.has_value() == answers.contains("v"), "output, v and v's derivative");
    if (output) {
        take_values(p, v);
        want.output = view(*output, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "output");
        want.v = named.statistics("v", p.batch * p.v_heads * p.keys * p.d_v);
    }
    want.q = named.statistics("q", heads * p.queries * p.d_k);
    want.k = named.statistics("k", p.batch * p.kv_heads * p.keys * p.d_k);
    check(answers.contains("q") && answers.contains("k"), "q's and k's derivatives");
    if (const auto by_bias = named.write("bias")) {
        check(by_bias->ndim() == 4, "bias's derivative");
        const int64_t size[] = {p.batch, p.heads, p.queries, p.keys};
        int64_t* stride[] = {&want.bias_batch, &want.bias_head, &want.bias_row, &want.bias_column};
        for (int i = 0; i < 4; ++i) {
            const int64_t size_of_bias = int64_t(by_bias->shape(i));
            check(size_of_bias == size[i] || size_of_bias == 1, "bias's derivative");
            *stride[i] = size_of_bias == 1 ? 0 : by_bias->stride(i);
        }
        want.bias = named.statistics("bias", int64_t(by_bias->size()));
    }
    want.span_table = named.sums("span_table", heads * p.span_queries * p.span_keys);
    check(!answers.contains("span_table") || p.query_spans, "spans");
    inputs.done();
    named.done();
    work(differentiate, {job}, threads);
}

// The values and the derivatives g of edges.
void take_edges(Job& job, const Input& v, const Input& g) {
    Problem& p = job.problem;
    take_values(p, v);
    job.effects.g = view(g, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "g");
}

void others(int threads, const Described& d, const Input& q, const Input& k, const Input& v, const Input& g,
            nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    take_edges(job, v, g);
    Named named(answers, job.problem);
    const int64_t count = job.problem.batch * job.problem.heads * job.problem.queries;
    for (const char* name : {"strongest", "logit", "term", "largest", "log_sum", "others"})
        check(answers.contains(name), name);
    job.others = {named.indices("strongest", count), named.sums("logit", count),   named.sums("term", count),
                  named.sums("largest", count),      named.sums("log_sum", count), named.sums("others", count)};
    named.done();
    work(find_others, {job}, threads);
}

// `known`: as for columns, and what each row must know for a cut; `answers`: what is to be filled.
void effects(int threads, const Described& d, const Input& q, const Input& k, const Input& v, const Input& g,
             nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    take_edges(job, v, g);
    const Problem& p = job.problem;
    EffectAnswers& want = job.effects;
    ColumnAnswers& sums = job.columns;
    Named inputs(known, p), named(answers, p);
    take_columns(sums, inputs, named);
    const int64_t heads = p.batch * p.heads, n = heads * p.queries;
    want.whole = inputs.per_query("whole");
    want.others = inputs.per_query("others");
    want.strongest = inputs.all<int64_t>("strongest", n);
    const bool cuts = known.contains("whole");
    check(cuts == known.contains("others") && cuts == known.contains("strongest"), "whole, others and strongest");
    want.by_query = named.sums("by_query", n);
    want.top = named.lists("top_values", "top_indices", n, want.top_values, want.top_indices);
    if (want.top) {
        const int order = inputs.number("order");
        check(order >= 0 && order < 3, "order");
        want.order = Order(order);
    }
    want.strongest_count =
        named.lists("strongest_values", "strongest_indices", heads, want.strongest_values, want.strongest_indices);
    if (const auto mean = named.write("image_mean")) take_picture(sums, *mean);
    want.image_mean = named.statistics("image_mean", heads * sums.height * sums.width);
    want.image_largest = named.statistics("image_largest", heads * sums.height * sums.width);
    check(answers.contains("image_mean") == answers.contains("image_largest"), "a picture's two parts");
    if (named.write("product")) {
        check(!sums.transposed, "one product");
        take_operand(sums, inputs, p.keys);
        want.product = named.sums("product", n * sums.x_columns);
    }
    inputs.done();
    named.done();
    work(find_effects, {job}, threads);
}

// Float multiply-adds on so many threads at once, `rounds` on each; returns how many were done.
int64_t exercise(int threads, int64_t rounds) {
    check(level() && threads > 0 && rounds > 0, "rounds");
    struct Context {
        int64_t rounds;
        std::vector<int64_t> done;
    } context{rounds, std::vector<int64_t>(threads)};
    const auto body = [](const void* inputs, int64_t task, void*) {
        Context& c = *static_cast<Context*>(const_cast<void*>(inputs));
        float seed = 0.5f;
        c.done[task] = level()->f32.exercise(c.rounds, &seed);
    };
    Released released;
    run({threads, threads, body, &context, 0, nullptr});
    return std::accumulate(context.done.begin(), context.done.end(), int64_t{0});
}

// Reads all of an array of floats with so many threads, a mebibyte at a time; returns the largest.
float read_all(int threads, const Input& x) {
    constexpr int64_t piece = 1 << 18;
    struct Context {
        const float* from;
        float best[4096];
    } context{static_cast<const float*>(x.data()), {}};
    const int64_t count = int64_t(x.size()) / piece;
    check(level() && x.itemsize() == 4 && int64_t(x.size()) % piece == 0 && count <= 4096 &&
              whole<float>(x, x.size(), "x"),
          "x");
    const auto body = [](const void* inputs, int64_t task, void*) {
        Context& c = *static_cast<Context*>(const_cast<void*>(inputs));
        c.best[task] = level()->f32.read(c.from + task * piece, piece);
    };
    {
        Released released;
        run({count, threads, body, &context, 0, nullptr});
    }
    float best = 0;
    for (int64_t i = 0; i < count; ++i) best = context.best[i] > best ? context.best[i] : best;
    return best;
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
    m.def("gradients", &gradients, "threads"_a, "described"_a, "q"_a, "k"_a, "known"_a, "answers"_a);
    m.def("others", &others);
    m.def("effects", &effects);
    m.def("exercise", &exercise);
    m.def("read", &read_all);
    m.def("statistics", [] {
        nb::list names;
        for (const char* name : statistics) names.append(name);
        return names;
    });
    m.def("level", [] { return level() ? level()->name : ""; });
    m.def("levels", &level_names);
    m.def("compiled_levels", &compiled_names);
    m.def("all_levels", &all_names);
}
