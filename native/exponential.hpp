// 2^x and tanh by polynomials (minimax, relative error on [-1/2, 1/2]; fitted with the constant term fixed at 1, so
// that 2^0 is 1 exactly).
#pragma once

#include <cmath>

#include "simd.hpp"

namespace clearhead {
namespace {

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;
// A logit in units of log₂ up to kNear is rounded by 2^-15 (2^-14 of a double's) at most. Logits beyond kRounded lie 64
// apart and more.
template <class T> constexpr T kNear = T(sizeof(T) == 4 ? 0x1p10 : 0x1p39);
template <class T> constexpr T kRounded = T(sizeof(T) == 4 ? 0x1p30 : 0x1p59);

CLEARHEAD_INLINE Vec<float> power_of_fraction(Vec<float> r) {  // degree 6: 2.0e-9
    Vec<float> y = broadcast<float>(0.0001535336191172096f);
    y = fma(y, r, broadcast<float>(0.001339887441412695f));
    y = fma(y, r, broadcast<float>(0.009618437357661554f));
    y = fma(y, r, broadcast<float>(0.05550332471125868f));
    y = fma(y, r, broadcast<float>(0.240226479136289f));
    y = fma(y, r, broadcast<float>(0.6931472028550661f));
    return fma(y, r, broadcast<float>(1.0f));
}

CLEARHEAD_INLINE Vec<double> power_of_fraction(Vec<double> r) {  // degree 11: 1.2e-17
    Vec<double> y = broadcast<double>(4.3075765148573094e-10);
    y = fma(y, r, broadcast<double>(7.073317584339574e-09));
    y = fma(y, r, broadcast<double>(1.0179108811157608e-07));
    y = fma(y, r, broadcast<double>(1.3215437556052541e-06));
    y = fma(y, r, broadcast<double>(1.5252731107119468e-05));
    y = fma(y, r, broadcast<double>(0.0001540353045405473));
    y = fma(y, r, broadcast<double>(0.0013333558149544607));
    y = fma(y, r, broadcast<double>(0.009618129107594308));
    y = fma(y, r, broadcast<double>(0.05550410866480683));
    y = fma(y, r, broadcast<double>(0.24022650695910142));
    y = fma(y, r, broadcast<double>(0.6931471805599455));
    return fma(y, r, broadcast<double>(1.0));
}

// 2^x, for x at most a little above 0: exactly 0 at -infinity and far below 0, exactly 1 at 0, NaN at NaN.
template <class T> CLEARHEAD_INLINE Vec<T> power_of_two(Vec<T> x) {
    x = larger(broadcast<T>(Simd<T>::lowest), x);  // NaN passes
    const Vec<T> whole = nearest<T>(x);
    return times_power<T>(power_of_fraction(x - whole), whole);
}

CLEARHEAD_INLINE float exp2_of(float x) { return exp2f(x); }
CLEARHEAD_INLINE double exp2_of(double x) { return exp2(x); }

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
