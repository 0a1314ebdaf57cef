// Python's door: arrays become pointers after their shapes are checked; no arithmetic.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "binding.hpp"
#include "given_spans.hpp"
#include "repeated.hpp"
#include "threads.hpp"

using namespace clearhead;
using namespace nb::literals;

namespace {

// What Python gives by name. `done` refuses a name that nobody asked for, so that no answer is forgotten.
class Named {
  public:
    explicit Named(const nb::dict& given) {
        for (auto [name, value] : given) items.push_back({nb::cast<const char*>(name), value});
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

// Reads v (batch, heads, keys, d_v) into the problem.
void take_values(Problem& p, const std::optional<Given>& v) {
    check(v && v->ndim() == 4, "v");
    p.v_heads = int64_t(v->shape(1));
    p.d_v = int64_t(v->shape(3));
    check(p.v_heads > 0 ? p.heads % p.v_heads == 0 : p.heads == 0, "v's heads");
    p.v = view(*v, bytes_of(p.type), p.batch, p.v_heads, p.keys, p.d_v, "v");
}

void rows(int threads, const Described& d, const Given& q, const Given& k, std::optional<Given> v, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    RowAnswers& want = job.rows;
    Named named(answers);
    const int64_t n = p.batch * p.heads * p.queries, wide = p.type == Type::f64 ? 8 : 4;
    const auto output = named.write("output"), received = named.write("received");
    const auto weights = named.write("top_weights"), indices = named.write("top_indices");
    if (output) take_values(p, v);
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
    work(attend, job, threads);
}

// So many numbers in the statistics' type; null where they are not given.
const void* numbers(Named& given, const Problem& p, const char* name, int64_t count) {
    const auto x = given.read(name);
    return p.type == Type::f64 ? static_cast<const void*>(whole<double>(x, count, name))
                               : static_cast<const void*>(whole<float>(x, count, name));
}

const void* per_query(Named& given, const Problem& p, const char* name) {
    return numbers(given, p, name, p.batch * p.heads * p.queries);
}

// The right-hand side x of a product, with so many rows.
void take_operand(ColumnAnswers& want, Named& given, const Problem& p, int64_t rows) {
    const auto x = given.read("x");
    const int x_type = given.number("x_type");
    check(x && x->ndim() == 4 && x_type >= 0 && x_type < 4, "x");
    want.x_heads = int64_t(x->shape(1));
    check(want.x_heads > 0 ? p.heads % want.x_heads == 0 : p.heads == 0, "x's heads");
    want.x_type = Type(x_type);
    want.x_columns = int64_t(x->shape(3));
    want.x = view(*x, bytes_of(want.x_type), p.batch, want.x_heads, rows, want.x_columns, "x");
}

void take_picture(ColumnAnswers& want, const Taken& image) {
    check(image.ndim() == 4 && image.shape(2) > 0 && image.shape(3) > 0, "image");
    want.height = int64_t(image.shape(2));
    want.width = int64_t(image.shape(3));
}

// What the column pass and the pass over effects both need and answer: the log-sum-exp, the labels of groups, x.
void take_columns(Job& job, Named& given, Named& named) {
    const Problem& p = job.problem;
    ColumnAnswers& want = job.columns;
    const int64_t heads = p.batch * p.heads, wide = p.type == Type::f64 ? 8 : 4;
    want.logsumexp = per_query(given, p, "logsumexp");
    check(want.logsumexp || heads * p.queries == 0, "logsumexp");
    want.received = static_cast<double*>(room(named.write("received"), heads * p.keys, 8, "received"));
    want.query_labels = whole<int64_t>(given.read("query_labels"), p.batch * p.queries, "query labels");
    want.key_labels = whole<int64_t>(given.read("key_labels"), p.batch * p.keys, "key labels");
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
        take_operand(want, given, p, p.queries);
        want.transposed = room(transposed, heads * p.keys * want.x_columns, wide, "transposed");
    }
}

// `known`: the log-sum-exp, the labels of groups, x; `answers`: what is to be filled.
void columns(int threads, const Described& d, const Given& q, const Given& k, nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    const Problem& p = job.problem;
    Named given(known), named(answers);
    take_columns(job, given, named);
    if (const auto image = named.write("image")) {
        take_picture(job.columns, *image);
        job.columns.image =
            static_cast<double*>(room(image, p.batch * p.heads * job.columns.height * job.columns.width, 8, "image"));
    }
    job.columns.peak = static_cast<double*>(room(named.write("peak"), p.batch * p.heads * p.keys, 8, "peak"));
    given.done();
    named.done();
    work(observe, job, threads);
}

// The values and the derivatives g of edges.
void take_edges(Job& job, const Given& v, const Given& g) {
    Problem& p = job.problem;
    take_values(p, v);
    job.effects.g = view(g, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "g");
}

void others(int threads, const Described& d, const Given& q, const Given& k, const Given& v, const Given& g,
            nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    take_edges(job, v, g);
    Named named(answers);
    const int64_t count = job.problem.batch * job.problem.heads * job.problem.queries;
    const auto take = [&](const char* name) {
        check(answers.contains(name), name);
        return room(named.write(name), count, 8, name);
    };
    OtherAnswers& want = job.others;
    want.strongest = static_cast<int64_t*>(take("strongest"));
    want.logit = static_cast<double*>(take("logit"));
    want.term = static_cast<double*>(take("term"));
    want.logsumexp = static_cast<double*>(take("logsumexp"));
    want.others = static_cast<double*>(take("others"));
    named.done();
    work(find_others, job, threads);
}

// `known`: as for columns, and what each row must know for a cut; `answers`: what is to be filled.
void effects(int threads, const Described& d, const Given& q, const Given& k, const Given& v, const Given& g,
             nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    take_edges(job, v, g);
    const Problem& p = job.problem;
    EffectAnswers& want = job.effects;
    ColumnAnswers& sums = job.columns;
    Named given(known), named(answers);
    take_columns(job, given, named);
    const int64_t heads = p.batch * p.heads, n = heads * p.queries, wide = p.type == Type::f64 ? 8 : 4;
    want.whole = per_query(given, p, "whole");
    want.others = per_query(given, p, "others");
    want.strongest = whole<int64_t>(given.read("strongest"), n, "strongest");
    const bool cuts = known.contains("whole");
    check(cuts == known.contains("others") && cuts == known.contains("strongest"), "whole, others and strongest");
    want.by_query = static_cast<double*>(room(named.write("by_query"), n, 8, "by_query"));
    const auto values = named.write("top_values"), indices = named.write("top_indices");
    want.top = values ? int64_t(values->shape(values->ndim() - 1)) : 0;
    want.top_values = room(values, n * want.top, wide, "top_values");
    want.top_indices = static_cast<int64_t*>(room(indices, n * want.top, 8, "top_indices"));
    check(!values == !indices && (!values || want.top > 0), "top");
    if (values) {
        const int order = given.number("order");
        check(order >= 0 && order < 3, "order");
        want.order = Order(order);
    }
    const auto strongest = named.write("strongest_values"), places = named.write("strongest_indices");
    want.strongest_count = strongest ? int64_t(strongest->shape(strongest->ndim() - 1)) : 0;
    want.strongest_values = room(strongest, heads * want.strongest_count, wide, "strongest_values");
    want.strongest_indices = static_cast<int64_t*>(room(places, heads * want.strongest_count, 8, "strongest_indices"));
    check(!strongest == !places && (!strongest || want.strongest_count > 0), "strongest");
    const auto mean = named.write("image_mean"), largest = named.write("image_largest");
    if (mean) take_picture(sums, *mean);
    want.image_mean = room(mean, heads * sums.height * sums.width, wide, "image_mean");
    want.image_largest = room(largest, heads * sums.height * sums.width, wide, "image_largest");
    check(!mean == !largest, "a picture's two parts");
    if (const auto product = named.write("product")) {
        check(!sums.transposed, "one product");
        take_operand(sums, given, p, p.keys);
        want.product = static_cast<double*>(room(product, n * sums.x_columns, 8, "product"));
    }
    given.done();
    named.done();
    work(find_effects, job, threads);
}

// `known`: the log-sum-exp, v, and what is known of the loss (base.Upstream); `answers`: the derivatives.
void gradients(int threads, const Described& d, const Given& q, const Given& k, nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    GradientAnswers& want = job.gradients;
    Named given(known), named(answers);
    const int64_t wide = p.type == Type::f64 ? 8 : 4, heads = p.batch * p.heads;
    want.logsumexp = per_query(given, p, "logsumexp");
    want.rows = per_query(given, p, "rows");
    want.keys = numbers(given, p, "keys", heads * p.keys);
    want.entropy = per_query(given, p, "entropy");
    want.distance = per_query(given, p, "distance");
    check(known.contains("logsumexp") && known.contains("rows"), "logsumexp and rows");
    const auto output = given.read("output"), v = given.read("v");
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
            const int64_t own = int64_t(by_bias->shape(i));
            check(own == size[i] || own == 1, "bias's derivative");
            *stride[i] = own == 1 ? 0 : by_bias->stride(i);
        }
        want.bias = room(by_bias, int64_t(by_bias->size()), wide, "bias's derivative");
    }
    if (const auto by_table = named.write("span_table")) {
        check(bool(p.query_spans), "spans");
        want.span_table = static_cast<double*>(room(by_table, heads * p.span_queries * p.span_keys, 8, "the table's"));
    }
    given.done();
    named.done();
    work(differentiate, job, threads);
}

// Float multiply-adds on so many threads at once, `rounds` on each; returns how many were done.
int64_t exercise(int threads, int64_t rounds) {
    check(level() && threads > 0 && rounds > 0, "rounds");
    struct Context {
        int64_t rounds;
        std::vector<int64_t> done;
    } context{rounds, std::vector<int64_t>(threads)};
    const auto body = [](const void* given, int64_t task, void*) {
        Context& c = *static_cast<Context*>(const_cast<void*>(given));
        float seed = 0.5f;
        c.done[task] = level()->exercise(c.rounds, &seed);
    };
    nb::gil_scoped_release released;
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
    const auto body = [](const void* given, int64_t task, void*) {
        Context& c = *static_cast<Context*>(const_cast<void*>(given));
        c.best[task] = level()->read(c.from + task * piece, piece);
    };
    {
        nb::gil_scoped_release released;
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
    m.def("rows", &rows);
    m.def("columns", &columns);
    m.def("gradients", &gradients);
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
}
