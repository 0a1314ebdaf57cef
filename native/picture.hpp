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
    double tall, wide;
    struct Pixel {  // the columns first … last of a block that lie under a pixel
        int64_t x;
        int first, last;
        double first_share, last_share;  // how much of the pixel the outer ones cover; those between, 1 / wide
    }* pixels;
    int pixel_count = 0;
    int64_t block = -1;  // whose columns `pixels` has
    T *line, *large;     // (kBlock,)

    Picture(const Problem& problem, int64_t height_, int64_t width_, Arena& arena)
        : p(problem),
          height(height_),
          width(width_),
          tall(double(p.queries) / double(height)),
          wide(double(p.keys) / double(width)) {
        pixels = arena.take<Pixel>(width ? min_of(width, kBlock + 2 + width * kBlock / max_of(1, p.keys)) : 0);
        line = arena.take<T>(kBlock);
        large = arena.take<T>(kBlock);
    }

    // The first pixel with a part of row i.
    int64_t first_of(int64_t i) const { return min_of(int64_t(double(i) / tall), height - 1); }

    // Whether pixels y have nothing but a part of the rows start … stop.
    bool within(int64_t y, int64_t start, int64_t stop) const {
        return double(y) * tall >= double(start) && double(y + 1) * tall <= double(stop);
    }

    // Adds the tile of queries i … and keys j0 … to the means of pixels y, which start at mean_of(y), and, with
    // LARGEST, puts the numbers of largest magnitude where largest_of(y) starts.
    template <bool LARGEST, class MeanOf, class LargestOf>
    void add(const T* tile, int64_t i, int count, int64_t j0, int columns, MeanOf mean_of, LargestOf largest_of) {
        read_pixels(j0, columns);
        for (int64_t y = first_of(i); y < height && double(y) * tall < double(i + count); ++y) {
            T shares[kTile];
            const double from = double(y) * tall, to = double(y + 1) * tall;
            int first = int(max_of(0, int64_t(from) - i)), last = first;
            for (int r = first; r < count && double(i + r) < to; ++r) {
                const double high = to < double(i + r + 1) ? to : double(i + r + 1),
                             low = from > double(i + r) ? from : double(i + r);
                if (high > low)
                    shares[r] = T((high - low) / tall), last = r + 1;
                else if (last == first)
                    last = first = r + 1;
            }
            if (first == last) continue;
            for (int j = 0; j < columns; j += kLanes<T>) {
                Vec<T> sum = {}, best = {};
                for (int r = first; r < last; ++r) {
                    const Vec<T> x = load(tile + r * kPitch<T> + j);
                    sum = fma(x, broadcast<T>(shares[r]), sum);
                    if constexpr (LARGEST) best = magnitude_of<T>(x) > magnitude_of<T>(best) ? x : best;
                }
                store(line + j, sum);
                if constexpr (LARGEST) store(large + j, best);
            }
            add_line(mean_of(y));
            if constexpr (LARGEST) put_largest(largest_of(y));
        }
    }

    void add_line(double* means) const {
        for (int n = 0; n < pixel_count; ++n) {
            const Pixel& at = pixels[n];
            double between = 0;
            for (int j = at.first + 1; j < at.last - 1; ++j) between += double(line[j]);
            double sum = double(line[at.first]) * at.first_share + between / wide;
            if (at.last - at.first > 1) sum += double(line[at.last - 1]) * at.last_share;
            means[at.x] += sum;
        }
    }

    void put_largest(double* largest) const {
        for (int n = 0; n < pixel_count; ++n) {
            T best = large[pixels[n].first];
            for (int j = pixels[n].first + 1; j < pixels[n].last; ++j)
                best = is_larger(large[j], best) ? large[j] : best;
            put_larger(largest[pixels[n].x], double(best));
        }
    }

    // Whether a number has the larger magnitude.
    template <class U> CLEARHEAD_INLINE bool is_larger(U x, U than) {
        return (x < 0 ? -x : x) > (than < 0 ? -than : than);
    }

    CLEARHEAD_INLINE void put_larger(double& best, double x) { best = is_larger(x, best) ? x : best; }

    void read_pixels(int64_t j0, int64_t columns) {
        if (block == j0) return;
        block = j0, pixel_count = 0;
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
