// The strongest scores of a row, as a falling list: of equals the earlier key stays ahead. Keys come in rising order.
#pragma once

#include <cmath>

#include "tiles.hpp"

namespace clearhead {
namespace {

// One strong score enters the list; the weakest leaves it.
template <class T> void insert(T* top, int64_t* key, int64_t k, T score, int64_t j) {
    int64_t at = k - 1;
    for (; at > 0 && top[at - 1] < score; --at) top[at] = top[at - 1], key[at] = key[at - 1];
    top[at] = score, key[at] = j;
}

// The k-th largest lane.
template <class T> CLEARHEAD_INLINE T ranked(Vec<T> x, int64_t k) {
    T lane[kLanes<T>];
    store(lane, x);
    const Vec<T> at = lanes<T>();
    IntVec<T> before = {};  // lanes that come before this one in falling order, negated
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
        const Vec<T> other = spread<T>(lane[i]);
        before += (other > x) | ((other == x) & (spread<T>(T(i)) < at));
    }
    const IntVec<T> wanted = IntVec<T>{} - typename Simd<T>::Int(k - 1);
    return largest_of<T>(before == wanted ? x : spread<T>(-kInfinity<T>));
}

#if defined(__AVX512F__)
// A list of at most 16, `used` of the lanes of a vector. Those above `least` are gathered before they enter, one by one.
void enter_short_list(float* top, int64_t* key, uint32_t used, const float* scores, int64_t j0, int first, int last,
                      float least) {
    float strong[kBlock + 16];
    int32_t place[kBlock + 16];
    int count = 0;
    const __m512i one_by_one = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int j = first; j < last; j += 16) {
        const __m512 x = _mm512_loadu_ps(scores + j);
        const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GT_OQ);
        const __m512i column = _mm512_add_epi32(one_by_one, _mm512_set1_epi32(j));
        _mm512_storeu_ps(strong + count, _mm512_maskz_compress_ps(above, x));
        _mm512_storeu_si512(place + count, _mm512_maskz_compress_epi32(above, column));
        count += __builtin_popcount(above);
    }
    // Each pushes the weaker ones back by a lane. A place is a column, or kBlock and a lane of the list as it was.
    __m512 list = _mm512_mask_loadu_ps(_mm512_set1_ps(-kInfinity<float>), __mmask16(used), top);
    __m512i places = _mm512_add_epi32(one_by_one, _mm512_set1_epi32(kBlock));
    const __m512 none = _mm512_set1_ps(kInfinity<float>);
    for (int i = 0; i < count; ++i) {
        const __m512 x = _mm512_set1_ps(strong[i]);
        const __m512 back = (__m512)_mm512_alignr_epi32((__m512i)list, (__m512i)none, 15);
        const __m512i places_back = _mm512_alignr_epi32(places, places, 15);
        const __mmask16 stays = _mm512_cmp_ps_mask(list, x, _CMP_GE_OQ), before = _mm512_cmp_ps_mask(back, x, _CMP_GE_OQ);
        places = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(places_back, before, _mm512_set1_epi32(place[i])), stays, places);
        list = _mm512_mask_mov_ps(_mm512_mask_mov_ps(back, before, x), stays, list);
    }
    const __m512i low = _mm512_maskz_loadu_epi64(__mmask8(used), key);
    const __m512i high = _mm512_maskz_loadu_epi64(__mmask8(used >> 8), key + 8);
    for (int half = 0; half < 2; ++half) {
        const __m512i at = _mm512_cvtepi32_epi64(half ? _mm512_extracti64x4_epi64(places, 1) : _mm512_castsi512_si256(places));
        const __mmask8 fresh = _mm512_cmplt_epi64_mask(at, _mm512_set1_epi64(kBlock));
        const __m512i old = _mm512_permutex2var_epi64(low, at, high);
        _mm512_mask_storeu_epi64(key + 8 * half, __mmask8(used >> 8 * half),
                                 _mm512_mask_add_epi64(old, fresh, at, _mm512_set1_epi64(j0)));
    }
    _mm512_mask_storeu_ps(top, __mmask16(used), list);
}
#endif

// What the block at j0 adds to the list: scores of columns first … last, of which `high` is the largest lane by lane.
template <class T>
void enter_top(T* top, int64_t* key, int64_t k, const T* scores, int64_t j0, int first, int last, Vec<T> high) {
    T least = top[k - 1];
    if (!lanes_above<T>(high, least)) return;
    // A list that is not full takes everything, most of it for a moment: k lanes hold a score as large as their k-th.
    if (least == -kInfinity<T> && k <= kLanes<T>) least = std::nextafter(ranked<T>(high, k), -kInfinity<T>);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        if (k <= 16) return enter_short_list(top, key, uint32_t((1u << k) - 1), scores, j0, first, last, least);
#endif
    for (int j = first; j < last; j += kLanes<T>)
        for (uint32_t above = lanes_above<T>(load(scores + j), least); above; above &= above - 1) {
            const int i = j + __builtin_ctz(above);
            if (scores[i] > top[k - 1]) insert(top, key, k, scores[i], j0 + i);
        }
}

}  // namespace
}  // namespace clearhead
