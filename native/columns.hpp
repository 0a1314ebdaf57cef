// The column pass: statistics that need the final state of every row. It computes the weights again, a tile at a
// time, and adds each tile to every requested sum, in the order of the queries.
#pragma once

#include "operand.hpp"
#include "weight_tiles.hpp"

namespace clearhead {
namespace {

// One axis of a picture: each of its pixels covers `size` rows, or columns, of the matrix, from pixel · size on.
struct PictureAxis {
    int64_t pixels;
    double size;
    struct Pixel {  // the part of a tile under it
        int64_t at;
        int first, last;
        double first_share, last_share;  // how much of the pixel the outer ones cover; those between, 1 / size
    };

    // The first pixel with a part of row i.
    int64_t first_of(int64_t i) const { return min_of(int64_t(double(i) / size), pixels - 1); }

    // How many pixels so many neighbouring rows may lie under.
    int64_t most(int64_t count) const { return pixels ? min_of(pixels, count + 2 + int64_t(double(count) / size)) : 0; }

    // Lists the pixels over rows start … start + count; returns how many.
    int list(int64_t start, int64_t count, Pixel* to) const {
        const auto share = [&](int64_t at, int64_t i) {
            const double right = double(at + 1) * size, left = double(at) * size;
            return ((right < double(i + 1) ? right : double(i + 1)) - (left > double(i) ? left : double(i))) / size;
        };
        const int64_t stop = start + count;
        int listed = 0;
        for (int64_t at = first_of(start); at < pixels && double(at) * size < double(stop); ++at) {
            int64_t first = max_of(start, int64_t(double(at) * size)), last = first;
            while (first < stop && !(share(at, first) > 0) && double(first) < double(at + 1) * size) ++first;
            for (last = first; last < stop && share(at, last) > 0; ++last) continue;
            if (first == last) continue;
            to[listed++] = {at, int(first - start), int(last - start), share(at, first), share(at, last - 1)};
        }
        return listed;
    }
};

// A picture of a matrix, from tiles of it: the mean under each pixel; a cell on a border is divided in proportion
// (core/observations.py, areas).
template <class T> struct Picture {
    using Pixel = PictureAxis::Pixel;

    const Problem& p;
    int64_t height, width;
    Arena& arena;
    PictureAxis tall{height, double(p.queries) / double(height)}, wide{width, double(p.keys) / double(width)};
    Pixel *across = arena.take<Pixel>(wide.most(kBlock)), *down = arena.take<Pixel>(tall.most(kTile));
    int across_count = 0;
    int64_t block = -1;  // whose columns `across` has
    T* line = arena.take<T>(kBlock);

    // Adds a tile's numbers to the means of the pixels, which start at pixel row `first`.
    void add(const T* numbers, const Tile& tile, int64_t first, double* means) {
        if (block != tile.key) across_count = wide.list(tile.key, min_of(kBlock, p.keys - tile.key), across);
        block = tile.key;
        // Whole pixels, so that no bit depends on where the tile ends; what follows in its rows is 0.
        int used = across_count;
        while (used && across[used - 1].first >= tile.columns) --used;
        if (!used) return;
        const int columns = across[used - 1].last, down_count = tall.list(tile.query, tile.rows, down);
        for (const Pixel* y = down; y < down + down_count; ++y) {
            T shares[kTile];
            for (int r = y->first; r < y->last; ++r) shares[r] = T(1 / tall.size);
            shares[y->last - 1] = T(y->last_share), shares[y->first] = T(y->first_share);
            for (int j = 0; j < columns; j += kLanes<T>) {
                Vec<T> sum = {};
                for (int r = y->first; r < y->last; ++r)
                    sum = fma(load(numbers + r * kPitch<T> + j), broadcast<T>(shares[r]), sum);
                store(line + j, sum);
            }
            add_line(used, means + (y->at - first) * width);
        }
    }

    void add_line(int used, double* means) const {
        for (const Pixel* x = across; x < across + used; ++x) {
            double between = 0;
            for (int j = x->first + 1; j < x->last - 1; ++j) between += double(line[j]);
            double sum = double(line[x->first]) * x->first_share + between * (1 / wide.size);
            if (x->last - x->first > 1) sum += double(line[x->last - 1]) * x->last_share;
            means[x->at] += sum;
        }
    }
};

// The right-hand side of a product, rows `first` to `last` of it for a head.
template <class T> void load_operand(Operand<Single<T>>& to, const SumJob& job, int64_t head_index, int64_t rows,
                                     int64_t first, int64_t last) {
    const int64_t heads = job.problem.heads;
    const Matrix x{job.x, job.x_type,   head_index / heads, head_index % heads * job.x_heads / heads,
                   rows,  job.x_columns};
    to.load_rows(x, first, last);
}

// The results to which the column pass and the pass over effects add tiles, for a chunk of keys: a copy of the matrix,
// sums by key and by groups, and the product tilesᵀ·x, whose x (queries, columns) is read a tile of queries at a time.
template <class T> struct ChunkSums {
    const SumJob& job;
    int64_t head_index;
    Arena& arena;
    const Problem& p = job.problem;
    int64_t columns = job.transposed ? up_to_multiple(job.x_columns, kLanes<T>) : 0;
    Operand<Single<T>> x = Operand<Single<T>>::in(arena, kTile, columns);  // the tile's rows
    T* product = arena.take<T>((job.key_chunk + kStrip) * columns);        // (chunk, columns)
    T* line = arena.take<T>(kBlock);

    void clear_product(int64_t keys) {
        for (int64_t i = 0; i < keys * columns; ++i) product[i] = 0;
    }

    // Reads rows i … i + count of x; false when all are zero, as most are in attention rollout.
    bool load_rows(int64_t i, int count) {
        if (!job.transposed) return true;
        load_operand(x, job, head_index, p.queries, i, i + count);
        bool any = !x.all_finite;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < columns; ++c) any |= x.rows[r * x.pitch + c] != 0;
        return any;
    }

    // Adds a tile's numbers; `by_key` has the sums from the chunk's first key on.
    void add(const T* numbers, const Tile& tile, int64_t first, double* by_key, double* groups) {
        const int64_t batch = head_index / p.heads, width = tile.columns, start = tile.key - first;
        if (job.matrix) {
            T* to = static_cast<T*>(job.matrix) + (head_index * p.queries + tile.query) * p.keys + tile.key;
            for (int r = 0; r < tile.rows; ++r)
                std::memcpy(to + r * p.keys, numbers + r * kPitch<T>, width * sizeof(T));
        }
        if (job.received) add_to_keys(numbers, tile.rows, width, line, by_key + start);
        if (job.groups)
            add_to_groups(numbers, tile.rows, width, job.query_labels + batch * p.queries + tile.query,
                          job.key_labels + batch * p.keys + tile.key, line, groups, job.key_groups);
        for (int64_t j = 0; job.transposed && j < width; j += kStrip)
            add_products<Single<T>, 1, kPitch<T>>(numbers + j, int(min_of(kStrip, width - j)), x, 0, tile.rows,
                                                  product + (start + j) * columns);
    }

    // Writes the finished product of keys first … last.
    void write_product(int64_t first, int64_t last) const {
        T* to = static_cast<T*>(job.transposed) + (head_index * p.keys + first) * job.x_columns;
        for (int64_t j = 0; j < last - first; ++j)
            std::memcpy(to + j * job.x_columns, product + j * columns, job.x_columns * sizeof(T));
    }
};

// One chunk of keys of one head, or all of them where there are no chunks: an image and groups are sums over all keys.
template <class M> struct ColumnTask {
    using T = typename M::T;
    static constexpr int64_t pitch = kPitch<T>;

    const ColumnJob& job;
    int64_t index;
    void* scratch;
    const Problem& p = job.problem;
    Arena arena{static_cast<char*>(scratch)};
    int64_t chunks = max_of(1, job.key_chunks), head_index = index / chunks;
    WeightTiles<M> tiles{job, head_index, arena};
    Picture<T> picture{p, job.height, job.width, arena};
    ChunkSums<T> sums{job, head_index, arena};
    double* segment = arena.take<double>(job.key_chunk);  // `received` from the queries of one segment

    void run() {
        const int64_t start = index % chunks * job.key_chunk,
                      stop = job.key_chunks ? min_of(p.keys, start + job.key_chunk) : p.keys;
        for (int64_t first = start; first < stop; first += job.key_chunk)
            add_chunk(first, min_of(stop, first + job.key_chunk));
    }

    // Adds all queries' weights on keys first … last to the requested sums.
    void add_chunk(int64_t first, int64_t last) {
        tiles.load_keys(first, last);
        sums.clear_product(last - first);
        for (int64_t start = 0; start < p.queries; start += job.segment_rows) {
            for (int64_t j = 0; j < last - first; ++j) segment[j] = 0;
            tiles.each(
                start, min_of(p.queries, start + job.segment_rows), first, last,
                [&](int64_t i, int count) { return sums.load_rows(i, count); },
                [&](const TilePart& part) { normalize(part); }, [&](const Tile& tile) { add_weights(tile, first); });
            double* received = job.received ? job.received + head_index * p.keys + first : nullptr;
            for (int64_t j = 0; received && j < last - first; ++j) received[j] += segment[j];
        }
        if (job.transposed) sums.write_product(first, last);
    }

    // Scores become weights.
    void normalize(const TilePart& part) {
        for (int r = 0; r < part.rows; ++r) {
            const int64_t row = answer_index(p, head_index, part.query + r);
            const Normalizer<T> normalizer(job.states, row, tiles.rules.scale_of(tiles.head));
            T* x = tiles.tile + (part.row + r) * pitch;
            for (int j = part.seen.first, last = part.seen.last; j < last; j += kLanes<T>)
                store(x + j, normalizer.weight(load(x + j)));
        }
    }

    // Adds a tile of weights to every requested sum.
    void add_weights(const Tile& tile, int64_t first) {
        const T* weights = tiles.tile;
        sums.add(weights, tile, first, segment, job.groups + head_index * job.query_groups * job.key_groups);
        double* peak = job.peak ? job.peak + head_index * p.keys + tile.key : nullptr;
        for (int r = 0; peak && r < tile.rows; ++r)
            for (int j = 0; j < tile.columns; ++j) {
                const double w = double(weights[r * pitch + j]);
                if (w > peak[j] || w != w) peak[j] = w;  // NaN where one is NaN
            }
        if (job.image) picture.add(weights, tile, 0, job.image + head_index * job.height * job.width);
    }
};

}  // namespace
}  // namespace clearhead
