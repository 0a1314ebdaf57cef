// The products by packed weights: some rows of W, or a part of each row, are unpacked into the cache and multiplied by
// all tokens.
#pragma once

#include "attend.hpp"
#include "rounded.hpp"
#include "tiles.hpp"

namespace clearhead {
namespace {

constexpr int kHigh = 4;                                   // tokens of a tile
constexpr int kWide = kRegisters == 32 ? 4 : 3;            // and its rows of W,
constexpr int kAcross = kRegisters == 32 ? 4 : 2;          // or vectors of columns
constexpr int64_t kRows = kRegisters == 32 ? 8 : 24;       // of W that a task unpacks
constexpr int64_t kDepth = kRegisters == 32 ? 1024 : 512;  // columns of W that it unpacks at a time: whole blocks
constexpr int64_t kApart = kDepth + 16;                    // apart, so that rows do not share the places of the cache
constexpr int64_t kDeep = 64;                              // rows of W that a product back unpacks at a time

// Adds neighbours until lane i has the sum of x[i]'s lanes, in an order that is the same for all of them.
template <int COUNT> CLEARHEAD_INLINE Vec<float> sums_of(Vec<float>* x) {
    using Order = std::make_integer_sequence<int, kLanes<float>>;
    if constexpr (COUNT > 1) {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT / 2; ++i)
            x[i] = zip_low(x[i], x[i + COUNT / 2], Order{}) + zip_high(x[i], x[i + COUNT / 2], Order{});
        return sums_of<COUNT / 2>(x);
    }
    return x[0];
}

// Each task has kRows rows of W.
template <class K> struct Forward {
    const ProductJob& job;
    const int64_t first, count;  // of its rows
    float* weights;              // (kRows, kApart), unpacked
    Vec<float>* kept;            // (tokens, kRows): sums that go on with the next columns, lane by lane

    // For one token, a task has many rows, so that no other task uses what it prefetches.
    static int64_t rows_of(const ProductJob& job) {
        const int64_t share = job.rows / (8 * job.threads) / kRows * kRows;
        return job.tokens > 1 || share < kRows ? kRows : share;
    }
    static int64_t tasks(const ProductJob& job) { return (job.rows + rows_of(job) - 1) / rows_of(job); }
    static int64_t scratch_bytes(const ProductJob& job) {
        return 4 * kRows * kApart + (job.columns > kDepth ? kProductTokens * kRows * kVectorBytes : 0);
    }

    Forward(const ProductJob& job, int64_t task, void* scratch)
        : job(job),
          first(task * rows_of(job)),
          count(job.rows - first < rows_of(job) ? job.rows - first : rows_of(job)),
          weights(static_cast<float*>(scratch)),
          kept(reinterpret_cast<Vec<float>*>(weights + kRows * kApart)) {}

    void run() {
        if (job.tokens == 1) return alone();
        for (int64_t k = 0; k < job.columns; k += kDepth) multiply(k);
    }

    const uint8_t* row(int64_t r) const {  // of W; the last one again where r is beyond
        r = first + (r < count ? r : count - 1);
        return job.data + (job.order ? job.order[r] : r) * job.pitch;
    }

    // For one token, limited by memory, numbers are multiplied as soon as they are unpacked.
    void alone() {
        constexpr int lanes = kLanes<float>;
        for (int64_t r = 0; r < count; r += 4) {
            Vec<float> sum[lanes < 4 ? 4 : lanes] = {}, (&four)[4] = reinterpret_cast<Vec<float>(&)[4]>(sum);
            const uint8_t* const rows[] = {row(r), row(r + 1), row(r + 2), row(r + 3)};
            const int64_t done = dot<K>(rows, 4 * job.pitch, job.columns, job.x, four), rest = job.columns - done;
            if (rest) {
                float x[kGroup] = {}, w[kGroup];
                std::memcpy(x, job.x + done, 4 * rest);
                for (int i = 0; i < 4; ++i) {
                    unpack<K>(rows[i], done, job.columns, w);
                    for (int j = 0; j < rest; j += lanes) sum[i] = fma(load(x + j), load(w + j), sum[i]);
                }
            }
            float result[lanes < 4 ? 4 : lanes];
            store(result, sums_of<lanes>(sum));
            std::memcpy(job.out + first + r, result, 4 * (count - r < 4 ? count - r : 4));
        }
    }

    void multiply(int64_t k) {
        const int64_t depth = job.columns - k < kDepth ? job.columns - k : kDepth;
        const int64_t whole = depth / kLanes<float> * kLanes<float>;
        for (int64_t r = 0; r < count; ++r) unpack<K>(row(r), k, k + depth, weights + r * kApart);
        for (int64_t t = 0; t < job.tokens; t += kHigh) {
            const float* x = job.x + t * job.columns + k;
            const int high = int(job.tokens - t < kHigh ? job.tokens - t : kHigh);
            for (int64_t r = 0; r < count; r += kWide) {
                const auto tile = [&]<int R>() { this->tile<R>(x, whole, depth, t, r, k); };
                high == 1   ? tile.template operator()<1>()
                : high == 2 ? tile.template operator()<2>()
                : high == 3 ? tile.template operator()<3>()
                            : tile.template operator()<4>();
            }
        }
    }

    template <int R> CLEARHEAD_INLINE_MEMBER void tile(const float* x, int64_t whole, int64_t depth, int64_t token,
                                                       int64_t row, int64_t k) {
        constexpr int lanes = kLanes<float>, groups = (R * kWide + lanes - 1) / lanes;
        Vec<float> sum[groups * lanes];
        Vec<float>* before = kept + token * kRows + row;
#pragma GCC unroll 16
        for (int i = 0; i < groups * lanes; ++i)
            sum[i] = k && i < R * kWide ? before[i / kWide * kRows + i % kWide] : Vec<float>{};
        const float* w = weights + row * kApart;
        const auto step = [&](const float* from, int64_t pitch, int64_t i) {
            Vec<float> right[kWide];
#pragma GCC unroll 8
            for (int c = 0; c < kWide; ++c) right[c] = load(w + c * kApart + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec<float> left = load(from + r * pitch);
#pragma GCC unroll 8
                for (int c = 0; c < kWide; ++c) sum[r * kWide + c] = fma(left, right[c], sum[r * kWide + c]);
            }
        };
        for (int64_t i = 0; i < whole; i += lanes) step(x + i, job.columns, i);
        if (whole < depth) {
            float last[R][lanes] = {};
            for (int r = 0; r < R; ++r) std::memcpy(last[r], x + r * job.columns + whole, 4 * (depth - whole));
            step(last[0], lanes, whole);
        }
        if (k + depth < job.columns) {
#pragma GCC unroll 16
            for (int i = 0; i < R * kWide; ++i) before[i / kWide * kRows + i % kWide] = sum[i];
            return;
        }
        float result[groups * lanes];
        for (int g = 0; g < groups; ++g) store(result + g * lanes, sums_of<lanes>(sum + g * lanes));
        const int64_t wide = count - row < kWide ? count - row : kWide;
        for (int r = 0; r < R; ++r)
            std::memcpy(job.out + (token + r) * job.rows + first + row, result + r * kWide, 4 * wide);
    }
};

// Each task has some columns of W, of which it unpacks kDeep rows at a time.
template <class K> struct Backward {
    static constexpr int lanes = kLanes<float>, tile_columns = kAcross * lanes;
    const ProductJob& job;
    const int64_t first, count;  // of its columns
    const int64_t width = (count + tile_columns - 1) / tile_columns * tile_columns;
    float* weights;  // (kDeep, width)

    static int64_t tasks(const ProductJob& job) { return (job.columns + job.wide - 1) / job.wide; }
    static int64_t scratch_bytes(const ProductJob& job) { return 4 * kDeep * (job.wide + tile_columns); }

    Backward(const ProductJob& job, int64_t task, void* scratch)
        : job(job),
          first(task * job.wide),
          count(job.columns - first < job.wide ? job.columns - first : job.wide),
          weights(static_cast<float*>(scratch)) {}

    void run() {
        for (int64_t row = 0; row < job.rows; row += kDeep) multiply(row);
    }

    void multiply(int64_t row) {
        const int64_t deep = job.rows - row < kDeep ? job.rows - row : kDeep;
        for (int64_t r = 0; r < deep; ++r) {
            const int64_t from = job.order ? job.order[row + r] : row + r;
            unpack<K>(job.data + from * job.pitch, first, first + count, weights + r * width);
        }
        for (int64_t c = 0; c < count; c += tile_columns)
            for (int64_t t = 0; t < job.tokens; t += kHigh) {
                const int high = int(job.tokens - t < kHigh ? job.tokens - t : kHigh);
                const auto tile = [&]<int R>() { this->tile<R>(t, row, deep, c); };
                high == 1   ? tile.template operator()<1>()
                : high == 2 ? tile.template operator()<2>()
                : high == 3 ? tile.template operator()<3>()
                            : tile.template operator()<4>();
            }
    }

    template <int R> CLEARHEAD_INLINE_MEMBER void tile(int64_t token, int64_t row, int64_t deep, int64_t column) {
        const float *x = job.x + token * job.rows + row, *w = weights + column;
        float* out = job.out + token * job.columns + first + column;
        const int64_t wide = count - column < tile_columns ? count - column : tile_columns;
        float partial[R][tile_columns] = {};  // of the last columns
        for (int r = 0; r < R && wide < tile_columns; ++r) std::memcpy(partial[r], out + r * job.columns, 4 * wide);
        float* to = wide < tile_columns ? partial[0] : out;
        const int64_t pitch = wide < tile_columns ? tile_columns : job.columns;
        Vec<float> sum[R][kAcross] = {};  // apart from the rows before: shorter chains round less
        for (int64_t i = 0; i < deep; ++i, w += width) {
            Vec<float> right[kAcross];
#pragma GCC unroll 8
            for (int c = 0; c < kAcross; ++c) right[c] = load(w + c * lanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec<float> left = broadcast<float>(x[r * job.rows + i]);
#pragma GCC unroll 8
                for (int c = 0; c < kAcross; ++c) sum[r][c] = fma(left, right[c], sum[r][c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kAcross; ++c)
                store(to + r * pitch + c * lanes, load(to + r * pitch + c * lanes) + sum[r][c]);
        for (int r = 0; r < R && wide < tile_columns; ++r) std::memcpy(out + r * job.columns, partial[r], 4 * wide);
    }
};

template <class Task> ProductPass pass_of() {
    return {nullptr, nullptr, Task::tasks, Task::scratch_bytes,
            [](const ProductJob& job, int64_t task, void* scratch) { Task(job, task, scratch).run(); }};
}

inline ProductPass product_pass(Packing packing, bool back) {
    ProductPass pass{};
    with_packing(packing, [&]<class K>() {
        pass = back ? pass_of<Backward<K>>() : pass_of<Forward<K>>();
#if defined(__AVX512VNNI__)
        if constexpr (!std::is_same_v<typename K::Block, Sixteen>)
            if (!back) {
                pass = pass_of<InIntegers<K>>();
                pass.rounded_bytes = InIntegers<K>::rounded_bytes, pass.round = InIntegers<K>::round;
            }
#endif
    });
    return pass;
}

template <class M> void fill(Kernel& kernel) { kernel.products = product_pass; }

}  // namespace
}  // namespace clearhead
