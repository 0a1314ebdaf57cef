// The passes over what single edges did.
#include "effects.hpp"
#include "kernel.hpp"
#include "others.hpp"

namespace clearhead {
namespace {

template <class M> void fill(Kernel& kernel) {
    kernel.other_scratch_bytes = other_scratch_bytes<M>;
    kernel.others = others<M>;
    kernel.effect_scratch_bytes = effect_scratch_bytes<M>;
    kernel.effects = effects<M>;
}

}  // namespace

void CLEARHEAD_FILL(effects)(Level& level) {
    fill<Single<double>>(level.f64);
    fill<Single<float>>(level.f32);
    fill<Bfloat16>(level.bf16);
}

}  // namespace clearhead
