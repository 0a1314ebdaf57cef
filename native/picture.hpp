// A picture of a matrix, from tiles of it: the mean under each pixel, and the number of largest magnitude there. Pixel
// y covers the rows y·tall … (y + 1)·tall, and likewise the columns; a row that a border cuts is divided in proportion
// (core/observations.py, areas).
#pragma once

#include "packing.hpp"

namespace clearhead {
namespace {

template <class T> struct Picture {
    const Problem& p;
    int64_t height, width;
    Arena& arena;
    double tall = double(p.queries) / double(height), wide = double(p.keys) / double(width);
    struct Pixel {  // the columns first … last of a block that lie under a pixel
        int64_t x;
        int first, last;
        double first_share, last_share;  // how much of the pixel the outer ones cover; those between, 1 / wide
    };
    int64_t most_pixels = width ? min_of(width, kBlock + 2 + width * kBlock / max_of(1, p.keys)) : 0;  // of a block
    Pixel* pixels = arena.take<Pixel>(most_pixels);
    int pixel_count = 0;
    int64_t block = -1;  // whose columns `pixels` has
    T *line = arena.take<T>(kBlock), *large = arena.take<T>(kBlock);

    // The first pixel with a part of row i.
    int64_t first_of(int64_t i) const { return min_of(int64_t(double(i) / tall), height - 1); }

    // Adds the tile of queries i … and keys j0 … to the means of the pixels, and, with LARGEST, puts what `larger_of`
    // leaves of the numbers under them there; both arrays start at pixel row `first`.
    template <bool LARGEST>
    void add(const T* tile, int64_t i, int count, int64_t j0, int columns, int64_t first, double* means, T* largest) {
        read_pixels(j0);
        // Whole pixels, so that no bit depends on where the tile ends; what follows in its rows is 0.
        int used = pixel_count;
        while (used && pixels[used - 1].first >= columns) --used;
        if (!used) return;
        columns = pixels[used - 1].last;
        for (int64_t y = first_of(i); y < height && double(y) * tall < double(i + count); ++y) {
            T shares[kTile];
            const double from = double(y) * tall, to = double(y + 1) * tall;
            int top = int(max_of(0, int64_t(from) - i)), last = top;
            for (int r = top; r < count && double(i + r) < to; ++r) {
                const double high = to < double(i + r + 1) ? to : double(i + r + 1),
                             low = from > double(i + r) ? from : double(i + r);
                if (high > low)
                    shares[r] = T((high - low) / tall), last = r + 1;
                else if (last == top)
                    last = top = r + 1;
            }
            if (top == last) continue;
            for (int j = 0; j < columns; j += kLanes<T>) {
                Vec<T> sum = {}, best = {};
                for (int r = top; r < last; ++r) {
                    const Vec<T> x = load(tile + r * kPitch<T> + j);
                    sum = fma(x, broadcast<T>(shares[r]), sum);
                    if constexpr (LARGEST) best = larger_of(best, x);
                }
                store(line + j, sum);
                if constexpr (LARGEST) store(large + j, best);
            }
            add_line<LARGEST>(used, means + (y - first) * width, LARGEST ? largest + (y - first) * width : nullptr);
        }
    }

    template <bool LARGEST> void add_line(int used, double* means, T* largest) const {
        const double inside = 1 / wide;
        for (int n = 0; n < used; ++n) {
            const Pixel& cell = pixels[n];
            double between = 0;
            T best = large[cell.first];
            for (int j = cell.first + 1; j < cell.last - 1; ++j) {
                between += double(line[j]);
                if constexpr (LARGEST) best = larger_of(best, large[j]);
            }
            double sum = double(line[cell.first]) * cell.first_share + between * inside;
            if (cell.last - cell.first > 1) {
                sum += double(line[cell.last - 1]) * cell.last_share;
                if constexpr (LARGEST) best = larger_of(best, large[cell.last - 1]);
            }
            means[cell.x] += sum;
            if constexpr (LARGEST) largest[cell.x] = larger_of(largest[cell.x], best);
        }
    }

    // Of two numbers the one of larger magnitude, of equal ones the positive, or NaN: core/effects.py, larger.
    template <class X> CLEARHEAD_INLINE X larger_of(X best, X x) {
        const X size = best < X{} ? -best : best;
        return ((x >= size) & (x != best)) | (-x > size) | (x != x) ? x : best;
    }

    void read_pixels(int64_t j0) {
        if (block == j0) return;
        block = j0, pixel_count = 0;
        const int64_t columns = min_of(kBlock, p.keys - j0);
        const auto share = [&](int64_t x, int64_t j) {
            const double right = double(x + 1) * wide, left = double(x) * wide;
            return ((right < double(j + 1) ? right : double(j + 1)) - (left > double(j) ? left : double(j))) / wide;
        };
        for (int64_t x = min_of(int64_t(double(j0) / wide), width - 1);
             x < width && double(x) * wide < double(j0 + columns); ++x) {
            int64_t first = max_of(j0, int64_t(double(x) * wide)), last = first;
            while (first < j0 + columns && !(share(x, first) > 0) && double(first) < double(x + 1) * wide) ++first;
            for (last = first; last < j0 + columns && share(x, last) > 0; ++last) continue;
            if (first == last) continue;
            pixels[pixel_count++] = {x, int(first - j0), int(last - j0), share(x, first), share(x, last - 1)};
        }
    }
};

}  // namespace
}  // namespace clearhead
