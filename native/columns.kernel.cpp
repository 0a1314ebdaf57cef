// The pass over keys.
#include "columns.hpp"
#include "kernel.hpp"

namespace clearhead {
namespace {

template <class M> void fill(Kernel& kernel) {
    kernel.column_scratch_bytes = column_scratch_bytes<M>;
    kernel.columns = columns<M>;
}

}  // namespace

void CLEARHEAD_FILL(columns)(Level& level) {
    fill<Single<double>>(level.f64);
    fill<Single<float>>(level.f32);
    fill<Bfloat16>(level.bf16);
}

}  // namespace clearhead
