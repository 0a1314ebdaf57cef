// The k largest scores of a row, as a falling list; of equal scores the earlier key comes first. Keys are entered in
// rising order.
#pragma once

#include <cmath>

#include "tiles.hpp"

namespace clearhead {
namespace {

// Puts a score into the list in place of the smallest.
template <class T> void insert(T* top, int64_t* key, int64_t k, T score, int64_t j) {
    int64_t i = k - 1;
    for (; i > 0 && top[i - 1] < score; --i) top[i] = top[i - 1], key[i] = key[i - 1];
    top[i] = score, key[i] = j;
}

// The k-th largest lane.
template <class T> CLEARHEAD_INLINE T kth_largest(Vec<T> x, int64_t k) {
    T lane[kLanes<T>];
    store(lane, x);
    const Vec<T> index = lanes<T>();
    IntVec<T> before = {};  // lanes that come before this one in falling order, negated
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
        const Vec<T> other = broadcast<T>(lane[i]);
        before += (other > x) | ((other == x) & (broadcast<T>(T(i)) < index));
    }
    const IntVec<T> wanted = IntVec<T>{} - typename Simd<T>::Int(k - 1);
    return largest_of<T>(before == wanted ? x : broadcast<T>(-kInfinity<T>));
}

// Enters the scores of columns first … last of the block at j0; `high` is their maximum, lane by lane.
template <class T>
void enter_top(T* top, int64_t* key, int64_t k, const T* scores, int64_t j0, int first, int last, Vec<T> high) {
    T threshold = top[k - 1];
    if (!lanes_above<T>(high, threshold)) return;
    // A list that is not full would take every score, most of them only to drop them again. But k lanes hold a score at
    // least as large as the k-th largest of `high`, so smaller ones cannot stay.
    if (threshold == -kInfinity<T> && k <= kLanes<T>)
        threshold = std::nextafter(kth_largest<T>(high, k), -kInfinity<T>);
    for (int j = first; j < last; j += kLanes<T>)
        for (uint32_t above = lanes_above<T>(load(scores + j), threshold); above; above &= above - 1) {
            const int i = j + __builtin_ctz(above);
            if (scores[i] > top[k - 1]) insert(top, key, k, scores[i], j0 + i);
        }
}

}  // namespace
}  // namespace clearhead
