// 2^x and tanh by polynomials (minimax, relative error on [0, 1]; fitted with the constant term fixed at 1, so that 2^0
// is 1 exactly).
#pragma once

#include <cmath>

#include "simd.hpp"

namespace clearhead {
namespace {

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;
// Logits beyond lie 64 apart and more.
template <class T> constexpr T kRounded = T(sizeof(T) == 4 ? 0x1p30 : 0x1p59);

// The coefficients of 2^r from the highest on: of degree 6 with an error of 2.0e-9, and of degree 11 with 3.2e-18.
template <class T> CLEARHEAD_INLINE Vec<T> power_of_fraction(Vec<T> r) {
    constexpr float singles[] = {0.00021612916166888432f,
                                 0.001246784620460968f,
                                 0.009675451577901754f,
                                 0.05548528062281933f,
                                 0.24022930554858887f,
                                 0.6931470444438645f,
                                 1.0f};
    constexpr double doubles[] = {6.263464628088627e-10, 6.559530193150301e-09, 1.0253212219093686e-07,
                                  1.320836731952627e-06, 1.525317505287072e-05, 0.00015403512309781895,
                                  0.0013333558629561105, 0.009618129099550928,  0.055504108665602236,
                                  0.2402265069590633,    0.693147180559946,     1.0};
    constexpr int count = sizeof(T) == 4 ? 7 : 12;
    const auto coefficient = [&](int i) { return broadcast<T>(sizeof(T) == 4 ? T(singles[i]) : T(doubles[i])); };
    Vec<T> y = coefficient(0);
#pragma GCC unroll 16
    for (int i = 1; i < count; ++i) y = fma(y, r, coefficient(i));
    return y;
}

// 2^x, for x at most a little above 0: exactly 0 at -infinity and far below 0, exactly 1 at 0, NaN at NaN.
template <class T> CLEARHEAD_INLINE Vec<T> power_of_two(Vec<T> x) {
#if defined(__AVX512DQ__)  // 0 is what is left of -infinity, and times_power rounds down by itself
    return times_power<T>(power_of_fraction<T>(above_whole<T>(x)), x);
#else
    x = larger(broadcast<T>(Simd<T>::lowest), x);  // NaN passes
    const Vec<T> whole = rounded_down<T>(x);
    return times_power<T>(power_of_fraction<T>(x - whole), whole);
#endif
}

CLEARHEAD_INLINE Vec<float> tanh_of(Vec<float> x) {
    const Vec<float> bound = broadcast<float>(10.0f);  // beyond it, tanh is ±1 in float
    Vec<float> y = x > bound ? bound : x;
    y = y < -bound ? -bound : y;
    const Vec<float> e = power_of_two<float>(y * broadcast<float>(float(2 * kLog2e)));
    const Vec<float> one = broadcast<float>(1.0f);
    const Vec<float> quotient = (e - one) / (e + one);
    const Vec<float> s = y * y;  // near 0 the difference above cancels, so there the Taylor series is used
    Vec<float> series = fma(s, broadcast<float>(-17.0f / 315), broadcast<float>(2.0f / 15));
    series = fma(series, s, broadcast<float>(-1.0f / 3));
    series = fma(series * s, y, y);
    return s < broadcast<float>(0.04f) ? series : quotient;
}

CLEARHEAD_INLINE Vec<double> tanh_of(Vec<double> x) {
    for (int i = 0; i < kLanes<double>; ++i) x[i] = ::tanh(double(x[i]));
    return x;
}

}  // namespace
}  // namespace clearhead
