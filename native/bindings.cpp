// Python's door: arrays become pointers after their shapes are checked; no arithmetic.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "exchange.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;
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
    check(int64_t(x.shape(0)) == b && int64_t(x.shape(1)) == h && int64_t(x.shape(2)) == r && int64_t(x.shape(3)) == c,
          what);
    return {x.data(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

template <class T> const T* whole(const std::optional<Given>& x, int64_t count, const char* what) {
    if (!x) return nullptr;
    check(x->size() == size_t(count) && x->itemsize() == sizeof(T), what);
    int64_t expected = 1;
    if (count)
        for (size_t i = x->ndim(); i-- > 0; expected *= int64_t(x->shape(i)))
            check(x->shape(i) == 1 || x->stride(i) == expected, what);
    return static_cast<const T*>(x->data());
}

void* room(const std::optional<Taken>& x, int64_t count, int64_t bytes, const char* what) {
    if (!x) return nullptr;
    check(x->size() == size_t(count) && x->itemsize() == size_t(bytes), what);
    return x->data();
}

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

// Named one by one in `m.def`: what Python forgets, or knows and this side does not, is a TypeError there.
Described describe(int type, int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t d_k,
                   int64_t row_start, int64_t row_step, int64_t column_start, int64_t column_step, int64_t left,
                   int64_t right, double scale, double softcap, const Given& query_offset,
                   std::optional<Given> kv_lengths, std::optional<Given> query_lengths,
                   std::optional<Given> query_segments, std::optional<Given> kv_segments,
                   std::optional<Given> alibi_slopes, std::optional<Given> sinks, std::optional<Given> bias,
                   int bias_type, std::optional<Given> mask, bool team, nb::object kept) {
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

// Calls for the output alone that were checked once and may be repeated on other arrays of the same shapes and dtypes.
// Arrays are NumPy's, or tensors where PyTorch's exchange functions are given.
class Repeatable {
  public:
    explicit Repeatable(nb::object tensor_type)
        : api(tensor_type.is_none() ? nullptr : exchange_api(tensor_type.ptr())) {}

    // Adds a checked call; the oldest one leaves where there are too many. Arrays that `read` refuses are not added.
    // With any_keys, the call may be repeated on any number of keys.
    void add(nb::handle q, nb::handle k, nb::handle v, nb::object described, bool any_keys) {
        Operands given;
        if (!read(q, k, v, given)) return;
        if (any_keys) given[1].kind.shape[2] = given[2].kind.shape[2] = kAny;
        Call call{given[0].kind, given[1].kind, given[2].kind, described, nb::cast<const Described*>(described)};
        if (calls.size() < 32)
            calls.push_back(std::move(call));
        else
            calls[oldest++ % 32] = std::move(call);
    }

    // The output; None where no call like this was added, or memory is short.
    nb::object operator()(nb::handle q, nb::handle k, nb::handle v, int threads) {
        Operands given;
        if (!read(q, k, v, given)) return nb::none();
        if (given[1].kind.shape[2] != given[2].kind.shape[2]) return nb::none();
        for (const Call& call : calls)
            if (call.q == given[0].kind && call.k == given[1].kind && call.v == given[2].kind)
                return repeat(call, given, threads);
        return nb::none();
    }

  private:
    static constexpr int64_t kAny = -1;

    struct Kind {  // what must be the same as in the checked call
        int ndim = 0;
        int64_t shape[4] = {1, 1, 1, 1};  // leading axes of size 1 are filled in
        nb::dlpack::dtype dtype{};
        bool operator==(const Kind& other) const {
            return ndim == other.ndim && dtype == other.dtype && shape[0] == other.shape[0] &&
                   shape[1] == other.shape[1] && (shape[2] == other.shape[2] || shape[2] == kAny) &&
                   shape[3] == other.shape[3];
        }
    };
    struct Operand {
        Kind kind;
        View view;
        std::optional<nb::ndarray<nb::ro>> kept;
    };
    using Operands = std::array<Operand, 3>;
    struct Call {
        Kind q, k, v;
        nb::object kept;
        const Described* described;
    };

    bool read(nb::handle q, nb::handle k, nb::handle v, Operands& found) const {
        return read(q, found[0]) && read(k, found[1]) && read(v, found[2]);
    }

    bool read(nb::handle x, Operand& found) const {
        nb::dlpack::dltensor tensor{};
        if (api) {
            if (api->read(x.ptr(), &tensor)) {
                PyErr_Clear();
                return false;
            }
        } else {
            nb::ndarray<nb::ro> array;
            if (!nb::try_cast(x, array, false)) return false;
            found.kept = array;
            tensor.data = const_cast<void*>(array.data());
            tensor.device = {array.device_type(), array.device_id()};
            tensor.ndim = int32_t(array.ndim());
            tensor.dtype = array.dtype();
            tensor.shape = const_cast<int64_t*>(array.shape_ptr());
            tensor.strides = const_cast<int64_t*>(array.stride_ptr());
        }
        if (tensor.device.device_type != nb::device::cpu::value || tensor.ndim < 2 || tensor.ndim > 4) return false;
        const int missing = 4 - tensor.ndim;
        int64_t strides[4] = {0, 0, 0, 0};
        for (int i = 0; i < tensor.ndim; ++i) {
            found.kind.shape[missing + i] = tensor.shape[i];
            strides[missing + i] = tensor.strides[i];
        }
        found.kind.ndim = tensor.ndim;
        found.kind.dtype = tensor.dtype;
        const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
        if (reinterpret_cast<uintptr_t>(data) % (tensor.dtype.bits / 8)) return false;
        found.view = {data, strides[0], strides[1], strides[2], strides[3]};
        return true;
    }

    // `call` is a copy: another thread may add calls while this one runs.
    nb::object repeat(const Call call, const Operands& given, int threads) const {
        Job job;
        Problem& p = job.problem = call.described->p;
        p.q = given[0].view;
        p.k = given[1].view;
        p.v = given[2].view;
        p.keys = given[1].kind.shape[2];
        p.v_heads = given[2].kind.shape[1];
        p.d_v = given[2].kind.shape[3];
        int64_t shape[4];
        std::copy_n(given[0].kind.shape, 3, shape);
        shape[3] = p.d_v;
        const int ndim = call.q.ndim;
        try {
            const Output output = room(ndim, shape + 4 - ndim, call.q.dtype);
            if (!output.data) return nb::none();
            job.rows.output = output.data;
            work(attend, job, threads);
            return output.array;
        } catch (const std::bad_alloc&) { return nb::none(); }
    }

    struct Output {
        nb::object array;
        void* data = nullptr;
    };

    Output room(int ndim, int64_t* shape, nb::dlpack::dtype dtype) const {
        if (!api) {
            nb::object made = empty(shape, ndim, dtype);
            return {made, nb::cast<nb::ndarray<>>(made).data()};
        }
        nb::dlpack::dltensor like{};
        like.device = {nb::device::cpu::value, 0};
        like.ndim = ndim;
        like.dtype = dtype;
        like.shape = shape;
        ManagedTensor* made = nullptr;
        void* object = nullptr;
        const auto ignore = [](void*, const char*, const char*) {};
        if (api->allocate(&like, &made, nullptr, ignore) || !made) return {};
        void* data = static_cast<char*>(made->tensor.data) + made->tensor.byte_offset;
        if (api->object_from_managed(made, &object)) throw nb::python_error();
        return {nb::steal(static_cast<PyObject*>(object)), data};
    }

    static nb::object empty(const int64_t* shape, int ndim, nb::dlpack::dtype dtype) {
        static const nb::object make = nb::module_::import_("numpy").attr("empty");
        nb::list sizes;
        for (int i = 0; i < ndim; ++i) sizes.append(shape[i]);
        return make(nb::tuple(sizes), dtype.bits == 64 ? "f8" : dtype.bits == 32 ? "f4" : "f2");
    }

    const ExchangeApi* api;
    std::vector<Call> calls;
    size_t oldest = 0;
};

// `known`: the log-sum-exp, the labels of groups, g; `answers`: what is to be filled.
void columns(int threads, const Described& d, const Given& q, const Given& k, nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    const Problem& p = job.problem;
    ColumnAnswers& want = job.columns;
    Named given(known), named(answers);
    const int64_t heads = p.batch * p.heads, wide = p.type == Type::f64 ? 8 : 4;
    const auto logsumexp = given.read("logsumexp");
    check(bool(logsumexp), "logsumexp");
    want.logsumexp = wide == 8 ? static_cast<const void*>(whole<double>(logsumexp, heads * p.queries, "logsumexp"))
                               : static_cast<const void*>(whole<float>(logsumexp, heads * p.queries, "logsumexp"));
    want.received = static_cast<double*>(room(named.write("received"), heads * p.keys, 8, "received"));
    want.peak = static_cast<double*>(room(named.write("peak"), heads * p.keys, 8, "peak"));
    if (const auto image = named.write("image")) {
        check(image->ndim() == 4 && image->shape(2) > 0 && image->shape(3) > 0, "image");
        want.height = int64_t(image->shape(2));
        want.width = int64_t(image->shape(3));
        want.image = static_cast<double*>(room(image, heads * want.height * want.width, 8, "image"));
    }
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
    const auto g = given.read("g");
    if (const auto transposed = named.write("transposed")) {
        const int g_type = given.number("g_type");
        check(g && g->ndim() == 4 && g_type >= 0 && g_type < 4, "g");
        const int64_t g_heads = int64_t(g->shape(1));
        check(g_heads == 1 || g_heads == p.heads, "g's heads");
        want.g_type = Type(g_type);
        want.g_columns = int64_t(g->shape(3));
        want.g = view(*g, bytes_of(want.g_type), p.batch, g_heads, p.queries, want.g_columns, "g");
        if (g_heads == 1) want.g.head = 0;
        want.transposed = room(transposed, heads * p.keys * want.g_columns, wide, "transposed");
    }
    given.done();
    named.done();
    work(observe, job, threads);
}

// `known`: the log-sum-exp, v, and what is known of the loss (base.Upstream); `answers`: the derivatives.
void gradients(int threads, const Described& d, const Given& q, const Given& k, nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    Problem& p = job.problem;
    GradientAnswers& want = job.gradients;
    Named given(known), named(answers);
    const int64_t wide = p.type == Type::f64 ? 8 : 4, heads = p.batch * p.heads;
    const auto per = [&](const char* name, int64_t count) {
        const auto x = given.read(name);
        return wide == 8 ? static_cast<const void*>(whole<double>(x, count, name))
                         : static_cast<const void*>(whole<float>(x, count, name));
    };
    want.logsumexp = per("logsumexp", heads * p.queries);
    want.rows = per("rows", heads * p.queries);
    want.keys = per("keys", heads * p.keys);
    want.entropy = per("entropy", heads * p.queries);
    want.distance = per("distance", heads * p.queries);
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
          "kv_segments"_a.none(), "alibi_slopes"_a.none(), "sinks"_a.none(), "bias"_a.none(), "bias_type"_a,
          "mask"_a.none(), "team"_a, "kept"_a);
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
        .def("__call__", &Repeatable::operator());
    m.def("rows", &rows);
    m.def("columns", &columns);
    m.def("gradients", &gradients);
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
