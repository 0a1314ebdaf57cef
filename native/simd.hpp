// SIMD vectors of one width: the compiler's vector types for what all processors share, intrinsics for the rest.
// Included by the per-instruction-set units only. Everything is in an anonymous namespace and nothing is an object at
// namespace scope: two units compiled with different flags must not share code, and nothing may run before dispatch.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CLEARHEAD_INLINE static inline __attribute__((always_inline))
#define CLEARHEAD_INLINE_MEMBER inline __attribute__((always_inline))

namespace clearhead {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
using Floats = __m512;
using Doubles = __m512d;
#define CLEARHEAD_X86(name) _mm512_##name  // the instruction for vectors of this width
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
using Floats = __m256;
using Doubles = __m256d;
#define CLEARHEAD_X86(name) _mm256_##name
#elif defined(__x86_64__)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
using Floats = __m128;
using Doubles = __m128d;
#define CLEARHEAD_X86(name) _mm_##name
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
using Floats = float32x4_t;
using Doubles = float64x2_t;
#endif

template <class T> struct Simd;

template <> struct Simd<float> {
    typedef float V __attribute__((vector_size(kVectorBytes)));
    typedef int32_t I __attribute__((vector_size(kVectorBytes)));
    using Int = int32_t;
    static constexpr int bias = 127, mantissa = 23;
    static constexpr float magic = 12582912.0f;  // 1.5·2²³: adding it leaves the nearest integer in the low bits
    static constexpr float lowest = -252.0f;     // 2^lowest is 0 in float, by two factors of 2^(lowest/2)
};

template <> struct Simd<double> {
    typedef double V __attribute__((vector_size(kVectorBytes)));
    typedef int64_t I __attribute__((vector_size(kVectorBytes)));
    using Int = int64_t;
    static constexpr int bias = 1023, mantissa = 52;
    static constexpr double magic = 6755399441055744.0;
    static constexpr double lowest = -2044.0;
};

template <class T> using Vec = typename Simd<T>::V;
template <class T> using IntVec = typename Simd<T>::I;
template <class T> constexpr int kLanes = kVectorBytes / int(sizeof(T));
template <class T> constexpr T kInfinity = T(__builtin_huge_val());
template <class T> constexpr T kLargest = sizeof(T) == 4 ? T(__FLT_MAX__) : T(__DBL_MAX__);

template <class V> constexpr bool kOfFloats = sizeof(V{}[0]) == 4;
template <class V> using Register = std::conditional_t<kOfFloats<V>, Floats, Doubles>;
// Returns what an instruction on vectors V answers, as a Result: name_ps for floats, name_pd for doubles.
#define CLEARHEAD_RETURN(Result, V, name, ...)                \
    if constexpr (kOfFloats<V>)                               \
        return (Result)CLEARHEAD_X86(name##_ps)(__VA_ARGS__); \
    else                                                      \
        return (Result)CLEARHEAD_X86(name##_pd)(__VA_ARGS__)

template <class T> CLEARHEAD_INLINE Vec<T> load(const T* from) {
    Vec<T> v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class T> CLEARHEAD_INLINE void store(T* to, Vec<T> v) { std::memcpy(to, &v, sizeof v); }

template <class T> CLEARHEAD_INLINE Vec<T> broadcast(T x) {  // a copy in every lane, bit for bit
#if defined(__AVX2__)
    CLEARHEAD_RETURN(Vec<T>, Vec<T>, set1, x);
#else
    Vec<T> v;
    for (int i = 0; i < kLanes<T>; ++i) v[i] = x;
    return v;
#endif
}

template <class T> CLEARHEAD_INLINE Vec<T> lanes() {  // 0, 1, 2, …
    Vec<T> v;
    for (int i = 0; i < kLanes<T>; ++i) v[i] = T(i);
    return v;
}

// a·b + c in one rounding where the processor can.
template <class V> CLEARHEAD_INLINE V fma(V a, V b, V c) {
#if defined(__FMA__)
    CLEARHEAD_RETURN(V, V, fmadd, (Register<V>)a, (Register<V>)b, (Register<V>)c);
#elif defined(__aarch64__)
    if constexpr (kOfFloats<V>)
        return (V)vfmaq_f32((Floats)c, (Floats)a, (Floats)b);
    else
        return (V)vfmaq_f64((Doubles)c, (Doubles)a, (Doubles)b);
#else
    return a * b + c;
#endif
}

// The larger; `best` where x is NaN, so that one NaN does not hide the others' maximum.
template <class V> CLEARHEAD_INLINE V larger(V x, V best) {
#if defined(__x86_64__)
    CLEARHEAD_RETURN(V, V, max, (Register<V>)x, (Register<V>)best);
#else
    return x > best ? x : best;
#endif
}

#if defined(__AVX512DQ__)
template <class T> CLEARHEAD_INLINE Vec<T> above_whole(Vec<T> x) {  // x - ⌊x⌋, 0 for an infinite x
    CLEARHEAD_RETURN(Vec<T>, Vec<T>, reduce, (Register<Vec<T>>)x, 9);
}
#else
template <class T> CLEARHEAD_INLINE Vec<T> rounded_down(Vec<T> x) {
#if defined(__AVX2__)
    CLEARHEAD_RETURN(Vec<T>, Vec<T>, floor, (Register<Vec<T>>)x);
#elif defined(__aarch64__)
    if constexpr (sizeof(T) == 4)
        return (Vec<T>)vrndmq_f32((Floats)x);
    else
        return (Vec<T>)vrndmq_f64((Doubles)x);
#else  // or 1 less where x is whole
    return (x - T(0.5) + Simd<T>::magic) - Simd<T>::magic;
#endif
}
#endif

// x·2ⁿ for a vector n of whole numbers; AVX-512 rounds n down.
template <class T> CLEARHEAD_INLINE Vec<T> times_power(Vec<T> x, Vec<T> n) {
#if defined(__AVX512F__)
    CLEARHEAD_RETURN(Vec<T>, Vec<T>, scalef, (Register<Vec<T>>)x, (Register<Vec<T>>)n);
#else  // by two factors, so that results below the normal range are right: 2^⌊n/2⌋ and the rest
    using S = Simd<T>;
    const IntVec<T> zero = (IntVec<T>)broadcast<T>(S::magic), exponent = (IntVec<T>)(n + S::magic) - zero + 2 * S::bias;
    const IntVec<T> halved = exponent << (S::mantissa - 1), a = halved & typename S::Int(-1) << S::mantissa;
    return x * (Vec<T>)a * (Vec<T>)(halved + halved - a);
#endif
}

template <class T> CLEARHEAD_INLINE T sum_of(Vec<T> v) {
#if defined(__AVX512F__)
    CLEARHEAD_RETURN(T, Vec<T>, reduce_add, (Register<Vec<T>>)v);
#else
    T total = v[0];
    for (int i = 1; i < kLanes<T>; ++i) total += v[i];
    return total;
#endif
}

template <class T> CLEARHEAD_INLINE T largest_of(Vec<T> v) {
#if defined(__AVX512F__)
    CLEARHEAD_RETURN(T, Vec<T>, reduce_max, (Register<Vec<T>>)v);
#else
    T best = v[0];
    for (int i = 1; i < kLanes<T>; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// The largest of x[first …, last), whole pairs of vectors, lane by lane.
template <class T> CLEARHEAD_INLINE Vec<T> largest_lanes(const T* x, int first, int last) {
    Vec<T> a = broadcast<T>(-kInfinity<T>), b = a;
    for (int j = first; j < last; j += 2 * kLanes<T>) {
        a = larger(load(x + j), a);
        b = larger(load(x + j + kLanes<T>), b);
    }
    return larger(a, b);
}

// One bit for each lane of x above `threshold`.
template <class T> CLEARHEAD_INLINE uint32_t lanes_above(Vec<T> x, T threshold) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(threshold), _CMP_GT_OQ);
    else
        return _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(threshold), _CMP_GT_OQ);
#elif defined(__x86_64__)
    CLEARHEAD_RETURN(uint32_t, Vec<T>, movemask, (Register<Vec<T>>)(x > broadcast<T>(threshold)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes<T>; ++i) bits |= uint32_t(x[i] > threshold) << i;
    return bits;
#endif
}

// The first halves of a and b, interleaved, and their second halves.
template <class V, int... I> CLEARHEAD_INLINE V zip_low(V a, V b, std::integer_sequence<int, I...>) {
    constexpr int n = sizeof...(I);
    return __builtin_shufflevector(a, b, (I % 2 ? n + I / 2 : I / 2)...);
}
template <class V, int... I> CLEARHEAD_INLINE V zip_high(V a, V b, std::integer_sequence<int, I...>) {
    constexpr int n = sizeof...(I);
    return __builtin_shufflevector(a, b, (n / 2 + (I % 2 ? n + I / 2 : I / 2))...);
}

// Transposes a square of vectors by log₂ perfect shuffles, each of which rotates the (row, column) bits of an index by
// one.
template <class T> CLEARHEAD_INLINE void transpose(Vec<T> (&x)[kLanes<T>]) {
    constexpr int n = kLanes<T>;
    using Order = std::make_integer_sequence<int, n>;
#pragma GCC unroll 8
    for (int turn = 1; turn < n; turn *= 2) {
        Vec<T> y[n];
#pragma GCC unroll 16
        for (int i = 0; i < n / 2; ++i) {
            y[2 * i] = zip_low(x[i], x[i + n / 2], Order{});
            y[2 * i + 1] = zip_high(x[i], x[i + n / 2], Order{});
        }
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) x[i] = y[i];
    }
}

// Four words from each of kLanes<float> rows, at this byte: to[c][r] = word c of row r.
CLEARHEAD_INLINE void load_words(const uint8_t* const* row, int64_t at, Vec<float> (&to)[4]) {
#if defined(__x86_64__)
    Floats t[4];
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {  // four rows at a time go to their lanes as they are loaded
        const auto four = [&](int r) { return _mm_loadu_ps(reinterpret_cast<const float*>(row[r] + at)); };
#if defined(__AVX512F__)
        t[s] = _mm512_zextps128_ps512(four(s));
        t[s] = _mm512_mask_broadcast_f32x4(t[s], 0x00f0, four(4 + s));
        t[s] = _mm512_mask_broadcast_f32x4(t[s], 0x0f00, four(8 + s));
        t[s] = _mm512_mask_broadcast_f32x4(t[s], 0xf000, four(12 + s));
#elif defined(__AVX2__)
        const __m256 later = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(row[4 + s] + at));
        t[s] = _mm256_blend_ps(_mm256_castps128_ps256(four(s)), later, 0xf0);  // Zen inserts half as fast
#else
        t[s] = four(s);
#endif
    }
    const Doubles low01 = (Doubles)CLEARHEAD_X86(unpacklo_ps)(t[0], t[1]),
                  high01 = (Doubles)CLEARHEAD_X86(unpackhi_ps)(t[0], t[1]),
                  low23 = (Doubles)CLEARHEAD_X86(unpacklo_ps)(t[2], t[3]),
                  high23 = (Doubles)CLEARHEAD_X86(unpackhi_ps)(t[2], t[3]);
    to[0] = (Vec<float>)CLEARHEAD_X86(unpacklo_pd)(low01, low23);
    to[1] = (Vec<float>)CLEARHEAD_X86(unpackhi_pd)(low01, low23);
    to[2] = (Vec<float>)CLEARHEAD_X86(unpacklo_pd)(high01, high23);
    to[3] = (Vec<float>)CLEARHEAD_X86(unpackhi_pd)(high01, high23);
#else
    for (int r = 0; r < 4; ++r) std::memcpy(&to[r], row[r] + at, 16);
    transpose<float>(to);
#endif
}

// Columns that load_columns reads at a time: four words leave half of the shuffles of a square.
template <class T> constexpr int kColumns = sizeof(T) == 4 ? 4 : kLanes<T>;

// Columns k, k + 1, … of kLanes rows: x[c][r] = row[r][k + c].
template <class T> CLEARHEAD_INLINE void load_columns(const T* const* row, int64_t k, Vec<T> (&x)[kColumns<T>]) {
    if constexpr (sizeof(T) == 4)
        return load_words(reinterpret_cast<const uint8_t* const*>(row), 4 * k, x);
    else {
#pragma GCC unroll 8
        for (int r = 0; r < kLanes<T>; ++r) x[r] = load(row[r] + k);
        transpose<T>(x);
    }
}

// float16 and bfloat16 numbers, one by one; the compiler vectorises loops over the latter.
CLEARHEAD_INLINE float from_bf16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

CLEARHEAD_INLINE uint16_t to_bf16(float x) {  // nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

CLEARHEAD_INLINE float from_f16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
    uint32_t wide;
    if (exponent == 31)
        wide = sign | 0x7f800000 | (fraction << 13);
    else if (exponent != 0)
        wide = sign | ((exponent + 112) << 23) | (fraction << 13);
    else {
        const float small = float(fraction) * 5.9604644775390625e-8f;  // 2⁻²⁴
        std::memcpy(&wide, &small, 4);
        wide |= sign;
    }
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
#endif
}

CLEARHEAD_INLINE uint16_t to_f16(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (bits < 0x38800000) {  // below the normal range: let an addition round to the last place, 2⁻²⁴
        float y;
        std::memcpy(&y, &bits, 4);
        y += 0.5f;
        std::memcpy(&bits, &y, 4);
        return uint16_t(sign | (bits - 0x3f000000));
    }
    return uint16_t(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
#endif
}

CLEARHEAD_INLINE void widen(const uint16_t* from, float* to, int64_t count, bool is_bf16) {
    int64_t i = 0;
    if (is_bf16) {
        for (; i < count; ++i) to[i] = from_bf16(from[i]);
        return;
    }
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
    for (; i < count; ++i) to[i] = from_f16(from[i]);
}

}  // namespace
}  // namespace clearhead
