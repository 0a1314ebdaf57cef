// One part of a kernel. CMakeLists.txt compiles this file once per instruction set and part, with the level's flags,
// its name CLEARHEAD_LEVEL, and the part's file CLEARHEAD_PART: received (the passes over queries), gradients (the
// backward pass), effects (the passes that compute the weights again) or packed (products by a model's weights).
//
// Read in this order: simd, amx, tiles, packing, rules, top, softmax_state, key_blocks, rows,
// row_results, received, weight_tiles, operand, columns, gradients, others, strongest, effects; products, packings,
// rounded, packed.
#define CLEARHEAD_TEXT_(a) #a
#define CLEARHEAD_TEXT(a) CLEARHEAD_TEXT_(a)
#include CLEARHEAD_TEXT(CLEARHEAD_PART.hpp)

#define CLEARHEAD_JOIN_(a, b, c) a##b##_##c
#define CLEARHEAD_JOIN(a, b, c) CLEARHEAD_JOIN_(a, b, c)

namespace clearhead {

// Such as fill_gradients_avx2, which dispatch.cpp calls.
void CLEARHEAD_JOIN(fill_, CLEARHEAD_PART, CLEARHEAD_LEVEL)(Level& level) {
#if defined(__AVX512BF16__)
    fill<Paired>(level.bf16);
#else
    fill<Single<float>>(level.bf16);
#endif
    fill<Single<double>>(level.f64);
    fill<Single<float>>(level.f32);
}

}  // namespace clearhead
