// PyTorch's tensors without Python in between: the table of C functions that DLPack 1.2 and later define under
// `__dlpack_c_exchange_api__` (dlpack.h, DLPackExchangeAPI).
#pragma once

#include <Python.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace clearhead {

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

}  // namespace clearhead
