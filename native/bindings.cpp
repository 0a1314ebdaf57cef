// Python's door: arrays become pointers after their shapes are checked; no arithmetic.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <numeric>
#include <optional>
#include <vector>

#include "along.hpp"
#include "given_spans.hpp"
#include "named.hpp"
#include "repeated.hpp"
#include "threads.hpp"

using namespace clearhead;
using namespace nb::literals;

namespace {

// Named one by one in `m.def`: what Python forgets, or knows and this side does not, is a TypeError there.
Described describe(int type, int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t d_k,
                   int64_t row_start, int64_t row_step, int64_t column_start, int64_t column_step, int64_t left,
                   int64_t right, double scale, double softcap, const Given& query_offset,
                   std::optional<Given> kv_lengths, std::optional<Given> query_lengths,
                   std::optional<Given> query_segments, std::optional<Given> kv_segments,
                   std::optional<Given> alibi_slopes, std::optional<Given> sinks, std::optional<Given> scales,
                   std::optional<Given> query_spans, std::optional<Given> key_spans, std::optional<Given> span_table,
                   std::optional<Given> bias, int bias_type, std::optional<Given> mask, bool team, nb::object kept) {
    check(type >= 0 && type < 4 && bias_type >= 0 && bias_type < 4, "type");
    Described d;
    Problem& p = d.p;
    p.type = Type(type);
    p.bias_type = Type(bias_type);
    p.team = team;
    p.batch = batch;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.queries = queries;
    p.keys = keys;
    p.d_k = d_k;
    p.row_start = row_start;
    p.row_step = row_step;
    p.column_start = column_start;
    p.column_step = column_step;
    p.left = left;
    p.right = right;
    check(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, "heads");
    check(p.row_step != 0 && p.column_step != 0, "steps");
    p.scale = scale;
    p.softcap = softcap;
    p.offset = whole<int64_t>(query_offset, p.batch, "query_offset");
    p.kv_lengths = whole<int64_t>(kv_lengths, p.batch, "kv_lengths");
    p.query_lengths = whole<int64_t>(query_lengths, p.batch, "query_lengths");
    p.query_segments = whole<int64_t>(query_segments, p.batch * p.queries, "query_segments");
    p.kv_segments = whole<int64_t>(kv_segments, p.batch * p.keys, "kv_segments");
    check(!p.query_segments == !p.kv_segments, "segments");
    p.alibi_slopes = whole<double>(alibi_slopes, p.heads, "alibi_slopes");
    p.sinks = whole<double>(sinks, p.heads, "sinks");
    p.scales = whole<double>(scales, p.heads, "scales");
    p.query_spans = whole<int64_t>(query_spans, p.batch * p.queries, "query_spans");
    p.key_spans = whole<int64_t>(key_spans, p.batch * p.keys, "key_spans");
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
        for (int64_t i = 0; i < p.batch * p.queries; ++i) check(p.query_spans[i] < p.span_queries, "query_spans");
        for (int64_t j = 0; j < p.batch * p.keys; ++j) check(p.key_spans[j] < p.span_keys, "key_spans");
    }
    if (bias) p.bias = view(*bias, bytes_of(p.bias_type), p.batch, p.heads, p.queries, p.keys, "bias");
    if (mask) p.mask = view(*mask, 1, p.batch, p.heads, p.queries, p.keys, "mask");
    d.kept = std::move(kept);
    return d;
}

#define CLEARHEAD_NAME(name) #name,
const char* const statistics[] = {
    CLEARHEAD_PER_QUERY(CLEARHEAD_NAME) "output", "top", "received", "peak", "image", "groups"};

// `along`, here and below: the inputs' tangents, for an answer along a direction; of `rows`, its tangents too.
void rows(int threads, const Described& d, const Given& q, const Given& k, std::optional<Given> v, nb::dict answers,
          std::optional<nb::dict> along) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    RowAnswers& want = job.rows;
    Named named(answers);
    const int64_t n = p.batch * p.heads * p.queries, wide = p.type == Type::f64 ? 8 : 4;
    const auto output = named.write("output"), received = named.write("received");
    const auto weights = named.write("top_weights"), indices = named.write("top_indices");
    if (output || (along && v)) take_values(p, v);
    want.keep_float32 = output && bytes_of(p.type) == 2 && output->itemsize() == 4;
    want.output = room(output, n * p.d_v, want.keep_float32 ? 4 : bytes_of(p.type), "output");
#define CLEARHEAD_TAKE(name) want.name = room(named.write(#name), n, wide, #name);
    CLEARHEAD_PER_QUERY(CLEARHEAD_TAKE)
    want.top = weights ? int64_t(weights->shape(weights->ndim() - 1)) : 0;
    want.top_weights = room(weights, n * want.top, wide, "top_weights");
    want.top_indices = static_cast<int64_t*>(room(indices, n * want.top, 8, "top_indices"));
    check(!weights == !indices && (!weights || want.top > 0), "top");
    want.received = static_cast<double*>(room(received, p.batch * p.heads * p.keys, 8, "received"));
    check(!received || answers.contains("logsumexp"), "received needs logsumexp");
    named.done();
    if (along) take_along(job, *along);
    work(attend, job, threads);
}

// `known`: the log-sum-exp, the labels of groups, x; `answers`: what is to be filled.
void columns(int threads, const Described& d, const Given& q, const Given& k, nb::dict known, nb::dict answers,
             std::optional<nb::dict> along) {
    Job job;
    job.problem = d.with(q, k);
    const Problem& p = job.problem;
    Named inputs(known), named(answers);
    take_columns(job, inputs, named);
    if (const auto image = named.write("image")) {
        take_picture(job.columns, *image);
        job.columns.image =
            static_cast<double*>(room(image, p.batch * p.heads * job.columns.height * job.columns.width, 8, "image"));
    }
    job.columns.peak = static_cast<double*>(room(named.write("peak"), p.batch * p.heads * p.keys, 8, "peak"));
    inputs.done();
    named.done();
    if (along) take_along(job, *along);
    check(!along || job.along.kept || p.batch * p.heads * p.queries == 0, "the tangent of the log-sum-exp");
    work(observe, job, threads);
}

// `known`: the log-sum-exp, v, and what is known of the loss (base.Upstream); `answers`: the derivatives.
void gradients(int threads, const Described& d, const Given& q, const Given& k, nb::dict known, nb::dict answers,
               std::optional<nb::dict> along) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    GradientAnswers& want = job.gradients;
    Named inputs(known), named(answers);
    const int64_t wide = p.type == Type::f64 ? 8 : 4, heads = p.batch * p.heads;
    want.logsumexp = per_query(inputs, p, "logsumexp");
    want.rows = per_query(inputs, p, "rows");
    want.keys = numbers(inputs, p, "keys", heads * p.keys);
    want.entropy = per_query(inputs, p, "entropy");
    want.distance = per_query(inputs, p, "distance");
    want.diagonal = per_query(inputs, p, "diagonal");
    check(along || !want.diagonal, "diagonal");
    check(known.contains("logsumexp") && known.contains("rows"), "logsumexp and rows");
    const auto output = inputs.read("output"), v = inputs.read("v");
    const auto by_v = named.write("v");
    check(!output == !v && !output == !by_v, "output, v and v's derivative");
    if (output) {
        take_values(p, v);
        want.output = view(*output, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "output");
        want.v = room(by_v, p.batch * p.v_heads * p.keys * p.d_v, wide, "v's derivative");
    }
    want.q = room(named.write("q"), heads * p.queries * p.d_k, wide, "q's derivative");
    want.k = room(named.write("k"), p.batch * p.kv_heads * p.keys * p.d_k, wide, "k's derivative");
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
        want.bias = room(by_bias, int64_t(by_bias->size()), wide, "bias's derivative");
    }
    if (const auto by_table = named.write("span_table")) {
        check(bool(p.query_spans), "spans");
        want.span_table = static_cast<double*>(room(by_table, heads * p.span_queries * p.span_keys, 8, "the table's"));
    }
    inputs.done();
    named.done();
    if (along) take_along(job, *along);
    check(!along || (!want.keys && job.along.kept && job.along.rows), "gradients along a direction");
    work(differentiate, job, threads);
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
float read_all(int threads, const Given& x) {
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
    m.def("describe", &describe, nb::kw_only(), "type"_a, "batch"_a, "heads"_a, "kv_heads"_a, "queries"_a, "keys"_a,
          "d_k"_a, "row_start"_a, "row_step"_a, "column_start"_a, "column_step"_a, "left"_a, "right"_a, "scale"_a,
          "softcap"_a, "query_offset"_a, "kv_lengths"_a.none(), "query_lengths"_a.none(), "query_segments"_a.none(),
          "kv_segments"_a.none(), "alibi_slopes"_a.none(), "sinks"_a.none(), "scales"_a.none(), "query_spans"_a.none(),
          "key_spans"_a.none(), "span_table"_a.none(), "bias"_a.none(), "bias_type"_a, "mask"_a.none(), "team"_a,
          "kept"_a);
    m.def(
        "use_team",
        [](uintptr_t parallel, uintptr_t size) {
            use_team(reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel),
                     reinterpret_cast<int (*)()>(size));
        },
        "parallel"_a, "size"_a);
    nb::class_<Repeatable>(m, "Repeatable")
        .def(nb::init<nb::object>(), "tensor_type"_a.none())
        .def("add", &Repeatable::add, "q"_a, "k"_a, "v"_a, "described"_a, "any_keys"_a)
        .def("__call__", &Repeatable::operator(), "q"_a, "k"_a, "v"_a, "spans"_a.none(), "threads"_a)
        .def("step", &Repeatable::step, "q"_a, "k"_a, "v"_a, "keys"_a, "values"_a, "place"_a, "turns"_a.none(),
             "threads"_a);
    m.def("engine_named", &engine_named);
    const auto none = nb::none();
    m.def("rows", &rows, "threads"_a, "described"_a, "q"_a, "k"_a, "v"_a.none(), "answers"_a, "along"_a = none);
    m.def("columns", &columns, "threads"_a, "described"_a, "q"_a, "k"_a, "known"_a, "answers"_a, "along"_a = none);
    m.def("gradients", &gradients, "threads"_a, "described"_a, "q"_a, "k"_a, "known"_a, "answers"_a, "along"_a = none);
    bind_effects(m);
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
