// The backward pass.
#include "gradients.hpp"
#include "kernel.hpp"

namespace clearhead {
namespace {

template <class M> void fill(Kernel& kernel) {
    kernel.gradient_keys = kGradientKeys;
    kernel.gradient_scratch_bytes = gradient_scratch_bytes<M>;
    kernel.gradient_spans = gradient_spans;
    kernel.gradients = gradients<M>;
}

}  // namespace

void CLEARHEAD_FILL(gradients)(Level& level) {
    fill<Single<double>>(level.f64);
    fill<Single<float>>(level.f32);
    fill<Bfloat16>(level.bf16);
}

}  // namespace clearhead
