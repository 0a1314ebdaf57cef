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

CLEARHEAD_INLINE Vec<float> power_of_fraction(Vec<float> r) {  // degree 6: 2.0e-9
    Vec<float> y = broadcast<float>(0.00021612916166888432f);
    y = fma(y, r, broadcast<float>(0.001246784620460968f));
    y = fma(y, r, broadcast<float>(0.009675451577901754f));
    y = fma(y, r, broadcast<float>(0.05548528062281933f));
    y = fma(y, r, broadcast<float>(0.24022930554858887f));
    y = fma(y, r, broadcast<float>(0.6931470444438645f));
    return fma(y, r, broadcast<float>(1.0f));
}

CLEARHEAD_INLINE Vec<double> power_of_fraction(Vec<double> r) {  // degree 11: 3.2e-18
    Vec<double> y = broadcast<double>(6.263464628088627e-10);
    y = fma(y, r, broadcast<double>(6.559530193150301e-09));
    y = fma(y, r, broadcast<double>(1.0253212219093686e-07));
    y = fma(y, r, broadcast<double>(1.320836731952627e-06));
    y = fma(y, r, broadcast<double>(1.525317505287072e-05));
    y = fma(y, r, broadcast<double>(0.00015403512309781895));
    y = fma(y, r, broadcast<double>(0.0013333558629561105));
    y = fma(y, r, broadcast<double>(0.009618129099550928));
    y = fma(y, r, broadcast<double>(0.055504108665602236));
    y = fma(y, r, broadcast<double>(0.2402265069590633));
    y = fma(y, r, broadcast<double>(0.693147180559946));
    return fma(y, r, broadcast<double>(1.0));
}

// 2^x, for x at most a little above 0: exactly 0 at -infinity and far below 0, exactly 1 at 0, NaN at NaN.
template <class T> CLEARHEAD_INLINE Vec<T> power_of_two(Vec<T> x) {
#if defined(__AVX512DQ__)  // 0 is what is left of -infinity, and times_power rounds down by itself
    return times_power<T>(power_of_fraction(above_whole<T>(x)), x);
#else
    x = larger(broadcast<T>(Simd<T>::lowest), x);  // NaN passes
    const Vec<T> whole = rounded_down<T>(x);
    return times_power<T>(power_of_fraction(x - whole), whole);
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
