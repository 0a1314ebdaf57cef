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

#if defined(__AVX512F__)
// The same as enter_top for a list of at most 16 scores, which lies in one vector; `used` are its lanes. The columns of
// the scores above `threshold` are bits of a few words, and enter one by one in one loop: a branch that is mispredicted
// costs as much as a score does.
void enter_short_list(float* top, int64_t* key, uint32_t used, const float* scores, int64_t j0, int first, int last,
                      float threshold) {
    uint64_t words[kBlock / 64 + 1];  // those that are not 0
    int starts[kBlock / 64 + 1], filled = 0, count = 0;
    for (int j = first / 64 * 64; j < last; j += 64) {
        uint64_t word = 0;
#pragma GCC unroll 4
        for (int i = 0; i < 64; i += 16) word |= uint64_t(lanes_above<float>(load(scores + j + i), threshold)) << i;
        if (j < first) word &= ~uint64_t{0} << kPanel<float>;
        if (j + 64 > last) word &= (uint64_t{1} << kPanel<float>)-1;
        words[filled] = word;
        starts[filled] = j;
        filled += word != 0;
        count += __builtin_popcountll(word);
    }
    const __m512i one_by_one = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // Each moves the smaller ones back by a lane. `sources` says where each score came from: a column of the block, or
    // kBlock plus a lane of the list before.
    __m512 list = _mm512_mask_loadu_ps(_mm512_set1_ps(-kInfinity<float>), __mmask16(used), top);
    __m512i sources = _mm512_add_epi32(one_by_one, _mm512_set1_epi32(kBlock));
    const __m512 none = _mm512_set1_ps(kInfinity<float>);
    for (int i = 0; count; --count) {
        const int column = starts[i] + __builtin_ctzll(words[i]);
        i += (words[i] &= words[i] - 1) == 0;
        const __m512 x = _mm512_set1_ps(scores[column]);
        const __m512 back = (__m512)_mm512_alignr_epi32((__m512i)list, (__m512i)none, 15);
        const __m512i sources_back = _mm512_alignr_epi32(sources, sources, 15);
        const __mmask16 stays = _mm512_cmp_ps_mask(list, x, _CMP_GE_OQ),
                        before = _mm512_cmp_ps_mask(back, x, _CMP_GE_OQ);
        sources = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(sources_back, before, _mm512_set1_epi32(column)), stays,
                                        sources);
        list = _mm512_mask_mov_ps(_mm512_mask_mov_ps(back, before, x), stays, list);
    }
    const __m512i low = _mm512_maskz_loadu_epi64(__mmask8(used), key);
    const __m512i high = _mm512_maskz_loadu_epi64(__mmask8(used >> 8), key + 8);
    for (int half = 0; used >> 8 * half; ++half) {
        const __m512i source =
            _mm512_cvtepi32_epi64(half ? _mm512_extracti64x4_epi64(sources, 1) : _mm512_castsi512_si256(sources));
        const __mmask8 fresh = _mm512_cmplt_epi64_mask(source, _mm512_set1_epi64(kBlock));
        const __m512i old = _mm512_permutex2var_epi64(low, source, high);
        _mm512_mask_storeu_epi64(key + 8 * half, __mmask8(used >> 8 * half),
                                 _mm512_mask_add_epi64(old, fresh, source, _mm512_set1_epi64(j0)));
    }
    _mm512_mask_storeu_ps(top, __mmask16(used), list);
}
#endif

// Enters the scores of columns first … last of the block at j0; `high` is their maximum, lane by lane.
template <class T>
void enter_top(T* top, int64_t* key, int64_t k, const T* scores, int64_t j0, int first, int last, Vec<T> high) {
    T threshold = top[k - 1];
    if (!lanes_above<T>(high, threshold)) return;
    // A list that is not full would take every score, most of them only to drop them again. But k lanes hold a score at
    // least as large as the k-th largest of `high`, so smaller ones cannot stay.
    if (threshold == -kInfinity<T> && k <= kLanes<T>)
        threshold = std::nextafter(kth_largest<T>(high, k), -kInfinity<T>);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        if (k <= 16) return enter_short_list(top, key, uint32_t((1u << k) - 1), scores, j0, first, last, threshold);
#endif
    for (int j = first; j < last; j += kLanes<T>)
        for (uint32_t above = lanes_above<T>(load(scores + j), threshold); above; above &= above - 1) {
            const int i = j + __builtin_ctz(above);
            if (scores[i] > top[k - 1]) insert(top, key, k, scores[i], j0 + i);
        }
}

}  // namespace
}  // namespace clearhead
