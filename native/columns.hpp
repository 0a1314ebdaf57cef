// What needs the final log-sum-exp: weights again, exactly, a chunk of keys at a time, and what is summed from them in the
// order of the queries.
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
    Row* rows;         // (kTile,)
    Cell* queries;     // (depth, kStrip)
    Cell* keys;        // (blocks of the chunk, kBlock, depth) packed
    Cell* room;
    T* weights;        // (kTile, pitch)
    T* line;           // (kBlock,)
    double* segment;   // (chunk,): what these keys received from the queries of one segment
    T* g;              // (kTile, g_columns)
    T* product;        // (chunk, g_columns)
    T* poison;         // (kTile, g_columns): what of g is not finite, in careful mode
    bool careful = false;

    ColumnTask(const Job& j, int64_t index, void* scratch)
        : job(j), p(j.problem), want(j.columns), arena{static_cast<char*>(scratch)}, head_index(index),
          batch(index / p.heads), head(index % p.heads), rules(p, batch, arena) {
        depth = depth_of<M>(p.d_k);
        g_columns = want.transposed ? up_to_multiple(want.g_columns, kLanes<T>) : 0;
        rows = arena.take<Row>(kTile);
        queries = arena.take<Cell>(kStrip * depth);
        keys = arena.take<Cell>(job.key_chunk * depth);
        room = arena.take<Cell>(kPanel<T> * up_to_multiple(depth, kLanes<T>));
        weights = arena.take<T>(kTile * pitch);
        line = arena.take<T>(kBlock);
        segment = arena.take<double>(job.key_chunk);
        g = arena.take<T>(kTile * g_columns);
        product = arena.take<T>((job.key_chunk + kStrip) * g_columns);
        poison = arena.take<T>(kTile * g_columns);
    }

    // All queries against keys first … last.
    void run(int64_t first, int64_t last) {
        const int64_t key_head = head * p.kv_heads / p.heads;
        for (int64_t j = first; j < last; j += kPanel<T>)
            pack_panel<M>(p.k, p.type, batch, key_head, j, p.keys, p.d_k, room, keys + (j - first) * depth);
        pass(first, last);
        if (want.transposed && !write_product(first, last)) {
            careful = true;
            pass(first, last);
            write_product(first, last);
            careful = false;
        }
    }

    void pass(int64_t first, int64_t last) {
        for (int64_t i = 0; i < (last - first) * g_columns; ++i) product[i] = 0;
        for (int64_t j = 0; j < last - first; ++j) segment[j] = 0;
        for (int64_t i = 0; i < p.queries; i += kTile) {
            if (want.received && i && i % job.segment_rows == 0) close_segment(first, last);
            const int count = int(least(kTile, p.queries - i));
            for (int r = 0; r < count; ++r) rows[r] = row_at(p, batch, head, i + r);
            const Strip whole = strip_of(rows, count);
            if (most(whole.low, first) >= least(whole.high, last)) continue;
            if (want.transposed && !take_g(i, count)) continue;
            for (int64_t j0 = first; j0 < last; j0 += kBlock) {
                const int64_t end = least(j0 + kBlock, last);
                if (most(whole.low, j0) >= least(whole.high, end)) continue;
                if (weigh(i, count, j0, end, keys + (j0 - first) * depth)) spend(i, count, j0, end, first);
            }
        }
        if (want.received) close_segment(first, last);
    }

    void close_segment(int64_t first, int64_t last) {
        double* received = want.received + head_index * p.keys + first;
        for (int64_t j = 0; j < last - first; ++j) received[j] += segment[j], segment[j] = 0;
    }

    // The weights of queries i … i + count and keys j0 … end; false when all are 0.
    bool weigh(int64_t i, int count, int64_t j0, int64_t end, const Cell* panels) {
        const int panel_count = int(up_to_multiple(end - j0, kPanel<T>) / kPanel<T>), width = panel_count * kPanel<T>;
        bool any = false;
        for (int s = 0; s < count; s += kStrip) {
            const int here = int(least(kStrip, count - s));
            const Strip strip = strip_of(rows + s, here);
            T* own = weights + s * pitch;
            const int64_t low = most(strip.low, j0), high = least(strip.high, end);
            const Sight sight = low < high ? rules.look(rows + s, here, j0, low, high) : Sight::nobody;
            if (sight == Sight::nobody) {
                for (int r = 0; r < here; ++r)
                    for (int j = 0; j < width; ++j) own[r * pitch + j] = 0;
                continue;
            }
            any = true;
            pack(i + s, here);
            const int from = int(low - j0) / kPanel<T>, to = int(high - j0 + kPanel<T> - 1) / kPanel<T>;
            with_rows(here, [&]<int R>() { score_panels<M, R>(queries, panels, depth, from, to, own); });
            rules.apply(rows + s, here, j0, from * kPanel<T>, to * kPanel<T>, own);
            for (int r = 0; r < here; ++r) normalise(s + r, r, sight, j0, from * kPanel<T>, to * kPanel<T>, width);
        }
        return any;
    }

    void pack(int64_t i, int count) {
        if (count < kStrip)
            for (int64_t k = 0; k < kStrip * depth; ++k) queries[k] = 0;
        for (int r = 0; r < count; ++r)
            pack_query<M>(p.q, p.type, batch, head, i + r, p.d_k, rules.negated, room, queries, r);
    }

    void normalise(int n, int r, Sight sight, int64_t j0, int first, int last, int width) {
        T* x = weights + n * pitch;
        rules.forbid(rows[n], r, sight, j0, first, last, x);
        const Normal<T> normal(static_cast<const T*>(want.logsumexp)[head_index * p.queries + rows[n].query], rules.factor);
        for (int j = 0; j < first; ++j) x[j] = 0;
        for (int j = first; j < last; j += kLanes<T>) store(x + j, normal.weight(load(x + j)));
        for (int j = last; j < width; ++j) x[j] = 0;
    }

    // Sums that are asked for take in one tile of weights.
    void spend(int64_t i, int count, int64_t j0, int64_t end, int64_t first) {
        const int64_t width = end - j0;
        if (want.weights)
            for (int r = 0; r < count; ++r)
                std::memcpy(static_cast<T*>(want.weights) + (head_index * p.queries + i + r) * p.keys + j0, weights + r * pitch,
                            width * sizeof(T));
        if (want.received) receive(count, segment + (j0 - first), width);
        if (want.peak) {
            double* peak = want.peak + head_index * p.keys + j0;
            for (int r = 0; r < count; ++r)
                for (int64_t j = 0; j < width; ++j) {
                    const double w = double(weights[r * pitch + j]);
                    if (w > peak[j] || w != w) peak[j] = w;
                }
        }
        if (want.image) paint(i, count, j0, width);
        if (want.groups) gather(i, count, j0, width);
        if (want.transposed) multiply(count, j0 - first, width);
    }

    void receive(int count, double* received, int64_t width) {
        for (int s = 0; s < count; s += kStrip) {
            const int stop = int(least(count, s + kStrip));
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

    // Pixel r covers r·step … (r + 1)·step rows; a row that a border cuts counts in part (observations.areas).
    void paint(int64_t i, int count, int64_t j0, int64_t width) {
        const double tall = double(p.queries) / double(want.height), wide = double(p.keys) / double(want.width);
        double* image = want.image + head_index * want.height * want.width;
        const int64_t top = least(int64_t(double(i) / tall), want.height - 1);
        for (int64_t y = top; y < want.height && double(y) * tall < double(i + count); ++y) {
            const double from = double(y) * tall, to = double(y + 1) * tall;
            for (int64_t j = 0; j < width; ++j) line[j] = 0;
            for (int r = int(most(0, int64_t(from) - i)); r < count && double(i + r) < to; ++r) {
                const double high = to < double(i + r + 1) ? to : double(i + r + 1), low = from > double(i + r) ? from : double(i + r);
                if (high <= low) continue;
                const Vec<T> share = spread<T>(T((high - low) / tall));
                for (int64_t j = 0; j < width; j += kLanes<T>) store(line + j, fma(load(weights + r * pitch + j), share, load(line + j)));
            }
            int64_t x = least(int64_t(double(j0) / wide), want.width - 1);
            for (int64_t j = j0; j < j0 + width; ++j) {
                while (x + 1 < want.width && double(x + 1) * wide <= double(j)) ++x;
                for (int64_t at = x; at < want.width && double(at) * wide < double(j + 1); ++at) {
                    const double right = double(at + 1) * wide, left = double(at) * wide;
                    const double overlap = (right < double(j + 1) ? right : double(j + 1)) - (left > double(j) ? left : double(j));
                    if (overlap > 0) image[y * want.width + at] += double(line[j - j0]) * overlap / wide;
                }
            }
        }
    }

    void gather(int64_t i, int count, int64_t j0, int64_t width) {
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

    // Rows i … i + count of g, zeros up to whole vectors; false when all are zero, as most are in attention rollout.
    bool take_g(int64_t i, int count) {
        const bool shared = want.g.head == 0;
        T any = 0;
        for (int r = 0; r < count; ++r) {
            T* to = g + r * g_columns;
            fetch(row_of(want.g, want.g_type, batch, shared ? 0 : head, i + r), want.g.column, want.g_type, want.g_columns, to);
            for (int64_t c = want.g_columns; c < g_columns; ++c) to[c] = 0;
            for (int64_t c = 0; c < want.g_columns; ++c) {
                any = to[c] == 0 ? any : T(1);
                if (!careful) continue;
                const bool fine = to[c] - to[c] == 0;
                poison[r * g_columns + c] = fine ? T(0) : to[c];
                if (!fine) to[c] = 0;
            }
        }
        return any != 0;
    }

    void multiply(int count, int64_t at, int64_t width) {
        for (int64_t j = 0; j < width; j += kStrip) {
            T* out = product + (at + j) * g_columns;
            with_rows(int(least(kStrip, width - j)), [&]<int R>() {
                mix_rows<Single<T>, R, 1, pitch>(weights + j, g, g_columns, count, nullptr, out, g_columns, g_columns);
            });
        }
        if (!careful) return;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < want.g_columns; ++c) {
                const T bad = poison[r * g_columns + c];
                if (bad == 0) continue;
                for (int64_t j = 0; j < width; ++j)
                    if (weights[r * pitch + j] != 0) product[(at + j) * g_columns + c] += weights[r * pitch + j] * bad;
            }
    }

    bool write_product(int64_t first, int64_t last) {
        T bad = 0;
        for (int64_t j = first; j < last; ++j) {
            const T* from = product + (j - first) * g_columns;
            T* to = static_cast<T*>(want.transposed) + (head_index * p.keys + j) * want.g_columns;
            for (int64_t c = 0; c < want.g_columns; ++c) to[c] = from[c], bad += from[c] - from[c];
        }
        return bad == 0;
    }
};

template <class M> int64_t column_scratch_bytes(const Job& job) {
    return ColumnTask<M>(job, 0, nullptr).arena.bytes;
}

// One chunk of keys of one head, or all chunks where pictures and groups are shared among them.
template <class M> void columns(const Job& job, int64_t head, int64_t chunk, void* scratch) {
    ColumnTask<M> task(job, head, scratch);
    const int64_t keys = job.problem.keys;
    if (chunk >= 0) return task.run(chunk * job.key_chunk, least(keys, (chunk + 1) * job.key_chunk));
    for (int64_t first = 0; first < keys; first += job.key_chunk) task.run(first, least(keys, first + job.key_chunk));
}

}  // namespace
}  // namespace clearhead
