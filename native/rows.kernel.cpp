// The passes over queries, and the rates of the processor.
#include "kernel.hpp"
#include "received.hpp"

#define CLEARHEAD_TEXT_(a) #a
#define CLEARHEAD_TEXT(a) CLEARHEAD_TEXT_(a)

namespace clearhead {
namespace {

template <class M> void fill(Kernel& kernel) {
    kernel.strip_rows = kStrip;
    kernel.tile_rows = kTile;
    kernel.block_keys = kBlock;
    kernel.span_keys = kSpan;
    kernel.vector_bytes = kVectorBytes;
    kernel.packed_key_bytes = packed_key_bytes<M>;
    kernel.packed_value_bytes = packed_value_bytes<M>;
    kernel.values_in_place = values_in_place<M>;
    kernel.pack_keys = pack_keys<M>;
    kernel.pack_values = pack_values<M>;
    kernel.row_scratch_bytes = row_scratch_bytes<M>;
    kernel.part_bytes = part_bytes<M>;
    kernel.rows = rows<M>;
    kernel.merge = merge<M>;
    kernel.rows_and_received = rows_and_received<M>;
}

// The processor's peak rate of multiply-adds, for the benchmark's limit: independent chains of them.
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

// The rate of reading memory, for the same: the largest of many floats.
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

void CLEARHEAD_FILL(rows)(Level& level) {
    level.name = CLEARHEAD_TEXT(CLEARHEAD_LEVEL);
    level.exercise = exercise;
    level.read = read;
    fill<Single<double>>(level.f64);
    fill<Single<float>>(level.f32);
    fill<Bfloat16>(level.bf16);
}

}  // namespace clearhead
