// The k numbers of largest magnitude of a whole matrix, and of a row. Both lists keep magnitudes; one bit of a number's
// index keeps its sign.
#pragma once

#include "top.hpp"

namespace clearhead {
namespace {

constexpr int64_t kNegative = int64_t{1} << 62;  // in a place: the number is below 0
constexpr int64_t kNowhere = kNegative - 1;      // the place of nothing, after all others

// What numbers are compared by, their magnitude. What is hidden, and NaN, which has no place in an order, have the rank
// -infinity and are never listed.
template <class T, class Hidden> CLEARHEAD_INLINE Vec<T> rank_of(Vec<T> x, Hidden hidden) {
    const Vec<T> size = (Vec<T>)((IntVec<T>)x & ~(IntVec<T>)broadcast<T>(T(-0.0)));
    const Vec<T> listed = x == x ? size : broadcast<T>(-kInfinity<T>);
    return hidden ? broadcast<T>(-kInfinity<T>) : listed;
}

// A heap with what goes first at its root: the smallest rank and, of equal ones, the latest place.
template <class T> struct StrongestList {
    T* rank;         // (k,)
    int64_t* place;  // (k,), with kNegative
    int64_t k;
    T below;  // no smaller rank, nor this one, can enter

    void clear() {
        for (int64_t i = 0; i < k; ++i) rank[i] = -kInfinity<T>, place[i] = kNowhere;
        below = -kInfinity<T>;
    }

    static bool stays_longer(T a, int64_t at_a, T b, int64_t at_b) {
        return a > b || (a == b && (at_a & ~kNegative) < (at_b & ~kNegative));
    }

    void enter(T x, int64_t index) {
        if (!stays_longer(x, index, rank[0], place[0])) return;
        sink(x, index, k);
        below = std::nextafter(rank[0], -kInfinity<T>);
    }

    // Puts a number in the place of the root of the heap of the first `count`.
    void sink(T x, int64_t index, int64_t count) {
        int64_t i = 0;
        for (int64_t child = 1; child < count; child = 2 * i + 1) {
            if (child + 1 < count && stays_longer(rank[child], place[child], rank[child + 1], place[child + 1]))
                ++child;
            if (!stays_longer(x, index, rank[child], place[child])) break;
            rank[i] = rank[child], place[i] = place[child], i = child;
        }
        rank[i] = x, place[i] = index;
    }

    // Falling ranks become the numbers and their places, or 0 and -1 where there are fewer than k.
    void finish() {
        for (int64_t count = k; --count > 0;) {
            const T x = rank[count], first = rank[0];
            const int64_t index = place[count], first_place = place[0];
            sink(x, index, count);
            rank[count] = first, place[count] = first_place;
        }
        for (int64_t i = 0; i < k; ++i) {
            const bool none = place[i] == kNowhere;
            if (none || place[i] & kNegative) rank[i] = none ? T(0) : -rank[i];
            place[i] = none ? -1 : place[i] & ~kNegative;
        }
    }
};

// The first k numbers of a row.
template <class T> struct FirstList {
    T* rank;       // (k,), falling
    int64_t* key;  // (k,), with kNegative; -1 for nothing
    int64_t k;

    void clear() const {
        for (int64_t i = 0; i < k; ++i) rank[i] = -kInfinity<T>, key[i] = -1;
    }

    // Enters the ranks of columns first … last of the block at j0; x are the numbers that they are of, `high` is their
    // maximum, lane by lane.
    void enter(const T* ranks, const T* x, int64_t j0, int first, int last, Vec<T> high) const {
        enter_top(rank, key, k, ranks, j0, first, last, high);
        for (int64_t i = 0; i < k; ++i)
            if (key[i] >= j0 && key[i] < kNegative) key[i] += int64_t(x[key[i] - j0] < 0) * kNegative;
    }

    void finish() const {
        for (int64_t i = 0; i < k; ++i) {
            const bool none = key[i] < 0;
            if (none || key[i] & kNegative) rank[i] = none ? T(0) : -rank[i];
            if (!none) key[i] &= ~kNegative;
        }
    }
};

}  // namespace
}  // namespace clearhead
