// Products by weights in the bytes of a model's file, and the norm of what they multiply.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>

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

// out = weight·x/√(mean of x² + epsilon) of a row.
inline void rms_norm(const float* x, const float* weight, int64_t width, double epsilon, float* out) {
    float sums[16] = {};  // apart, so that the compiler adds several at a time
    int64_t i = 0;
    for (; i + 16 <= width; i += 16)
        for (int j = 0; j < 16; ++j) sums[j] += x[i + j] * x[i + j];
    for (; i < width; ++i) sums[0] += x[i] * x[i];
    const float deviation = float(std::sqrt(std::accumulate(sums, sums + 16, 0.0) / double(width) + epsilon));
    for (i = 0; i < width; ++i) out[i] = weight[i] * (x[i] / deviation);
}

}  // namespace clearhead
