// The state of a block of rows on their way through the keys, in memory of the caller's.
#pragma once

#include "packing.hpp"
#include "top.hpp"

namespace clearhead {
namespace {

// What has been found for the rows of a task over some keys. Scores are in the kernel's own unit (Rules::natural).
template <class T> struct Found {
    T* highest;       // the largest score
    T* reference;     // highest · factor: weights are 2^(score·factor - reference)
    double* sum;      // Σ weights
    double* centred;  // Σ weights · log₂ weights
    double* far;      // Σ weights · distance
    T* out;           // (rows, columns): Σ weights · values
    T* top;           // (rows, k) the largest scores, falling
    int64_t* top_key;

    static Found in(Arena& arena, const Job& job, int64_t columns) {
        const int64_t n = job.block_rows;
        Found f;
        f.highest = arena.take<T>(n);
        f.reference = arena.take<T>(n);
        f.sum = arena.take<double>(n);
        f.centred = arena.take<double>(n);
        f.far = arena.take<double>(n);
        f.top = arena.take<T>(n * job.rows.top);
        f.top_key = arena.take<int64_t>(n * job.rows.top);
        f.out = arena.take<T>((n + kStrip) * columns);
        return f;
    }

    void clear(const Job& job, int64_t n, int64_t columns) {
        for (int64_t r = 0; r < n; ++r) {
            highest[r] = reference[r] = -kInfinity<T>;
            sum[r] = centred[r] = far[r] = 0;
        }
        for (int64_t i = 0; i < n * job.rows.top; ++i) top[i] = -kInfinity<T>, top_key[i] = -1;
        for (int64_t i = 0; i < n * columns; ++i) out[i] = 0;
    }
};

}  // namespace
}  // namespace clearhead
