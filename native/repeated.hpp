// Calls that were checked once, repeated without Python in between (ops/fast_calls.py).
#pragma once

#include <Python.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "binding.hpp"
#include "given_spans.hpp"

namespace clearhead {
namespace {

// PyTorch's tensors without Python in between: the table of C functions that DLPack 1.2 and later define under
// `__dlpack_c_exchange_api__` (dlpack.h, DLPackExchangeAPI).
struct DlpackVersion {
    uint32_t major, minor;
};

struct ManagedTensor {
    DlpackVersion version;
    void* context;
    void (*deleter)(ManagedTensor*);
    uint64_t flags;
    nanobind::dlpack::dltensor tensor;
};

struct ExchangeApi {
    DlpackVersion version;
    ExchangeApi* previous;
    int (*allocate)(nanobind::dlpack::dltensor* like, ManagedTensor** made, void* context,
                    void (*set_error)(void* context, const char* kind, const char* message));
    int (*managed_from_object)(void* object, ManagedTensor** made);
    int (*object_from_managed)(ManagedTensor* taken, void** object);
    int (*read)(void* object, nanobind::dlpack::dltensor* tensor);  // borrowed from the object; may be null
};

// The table of a tensor type; null where it has none that is known here.
inline const ExchangeApi* exchange_api(PyObject* type) {
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    void* table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
    Py_XDECREF(capsule);
    PyErr_Clear();
    const auto* api = static_cast<const ExchangeApi*>(table);
    return api && api->version.major == 1 && api->read ? api : nullptr;
}

// Does the environment name an engine? Asking os.environ takes longer than PyTorch needs for a short call.
inline bool engine_named() { return std::getenv("CLEARHEAD_ENGINE") != nullptr; }

// Calls for the output alone that were checked once and may be repeated on other arrays of the same shapes and dtypes.
// Arrays are NumPy's, or tensors where PyTorch's exchange functions are given.
class Repeatable {
  public:
    explicit Repeatable(nb::object tensor_type)
        : api(tensor_type.is_none() ? nullptr : exchange_api(tensor_type.ptr())) {}

    // Adds a checked call; the oldest one leaves where there are too many. Arrays that `read` refuses are not added.
    // With any_keys, the call may be repeated on any number of keys.
    void add(nb::handle q, nb::handle k, nb::handle v, nb::object described, bool any_keys) {
        Operands operands;
        if (!read(q, k, v, operands)) return;
        if (any_keys) operands[1].kind.shape[2] = operands[2].kind.shape[2] = kAny;
        Call call{operands[0].kind, operands[1].kind, operands[2].kind, described,
                  nb::cast<const Described*>(described)};
        if (calls.size() < 32)
            calls.push_back(std::move(call));
        else
            calls[oldest++ % 32] = std::move(call);
    }

    // The output; None where no call like this was added, memory is short, or `spans`, the rule's three NumPy arrays or
    // None, needs a closer look.
    nb::object operator()(nb::handle q, nb::handle k, nb::handle v, nb::handle spans, int threads) {
        Operands operands;
        if (engine_named() || !read(q, k, v, operands)) return nb::none();
        if (operands[1].kind.shape[2] != operands[2].kind.shape[2]) return nb::none();
        const Call* call = find(operands);
        return call ? repeat(*call, operands, spans, threads) : nb::none();
    }

    // One step of decoding: writes k (batch, kv_heads, 1, d_k) and v to position `place` of their rooms (batch,
    // kv_heads, room, d), and attends with q (batch, heads, 1, d_k) to all positions up to it. `turns` (2, d_k) are the
    // cosine and the signed sine by which q and k are turned before (nn/rotary.py), or None. Returns the output; None,
    // before anything is written, where no call like this was added.
    nb::object step(nb::handle q, nb::handle k, nb::handle v, nb::handle keys, nb::handle values, int64_t place,
                    nb::handle turns, int threads) {
        Operands operands;
        Operand key, value, turn;
        if (engine_named() || !read(q, keys, values, operands) || !read(k, key) || !read(v, value)) return nb::none();
        if (!fits(key.kind, operands[1].kind, place) || !fits(value.kind, operands[2].kind, place)) return nb::none();
        const Kind& query = operands[0].kind;
        const int64_t* size = query.shape;
        if (query.ndim != 4 || !(query.dtype == key.kind.dtype)) return nb::none();
        const bool is_double = query.dtype.bits == 64, turned = !turns.is_none();
        if (turned) {
            if (!read(turns, turn) || !(turn.kind.dtype == query.dtype) || !(is_double || query.dtype.bits == 32) ||
                turn.kind.ndim != 2 || turn.kind.shape[2] != 2 || turn.kind.shape[3] != size[3] || size[3] % 2 ||
                key.kind.shape[3] != size[3] || turn.view.column != 1)
                return nb::none();
        }
        operands[1].kind.shape[2] = operands[2].kind.shape[2] = place + 1;
        const Call* call = find(operands);
        if (!call) return nb::none();
        const int64_t bytes = query.dtype.bits / 8, rows = size[0] * size[1];
        std::vector<char> turned_queries(turned ? rows * size[3] * bytes : 0);
        const View room = {turned_queries.data(), size[1] * size[3], size[3], size[3], 1};
        const View* by = turned ? &turn.view : nullptr;
        const auto write = [&]<class T>() {
            if (turned) move<T>(operands[0].view, size, by, room, 0);
            move<T>(key.view, key.kind.shape, by, operands[1].view, place);
            move<T>(value.view, value.kind.shape, nullptr, operands[2].view, place);
        };
        if (is_double)
            write.template operator()<double>();
        else
            bytes == 4 ? write.template operator()<float>() : write.template operator()<uint16_t>();
        if (turned) operands[0].view = room;
        return repeat(*call, operands, nb::none(), threads);
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

    const Call* find(const Operands& operands) const {
        for (const Call& call : calls)
            if (call.q == operands[0].kind && call.k == operands[1].kind && call.v == operands[2].kind) return &call;
        return nullptr;
    }

    // May this new key or value be written to position `place` of the room?
    static bool fits(const Kind& fresh, const Kind& room, int64_t place) {
        return fresh.ndim == 4 && room.ndim == 4 && fresh.dtype == room.dtype && fresh.shape[0] == room.shape[0] &&
               fresh.shape[1] == room.shape[1] && fresh.shape[2] == 1 && fresh.shape[3] == room.shape[3] &&
               place >= 0 && place < room.shape[2];
    }

    // Copies the only row of every head to row `place` of `to`; turned, where `turns` are given, in the order of the
    // operations there.
    template <class T>
    static void move(const View& from, const int64_t* shape, const View* turns, const View& to, int64_t place) {
        const int64_t d = shape[3];
        const T* cos = turns ? static_cast<const T*>(turns->data) : nullptr;
        for (int64_t b = 0; b < shape[0]; ++b)
            for (int64_t h = 0; h < shape[1]; ++h) {
                const T* x = static_cast<const T*>(from.data) + b * from.batch + h * from.head;
                T* y = static_cast<T*>(const_cast<void*>(to.data)) + b * to.batch + h * to.head + place * to.row;
                for (int64_t i = 0; i < d; ++i) {
                    const T value = x[i * from.column];
                    if (!turns) {
                        y[i * to.column] = value;
                        continue;
                    }
                    const T other = x[(i < d / 2 ? i + d / 2 : i - d / 2) * from.column];
                    const T a = value * cos[i], b = other * cos[turns->row + i];
                    y[i * to.column] = a + b;
                }
            }
    }

    bool read(nb::handle q, nb::handle k, nb::handle v, Operands& result) const {
        return read(q, result[0]) && read(k, result[1]) && read(v, result[2]);
    }

    bool read(nb::handle x, Operand& result) const {
        nb::dlpack::dltensor tensor{};
        if (api) {
            if (api->read(x.ptr(), &tensor)) {
                PyErr_Clear();
                return false;
            }
        } else {
            nb::ndarray<nb::ro> array;
            if (!nb::try_cast(x, array, false)) return false;
            result.kept = array;
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
            result.kind.shape[missing + i] = tensor.shape[i];
            strides[missing + i] = tensor.strides[i];
        }
        result.kind.ndim = tensor.ndim;
        result.kind.dtype = tensor.dtype;
        const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
        if (reinterpret_cast<uintptr_t>(data) % (tensor.dtype.bits / 8)) return false;
        result.view = {data, strides[0], strides[1], strides[2], strides[3]};
        return true;
    }

    // `call` is a copy: another thread may add calls while this one runs.
    nb::object repeat(const Call call, const Operands& operands, nb::handle spans, int threads) const {
        Job job;
        RepeatedSpans labels;
        Problem& p = job.problem = call.described->p;
        p.q = operands[0].view;
        p.k = operands[1].view;
        p.v = operands[2].view;
        p.keys = operands[1].kind.shape[2];
        p.v_heads = operands[2].kind.shape[1];
        p.d_v = operands[2].kind.shape[3];
        int64_t shape[4];
        std::copy_n(operands[0].kind.shape, 3, shape);
        shape[3] = p.d_v;
        const int ndim = call.q.ndim;
        try {
            if (!spans.is_none() && !labels.take(nb::cast<nb::tuple>(spans), p)) return nb::none();
            const Output output = room(ndim, shape + 4 - ndim, call.q.dtype);
            if (!output.data) return nb::none();
            job.rows.output = output.data;
            work(attend, {job}, threads);
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

}  // namespace
}  // namespace clearhead
