// The column pass: statistics that need the final state of every row. It computes the weights again, a tile at a
// time, and adds each tile to every requested sum, in the order of the queries.
#pragma once

#include "operand.hpp"
#include "tile_sums.hpp"
#include "weight_tiles.hpp"

namespace clearhead {
namespace {

// A picture of a matrix, from tiles of it: the mean under each pixel, and the number of largest magnitude there. Pixel
// y covers the rows y·tall … (y + 1)·tall, and likewise the columns; a row that a border cuts is divided in proportion
// (core/observations.py, areas).
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

// The product tilesᵀ·x for a chunk of keys: x (queries, columns) is read a tile of queries at a time.
template <class T> struct TransposedProduct {
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    int64_t head_index;
    Arena& arena;
    const Problem& p = job.problem;
    const ColumnAnswers& want = job.columns;
    int64_t columns = want.transposed ? up_to_multiple(want.x_columns, kLanes<T>) : 0;
    Operand<Single<T>> x = Operand<Single<T>>::in(arena, kTile, columns);  // the tile's rows
    T* product = arena.take<T>((job.key_chunk + kStrip) * columns);        // (chunk, columns)

    void clear(int64_t keys) {
        for (int64_t i = 0; i < keys * columns; ++i) product[i] = 0;
    }

    // Reads rows i … i + count of x; false when all are zero, as most are in attention rollout.
    bool load_rows(int64_t i, int count) {
        const int64_t batch = head_index / p.heads, head = head_index % p.heads * want.x_heads / p.heads;
        x.load_rows(want.x, want.x_type, batch, head, i, i + count, want.x_columns);
        bool any = !x.all_finite;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < columns; ++c) any |= x.rows[r * x.pitch + c] != 0;
        return any;
    }

    // product[start + j] += Σ_r tile[r][j]·x[r] for the keys of one block.
    void add(const T* tile, int count, int64_t start, int64_t width) {
        for (int64_t j = 0; j < width; j += kStrip)
            add_products<Single<T>, 1, pitch>(tile + j, int(min_of(kStrip, width - j)), x, 0, count,
                                              product + (start + j) * columns);
    }

    // Writes the finished product of keys first … last.
    void write(int64_t first, int64_t last) const {
        T* to = static_cast<T*>(want.transposed) + (head_index * p.keys + first) * want.x_columns;
        for (int64_t j = 0; j < last - first; ++j)
            std::memcpy(to + j * want.x_columns, product + j * columns, want.x_columns * sizeof(T));
    }
};

template <class M> struct ColumnTask {
    using T = typename M::T;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    int64_t head_index;
    void* scratch;
    const Problem& p = job.problem;
    const ColumnAnswers& want = job.columns;
    Arena arena{static_cast<char*>(scratch)};
    WeightTiles<M> tiles{job, head_index, arena};
    Picture<T> picture{p, want.height, want.width, arena};
    TransposedProduct<T> product{job, head_index, arena};
    T* line = arena.take<T>(kBlock);
    double* segment = arena.take<double>(job.key_chunk);  // `received` from the queries of one segment

    // Adds all queries' weights on keys first … last to the requested sums.
    void run(int64_t first, int64_t last) {
        tiles.load_keys(first, last);
        product.clear(last - first);
        for (int64_t start = 0; start < p.queries; start += job.segment_rows) {
            for (int64_t j = 0; j < last - first; ++j) segment[j] = 0;
            tiles.each(
                start, min_of(p.queries, start + job.segment_rows), first, last,
                [&](int64_t i, int count) { return !want.transposed || product.load_rows(i, count); },
                [&](const TilePart& part) { normalize(part); },
                [&](int64_t i, int count, int64_t j0, int64_t end) { add_weights(i, count, j0, end, first); });
            double* received = want.received ? want.received + head_index * p.keys + first : nullptr;
            for (int64_t j = 0; received && j < last - first; ++j) received[j] += segment[j];
        }
        if (want.transposed) product.write(first, last);
    }

    // Scores become weights.
    void normalize(const TilePart& part) {
        for (int r = 0; r < part.rows; ++r) {
            const int64_t index = answer_index(p, head_index, part.query + r);
            const Normalizer<T> normalizer(want.states, index, tiles.rules.scale_of(tiles.head));
            T* x = tiles.tile + (part.row + r) * pitch;
            for (int j = part.first; j < part.last; j += kLanes<T>) store(x + j, normalizer.weight(load(x + j)));
        }
    }

    // Adds a tile of weights to every requested sum.
    void add_weights(int64_t i, int count, int64_t j0, int64_t end, int64_t first) {
        const T* weights = tiles.tile;
        const int64_t width = end - j0;
        if (want.weights) copy_tile(weights, count, width, want.weights, head_index * p.queries + i, j0, p.keys);
        if (want.received) add_to_keys(weights, count, width, line, segment + (j0 - first));
        double* peak = want.peak ? want.peak + head_index * p.keys + j0 : nullptr;
        for (int r = 0; peak && r < count; ++r)
            for (int64_t j = 0; j < width; ++j) {
                const double w = double(weights[r * pitch + j]);
                if (w > peak[j] || w != w) peak[j] = w;  // NaN where one is NaN
            }
        if (want.image) {
            double* pixels = want.image + head_index * want.height * want.width;
            picture.template add<false>(weights, i, count, j0, int(width), 0, pixels, nullptr);
        }
        if (want.groups)
            add_to_groups(weights, count, width, want.query_labels + tiles.batch * p.queries + i,
                          want.key_labels + tiles.batch * p.keys + j0, line,
                          want.groups + head_index * want.query_groups * want.key_groups, want.key_groups);
        if (want.transposed) product.add(weights, count, j0 - first, width);
    }
};

template <class M> int64_t column_scratch_bytes(const Job& job) { return ColumnTask<M>{job, 0, nullptr}.arena.bytes; }

// One chunk of keys of one head, or all of them where there are no chunks: an image and groups are sums over all keys.
template <class M> void columns(const Job& job, int64_t index, void* scratch) {
    const int64_t chunks = max_of(1, job.key_chunks), keys = job.problem.keys, size = job.key_chunk;
    ColumnTask<M> task{job, index / chunks, scratch};
    const int64_t start = index % chunks * size, stop = job.key_chunks ? min_of(keys, start + size) : keys;
    for (int64_t first = start; first < stop; first += size) task.run(first, min_of(stop, first + size));
}

}  // namespace
}  // namespace clearhead
