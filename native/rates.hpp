// The rates of the processor, for the benchmarks.
#pragma once

#include "simd.hpp"

namespace clearhead {
namespace {

// The peak rate of multiply-adds: independent chains of them.
int64_t exercise(int64_t rounds, float* result) {
    constexpr int chains = kRegisters == 32 ? 24 : 12;
    Vec<float> sum[chains];
    for (int c = 0; c < chains; ++c)
        sum[c] = broadcast<float>(*result + float(c));  // different, or the compiler would compute one for all
    const Vec<float> a = broadcast<float>(*result), b = broadcast<float>(1.0f - *result);
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 24
        for (int c = 0; c < chains; ++c) sum[c] = fma(sum[c], a, b);
    for (int c = 0; c < chains; ++c) *result += sum_of<float>(sum[c]);
    return rounds * chains * kLanes<float>;
}

// The rate of reading memory: the largest of many floats.
float read(const float* from, int64_t count) {
    constexpr int chains = 256 / kLanes<float> < 16 ? 256 / kLanes<float> : 16;
    Vec<float> best[chains] = {};
    for (int64_t i = 0; i < count; i += chains * kLanes<float>)
#pragma GCC unroll 16
        for (int c = 0; c < chains; ++c) best[c] = larger(load(from + i + c * kLanes<float>), best[c]);
    for (int c = 1; c < chains; ++c) best[0] = larger(best[c], best[0]);
    return largest_of<float>(best[0]);
}

}  // namespace
}  // namespace clearhead
