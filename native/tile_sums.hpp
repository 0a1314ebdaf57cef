// Sums of a tile of numbers, those of `count` queries for the keys of one block, (count, kPitch): by key, and by
// groups. `line` is room for the numbers of one row, (kBlock,).
#pragma once

#include "packing.hpp"

namespace clearhead {
namespace {

// line[j] = Σ_r tile[r][j], first ≤ r < last.
template <class T> void sum_rows(const T* tile, int first, int last, int64_t width, T* line) {
    for (int64_t j = 0; j < width; j += kLanes<T>) {
        Vec<T> sum = {};
        for (int r = first; r < last; ++r) sum = sum + load(tile + r * kPitch<T> + j);
        store(line + j, sum);
    }
}

template <class T> void add_to_keys(const T* tile, int count, int64_t width, T* line, double* sums) {
    for (int s = 0; s < count; s += kStrip) {
        sum_rows(tile, s, int(min_of(count, s + kStrip)), width, line);
        for (int64_t j = 0; j < width; ++j) sums[j] += double(line[j]);
    }
}

// Adds to the sums of (query group, key group); neighbouring queries of one group are added up first. `from` and `to`
// are the labels of the tile's queries and keys.
template <class T> void add_to_groups(const T* tile, int count, int64_t width, const int64_t* from, const int64_t* to,
                                      T* line, double* groups, int64_t key_groups) {
    for (int r = 0; r < count;) {
        int stop = r + 1;
        while (stop < count && from[stop] == from[r]) ++stop;
        if (from[r] >= 0) {
            double* total = groups + from[r] * key_groups;
            sum_rows(tile, r, stop, width, line);
            for (int64_t j = 0; j < width; ++j)
                if (to[j] >= 0) total[to[j]] += double(line[j]);
        }
        r = stop;
    }
}

}  // namespace
}  // namespace clearhead
