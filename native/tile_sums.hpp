// Sums of a tile of numbers, those of `count` queries for the keys of one block, (count, kPitch): by key, by groups and
// by the pixels of a picture. `line` is room for the numbers of one row, (kBlock,).
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

// Writes the tile to rows row … and columns j0 … of a matrix with so many columns.
template <class T>
void copy_tile(const T* tile, int count, int64_t width, void* matrix, int64_t row, int64_t j0, int64_t columns) {
    for (int r = 0; r < count; ++r)
        std::memcpy(static_cast<T*>(matrix) + (row + r) * columns + j0, tile + r * kPitch<T>, width * sizeof(T));
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

// A picture of the matrix. Pixel y covers the rows y·tall … (y + 1)·tall, and likewise the columns; a row that a border
// cuts is divided in proportion (core/observations.py, areas).
template <class T> struct Picture {
    const Problem& p;
    int64_t height, width;
    double tall, wide;
    struct Overlap {  // of a column of the block and a pixel
        int64_t column, pixel;
        double share;  // of the pixel
    }* overlaps;
    int64_t overlap_count = 0, block = -1;
    T* large;  // (kBlock,)

    Picture(const Problem& problem, int64_t height_, int64_t width_, Arena& arena)
        : p(problem),
          height(height_),
          width(width_),
          tall(double(p.queries) / double(height)),
          wide(double(p.keys) / double(width)) {
        overlaps = arena.take<Overlap>(width ? kBlock + width + 2 : 0);
        large = arena.take<T>(width ? kBlock : 0);
    }

    // The pixels that row i lies under in part, if only by rounding.
    int64_t first_pixel(int64_t i) const { return min_of(int64_t(double(i) / tall), height - 1); }

    // Adds the tile of queries i … and keys j0 … to the means of the pixels, and, where `largest` is given, puts there
    // the number of largest magnitude under each. Both start at pixel row `first`.
    void add(const T* tile, int64_t i, int count, int64_t j0, int64_t columns, T* line, double* mean, double* largest,
             int64_t first) {
        read_overlaps(j0, columns);
        for (int64_t y = first_pixel(i); y < height && double(y) * tall < double(i + count); ++y) {
            const double from = double(y) * tall, to = double(y + 1) * tall;
            for (int64_t j = 0; j < columns; ++j) line[j] = 0;
            for (int64_t j = 0; largest && j < columns; ++j) large[j] = 0;
            for (int r = int(max_of(0, int64_t(from) - i)); r < count && double(i + r) < to; ++r) {
                const double high = to < double(i + r + 1) ? to : double(i + r + 1),
                             low = from > double(i + r) ? from : double(i + r);
                if (high <= low) continue;
                const T* x = tile + r * kPitch<T>;
                const Vec<T> share = broadcast<T>(T((high - low) / tall));
                for (int64_t j = 0; j < columns; j += kLanes<T>)
                    store(line + j, fma(load(x + j), share, load(line + j)));
                for (int64_t j = 0; largest && j < columns; j += kLanes<T>) {
                    const Vec<T> a = load(x + j), b = load(large + j);
                    store(large + j, magnitude_of<T>(a) > magnitude_of<T>(b) ? a : b);
                }
            }
            double* means = mean + (y - first) * width;
            for (int64_t n = 0; n < overlap_count; ++n)
                means[overlaps[n].pixel] += double(line[overlaps[n].column]) * overlaps[n].share;
            if (!largest) continue;
            double* most = largest + (y - first) * width;
            for (int64_t n = 0; n < overlap_count; ++n) put_larger(most[overlaps[n].pixel], large[overlaps[n].column]);
        }
    }

    // Of two numbers the one of larger magnitude, the earlier one of equals.
    CLEARHEAD_INLINE void put_larger(double& best, double x) {
        if ((x < 0 ? -x : x) > (best < 0 ? -best : best)) best = x;
    }

    void read_overlaps(int64_t j0, int64_t columns) {
        if (block == j0) return;
        block = j0, overlap_count = 0;
        int64_t x = min_of(int64_t(double(j0) / wide), width - 1);
        for (int64_t j = j0; j < j0 + columns; ++j) {
            while (x + 1 < width && double(x + 1) * wide <= double(j)) ++x;
            for (int64_t pixel = x; pixel < width && double(pixel) * wide < double(j + 1); ++pixel) {
                const double right = double(pixel + 1) * wide, left = double(pixel) * wide;
                const double overlap =
                    (right < double(j + 1) ? right : double(j + 1)) - (left > double(j) ? left : double(j));
                if (overlap > 0) overlaps[overlap_count++] = {j - j0, pixel, overlap / wide};
            }
        }
    }
};

}  // namespace
}  // namespace clearhead
