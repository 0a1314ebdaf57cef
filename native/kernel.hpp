// What the units of the kernel share. CMakeLists.txt compiles each of them once per instruction set, with its flags and
// CLEARHEAD_LEVEL, the level's name; dispatch.cpp calls what they define.
//
// Read in this order: simd, exponential, tiles, packing, rules, top, softmax_state, key_blocks, score_tangents,
// row_tangents, rows, row_results, received, weight_tiles, tile_sums, picture, transposed, columns, operand,
// gradient_tangents, gradients, edge_terms, others, strongest, effects.
#pragma once

#include "dispatch.hpp"
#include "tiles.hpp"

#define CLEARHEAD_JOIN_(a, b, c) a##b##_##c
#define CLEARHEAD_JOIN(a, b, c) CLEARHEAD_JOIN_(a, b, c)
// The function that enters a unit's part of a level's kernels: CLEARHEAD_FILL(rows) is fill_rows_avx2.
#define CLEARHEAD_FILL(part) CLEARHEAD_JOIN(fill_, part, CLEARHEAD_LEVEL)

namespace clearhead {
namespace {

#if defined(__AVX512BF16__)
using Bfloat16 = Paired;
#else
using Bfloat16 = Single<float>;
#endif

}  // namespace
}  // namespace clearhead
