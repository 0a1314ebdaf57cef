// Products by weights in the bytes of a model's file.
#pragma once

#include <cstdint>

namespace clearhead {

// How the numbers of a row are stored, how many make a block, and its bytes.
// clang-format off
#define CLEARHEAD_PACKINGS(EACH)                                                                                     \
    EACH(F32, 1, 4) EACH(F16, 1, 2) EACH(BF16, 1, 2) EACH(Q4_0, 32, 18) EACH(Q4_1, 32, 20) EACH(Q5_0, 32, 22)        \
    EACH(Q5_1, 32, 24) EACH(Q8_0, 32, 34) EACH(IQ4_NL, 32, 18) EACH(MXFP4, 32, 17) EACH(Q2_K, 256, 84)               \
    EACH(Q3_K, 256, 110) EACH(Q4_K, 256, 144) EACH(Q5_K, 256, 176) EACH(Q6_K, 256, 210) EACH(IQ4_XS, 256, 136)
// clang-format on
#define CLEARHEAD_PACKING_NAME(name, numbers, bytes) name,
enum class Packing : int32_t { CLEARHEAD_PACKINGS(CLEARHEAD_PACKING_NAME) };

// out = x·Wᵀ, x (tokens, columns) and out (tokens, rows); where `back`, out = x·W, x (tokens, rows), out (tokens,
// columns), which must start at 0. W (rows, columns) is packed row by row. In float32, or x in integers of 24 bits
// (rounded.hpp): each number of `out` is the same chain whatever the other tokens and the number of threads.
struct ProductJob {
    Packing packing;
    const uint8_t* data;
    int64_t pitch;         // bytes from row to row
    const int64_t* order;  // which rows of `data` are W's; null: all as they are
    int64_t rows, columns, tokens;
    const float* x;
    float* out;
    bool back;
    int64_t wide;  // columns of a task of a product that goes back: whole blocks
    int threads;
    void* rounded = nullptr;  // room for x in integers, where the pass has that
};

constexpr int64_t kProductTokens = 256;  // tokens at a time, which share what is unpacked

struct ProductPass {
    int64_t (*rounded_bytes)(const ProductJob&);  // of `rounded`; null where x is multiplied as it is
    void (*round)(const ProductJob&, int64_t token);
    int64_t (*tasks)(const ProductJob&);
    int64_t (*scratch_bytes)(const ProductJob&);
    void (*run)(const ProductJob&, int64_t task, void* scratch);
};

}  // namespace clearhead
