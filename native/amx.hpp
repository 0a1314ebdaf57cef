// Products of bfloat16 numbers in the tile registers of Intel's AMX, of 16 rows of 64 bytes. One instruction multiplies
// 16 cells of the depth: an element's products of even numbers, and those of odd ones, are a chain each, whose sum is
// added to the element. Numbers below the normal range are taken for 0. So where a sum over the depth begins changes no
// bit as long as the weights before are 0, but its cuts must lie at multiples of kTileCells.
#pragma once

#include "attend.hpp"
#include "simd.hpp"

namespace clearhead {
namespace {

constexpr int kTileCells = 16;  // cells of the depth, and columns, in a tile

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

// Says what the tile registers hold: sums (rows, 16) in 0 to 3, the left operand (rows, cells) in 4, and the right one
// (cells, 16) in 5 and 6. They are 0 afterwards.
CLEARHEAD_INLINE void configure_tiles(int rows, int cells) {
    alignas(64) struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};  // of a row of each register
        uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 7; ++i) {
        shape.bytes[i] = uint16_t(i == 4 ? 4 * cells : 64);
        shape.rows[i] = uint8_t(i < 5 ? rows : cells);
    }
    _tile_loadconfig(&shape);
}

CLEARHEAD_INLINE void release_tiles() { _tile_release(); }

// sum(rows, 16·C) = left · right over `chunks` chunks of the depth, each of the cells that are configured; with `add`
// it is added to what is there. Cells lie at left + row·left_row + chunk·left_step, and at right + cell·right_row +
// chunk·right_step; of the groups of 16 columns, pairs lie side by side, and right_pair after one another. All in
// bytes.
struct TileProduct {
    const char *left, *right;
    int64_t left_row, left_step, right_row, right_step, right_pair;
    int64_t chunks;

    template <int C> CLEARHEAD_INLINE_MEMBER void operator()(float* sum, int64_t sum_row, bool add) const {
        const int64_t row = sum_row * int64_t(sizeof(float));
        if (add) {
            _tile_loadd(0, sum, row);
            if constexpr (C > 1) _tile_loadd(1, sum + 16, row);
            if constexpr (C > 2) _tile_loadd(2, sum + 32, row);
            if constexpr (C > 3) _tile_loadd(3, sum + 48, row);
        } else {
            _tile_zero(0);
            if constexpr (C > 1) _tile_zero(1);
            if constexpr (C > 2) _tile_zero(2);
            if constexpr (C > 3) _tile_zero(3);
        }
        const char *a = left, *b = right;
        for (int64_t i = 0; i < chunks; ++i, a += left_step, b += right_step) {
            _tile_loadd(4, a, left_row);
            _tile_loadd(5, b, right_row);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (C > 1) _tile_loadd(6, b + 64, right_row);
            if constexpr (C > 1) _tile_dpbf16ps(1, 4, 6);
            if constexpr (C > 2) _tile_loadd(5, b + right_pair, right_row);
            if constexpr (C > 2) _tile_dpbf16ps(2, 4, 5);
            if constexpr (C > 3) _tile_loadd(6, b + right_pair + 64, right_row);
            if constexpr (C > 3) _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, sum, row);
        if constexpr (C > 1) _tile_stored(1, sum + 16, row);
        if constexpr (C > 2) _tile_stored(2, sum + 32, row);
        if constexpr (C > 3) _tile_stored(3, sum + 48, row);
    }
};
#else
constexpr bool kHasTiles = false;
#endif

}  // namespace
}  // namespace clearhead
