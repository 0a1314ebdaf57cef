// Python's door: arrays become pointers after their shapes are checked; no arithmetic.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <chrono>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "dispatch.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace clearhead;

namespace {

using Given = nb::ndarray<nb::ro, nb::device::cpu>;
using Taken = nb::ndarray<nb::device::cpu, nb::c_contig>;

void check(bool fine, const char* what) {
    if (!fine) throw std::invalid_argument(what);
}

int64_t bytes_of(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2; }

View view(const Given& x, int64_t bytes, int64_t b, int64_t h, int64_t r, int64_t c, const char* what) {
    check(x.ndim() == 4 && x.itemsize() == size_t(bytes), what);
    check(int64_t(x.shape(0)) == b && int64_t(x.shape(1)) == h && int64_t(x.shape(2)) == r && int64_t(x.shape(3)) == c, what);
    return {x.data(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

template <class T> const T* whole(const std::optional<Given>& x, int64_t count, const char* what) {
    if (!x) return nullptr;
    check(x->size() == size_t(count) && x->itemsize() == sizeof(T), what);
    int64_t expected = 1;
    if (count) for (size_t i = x->ndim(); i-- > 0; expected *= int64_t(x->shape(i))) check(x->shape(i) == 1 || x->stride(i) == expected, what);
    return static_cast<const T*>(x->data());
}

void* room(const std::optional<Taken>& x, int64_t count, int64_t bytes, const char* what) {
    if (!x) return nullptr;
    check(x->size() == size_t(count) && x->itemsize() == size_t(bytes), what);
    return x->data();
}

// The shapes and the score rules; keeps their arrays alive.
struct Described {
    Problem p{};
    nb::object kept;

    Problem with(const Given& q, const Given& k) const {
        Problem whole = p;
        whole.q = view(q, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_k, "q");
        whole.k = view(k, bytes_of(p.type), p.batch, p.kv_heads, p.keys, p.d_k, "k");
        return whole;
    }
};

Described describe(int type, nb::tuple sizes, nb::tuple places, double scale, double softcap, const Given& offset, std::optional<Given> kv_lengths, std::optional<Given> query_lengths,
                   std::optional<Given> query_segments, std::optional<Given> kv_segments, std::optional<Given> alibi_slopes,
                   std::optional<Given> sinks, std::optional<Given> bias, int bias_type, std::optional<Given> mask, nb::object kept) {
    check(type >= 0 && type < 4 && bias_type >= 0 && bias_type < 4, "type");
    Described d;
    Problem& p = d.p;
    p.type = Type(type);
    p.bias_type = Type(bias_type);
    int64_t* size[] = {&p.batch, &p.heads, &p.kv_heads, &p.queries, &p.keys, &p.d_k};
    check(sizes.size() == 6 && places.size() == 6, "sizes");
    for (int i = 0; i < 6; ++i) *size[i] = nb::cast<int64_t>(sizes[i]);
    int64_t* place[] = {&p.row_start, &p.row_step, &p.column_start, &p.column_step, &p.left, &p.right};
    for (int i = 0; i < 6; ++i) *place[i] = nb::cast<int64_t>(places[i]);
    check(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, "heads");
    check(p.row_step != 0 && p.column_step != 0, "steps");
    p.scale = scale;
    p.softcap = softcap;
    p.offset = whole<int64_t>(offset, p.batch, "query_offset");
    p.kv_lengths = whole<int64_t>(kv_lengths, p.batch, "kv_lengths");
    p.query_lengths = whole<int64_t>(query_lengths, p.batch, "query_lengths");
    p.query_segments = whole<int64_t>(query_segments, p.batch * p.queries, "query_segments");
    p.kv_segments = whole<int64_t>(kv_segments, p.batch * p.keys, "kv_segments");
    check(!p.query_segments == !p.kv_segments, "segments");
    p.alibi_slopes = whole<double>(alibi_slopes, p.heads, "alibi_slopes");
    p.sinks = whole<double>(sinks, p.heads, "sinks");
    if (bias) p.bias = view(*bias, bytes_of(p.bias_type), p.batch, p.heads, p.queries, p.keys, "bias");
    if (mask) p.mask = view(*mask, 1, p.batch, p.heads, p.queries, p.keys, "mask");
    d.kept = std::move(kept);
    return d;
}

// Looks for Ctrl-C, some twenty times a second, without holding the interpreter in between.
thread_local std::chrono::steady_clock::time_point last_look;

bool interrupted() {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_look < std::chrono::milliseconds(50)) return false;
    last_look = now;
    nb::gil_scoped_acquire held;
    return PyErr_CheckSignals() != 0;
}

// Indices and byte counts are 64 bits wide. A broadcast axis may claim any size; no memory holds what these would need.
void check_sizes(const Job& job) {
    const Problem& p = job.problem;
    const double heads = double(p.batch) * double(p.heads), queries = double(p.queries), keys = double(p.keys);
    const double width = double(p.d_k) + double(p.d_v) + double(job.rows.top) + double(job.columns.g_columns) + 64;
    if (heads * (queries + keys) * width > 0x1p52 || heads * queries * keys > 0x1p61) throw std::bad_alloc();
}

void work(bool (*how)(Job, bool (*)()), Job& job, int threads) {
    check(threads > 0, "threads");
    check_sizes(job);
    job.threads = threads;
    bool done;
    last_look = std::chrono::steady_clock::now();
    {
        nb::gil_scoped_release released;
        done = how(job, interrupted);
    }
    if (!done) throw nb::python_error();
}

void rows(int threads, const Described& d, const Given& q, const Given& k, std::optional<Given> v, std::optional<Taken> output, std::optional<Taken> logsumexp,
          std::optional<Taken> max_logit, std::optional<Taken> entropy, std::optional<Taken> distance,
          std::optional<Taken> top_weights, std::optional<Taken> top_indices, int64_t top, std::optional<Taken> received) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    const int64_t n = p.batch * p.heads * p.queries, wide = p.type == Type::f64 ? 8 : 4;
    if (output) {
        check(v && v->ndim() == 4, "v");
        p.v_heads = int64_t(v->shape(1));
        p.d_v = int64_t(v->shape(3));
        check(p.v_heads > 0 ? p.heads % p.v_heads == 0 : p.heads == 0, "v's heads");
        p.v = view(*v, bytes_of(p.type), p.batch, p.v_heads, p.keys, p.d_v, "v");
    }
    check(top >= 0 && !top == !top_weights && !top == !top_indices, "top");
    const bool unrounded = output && bytes_of(p.type) == 2 && output->itemsize() == 4;
    job.rows = {room(output, n * p.d_v, unrounded ? 4 : bytes_of(p.type), "output"),
                room(logsumexp, n, wide, "logsumexp"),
                room(max_logit, n, wide, "max_logit"),
                room(entropy, n, wide, "entropy"),
                room(distance, n, wide, "distance"),
                room(top_weights, n * top, wide, "top_weights"),
                static_cast<int64_t*>(room(top_indices, n * top, 8, "top_indices")),
                top,
                static_cast<double*>(room(received, p.batch * p.heads * p.keys, 8, "received")),
                unrounded};
    check(!received || logsumexp, "received needs logsumexp");
    work(attend, job, threads);
}

void columns(int threads, const Described& d, const Given& q, const Given& k, const Given& logsumexp, std::optional<Taken> received, std::optional<Taken> peak,
             std::optional<Taken> image, int64_t height, int64_t width, std::optional<Taken> groups,
             std::optional<Given> query_labels, std::optional<Given> key_labels, int64_t query_groups, int64_t key_groups,
             std::optional<Taken> weights, std::optional<Taken> transposed, std::optional<Given> g, int g_type) {
    Job job;
    job.problem = d.with(q, k);
    const Problem& p = job.problem;
    ColumnAnswers& want = job.columns;
    const int64_t heads = p.batch * p.heads, wide = p.type == Type::f64 ? 8 : 4;
    want.logsumexp = wide == 8 ? static_cast<const void*>(whole<double>(logsumexp, heads * p.queries, "logsumexp"))
                               : static_cast<const void*>(whole<float>(logsumexp, heads * p.queries, "logsumexp"));
    want.received = static_cast<double*>(room(received, heads * p.keys, 8, "received"));
    want.peak = static_cast<double*>(room(peak, heads * p.keys, 8, "peak"));
    check(!image || (height > 0 && width > 0), "image");
    want.image = static_cast<double*>(room(image, heads * height * width, 8, "image"));
    want.height = height;
    want.width = width;
    want.groups = static_cast<double*>(room(groups, heads * query_groups * key_groups, 8, "groups"));
    want.query_labels = whole<int64_t>(query_labels, p.batch * p.queries, "query labels");
    want.key_labels = whole<int64_t>(key_labels, p.batch * p.keys, "key labels");
    want.query_groups = query_groups;
    want.key_groups = key_groups;
    if (groups) {
        check(want.query_labels && want.key_labels, "labels");
        for (int64_t i = 0; i < p.batch * p.queries; ++i) check(want.query_labels[i] < query_groups, "query labels");
        for (int64_t j = 0; j < p.batch * p.keys; ++j) check(want.key_labels[j] < key_groups, "key labels");
    }
    want.weights = room(weights, heads * p.queries * p.keys, wide, "weights");
    if (transposed) {
        check(g && g->ndim() == 4 && g_type >= 0 && g_type < 4, "g");
        const int64_t g_heads = int64_t(g->shape(1));
        check(g_heads == 1 || g_heads == p.heads, "g's heads");
        want.g_type = Type(g_type);
        want.g_columns = int64_t(g->shape(3));
        want.g = view(*g, bytes_of(want.g_type), p.batch, g_heads, p.queries, want.g_columns, "g");
        if (g_heads == 1) want.g.head = 0;
        want.transposed = room(transposed, heads * p.keys * want.g_columns, wide, "transposed");
    }
    work(observe, job, threads);
}

void gradients(int threads, const Described& d, const Given& q, const Given& k, std::optional<Given> v, std::optional<Given> output, const Given& logsumexp,
               const Given& rows, std::optional<Given> keys, std::optional<Given> entropy,
               std::optional<Given> distance, const Taken& by_q, const Taken& by_k, std::optional<Taken> by_v,
               std::optional<Taken> by_bias) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    GradientAnswers& want = job.gradients;
    const int64_t wide = p.type == Type::f64 ? 8 : 4, heads = p.batch * p.heads;
    const auto given = [&](const std::optional<Given>& x, int64_t count, const char* what) {
        return wide == 8 ? static_cast<const void*>(whole<double>(x, count, what)) : static_cast<const void*>(whole<float>(x, count, what));
    };
    want.logsumexp = given(logsumexp, heads * p.queries, "logsumexp");
    want.rows = given(rows, heads * p.queries, "rows");
    want.keys = given(keys, heads * p.keys, "keys");
    want.entropy = given(entropy, heads * p.queries, "entropy");
    want.distance = given(distance, heads * p.queries, "distance");
    check(!output == !v && !output == !by_v, "output, v and v's derivative");
    if (output) {
        check(v->ndim() == 4, "v");
        p.v_heads = int64_t(v->shape(1));
        p.d_v = int64_t(v->shape(3));
        check(p.v_heads > 0 ? p.heads % p.v_heads == 0 : p.heads == 0, "v's heads");
        p.v = view(*v, bytes_of(p.type), p.batch, p.v_heads, p.keys, p.d_v, "v");
        want.output = view(*output, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "output");
        want.v = room(by_v, p.batch * p.v_heads * p.keys * p.d_v, wide, "v's derivative");
    }
    want.q = room(by_q, heads * p.queries * p.d_k, wide, "q's derivative");
    want.k = room(by_k, p.batch * p.kv_heads * p.keys * p.d_k, wide, "k's derivative");
    if (by_bias) {
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
    check(level() && x.itemsize() == 4 && int64_t(x.size()) % piece == 0 && count <= 4096 && whole<float>(x, x.size(), "x"), "x");
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
    m.def("describe", &describe);
    m.def("rows", &rows);
    m.def("columns", &columns);
    m.def("gradients", &gradients);
    m.def("exercise", &exercise);
    m.def("read", &read_all);
    m.def("level", [] { return level() ? level()->name : ""; });
    m.def("levels", &level_names);
}
