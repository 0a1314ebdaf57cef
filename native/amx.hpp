// Products of bfloat16 numbers in the tile registers of Intel's AMX, each of 16 rows of 64 bytes. An instruction
// multiplies 16 cells of the depth: it sums the products of even numbers and those of odd ones in two chains, and adds
// their sum to the element. Numbers below the normal range count as 0. A sum may begin and end at any cell, since
// weights of 0 change no bit, but is cut at multiples of kTileCells only.
#pragma once

#include "attend.hpp"
#include "simd.hpp"

namespace clearhead {
namespace {

constexpr int kTileCells = 16;  // cells of the depth, and columns, in a tile

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

// GCC's intrinsics do not say which memory the instructions read, so all earlier stores must be finished.
CLEARHEAD_INLINE void finish_stores() { asm volatile("" : : : "memory"); }

// Configures the registers and sets them to 0: 0 to 3 hold sums (rows, columns), 4 the left operand (rows, cells), 5
// and 6 the right operand (cells, columns).
CLEARHEAD_INLINE void configure_tiles(int rows, int cells, int columns = kTileCells) {
    alignas(64) struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 7; ++i) {
        shape.row_bytes[i] = uint16_t(4 * (i == 4 ? cells : columns));
        shape.rows[i] = uint8_t(i < 5 ? rows : cells);
    }
    finish_stores();
    _tile_loadconfig(&shape);
}

// The operands of a product whose depth is `chunks` times the configured cells. Distances are in cells: from one row to
// the next, from one chunk to the next, and, for columns, from one pair of tiles to the next pair.
struct TileProduct {
    const float* left;
    int64_t left_row, left_step;
    const float* right;
    int64_t right_row, right_step, right_pair, chunks;

    // sum(rows, 16·C) = left · right, or, with `add`, += left · right.
    template <int C> CLEARHEAD_INLINE_MEMBER void operator()(float* sum, int64_t sum_row, bool add) const {
        // Each number of a register stands in its instruction.
#define CLEARHEAD_EACH_TILE(DO)        \
    {                                  \
        DO(0, 5);                      \
        if constexpr (C > 1) DO(1, 6); \
        if constexpr (C > 2) DO(2, 5); \
        if constexpr (C > 3) DO(3, 6); \
    }
#define CLEARHEAD_LOAD(i, _) _tile_loadd(i, sum + 16 * i, 4 * sum_row)
#define CLEARHEAD_CLEAR(i, _) _tile_zero(i)
#define CLEARHEAD_MULTIPLY(i, operand)                                            \
    {                                                                             \
        _tile_loadd(operand, b + i / 2 * right_pair + i % 2 * 16, 4 * right_row); \
        _tile_dpbf16ps(i, 4, operand);                                            \
    }
#define CLEARHEAD_STORE(i, _) _tile_stored(i, sum + 16 * i, 4 * sum_row)
        finish_stores();
        if (add)
            CLEARHEAD_EACH_TILE(CLEARHEAD_LOAD)
        else
            CLEARHEAD_EACH_TILE(CLEARHEAD_CLEAR)
        const float *a = left, *b = right;
        for (int64_t i = 0; i < chunks; ++i, a += left_step, b += right_step) {
            _tile_loadd(4, a, 4 * left_row);
            CLEARHEAD_EACH_TILE(CLEARHEAD_MULTIPLY)
        }
        CLEARHEAD_EACH_TILE(CLEARHEAD_STORE)
    }
};

// scores[r·pitch + 16·g + j] = q_r·k_j for `count` keys of each of C groups, rows of cells key_row apart from keys[g]
// on, and R queries (depth, R). The keys are the left operand, so that they are read where they lie; groups do not
// wait for each other's products. `count` rows, 16 cells and R columns are configured.
template <int R, int C, class Ahead> CLEARHEAD_INLINE void tile_squares(const float* queries, const float* const* keys,
                                                                        int64_t key_row, int64_t depth, float* scores,
                                                                        int64_t pitch, int count, Ahead& beside) {
    alignas(64) float sums[C][16][R];
#define CLEARHEAD_ADD_GROUP(i, _)                                                                     \
    {                                                                                                 \
        _tile_loadd(4, keys[i] + k, 4 * key_row);                                                     \
        _tile_dpbf16ps(i, 4, 5);                                                                      \
        beside.template issue<2>(); /* a few lines at a time: more would hold up the next products */ \
    }
#define CLEARHEAD_STORE_GROUP(i, _) _tile_stored(i, sums[i], 4 * R)
    finish_stores();
    CLEARHEAD_EACH_TILE(CLEARHEAD_CLEAR)
    for (int64_t k = 0; k < depth; k += kTileCells) {
        _tile_loadd(5, queries + k * R, 4 * R);
        CLEARHEAD_EACH_TILE(CLEARHEAD_ADD_GROUP)
    }
    CLEARHEAD_EACH_TILE(CLEARHEAD_STORE_GROUP)
    for (int i = 0; i < C; ++i)
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < count; ++j) scores[r * pitch + 16 * i + j] = sums[i][j][r];
}
#else
constexpr bool kHasTiles = false;
#endif

}  // namespace
}  // namespace clearhead
