// The column pass: statistics that need the final log-sum-exp of every row. It computes the weights again, a chunk of
// keys and a tile of queries at a time, and adds each tile to every requested sum, in the order of the queries.
#pragma once

#include "rules.hpp"

namespace clearhead {
namespace {

template <class M> struct ColumnTask {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    const Problem& p;
    const ColumnAnswers& want;
    Arena arena;
    int64_t head_index, batch, head, depth, g_columns;
    Rules<T> rules;
    Row* rows;      // (kTile,)
    Cell* queries;  // (depth, kStrip)
    Cell* keys;     // (blocks of the chunk, kBlock, depth) packed
    Cell* staging;
    T* weights;       // (kTile, pitch)
    T* line;          // (kBlock,)
    double* segment;  // (chunk,): `received` from the queries of one segment
    T* g;             // (kTile, g_columns): the right-hand side of `transposed`, weightsᵀ · g
    T* product;       // (chunk, g_columns)
    T* nonfinite;     // (kTile, g_columns): the numbers of g that are not finite, with separate_nonfinite
    bool separate_nonfinite = false;

    ColumnTask(const Job& j, int64_t index, void* scratch)
        : job(j),
          p(j.problem),
          want(j.columns),
          arena{static_cast<char*>(scratch)},
          head_index(index),
          batch(index / p.heads),
          head(index % p.heads),
          rules(p, batch, arena) {
        depth = depth_of<M>(p.d_k);
        g_columns = want.transposed ? up_to_multiple(want.g_columns, kLanes<T>) : 0;
        rows = arena.take<Row>(kTile);
        queries = arena.take<Cell>(kStrip * depth + kLanes<T>);
        keys = arena.take<Cell>(job.key_chunk * depth);
        staging = arena.take<Cell>(staging_cells<M>(depth));
        weights = arena.take<T>(kTile * pitch);
        line = arena.take<T>(kBlock);
        segment = arena.take<double>(job.key_chunk);
        g = arena.take<T>(kTile * g_columns);
        product = arena.take<T>((job.key_chunk + kStrip) * g_columns);
        nonfinite = arena.take<T>(kTile * g_columns);
    }

    // Adds all queries' weights on keys first … last to the requested sums.
    void run(int64_t first, int64_t last) {
        const int64_t key_head = head * p.kv_heads / p.heads;
        for (int64_t j = first; j < last; j += kPanel<T>)
            pack_panel<M>(p.k, p.type, batch, key_head, j, p.keys, p.d_k, staging, keys + (j - first) * depth);
        add_queries(first, last);
        if (want.transposed && !write_product(first, last)) {
            separate_nonfinite = true;
            add_queries(first, last);
            write_product(first, last);
            separate_nonfinite = false;
        }
    }

    void add_queries(int64_t first, int64_t last) {
        for (int64_t i = 0; i < (last - first) * g_columns; ++i) product[i] = 0;
        for (int64_t j = 0; j < last - first; ++j) segment[j] = 0;
        for (int64_t i = 0; i < p.queries; i += kTile) {
            if (want.received && i && i % job.segment_rows == 0) add_segment(first, last);
            const int count = int(min_of(kTile, p.queries - i));
            for (int r = 0; r < count; ++r) rows[r] = row_at(p, batch, head, i + r);
            const Strip tile = strip_of(rows, count);
            if (max_of(tile.low, first) >= min_of(tile.high, last)) continue;
            if (want.transposed && !load_g(i, count)) continue;
            for (int64_t j0 = first; j0 < last; j0 += kBlock) {
                const int64_t end = min_of(j0 + kBlock, last);
                if (max_of(tile.low, j0) >= min_of(tile.high, end)) continue;
                if (compute_weights(i, count, j0, end, keys + (j0 - first) * depth))
                    add_weights(i, count, j0, end, first);
            }
        }
        if (want.received) add_segment(first, last);
    }

    void add_segment(int64_t first, int64_t last) {
        double* received = want.received + head_index * p.keys + first;
        for (int64_t j = 0; j < last - first; ++j) received[j] += segment[j], segment[j] = 0;
    }

    // Computes the weights of queries i … i + count on keys j0 … end; false when all are 0.
    bool compute_weights(int64_t i, int count, int64_t j0, int64_t end, const Cell* panels) {
        const int panel_count = int(up_to_multiple(end - j0, kPanel<T>) / kPanel<T>), width = panel_count * kPanel<T>;
        bool any = false;
        for (int s = 0; s < count; s += kStrip) {
            const int here = int(min_of(kStrip, count - s));
            const Strip strip = strip_of(rows + s, here);
            T* x = weights + s * pitch;  // scores, then weights
            const int64_t low = max_of(strip.low, j0), high = min_of(strip.high, end);
            const Visibility visibility =
                low < high ? rules.content_visibility(rows + s, here, j0, low, high) : Visibility::none;
            if (visibility == Visibility::none) {
                for (int r = 0; r < here; ++r)
                    for (int j = 0; j < width; ++j) x[r * pitch + j] = 0;
                continue;
            }
            any = true;
            pack_strip<M>(p.q, p.type, batch, head, i + s, here, p.d_k, rules.negated(rows + s, here), staging,
                          queries);
            const int from = int(low - j0) / kPanel<T>, to = int(high - j0 + kPanel<T> - 1) / kPanel<T>;
            with_rows(here, [&]<int R>() { score_panels<M, R>(queries, panels, depth, from, to, x); });
            rules.apply(rows + s, here, j0, from * kPanel<T>, to * kPanel<T>, x);
            for (int r = 0; r < here; ++r) normalize(s + r, r, visibility, j0, from * kPanel<T>, to * kPanel<T>, width);
        }
        return any;
    }

    // Scores become weights, for row n of the tile, row r of its strip.
    void normalize(int n, int r, Visibility visibility, int64_t j0, int first, int last, int width) {
        T* x = weights + n * pitch;
        rules.mask_row(rows[n], r, visibility, j0, first, last, x);
        const Normalizer<T> normalizer(static_cast<const T*>(want.logsumexp)[head_index * p.queries + rows[n].query],
                                       rules.scale_of(head).log2);
        for (int j = 0; j < first; ++j) x[j] = 0;
        for (int j = first; j < last; j += kLanes<T>) store(x + j, normalizer.weight(load(x + j)));
        for (int j = last; j < width; ++j) x[j] = 0;
    }

    // Adds a tile of weights to every requested sum.
    void add_weights(int64_t i, int count, int64_t j0, int64_t end, int64_t first) {
        const int64_t width = end - j0;
        if (want.weights)
            for (int r = 0; r < count; ++r)
                std::memcpy(static_cast<T*>(want.weights) + (head_index * p.queries + i + r) * p.keys + j0,
                            weights + r * pitch, width * sizeof(T));
        if (want.received) add_received(count, segment + (j0 - first), width);
        if (want.peak) update_peak(count, want.peak + head_index * p.keys + j0, width);
        if (want.image) add_to_image(i, count, j0, width);
        if (want.groups) add_to_groups(i, count, j0, width);
        if (want.transposed) add_product(count, j0 - first, width);
    }

    // The largest weight on each key, NaN where one is NaN.
    void update_peak(int count, double* peak, int64_t width) {
        for (int r = 0; r < count; ++r)
            for (int64_t j = 0; j < width; ++j) {
                const double w = double(weights[r * pitch + j]);
                if (w > peak[j] || w != w) peak[j] = w;
            }
    }

    void add_received(int count, double* received, int64_t width) {
        for (int s = 0; s < count; s += kStrip) {
            const int stop = int(min_of(count, s + kStrip));
            sum_rows(s, stop, width);
            for (int64_t j = 0; j < width; ++j) received[j] += double(line[j]);
        }
    }

    // line[j] = Σ_r weights[r][j], first ≤ r < last.
    void sum_rows(int first, int last, int64_t width) {
        for (int64_t j = 0; j < width; j += kLanes<T>) {
            Vec<T> sum = {};
            for (int r = first; r < last; ++r) sum = sum + load(weights + r * pitch + j);
            store(line + j, sum);
        }
    }

    // Pixel y covers the rows y·tall … (y + 1)·tall, and likewise the columns; a row that a border cuts is divided in
    // proportion (core/observations.py, areas).
    void add_to_image(int64_t i, int count, int64_t j0, int64_t width) {
        const double tall = double(p.queries) / double(want.height), wide = double(p.keys) / double(want.width);
        double* image = want.image + head_index * want.height * want.width;
        const int64_t top = min_of(int64_t(double(i) / tall), want.height - 1);
        for (int64_t y = top; y < want.height && double(y) * tall < double(i + count); ++y) {
            const double from = double(y) * tall, to = double(y + 1) * tall;
            for (int64_t j = 0; j < width; ++j) line[j] = 0;
            for (int r = int(max_of(0, int64_t(from) - i)); r < count && double(i + r) < to; ++r) {
                const double high = to < double(i + r + 1) ? to : double(i + r + 1),
                             low = from > double(i + r) ? from : double(i + r);
                if (high <= low) continue;
                const Vec<T> share = broadcast<T>(T((high - low) / tall));
                for (int64_t j = 0; j < width; j += kLanes<T>)
                    store(line + j, fma(load(weights + r * pitch + j), share, load(line + j)));
            }
            int64_t x = min_of(int64_t(double(j0) / wide), want.width - 1);
            for (int64_t j = j0; j < j0 + width; ++j) {
                while (x + 1 < want.width && double(x + 1) * wide <= double(j)) ++x;
                for (int64_t pixel = x; pixel < want.width && double(pixel) * wide < double(j + 1); ++pixel) {
                    const double right = double(pixel + 1) * wide, left = double(pixel) * wide;
                    const double overlap =
                        (right < double(j + 1) ? right : double(j + 1)) - (left > double(j) ? left : double(j));
                    if (overlap > 0) image[y * want.width + pixel] += double(line[j - j0]) * overlap / wide;
                }
            }
        }
    }

    // Adds to the sums of (query group, key group); neighbouring queries of one group are added up first.
    void add_to_groups(int64_t i, int count, int64_t j0, int64_t width) {
        const int64_t* from = want.query_labels + batch * p.queries + i;
        const int64_t* to = want.key_labels + batch * p.keys + j0;
        for (int r = 0; r < count;) {
            int stop = r + 1;
            while (stop < count && from[stop] == from[r]) ++stop;
            if (from[r] >= 0) {
                double* total = want.groups + (head_index * want.query_groups + from[r]) * want.key_groups;
                sum_rows(r, stop, width);
                for (int64_t j = 0; j < width; ++j)
                    if (to[j] >= 0) total[to[j]] += double(line[j]);
            }
            r = stop;
        }
    }

    // Reads rows i … i + count of g, with zeros up to whole vectors; false when all are zero, as most are in attention
    // rollout.
    bool load_g(int64_t i, int count) {
        const bool shared = want.g.head == 0;
        T any = 0;
        for (int r = 0; r < count; ++r) {
            T* to = g + r * g_columns;
            fetch(row_of(want.g, want.g_type, batch, shared ? 0 : head, i + r), want.g.column, want.g_type,
                  want.g_columns, to);
            for (int64_t c = want.g_columns; c < g_columns; ++c) to[c] = 0;
            for (int64_t c = 0; c < want.g_columns; ++c) {
                any = to[c] == 0 ? any : T(1);
                if (!separate_nonfinite) continue;
                const bool finite = to[c] - to[c] == 0;
                nonfinite[r * g_columns + c] = finite ? T(0) : to[c];
                if (!finite) to[c] = 0;
            }
        }
        return any != 0;
    }

    // product[start + j] += Σ_r weights[r][j]·g[r] for the keys of one block.
    void add_product(int count, int64_t start, int64_t width) {
        for (int64_t j = 0; j < width; j += kStrip) {
            T* out = product + (start + j) * g_columns;
            with_rows(int(min_of(kStrip, width - j)), [&]<int R>() {
                weighted_sum<Single<T>, R, 1, pitch>(weights + j, g, g_columns, count, nullptr, out, g_columns,
                                                     g_columns);
            });
        }
        if (!separate_nonfinite) return;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < want.g_columns; ++c) {
                const T value = nonfinite[r * g_columns + c];
                if (value == 0) continue;
                for (int64_t j = 0; j < width; ++j)
                    if (weights[r * pitch + j] != 0)
                        product[(start + j) * g_columns + c] += weights[r * pitch + j] * value;
            }
    }

    // Writes the finished product of keys first … last; false where it is not finite.
    bool write_product(int64_t first, int64_t last) {
        T nonfinite_sum = 0;
        for (int64_t j = first; j < last; ++j) {
            const T* from = product + (j - first) * g_columns;
            T* to = static_cast<T*>(want.transposed) + (head_index * p.keys + j) * want.g_columns;
            for (int64_t c = 0; c < want.g_columns; ++c) to[c] = from[c], nonfinite_sum += from[c] - from[c];
        }
        return nonfinite_sum == 0;
    }
};

template <class M> int64_t column_scratch_bytes(const Job& job) { return ColumnTask<M>(job, 0, nullptr).arena.bytes; }

// One chunk of keys of one head, or, for chunk -1, all of them: an image and groups are sums over all chunks.
template <class M> void columns(const Job& job, int64_t head, int64_t chunk, void* scratch) {
    ColumnTask<M> task(job, head, scratch);
    const int64_t keys = job.problem.keys;
    if (chunk >= 0) return task.run(chunk * job.key_chunk, min_of(keys, (chunk + 1) * job.key_chunk));
    for (int64_t first = 0; first < keys; first += job.key_chunk) task.run(first, min_of(keys, first + job.key_chunk));
}

}  // namespace
}  // namespace clearhead
