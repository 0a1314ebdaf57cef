// The backward pass: the loss's derivatives by queries, keys, values and bias, from the log-sum-exp that the forward kept.
//
// A task takes one block of keys and meets every query that may see it, so that what its keys and values receive stays with
// it. What a tile of queries receives joins its row of the answer in the order of the blocks, whichever threads have them.
// So no cut into tasks changes a bit, and every product is taken once.
#pragma once

#include "operand.hpp"
#include "rules.hpp"
#include "threads.hpp"

namespace clearhead {
namespace {

constexpr int kGradientKeys = kStrip == 14 ? 224 : 240;  // whole panels and whole strips
static_assert(kGradientKeys <= kBlock && kGradientKeys % kStrip == 0);
static_assert(kGradientKeys % kPanel<float> == 0 && kGradientKeys % kPanel<double> == 0);

// products[r·kPitch + j] for the keys j of panels first … last: a strip of rows (depth, kStrip) by panels. A few numbers
// deep at a time, since one long chain of additions would lie further from the truth than peers' products do. Faster than
// score_panels, whose order of additions the forward pass has.
template <class M, int R>
__attribute__((noinline)) void multiply_panels(const typename M::Cell* strip, const typename M::Cell* panels, int64_t depth,
                                               int first, int last, typename M::T* products) {
    using T = typename M::T;
    for (int p = first; p < last; ++p) {
        const typename M::Cell* panel = panels + p * depth * kPanel<T>;
        for (int64_t k = 0; k == 0 || k < depth; k += kClose) {
            Vec<T> sum[R][2] = {};
            accumulate<M, R, 2, 1, kStrip>(strip + k * kStrip, panel + k * kPanel<T>, kPanel<T>, 0, least(kClose, depth - k), sum);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int c = 0; c < 2; ++c) {
                    T* to = products + r * kPitch<T> + p * kPanel<T> + c * kLanes<T>;
                    store(to, k ? load(to) + sum[r][c] : sum[r][c]);
                }
        }
    }
}

template <class M> struct GradientTask {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>, per_cell = M::per_cell;

    const Job& job;
    const Problem& p;
    const GradientAnswers& want;
    Arena arena;
    int64_t batch, unit, block, j0, end, depth_k, depth_v, k_columns, v_columns, tiles;
    int64_t key_head = -1, value_head = -1;  // whose keys and values lie packed
    Rules<T> rules;
    Row* rows;                          // (kTile,)
    Cell *key_panels, *value_panels;    // the block
    Cell *query_strip, *output_strip;   // (depth, kStrip)
    Cell* room;
    Operand<M> queries, outputs, keys;  // a tile; a tile; the block
    T* weights;                         // (kTile, pitch)
    T* slopes;                          // (kTile, pitch): first dO·v, then the loss's derivatives by logits, then by scores
    T* bend;                            // (kStrip, pitch): what a softcap leaves of a change; then derivatives as cells
    T* by_key;                          // (kGradientKeys,): upstream.keys
    T* line;                            // (kBlock,)
    T *to_keys, *to_values;             // (kGradientKeys, columns): what the block received
    T* to_queries;                      // (kTile, columns): what a tile receives from the block
    T* to_bias;                         // (kTile,): the same, where a bias is broadcast over keys
    int reach[kTile / kStrip][2];       // the columns of each strip that are not all 0

    GradientTask(const Job& j, int64_t batch_, int64_t unit_, int64_t block_, void* scratch)
        : job(j), p(j.problem), want(j.gradients), arena{static_cast<char*>(scratch)}, batch(batch_), unit(unit_), block(block_),
          rules(p, batch_, arena) {
        j0 = block * kGradientKeys;
        end = least(p.keys, j0 + kGradientKeys);
        tiles = (p.queries + kTile - 1) / kTile;
        depth_k = depth_of<M>(p.d_k);
        depth_v = want.v ? depth_of<M>(p.d_v) : 0;
        k_columns = up_to_multiple(p.d_k, kLanes<T>);
        v_columns = want.v ? up_to_multiple(p.d_v, kLanes<T>) : 0;
        rows = arena.take<Row>(kTile);
        key_panels = arena.take<Cell>(kGradientKeys * depth_k);
        value_panels = arena.take<Cell>(kGradientKeys * depth_v);
        query_strip = arena.take<Cell>(strip_cells(depth_k));
        output_strip = arena.take<Cell>(strip_cells(depth_v));
        room = arena.take<Cell>(room_cells(most(depth_k, depth_v)));
        queries = Operand<M>::in(arena, kTile, k_columns);
        outputs = Operand<M>::in(arena, kTile, v_columns);
        keys = Operand<M>::in(arena, kGradientKeys, k_columns);
        weights = arena.take<T>(kTile * pitch);
        slopes = arena.take<T>(kTile * pitch);
        bend = arena.take<T>(kStrip * pitch);
        by_key = arena.take<T>(kBlock);
        line = arena.take<T>(kBlock);
        to_keys = arena.take<T>((kGradientKeys + kStrip) * k_columns);
        to_values = arena.take<T>((kGradientKeys + kStrip) * v_columns);
        to_queries = arena.take<T>((kTile + kStrip) * k_columns);
        to_bias = arena.take<T>(kTile);
    }

    static int64_t strip_cells(int64_t depth) { return kStrip * depth + kLanes<T>; }
    static int64_t room_cells(int64_t depth) {
        return most(kPanel<T>, kStrip) * up_to_multiple(depth, kLanes<T>);
    }

    void run() {
        const int64_t heads = p.heads * p.batch / job.runs;  // of this unit
        for (int64_t head = unit * heads; head < (unit + 1) * heads; ++head)
            for (int64_t tile = tiles; tile-- > 0;) {  // the last first: under a causal rule every block meets them
                const int64_t* span = want.spans + (batch * tiles + tile) * 2;
                if (span[0] >= end || span[1] <= j0) continue;
                open(head);
                const bool any = meet(head, tile * kTile);
                const int32_t mine = int32_t(block - span[0] / kGradientKeys);
                int32_t* turn = want.turns + (batch * p.heads + head) * tiles + tile;
                await(turn, mine);
                if (any) give(head, tile * kTile);
                __atomic_store_n(turn, mine + 1, __ATOMIC_RELEASE);
            }
        close_keys();
        close_values();
    }

    // Packs the keys and values of this head, unless they are the last one's.
    void open(int64_t head) {
        if (key_head != head * p.kv_heads / p.heads) {
            close_keys();
            key_head = head * p.kv_heads / p.heads;
            for (int64_t j = j0; j < end; j += kPanel<T>)
                pack_panel<M>(p.k, p.type, batch, key_head, j, p.keys, p.d_k, room, key_panels + (j - j0) * depth_k);
            keys.take(p.k, p.type, batch, key_head, j0, end, p.d_k);
            for (int64_t i = 0; i < kGradientKeys * k_columns; ++i) to_keys[i] = 0;
        }
        if (want.v && value_head != head * p.v_heads / p.heads) {
            close_values();
            value_head = head * p.v_heads / p.heads;
            for (int64_t j = j0; j < end; j += kPanel<T>)
                pack_panel<M>(p.v, p.type, batch, value_head, j, p.keys, p.d_v, room, value_panels + (j - j0) * depth_v);
            for (int64_t i = 0; i < kGradientKeys * v_columns; ++i) to_values[i] = 0;
        }
    }

    void close_keys() {
        if (key_head < 0) return;
        T* to = static_cast<T*>(want.k) + ((batch * p.kv_heads + key_head) * p.keys + j0) * p.d_k;
        for (int64_t j = 0; j < end - j0; ++j)
            for (int64_t c = 0; c < p.d_k; ++c) to[j * p.d_k + c] = T(p.scale) * to_keys[j * k_columns + c];
    }

    void close_values() {
        if (value_head < 0) return;
        T* to = static_cast<T*>(want.v) + ((batch * p.v_heads + value_head) * p.keys + j0) * p.d_v;
        for (int64_t j = 0; j < end - j0; ++j) std::memcpy(to + j * p.d_v, to_values + j * v_columns, p.d_v * sizeof(T));
    }

    // Queries i … meet the block; false when none of them sees any of its keys.
    bool meet(int64_t head, int64_t i) {
        const int count = int(least(kTile, p.queries - i));
        const int64_t at = (batch * p.heads + head) * p.queries;
        for (int r = 0; r < count; ++r) {
            rows[r] = row_at(p, batch, head, i + r);
            if (static_cast<const T*>(want.logsumexp)[at + i + r] == -kInfinity<T>) rows[r].low = rows[r].high = 0;
        }
        queries.take(p.q, p.type, batch, head, i, i + count, p.d_k);
        if (want.v) outputs.take(want.output, p.type, batch, head, i, i + count, p.d_v);
        for (int j = 0; j < kBlock; ++j)
            by_key[j] = want.keys && j0 + j < end ? static_cast<const T*>(want.keys)[(batch * p.heads + head) * p.keys + j0 + j] : T(0);
        for (int64_t c = 0; c < kTile * k_columns; ++c) to_queries[c] = 0;
        for (int r = 0; r < kTile; ++r) to_bias[r] = 0;
        bool any = false;
        for (int s = 0; s < count; s += kStrip) any |= meet_strip(head, i, s, int(least(kStrip, count - s)));
        if (!any) return false;
        for (int64_t j = 0; want.v && j < end - j0; j += kStrip)
            receive(j, count, weights, outputs, to_values);
        for (int64_t j = 0; j < end - j0; j += kStrip)
            receive(j, count, slopes, queries, to_keys);
        return true;
    }

    // Keys j … j + kStrip of the block receive from the rows of the tile that see some of them.
    void receive(int64_t j, int count, const T* from, const Operand<M>& x, T* to) {
        int first = 0, last = (count + kStrip - 1) / kStrip;
        const auto misses = [&](int s) { return reach[s][0] >= j + kStrip || reach[s][1] <= j; };
        while (first < last && misses(first)) ++first;
        while (first < last && misses(last - 1)) --last;
        if (first == last) return;
        add_products<M, 1, per_cell * pitch>(reinterpret_cast<const Cell*>(from) + j, int(least(kStrip, end - j0 - j)), x,
                                             first * kStrip, least(count, last * kStrip), to + j * x.columns);
    }

    // Rows s … of the tile: their weights, the derivatives by their scores, and what the queries receive.
    bool meet_strip(int64_t head, int64_t i, int s, int count) {
        const Strip strip = strip_of(rows + s, count);
        const int64_t low = most(strip.low, j0), high = least(strip.high, end);
        const Sight sight = low < high ? rules.look(rows + s, count, j0, low, high) : Sight::nobody;
        const int width = int(up_to_multiple(end - j0, kPanel<T>));
        const int from = sight == Sight::nobody ? 0 : int(low - j0) / kPanel<T>;
        const int to = sight == Sight::nobody ? 0 : int(high - j0 + kPanel<T> - 1) / kPanel<T>;
        const int first = from * kPanel<T>, last = to * kPanel<T>;
        T *a = weights + s * pitch, *d = slopes + s * pitch;
        reach[s / kStrip][0] = first, reach[s / kStrip][1] = last;
        for (int r = 0; r < count; ++r) {
            for (int j = 0; j < first; ++j) a[r * pitch + j] = d[r * pitch + j] = 0;
            for (int j = last; j < width; ++j) a[r * pitch + j] = d[r * pitch + j] = 0;
        }
        if (first == last) return false;
        pack_strip<M>(p.q, p.type, batch, head, i + s, count, p.d_k, rules.negated, room, query_strip);
        if (want.v) pack_strip<M>(want.output, p.type, batch, head, i + s, count, p.d_v, false, room, output_strip);
        with_rows(count, [&]<int R>() {
            score_panels<M, R>(query_strip, key_panels, depth_k, from, to, a);  // the very bits that the log-sum-exp was made of
            if (want.v) multiply_panels<M, R>(output_strip, value_panels, depth_v, from, to, d);
        });
        rules.apply(rows + s, count, j0, first, last, a, bend);
        for (int r = 0; r < count; ++r) {
            rules.forbid(rows[s + r], r, sight, j0, first, last, a + r * pitch);
            const int64_t at = (batch * p.heads + head) * p.queries + i + s + r;
            if (!want.v)
                differentiate<false, true>(rows[s + r], at, first, last, a + r * pitch, d + r * pitch);
            else if (want.keys || want.entropy || want.distance)
                differentiate<true, true>(rows[s + r], at, first, last, a + r * pitch, d + r * pitch);
            else
                differentiate<true, false>(rows[s + r], at, first, last, a + r * pitch, d + r * pitch);
        }
        if (want.bias) add_bias(head, i, s, count, int(low - j0), int(high - j0));
        if (p.softcap != 0)
            for (int r = 0; r < count; ++r)
                for (int j = first; j < last; j += kLanes<T>) {
                    const Vec<T> by = load(d + r * pitch + j), slope = load(bend + r * pitch + j);
                    store(d + r * pitch + j, by == Vec<T>{} ? by : by * slope);
                }
        const T* along = d;
        if constexpr (per_cell == 2) {
            for (int r = 0; r < count; r += 2) {
                pair_rows<M>(a + r * pitch, r + 1 < count, first, last, nullptr);
                pair_rows<M>(d + r * pitch, r + 1 < count, first, last, bend + r * pitch);
            }
            along = bend;
        }
        add_products<M, pitch, 1>(reinterpret_cast<const Cell*>(along), count, keys, low - j0, high - j0, to_queries + s * k_columns);
        return true;
    }

    // One row: scores become weights, and dO·v becomes the loss's derivative by the logit. Where nobody may see, both are 0.
    template <bool VALUES, bool MORE>
    void differentiate(const Row& row, int64_t at, int first, int last, T* a, T* d) const {
        const T logsumexp = static_cast<const T*>(want.logsumexp)[at];
        const Normal<T> normal(logsumexp, rules.factor);
        const Vec<T> own = spread<T>(static_cast<const T*>(want.rows)[at]), hidden = spread<T>(-kInfinity<T>);
        const Vec<T> natural = spread<T>(rules.natural), total = spread<T>(-logsumexp);
        const Vec<T> entropy = spread<T>(want.entropy ? static_cast<const T*>(want.entropy)[at] : T(0));
        const Vec<T> far = spread<T>(want.distance ? static_cast<const T*>(want.distance)[at] : T(0));
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> score = load(a + j), weight = normal.weight(score);
            Vec<T> by = own;
            if constexpr (VALUES) by = by + load(d + j);
            if constexpr (MORE) {
                by = by + load(by_key + j) - entropy * fma(score, natural, total);
                if (want.distance) by = fma(far, rules.distance(row, j0 + j), by);
            }
            store(a + j, weight);
            store(d + j, score == hidden ? Vec<T>{} : weight * by);
        }
    }

    T* bias_at(int64_t head, int64_t i) const {
        return static_cast<T*>(want.bias) + batch * want.bias_batch + head * want.bias_head + i * want.bias_row;
    }

    // Columns first … last of rows s … of the tile. What is broadcast over keys waits for the tile's turn.
    void add_bias(int64_t head, int64_t i, int s, int count, int first, int last) {
        for (int j = 0; j < kBlock; ++j) line[j] = 0;
        for (int r = s; r < s + count; ++r) {
            const T* d = slopes + r * pitch;
            T* to = want.bias_row ? bias_at(head, i + r) + j0 : line;
            if (want.bias_column)
                for (int j = first; j < last; ++j) to[j] += d[j];
            else
                for (int j = first; j < last; ++j) to_bias[r] += d[j];
        }
        if (want.bias_column && !want.bias_row)
            for (int j = first; j < last; ++j) bias_at(head, i)[j0 + j] += line[j];
    }

    // A tile's turn: what it received from this block joins what it received from those before.
    void give(int64_t head, int64_t i) {
        const int count = int(least(kTile, p.queries - i));
        T* to = static_cast<T*>(want.q) + ((batch * p.heads + head) * p.queries + i) * p.d_k;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < p.d_k; ++c) to[r * p.d_k + c] += T(p.scale) * to_queries[r * k_columns + c];
        if (want.bias && !want.bias_column)
            for (int r = 0; r < count; ++r) *bias_at(head, i + r) += to_bias[r];
    }
};

// Which keys the queries of each tile may see by position.
void gradient_spans(const Job& job, int64_t batch) {
    const Problem& p = job.problem;
    int64_t* span = job.gradients.spans + batch * ((p.queries + kTile - 1) / kTile) * 2;
    for (int64_t i = 0; i < p.queries; i += kTile, span += 2) {
        Row rows[kTile];
        const int count = int(least(kTile, p.queries - i));
        for (int r = 0; r < count; ++r) rows[r] = row_at(p, batch, 0, i + r);
        const Strip whole = strip_of(rows, count);
        span[0] = whole.low, span[1] = whole.high;
    }
}

template <class M> int64_t gradient_scratch_bytes(const Job& job) {
    return GradientTask<M>(job, 0, 0, 0, nullptr).arena.bytes;
}

template <class M> void gradients(const Job& job, int64_t batch, int64_t unit, int64_t block, void* scratch) {
    GradientTask<M>(job, batch, unit, block, scratch).run();
}

}  // namespace
}  // namespace clearhead
