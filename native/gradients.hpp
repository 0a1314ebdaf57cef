// The backward pass: the gradients of queries, keys, values, bias and the table of spans, from the state of every row
// that the forward pass kept.
//
//   weight = exp((logit - m) - l)                dvalue_j = Σ_i weight_ij · doutput_i
//   dlogit = weight · (doutput·value + upstream gradients by row and by key)
//   dscore = dlogit · softcap'                   dquery_i = scale · Σ_j dscore_ij · key_j, dkey_j likewise
//
// A task has one block of keys and goes through all queries that may see it, so no other task writes its keys' and
// values' gradients. Blocks add to the gradient of a tile of queries one after the other, in the order of the keys,
// whichever threads compute them. So the cut into tasks changes no bit, and every product is computed once.
#pragma once

#include "operand.hpp"
#include "threads.hpp"
#include "weight_tiles.hpp"

namespace clearhead {
namespace {

constexpr int kGradientKeys = kStrip == 14 ? 224 : 240;  // whole panels and whole strips
static_assert(kGradientKeys <= kBlock && kGradientKeys % kStrip == 0);
static_assert(kGradientKeys % kPanel<float> == 0 && kGradientKeys % kPanel<double> == 0);

template <class M> struct GradientTask {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>, per_cell = M::per_cell;

    const GradientJob& job;
    int64_t batch, unit, block;
    void* scratch;
    const Problem& p = job.problem;
    Arena arena{static_cast<char*>(scratch)};
    int64_t j0 = block * kGradientKeys, end = min_of(p.keys, j0 + kGradientKeys);
    int64_t tiles = (p.queries + kTile - 1) / kTile, table_size = job.span_table ? p.span_queries * p.span_keys : 0;
    int64_t depth_k = depth_of<M>(p.d_k), depth_v = job.v ? depth_of<M>(p.d_v) : 0;
    int64_t k_columns = up_to_multiple(p.d_k, kLanes<T>), v_columns = job.v ? up_to_multiple(p.d_v, kLanes<T>) : 0;
    Rules<T> rules{p, batch, arena};
    // the block
    int64_t key_head = -1, value_head = -1;  // whose keys and values are packed
    int64_t scale_head = 0;                  // whose scale the sums in grad_k lack
    Cell* key_panels = arena.take<Cell>(kGradientKeys * depth_k);
    Cell* value_panels = arena.take<Cell>(kGradientKeys * depth_v);
    Operand<M> keys = Operand<M>::in(arena, kGradientKeys, k_columns);
    T* grad_k = arena.take<T>((kGradientKeys + kStrip) * k_columns);  // (kGradientKeys, columns)
    T* grad_v = arena.take<T>((kGradientKeys + kStrip) * v_columns);
    T* by_key = arena.take<T>(kBlock);                    // the upstream gradients
    double* grad_table = arena.take<double>(table_size);  // (query labels, key labels) of the head
    // the tile: queries i … i + count of a head
    int64_t head = 0, i = 0, first_row = 0;  // first_row: of i, over all batches and heads
    int count = 0;
    Row* rows = arena.take<Row>(kTile);
    Operand<M> queries = Operand<M>::in(arena, kTile, k_columns);
    Operand<M> outputs = Operand<M>::in(arena, kTile, v_columns);  // the upstream gradients
    T* weights = arena.take<T>(kTile * pitch);
    T* score_grads = arena.take<T>(kTile * pitch);  // first doutput·value, then the gradients by logits, then by scores
    int nonzero[kTile / kStrip][2] = {};  // per strip: the first column whose weights are not all 0, and past the last
    T* grad_q = arena.take<T>((kTile + kStrip) * k_columns);  // (kTile, columns), from this block
    T* grad_bias = arena.take<T>(kTile);                      // likewise, where the bias is broadcast over keys
    // a strip of it
    Cell* query_strip = arena.take<Cell>(strip_cells(depth_k));
    Cell* output_strip = arena.take<Cell>(strip_cells(depth_v));
    T* tanhs = arena.take<T>(kStrip * pitch);  // of the softcap; then the strip's score gradients as cells
    Cell* staging = arena.take<Cell>(staging_cells<M>(max_of(depth_k, depth_v)));
    T* line = arena.take<T>(kBlock);

    void run() {
        for (head = unit * job.unit_heads; head < (unit + 1) * job.unit_heads; ++head) {
            for (int64_t n = 0; n < table_size; ++n) grad_table[n] = 0;
            for (int64_t tile = tiles; tile-- > 0;) {  // the last first: with causal, they see every block
                const int64_t* span = job.spans + (batch * tiles + tile) * 2;
                if (span[0] >= end || span[1] <= j0) continue;
                load_keys_and_values();
                const bool any = add_tile(tile * kTile);
                const int64_t before = block - span[0] / kGradientKeys;  // blocks that precede this one
                const Turn turn(turn_of(tile), before);
                if (any) add_grad_q();
            }
            if (table_size) add_grad_table();
        }
        write_grad_k();
        write_grad_v();
    }

    int32_t* turn_of(int64_t tile) const { return job.turns + (batch * p.heads + head) * (tiles + 1) + tile; }

    // Packs this head's keys and values of the block, unless the previous head has the same (and the same scale).
    void load_keys_and_values() {
        if (key_head != head * p.kv_heads / p.heads || (p.scales && head != scale_head)) {
            write_grad_k();
            key_head = head * p.kv_heads / p.heads;
            scale_head = head;
            pack_panels<M>(keys_of(p, batch, key_head), j0, end, staging, key_panels);
            keys.load_rows(keys_of(p, batch, key_head), j0, end);
            for (int64_t n = 0; n < kGradientKeys * k_columns; ++n) grad_k[n] = 0;
        }
        if (job.v && value_head != head * p.v_heads / p.heads) {
            write_grad_v();
            value_head = head * p.v_heads / p.heads;
            pack_panels<M>(values_of(p, batch, value_head), j0, end, staging, value_panels);
            for (int64_t n = 0; n < kGradientKeys * v_columns; ++n) grad_v[n] = 0;
        }
    }

    // Adds the part of the tile of queries from `first` on to the block's gradients, and computes the block's part of
    // the queries' gradients; false if none of these queries sees any of the block's keys.
    bool add_tile(int64_t first) {
        i = first, count = int(min_of(kTile, p.queries - i));
        first_row = (batch * p.heads + head) * p.queries + i;
        const T *largest = static_cast<const T*>(job.states.largest) + first_row,
                *log_sum = static_cast<const T*>(job.states.log_sum) + first_row;
        for (int r = 0; r < count; ++r) {
            rows[r] = row_at(p, batch, head, i + r);
            if (largest[r] == -kInfinity<T> && log_sum[r] == 0) rows[r].low = rows[r].high = 0;  // it sees nothing
        }
        queries.load_rows(queries_of(p, batch, head), i, i + count);
        if (job.v) outputs.load_rows(like_output(p, job.output, batch, head), i, i + count);
        const T* upstream = static_cast<const T*>(job.by_key) + (batch * p.heads + head) * p.keys;
        for (int64_t j = j0; j < j0 + kBlock; ++j) by_key[j - j0] = job.by_key && j < end ? upstream[j] : T(0);
        for (int64_t c = 0; c < kTile * k_columns; ++c) grad_q[c] = 0;
        for (int r = 0; r < kTile; ++r) grad_bias[r] = 0;
        bool any = false;
        for (int s = 0; s < count; s += kStrip) any |= add_strip(s, int(min_of(kStrip, count - s)));
        if (!any) return false;
        for (int64_t j = 0; job.v && j < end - j0; j += kStrip) accumulate_keys(j, weights, outputs, grad_v);
        for (int64_t j = 0; j < end - j0; j += kStrip) accumulate_keys(j, score_grads, queries, grad_k);
        return true;
    }

    // Rows s … s + here of the tile: computes their weights, the gradients of their scores, and of the queries from
    // this block.
    bool add_strip(int s, int here) {
        const Row* strip = rows + s;
        const Seen seen = rules.see(strip, strip_of(strip, here), j0, end);
        const int width = int(up_to_multiple(end - j0, kPanel<T>)), first = seen.first, last = seen.last;
        T *a = weights + s * pitch, *d = score_grads + s * pitch;
        nonzero[s / kStrip][0] = first, nonzero[s / kStrip][1] = last;
        for (int r = 0; r < here; ++r) {
            for (int j = 0; j < first; ++j) a[r * pitch + j] = d[r * pitch + j] = 0;
            for (int j = last; j < width; ++j) a[r * pitch + j] = d[r * pitch + j] = 0;
        }
        if (first == last) return false;
        multiply_strip(s, here, first / kPanel<T>, last / kPanel<T>);
        rules.apply(strip, here, seen, a, tanhs);
        for (int r = 0; r < here; ++r) {
            rules.mask_row(strip[r], r, seen, a + r * pitch);
            if (!job.v)
                differentiate<false, true>(s + r, first, last);
            else if (job.by_key || job.entropy || job.distance)
                differentiate<true, true>(s + r, first, last);
            else
                differentiate<true, false>(s + r, first, last);
        }
        if (job.bias) add_bias(s, here, int(seen.low - j0), int(seen.high - j0));
        if (table_size) add_spans(s, here, first, last);
        for (int r = 0; p.softcap != 0 && r < here; ++r) through_softcap(r, first, last, d + r * pitch);
        const T* strip_grads = d;
        if constexpr (per_cell == 2) {
            for (int r = 0; r < here; r += 2) {
                pair_rows<M>(a + r * pitch, r + 1 < here, first, last, nullptr);
                pair_rows<M>(d + r * pitch, r + 1 < here, first, last, tanhs + r * pitch);
            }
            strip_grads = tanhs;
        }
        add_products<M, pitch, 1>(reinterpret_cast<const Cell*>(strip_grads), here, keys, seen.low - j0, seen.high - j0,
                                  grad_q + s * k_columns);
        return true;
    }

    // The strip's scores, to the bits that the rows' states were computed from, and doutput·value.
    void multiply_strip(int s, int here, int from, int to) {
        pack_strip<M>(queries_of(p, batch, head), i + s, here, rules.negated(rows + s, here), query_strip);
        if (job.v) pack_strip<M>(like_output(p, job.output, batch, head), i + s, here, 0, output_strip);
        with_rows(here, [&]<int R>() {
            score_panels<M, R>(query_strip, key_panels, depth_k, from, to, weights + s * pitch);
            if (job.v) multiply_panels<M, R>(output_strip, value_panels, depth_v, from, to, score_grads + s * pitch);
        });
    }

    // Row r of the tile: scores become weights, and doutput·value becomes the gradient by the logit. Both are 0 where
    // the row may not see the key.
    template <bool VALUES, bool MORE> void differentiate(int r, int first, int last) {
        T *a = weights + r * pitch, *d = score_grads + r * pitch;
        const int64_t row = first_row + r;
        const Normalizer<T> normalizer(job.states, row, rules.scale_of(head));
        const auto number = [&](const void* x) { return broadcast<T>(x ? static_cast<const T*>(x)[row] : T(0)); };
        const Vec<T> row_grad = number(job.by_row), entropy_grad = number(job.entropy),
                     distance_grad = number(job.distance);
        const Vec<T> hidden = broadcast<T>(-kInfinity<T>), ln2 = broadcast<T>(T(kLn2));
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> score = load(a + j), weight = normalizer.weight(score);
            Vec<T> grad = row_grad;  // by the weight
            if constexpr (VALUES) grad = grad + load(d + j);
            if constexpr (MORE) {
                grad = grad + load(by_key + j) - entropy_grad * (normalizer.exponent(score) * ln2);
                if (job.distance) grad = fma(distance_grad, rules.distance(rows[r], j0 + j), grad);
            }
            store(a + j, weight);
            store(d + j, score == hidden ? Vec<T>{} : weight * grad);
        }
    }

    // Row r of a strip: gradients by logits become gradients by scores.
    void through_softcap(int r, int first, int last, T* d) const {
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> tanh = load(tanhs + r * pitch + j), factor = broadcast<T>(T(1)) - tanh * tanh;
            const Vec<T> grad = load(d + j);
            store(d + j, grad == Vec<T>{} ? grad : grad * factor);  // 0·NaN is NaN
        }
    }

    // Adds weightsᵀ · x to the gradients of keys j … j + kStrip of the block, over the strips of rows that see one of
    // them.
    void accumulate_keys(int64_t j, const T* weights_or_grads, const Operand<M>& x, T* to) {
        int first = 0, last = (count + kStrip - 1) / kStrip;
        const auto all_zero = [&](int s) { return nonzero[s][0] >= j + kStrip || nonzero[s][1] <= j; };
        while (first < last && all_zero(first)) ++first;
        while (first < last && all_zero(last - 1)) --last;
        if (first == last) return;
        add_products<M, 1, per_cell * pitch>(reinterpret_cast<const Cell*>(weights_or_grads) + j,
                                             int(min_of(kStrip, end - j0 - j)), x, first * kStrip,
                                             min_of(count, last * kStrip), to + j * x.columns);
    }

    // Adds this block's part to the gradient of the tile's queries, when it is the block's turn.
    void add_grad_q() {
        add_scaled(grad_q, count, head, static_cast<T*>(job.q) + first_row * p.d_k);
        if (job.bias && !job.bias_column)
            for (int r = 0; r < count; ++r) *bias_at(i + r) += grad_bias[r];
    }

    void write_grad_k() {
        if (key_head < 0) return;
        const int64_t first = (batch * p.kv_heads + key_head) * p.keys + j0;
        add_scaled(grad_k, end - j0, scale_head, static_cast<T*>(job.k) + first * p.d_k);
    }

    // Adds rows of sums, (row, k_columns), times a head's scale.
    void add_scaled(const T* from, int64_t row_count, int64_t scale_of_head, T* to) const {
        const T scale = rules.scale_of(scale_of_head).scale;
        for (int64_t r = 0; r < row_count; ++r)
            for (int64_t c = 0; c < p.d_k; ++c) to[r * p.d_k + c] += scale * from[r * k_columns + c];
    }

    void write_grad_v() {
        if (value_head < 0) return;
        T* to = static_cast<T*>(job.v) + ((batch * p.v_heads + value_head) * p.keys + j0) * p.d_v;
        for (int64_t j = 0; j < end - j0; ++j) std::memcpy(to + j * p.d_v, grad_v + j * v_columns, p.d_v * sizeof(T));
    }

    T* bias_at(int64_t query) const {
        return static_cast<T*>(job.bias) + batch * job.bias_batch + head * job.bias_head + query * job.bias_row;
    }

    // Adds the gradients of columns first … last of rows s … to the bias. Those of a bias that is broadcast over keys
    // are kept in grad_bias until it is the block's turn.
    void add_bias(int s, int here, int first, int last) {
        for (int j = 0; j < kBlock; ++j) line[j] = 0;
        for (int r = s; r < s + here; ++r) {
            const T* d = score_grads + r * pitch;
            T* to = job.bias_row ? bias_at(i + r) + j0 : line;
            if (job.bias_column)
                for (int j = first; j < last; ++j) to[j] += d[j];
            else
                for (int j = first; j < last; ++j) grad_bias[r] += d[j];
        }
        if (job.bias_column && !job.bias_row)
            for (int j = first; j < last; ++j) bias_at(i)[j0 + j] += line[j];
    }

    // Adds the gradients of columns first … last of rows s … to the table's.
    void add_spans(int s, int here, int first, int last) {
        const int64_t width = min_of(last, end - j0) - first;
        add_to_groups(score_grads + s * pitch + first, here, width, p.query_spans + batch * p.queries + i + s,
                      p.key_spans + batch * p.keys + j0 + first, line, grad_table, p.span_keys);
    }

    // Adds this block's part to the gradient of the head's table, after all blocks before it.
    void add_grad_table() {
        const Turn turn(turn_of(tiles), block);
        double* to = job.span_table + (batch * p.heads + head) * table_size;
        for (int64_t n = 0; n < table_size; ++n) to[n] += grad_table[n];
    }
};

// Computes which keys the positions of each tile's queries let them see.
void gradient_spans(const GradientJob& job, int64_t batch, void*) {
    const Problem& p = job.problem;
    int64_t* span = job.spans + batch * ((p.queries + kTile - 1) / kTile) * 2;
    for (int64_t i = 0; i < p.queries; i += kTile, span += 2) {
        Row rows[kTile];
        const int count = int(min_of(kTile, p.queries - i));
        for (int r = 0; r < count; ++r) rows[r] = row_at(p, batch, 0, i + r);
        const Strip tile = strip_of(rows, count);
        span[0] = tile.low, span[1] = tile.high;
    }
}

template <class M> int64_t gradient_scratch_bytes(const GradientJob& job) {
    return GradientTask<M>{job, 0, 0, 0, nullptr}.arena.bytes;
}

// One block of keys of one unit. Blocks come in order, so that a task waits for earlier ones only. Units that share one
// bias are one task, which adds up their gradients of it.
template <class M> void gradients(const GradientJob& job, int64_t index, void* scratch) {
    const int64_t batches = job.problem.batch, units = job.problem.heads / job.unit_heads,
                  block = index / job.wave_units, first = index % job.wave_units;
    const bool all_batches = job.bias && !job.bias_batch, all_heads = job.bias && !job.bias_head;
    const int64_t batch = all_batches ? 0 : all_heads ? first : first / units, unit = all_heads ? 0 : first % units;
    for (int64_t b = batch; b < (all_batches ? batches : batch + 1); ++b)
        for (int64_t u = unit; u < (all_heads ? units : unit + 1); ++u)
            GradientTask<M>{job, b, u, block, scratch}.run();
}

template <class M> void fill(Kernel& kernel) {
    kernel.gradient_keys = kGradientKeys;
    kernel.gradient_spans = {nullptr, gradient_spans};
    kernel.gradients = {gradient_scratch_bytes<M>, gradients<M>};
}

}  // namespace
}  // namespace clearhead
