// The column pass: statistics that need the final log-sum-exp of every row. It computes the weights again, a tile at a
// time, and adds each tile to every requested sum, in the order of the queries.
#pragma once

#include "picture.hpp"
#include "tile_sums.hpp"
#include "transposed.hpp"
#include "weight_tiles.hpp"

namespace clearhead {
namespace {

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

    // Scores become weights, or along a direction the tangents of weights.
    void normalize(const TilePart& part) {
        for (int r = 0; r < part.rows; ++r) {
            const int64_t index = answer_index(p, head_index, part.query + r);
            const T logsumexp = static_cast<const T*>(want.logsumexp)[index];
            const Normalizer<T> normalizer(logsumexp, tiles.rules.scale_of(tiles.head).log2);
            T* x = tiles.tile + (part.row + r) * pitch;
            for (int j = part.first; j < part.last; j += kLanes<T>) store(x + j, normalizer.weight(load(x + j)));
            if (job.along.used) move(part, r, static_cast<const T*>(job.along.kept)[index], x);
        }
    }

    // Row r of a part: weights become their tangents; `middle` is the tangent of the row's log-sum-exp.
    void move(const TilePart& part, int r, T middle, T* x) const {
        const T* by_logit = tiles.tangents->tangents + r * pitch;
        for (int j = part.first; j < part.last; j += kLanes<T>) {
            const Vec<T> weight = load(x + j), moved = weight * (load(by_logit + j) - broadcast<T>(middle));
            store(x + j, weight == Vec<T>{} ? weight : moved);
        }
    }

    // Adds a tile of weights to every requested sum.
    void add_weights(int64_t i, int count, int64_t j0, int64_t end, int64_t first) {
        const T* weights = tiles.tile;
        const int64_t width = end - j0;
        if (want.weights) copy_tile(weights, count, width, want.weights, head_index * p.queries + i, j0, p.keys);
        if (want.received) add_to_keys(weights, count, width, line, segment + (j0 - first));
        if (want.peak) update_peak(count, want.peak + head_index * p.keys + j0, width);
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

    // The largest weight on each key, NaN where one is NaN.
    void update_peak(int count, double* peak, int64_t width) {
        for (int r = 0; r < count; ++r)
            for (int64_t j = 0; j < width; ++j) {
                const double w = double(tiles.tile[r * pitch + j]);
                if (w > peak[j] || w != w) peak[j] = w;
            }
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
