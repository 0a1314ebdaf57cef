// Calls for the output alone on arrays or tensors as the caller gave them: read here, without Python in between.
#pragma once

#include <Python.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "binding.hpp"

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

// Does the environment name an engine? Asking os.environ takes longer than PyTorch needs for a short call.
inline bool engine_named() { return std::getenv("CLEARHEAD_ENGINE") != nullptr; }

// An array with its leading axes of size 1 filled in.
struct Given {
    int ndim = 0;
    int64_t shape[4] = {1, 1, 1, 1};
    nb::dlpack::dtype dtype{};
    View view{};
    Py_buffer buffer{};  // of NumPy's arrays, whose DLPack goes through Python

    Given() = default;
    Given(const Given&) = delete;
    Given& operator=(const Given&) = delete;
    ~Given() {
        if (buffer.obj) PyBuffer_Release(&buffer);
    }

    bool has(int64_t batch, int64_t heads, int64_t rows, int64_t columns) const {
        return shape[0] == batch && shape[1] == heads && shape[2] == rows && shape[3] == columns;
    }
};

// Reads arrays of NumPy's, or of a type of tensors, and makes outputs of that kind.
class Reader {
  public:
    explicit Reader(nb::handle like) : api(exchange_api_of(Py_TYPE(like.ptr()))) {}

    // False for arrays that must be read in another way: not on the CPU, unaligned, another number of axes.
    bool read(nb::handle x, Given& result) const {
        nb::dlpack::dltensor tensor{};
        Py_ssize_t strides_of_buffer[4];
        if (api) {
            if (api->read(x.ptr(), &tensor)) {
                PyErr_Clear();
                return false;
            }
        } else {
            Py_buffer& from = result.buffer;
            if (PyObject_GetBuffer(x.ptr(), &from, PyBUF_STRIDED_RO | PyBUF_FORMAT)) {
                PyErr_Clear();
                return false;
            }
            const char kind = from.format && !from.format[1] ? from.format[0] : 0;
            if ((kind != 'd' && kind != 'f' && kind != 'e') || from.ndim > 4) return false;
            tensor.data = from.buf;
            tensor.device = {nb::device::cpu::value, 0};
            tensor.ndim = from.ndim;
            tensor.dtype = {uint8_t(nb::dlpack::dtype_code::Float), uint8_t(8 * from.itemsize), 1};
            tensor.shape = reinterpret_cast<int64_t*>(from.shape);
            for (int i = 0; i < from.ndim; ++i) {
                if (from.strides[i] % from.itemsize) return false;
                strides_of_buffer[i] = from.strides[i] / from.itemsize;
            }
            tensor.strides = reinterpret_cast<int64_t*>(strides_of_buffer);
        }
        if (tensor.device.device_type != nb::device::cpu::value || tensor.ndim < 2 || tensor.ndim > 4) return false;
        const int missing = 4 - tensor.ndim;
        int64_t strides[4] = {0, 0, 0, 0};
        for (int i = 0; i < tensor.ndim; ++i) {
            result.shape[missing + i] = tensor.shape[i];
            strides[missing + i] = tensor.strides[i];
        }
        result.ndim = tensor.ndim;
        result.dtype = tensor.dtype;
        const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
        if (reinterpret_cast<uintptr_t>(data) % (tensor.dtype.bits / 8)) return false;
        result.view = {data, strides[0], strides[1], strides[2], strides[3]};
        return true;
    }

    // An uninitialised array of the shape's last `ndim` axes; no data where memory is short.
    std::pair<nb::object, void*> make(int ndim, int64_t* shape, nb::dlpack::dtype dtype) const {
        shape += 4 - ndim;
        if (!api) {
            static thread_local PyObject *empty = nullptr, *kinds[3];  // never let go: the interpreter may end before
            if (!empty) {
                const nb::module_ numpy = nb::module_::import_("numpy");
                const char* const names[] = {"f8", "f4", "f2"};
                for (int i = 0; i < 3; ++i) kinds[i] = nb::object(numpy.attr("dtype")(names[i])).release().ptr();
                empty = nb::object(numpy.attr("empty")).release().ptr();
            }
            nb::object sizes = nb::steal(PyTuple_New(ndim));
            for (int i = 0; i < ndim; ++i) PyTuple_SET_ITEM(sizes.ptr(), i, PyLong_FromLongLong(shape[i]));
            PyObject* const arguments[] = {sizes.ptr(), kinds[dtype.bits == 64 ? 0 : dtype.bits == 32 ? 1 : 2]};
            nb::object made = nb::steal(PyObject_Vectorcall(empty, arguments, 2, nullptr));
            if (!made.is_valid()) throw nb::python_error();
            Py_buffer room;
            if (PyObject_GetBuffer(made.ptr(), &room, PyBUF_WRITABLE)) throw nb::python_error();
            void* data = room.buf;
            PyBuffer_Release(&room);  // the array itself keeps its memory
            return {made, data};
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

  private:
    // The table of a tensor type; null where it has none that is known here.
    static const ExchangeApi* exchange_api_of(PyTypeObject* type) {
        static thread_local PyTypeObject* latest = nullptr;  // of each thread: Python may have no lock
        static thread_local const ExchangeApi* found = nullptr;
        if (type == latest) return found;
        PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
        void* table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
        Py_XDECREF(capsule);
        PyErr_Clear();
        found = static_cast<const ExchangeApi*>(table);
        if (found && (found->version.major != 1 || !found->read)) found = nullptr;
        latest = type;
        return found;
    }

    const ExchangeApi* api;
};

// The shapes and dtypes of q, k and v as bytes, to look up calls by; None where `output` does not read them.
inline nb::object signature(nb::handle q, nb::handle k, nb::handle v) {
    const Reader reader(q);
    int64_t text[15];
    int64_t* next = text;
    for (nb::handle x : {q, k, v}) {
        Given given;
        if (!reader.read(x, given)) return nb::none();
        *next++ = given.ndim | int64_t{given.dtype.code} << 8 | int64_t{given.dtype.bits} << 16;
        next = std::copy_n(given.shape, 4, next);
    }
    return nb::bytes(text, sizeof text);
}

inline bool is_type(nb::dlpack::dtype dtype, Type type) {
    const auto code = type == Type::bf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
    return dtype.code == uint8_t(code) && dtype.bits == bytes_of(type) * 8 && dtype.lanes == 1;
}

constexpr double kSmall = 1 << 26;  // bytes of an output; for a larger one Python first checks for room

// Returns the output for q, k and v that were read, as the kind of array that q is; None if they do not fit the
// description, or memory is short, which Python then reports. The number of keys may differ from the description if no
// rule has values along them. With `state` it returns a tuple: the output and the rows' states.
inline nb::object output_of(int threads, const Described& d, const Reader& reader, const Given& q, const Given& k,
                            const Given& v, bool state = false) {
    RowJob job{{d.p, threads}};
    Problem& p = job.problem;
    const bool along_keys = p.kv_segments || p.key_spans || p.bias.data || p.mask.data || p.kv_lengths;
    const int64_t keys = along_keys ? p.keys : k.shape[2];
    const bool fits = q.has(p.batch, p.heads, p.queries, p.d_k) && k.has(p.batch, p.kv_heads, keys, p.d_k) &&
                      v.has(p.batch, p.kv_heads, keys, v.shape[3]);
    if (!fits || !is_type(q.dtype, p.type) || !is_type(k.dtype, p.type) || !is_type(v.dtype, p.type)) return nb::none();
    p.q = q.view;
    p.k = k.view;
    p.v = v.view;
    p.keys = keys;
    p.v_heads = p.kv_heads;
    p.d_v = v.shape[3];
    int64_t shape[4] = {q.shape[0], q.shape[1], q.shape[2], p.d_v};
    if (double(p.batch) * double(p.heads) * double(p.queries) * double(p.d_v) * double(bytes_of(p.type)) > kSmall)
        return nb::none();
    try {
        const auto [output, data] = reader.make(q.ndim, shape, q.dtype);
        if (!data) return nb::none();
        job.output = data;
        if (!state) {
            work(attend, {job});
            return output;
        }
        int64_t rows[4] = {1, q.shape[0], q.shape[1], q.shape[2]};
        const nb::dlpack::dtype kind = {uint8_t(nb::dlpack::dtype_code::Float), uint8_t(p.type == Type::f64 ? 64 : 32),
                                        1};
        const auto [largest, to_largest] = reader.make(q.ndim - 1, rows, kind);
        const auto [log_sum, to_log_sum] = reader.make(q.ndim - 1, rows, kind);
        if (!to_largest || !to_log_sum) return nb::none();
        job.largest = to_largest;
        job.log_sum = to_log_sum;
        work(attend, {job});
        return nb::make_tuple(output, largest, log_sum);
    } catch (const std::bad_alloc&) { return nb::none(); }
}

// The output alone, of q's kind, or with `state` that and the rows' states; None where the arrays must be read in
// another way.
inline nb::object output(int threads, const Described& d, nb::handle q, nb::handle k, nb::handle v, bool state) {
    const Reader reader(q);
    Given given[3];
    if (!reader.read(q, given[0]) || !reader.read(k, given[1]) || !reader.read(v, given[2])) return nb::none();
    return output_of(threads, d, reader, given[0], given[1], given[2], state);
}

// Copies the only row of every head to row `place` of `to`; turned, where `turns` are given, in the order of the
// operations there.
template <class T>
void move_row(const View& from, const int64_t* shape, const View* turns, const View& to, int64_t place) {
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

// One step of decoding: writes k (batch, kv_heads, 1, d_k) and v to position `place` of their rooms (batch, kv_heads,
// room, d), and attends with q (batch, heads, 1, d_k) to all positions up to it. `turns` (2, d_k) are the cosine and
// the signed sine by which q and k are turned before (nn/cache.py), or None. Returns the output; None, before anything
// is written, where the arrays are not what was described.
inline nb::object step(int threads, const Described& d, nb::handle q, nb::handle k, nb::handle v, nb::handle keys,
                       nb::handle values, int64_t place, nb::handle turns) {
    const Reader reader(q);
    Given query, key, value, turn, rooms[2];
    const Problem& p = d.p;
    if (!reader.read(q, query) || !reader.read(k, key) || !reader.read(v, value) || !reader.read(keys, rooms[0]) ||
        !reader.read(values, rooms[1]))
        return nb::none();
    const auto fits = [&](const Given& fresh, const Given& room) {
        return fresh.has(p.batch, p.kv_heads, 1, room.shape[3]) && room.shape[0] == p.batch &&
               room.shape[1] == p.kv_heads && place >= 0 && place < room.shape[2] && is_type(fresh.dtype, p.type) &&
               is_type(room.dtype, p.type);
    };
    if (!fits(key, rooms[0]) || !fits(value, rooms[1]) || !is_type(query.dtype, p.type) ||
        !query.has(p.batch, p.heads, 1, p.d_k) || key.shape[3] != p.d_k)
        return nb::none();
    const bool turned = !turns.is_none();
    if (turned &&
        (!reader.read(turns, turn) || !is_type(turn.dtype, p.type) || bytes_of(p.type) < 4 || turn.ndim != 2 ||
         turn.shape[2] != 2 || turn.shape[3] != p.d_k || p.d_k % 2 || turn.view.column != 1))
        return nb::none();
    rooms[0].shape[2] = rooms[1].shape[2] = place + 1;
    const int64_t bytes = bytes_of(p.type);
    std::vector<char> turned_queries(turned ? p.batch * p.heads * p.d_k * bytes : 0);
    const View room = {turned_queries.data(), p.heads * p.d_k, p.d_k, p.d_k, 1};
    const View* by = turned ? &turn.view : nullptr;
    const auto write = [&]<class T>() {
        if (turned) move_row<T>(query.view, query.shape, by, room, 0);
        move_row<T>(key.view, key.shape, by, rooms[0].view, place);
        move_row<T>(value.view, value.shape, nullptr, rooms[1].view, place);
    };
    if (bytes == 8)
        write.template operator()<double>();
    else
        bytes == 4 ? write.template operator()<float>() : write.template operator()<uint16_t>();
    if (turned) query.view = room;
    return output_of(threads, d, reader, query, rooms[0], rooms[1]);
}

}  // namespace
}  // namespace clearhead
