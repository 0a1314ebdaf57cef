// A device for tests, whose memory is the CPU's: its tensors refuse to mix with the CPU's, as a GPU's do, and NumPy
// cannot read them. Operators run on the CPU (PyTorch's cpu_fallback). device.py compiles it.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;

constexpr auto kind = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

// One device with one stream, on which everything has already happened.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kind; }
    c10::Device exchangeDevice(c10::Device) const override { return {kind, 0}; }
    c10::Device getDevice() const override { return {kind, 0}; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeDevice(const c10::DeviceIndex) const override {}
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* start = bytes ? std::malloc(bytes) : nullptr;
        return {start, start, &std::free, {kind, 0}};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
    void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    bool isAvailable() const override { return true; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::globalContext().defaultGenerator(at::kCPU);
    }
    at::Device getDeviceFromPtr(void*) const override { return {kind, 0}; }
};

Tensor empty(SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, keys, c10::dtype_or_default(dtype),
                                     format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<at::Device>, optional<bool>) {
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                             keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor local(const Tensor& x) {
    if (!x.device().is_privateuseone()) return x;
    auto storage = x.storage();
    auto count = static_cast<int64_t>(storage.nbytes() / x.itemsize());
    auto whole = at::from_blob(const_cast<void*>(storage.data()), {count}, [storage](void*) {}, at::dtype(x.dtype()));
    return whole.as_strided(x.sizes(), x.strides(), x.storage_offset());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
    if (to.numel()) local(to).copy_(local(from));
    return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
    if (to.sizes() != from.sizes()) to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& x) { return local(x).item(); }

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, optional<c10::SymInt> offset) {
    auto x = at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                     self.key_set(), self.dtype());
    auto start = offset ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset();
    x.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                   start);
    return x;
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
    return as_strided(self, size, stride, std::nullopt);
}

Tensor view(const Tensor& self, SymIntArrayRef size) {
    auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
    auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
    TORCH_CHECK(strides.has_value(), "view: no strides express this shape");
    return self.as_strided(sizes, *strides, self.storage_offset());
}

const Tensor& resize(const Tensor& self, SymIntArrayRef size, optional<at::MemoryFormat>) {
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    if (self.sizes() == sizes) return self;
    auto* storage = self.storage().unsafeGetStorageImpl();
    auto bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
    if (bytes > storage->nbytes()) {
        auto more = memory.allocate(bytes);
        if (storage->nbytes()) std::memcpy(more.get(), storage->data(), storage->nbytes());
        storage->set_data_ptr_noswap(std::move(more));
        storage->set_nbytes(bytes);
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return self;
}

// Runs an operator on the CPU, if its tensors are all on the device; indices and numbers may be the CPU's.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    bool there = false, here = false;
    auto look = [&](const Tensor& x) {
        there |= x.defined() && x.device().is_privateuseone();
        here |= x.defined() && x.device().is_cpu() && x.dim() > 0;
    };
    for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
        if (value.isTensor()) look(value.toTensor());
        if (value.isTensorList()) {
            for (const Tensor& x : value.toTensorVector()) look(x);
        }
    }
    auto name = op.schema().name();
    bool indexing = name.find("aten::index") == 0 || name.find("aten::_index_put") == 0;
    TORCH_CHECK(!(there && here) || indexing, "Expected all tensors to be on the same device, in ", name);
    at::native::cpu_fallback(op, stack);
}

[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("as_strided", as_strided);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("view", view);
    m.impl("resize_", resize);
}

TORCH_LIBRARY(elsewhere, m) { m.def("local(Tensor(a) x) -> Tensor(a)"); }
TORCH_LIBRARY_IMPL(elsewhere, PrivateUse1, m) { m.impl("local", local); }
