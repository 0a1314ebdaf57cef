// The backward pass: the gradients of queries, keys, values, bias and the table of spans, from the state of every row
// that the forward pass kept.
//
//   weight = exp((logit - m) - l)                dvalue_j = Σ_i weight_ij · doutput_i
//   dlogit = weight · (doutput·value + upstream gradients by row and by key)
//   dscore = dlogit · softcap'                   dquery_i = scale · Σ_j dscore_ij · key_j, dkey_j likewise
//
// A task has one block of keys and goes through all queries that may see it, so no other task writes its keys' and
// values' gradients. Blocks add to the gradient of a tile of queries one after the other, in the order of the keys,
// whichever threads compute them. So no cut into tasks changes a bit, and every product is computed once.
#pragma once

#include "operand.hpp"
#include "rules.hpp"
#include "threads.hpp"
#include "tile_sums.hpp"

namespace clearhead {
namespace {

constexpr int kGradientKeys = kStrip == 14 ? 224 : 240;  // whole panels and whole strips
static_assert(kGradientKeys <= kBlock && kGradientKeys % kStrip == 0);
static_assert(kGradientKeys % kPanel<float> == 0 && kGradientKeys % kPanel<double> == 0);

template <class M> struct GradientTask {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>, per_cell = M::per_cell;

    const Job& job;
    int64_t batch, unit, block;
    void* scratch;
    const Problem& p = job.problem;
    const GradientAnswers& want = job.gradients;
    Arena arena{static_cast<char*>(scratch)};
    int64_t j0 = block * kGradientKeys, end = min_of(p.keys, j0 + kGradientKeys);
    int64_t tiles = (p.queries + kTile - 1) / kTile;
    int64_t depth_k = depth_of<M>(p.d_k), depth_v = want.v ? depth_of<M>(p.d_v) : 0;
    int64_t k_columns = up_to_multiple(p.d_k, kLanes<T>), v_columns = want.v ? up_to_multiple(p.d_v, kLanes<T>) : 0;
    int64_t key_head = -1, value_head = -1;  // whose keys and values are packed
    int64_t scale_head = 0;                  // whose scale the sums in grad_k lack
    Rules<T> rules{p, batch, arena};
    Row* rows = arena.take<Row>(kTile);
    Cell* key_panels = arena.take<Cell>(kGradientKeys * depth_k);  // of the block
    Cell* value_panels = arena.take<Cell>(kGradientKeys * depth_v);
    Cell* query_strip = arena.take<Cell>(kStrip * depth_k + kLanes<T>);  // (depth, kStrip)
    Cell* output_strip = arena.take<Cell>(kStrip * depth_v + kLanes<T>);
    Cell* staging = arena.take<Cell>(staging_cells<M>(max_of(depth_k, depth_v)));
    Operand<M> queries = Operand<M>::in(arena, kTile, k_columns);       // the tile's
    Operand<M> outputs = Operand<M>::in(arena, kTile, v_columns);       // the tile's upstream gradients
    Operand<M> keys = Operand<M>::in(arena, kGradientKeys, k_columns);  // the block's
    T* weights = arena.take<T>(kTile * pitch);
    T* score_grads = arena.take<T>(kTile * pitch);  // first doutput·value, then the gradients by logits, then by scores
    T* tanhs = arena.take<T>(kStrip * pitch);       // of the softcap; then the strip's score gradients as cells
    T* key_grads = arena.take<T>(kBlock);           // the upstream gradients by key
    T* line = arena.take<T>(kBlock);
    // (query labels, key labels): of the head's table, from this block
    double* grad_table = arena.take<double>(want.span_table ? p.span_queries * p.span_keys : 0);
    T* grad_k = arena.take<T>((kGradientKeys + kStrip) * k_columns);  // (kGradientKeys, columns): of the block
    T* grad_v = arena.take<T>((kGradientKeys + kStrip) * v_columns);
    T* grad_q = arena.take<T>((kTile + kStrip) * k_columns);  // (kTile, columns): of the tile, from this block
    T* grad_bias = arena.take<T>(kTile);                      // the same, where the bias is broadcast over keys
    int nonzero[kTile / kStrip][2] = {};  // per strip: the first column whose weights are not all 0, and past the last

    void run() {
        const int64_t heads = p.heads * p.batch / job.runs;  // of this unit
        for (int64_t head = unit * heads; head < (unit + 1) * heads; ++head) {
            for (int64_t i = 0; want.span_table && i < p.span_queries * p.span_keys; ++i) grad_table[i] = 0;
            for (int64_t tile = tiles; tile-- > 0;) {  // the last first: with causal, they see every block
                const int64_t* span = want.spans + (batch * tiles + tile) * 2;
                if (span[0] >= end || span[1] <= j0) continue;
                load_keys_and_values(head);
                const bool any = add_tile(head, tile * kTile);
                const int32_t number = int32_t(block - span[0] / kGradientKeys);  // blocks that precede this one
                int32_t* turn = want.turns + (batch * p.heads + head) * tiles + tile;
                wait_for_turn(turn, number);
                if (any) add_grad_q(head, tile * kTile);
                __atomic_store_n(turn, number + 1, __ATOMIC_RELEASE);
            }
            if (want.span_table) add_grad_table(head);
        }
        write_grad_k();
        write_grad_v();
    }

    // Packs this head's keys and values of the block, unless the previous head has the same (and the same scale).
    void load_keys_and_values(int64_t head) {
        if (key_head != head * p.kv_heads / p.heads || (p.scales && head != scale_head)) {
            write_grad_k();
            key_head = head * p.kv_heads / p.heads;
            scale_head = head;
            pack_panels<M>(p.k, p.type, batch, key_head, j0, end, p.keys, p.d_k, staging, key_panels);
            keys.load_rows(p.k, p.type, batch, key_head, j0, end, p.d_k);
            for (int64_t i = 0; i < kGradientKeys * k_columns; ++i) grad_k[i] = 0;
        }
        if (want.v && value_head != head * p.v_heads / p.heads) {
            write_grad_v();
            value_head = head * p.v_heads / p.heads;
            pack_panels<M>(p.v, p.type, batch, value_head, j0, end, p.keys, p.d_v, staging, value_panels);
            for (int64_t i = 0; i < kGradientKeys * v_columns; ++i) grad_v[i] = 0;
        }
    }

    void write_grad_k() {
        if (key_head < 0) return;
        const T scale = rules.scale_of(scale_head).scale;
        T* to = static_cast<T*>(want.k) + ((batch * p.kv_heads + key_head) * p.keys + j0) * p.d_k;
        for (int64_t j = 0; j < end - j0; ++j)
            for (int64_t c = 0; c < p.d_k; ++c) to[j * p.d_k + c] += scale * grad_k[j * k_columns + c];
    }

    void write_grad_v() {
        if (value_head < 0) return;
        T* to = static_cast<T*>(want.v) + ((batch * p.v_heads + value_head) * p.keys + j0) * p.d_v;
        for (int64_t j = 0; j < end - j0; ++j) std::memcpy(to + j * p.d_v, grad_v + j * v_columns, p.d_v * sizeof(T));
    }

    // Adds what queries i … give to the block's gradients, and computes what the block gives to theirs; false when none
    // of them sees any of its keys.
    bool add_tile(int64_t head, int64_t i) {
        const int count = int(min_of(kTile, p.queries - i));
        const int64_t first_row = (batch * p.heads + head) * p.queries + i;
        const T *largest = static_cast<const T*>(want.states.largest) + first_row,
                *log_sum = static_cast<const T*>(want.states.log_sum) + first_row;
        for (int r = 0; r < count; ++r) {
            rows[r] = row_at(p, batch, head, i + r);
            if (largest[r] == -kInfinity<T> && log_sum[r] == 0) rows[r].low = rows[r].high = 0;  // it sees nothing
        }
        queries.load_rows(p.q, p.type, batch, head, i, i + count, p.d_k);
        if (want.v) outputs.load_rows(want.output, p.type, batch, head, i, i + count, p.d_v);
        for (int j = 0; j < kBlock; ++j)
            key_grads[j] = want.keys && j0 + j < end
                               ? static_cast<const T*>(want.keys)[(batch * p.heads + head) * p.keys + j0 + j]
                               : T(0);
        for (int64_t c = 0; c < kTile * k_columns; ++c) grad_q[c] = 0;
        for (int r = 0; r < kTile; ++r) grad_bias[r] = 0;
        bool any = false;
        for (int s = 0; s < count; s += kStrip) any |= add_strip(head, i, s, int(min_of(kStrip, count - s)));
        if (!any) return false;
        for (int64_t j = 0; want.v && j < end - j0; j += kStrip) accumulate_keys(j, count, weights, outputs, grad_v);
        for (int64_t j = 0; j < end - j0; j += kStrip) accumulate_keys(j, count, score_grads, queries, grad_k);
        return true;
    }

    // Adds weightsᵀ · x to the gradients of keys j … j + kStrip of the block, over the strips of rows that see one of
    // them.
    void accumulate_keys(int64_t j, int count, const T* weights_or_grads, const Operand<M>& x, T* to) {
        int first = 0, last = (count + kStrip - 1) / kStrip;
        const auto all_zero = [&](int s) { return nonzero[s][0] >= j + kStrip || nonzero[s][1] <= j; };
        while (first < last && all_zero(first)) ++first;
        while (first < last && all_zero(last - 1)) --last;
        if (first == last) return;
        add_products<M, 1, per_cell * pitch>(reinterpret_cast<const Cell*>(weights_or_grads) + j,
                                             int(min_of(kStrip, end - j0 - j)), x, first * kStrip,
                                             min_of(count, last * kStrip), to + j * x.columns);
    }

    // Rows s … of the tile: computes their weights, the gradients of their scores, and of the queries from this block.
    bool add_strip(int64_t head, int64_t i, int s, int count) {
        const Strip strip = strip_of(rows + s, count);
        const int64_t low = max_of(strip.low, j0), high = min_of(strip.high, end);
        const Visibility visibility =
            low < high ? rules.content_visibility(rows + s, count, j0, low, high) : Visibility::none;
        const int width = int(up_to_multiple(end - j0, kPanel<T>));
        const int from = visibility == Visibility::none ? 0 : int(low - j0) / kPanel<T>;
        const int to = visibility == Visibility::none ? 0 : int(high - j0 + kPanel<T> - 1) / kPanel<T>;
        const int first = from * kPanel<T>, last = to * kPanel<T>;
        T *a = weights + s * pitch, *d = score_grads + s * pitch;
        nonzero[s / kStrip][0] = first, nonzero[s / kStrip][1] = last;
        for (int r = 0; r < count; ++r) {
            for (int j = 0; j < first; ++j) a[r * pitch + j] = d[r * pitch + j] = 0;
            for (int j = last; j < width; ++j) a[r * pitch + j] = d[r * pitch + j] = 0;
        }
        if (first == last) return false;
        pack_strip<M>(p.q, p.type, batch, head, i + s, count, p.d_k, rules.negated(rows + s, count), staging,
                      query_strip);
        if (want.v) pack_strip<M>(want.output, p.type, batch, head, i + s, count, p.d_v, 0, staging, output_strip);
        with_rows(count, [&]<int R>() {
            score_panels<M, R>(query_strip, key_panels, depth_k, from, to,
                               a);  // to the bits that the rows' states were computed from
            if (want.v) multiply_panels<M, R>(output_strip, value_panels, depth_v, from, to, d);
        });
        rules.apply(rows + s, count, j0, first, last, a, tanhs);
        for (int r = 0; r < count; ++r) {
            rules.mask_row(rows[s + r], r, visibility, j0, first, last, a + r * pitch);
            const int64_t index = (batch * p.heads + head) * p.queries + i + s + r;
            if (!want.v)
                differentiate<false, true>(rows[s + r], index, first, last, a + r * pitch, d + r * pitch);
            else if (want.keys || want.entropy || want.distance)
                differentiate<true, true>(rows[s + r], index, first, last, a + r * pitch, d + r * pitch);
            else
                differentiate<true, false>(rows[s + r], index, first, last, a + r * pitch, d + r * pitch);
        }
        if (want.bias) add_bias(head, i, s, count, int(low - j0), int(high - j0));
        if (want.span_table) add_spans(s, count, first, last);
        for (int r = 0; p.softcap != 0 && r < count; ++r) through_softcap(r, first, last, d + r * pitch);
        const T* strip_grads = d;
        if constexpr (per_cell == 2) {
            for (int r = 0; r < count; r += 2) {
                pair_rows<M>(a + r * pitch, r + 1 < count, first, last, nullptr);
                pair_rows<M>(d + r * pitch, r + 1 < count, first, last, tanhs + r * pitch);
            }
            strip_grads = tanhs;
        }
        add_products<M, pitch, 1>(reinterpret_cast<const Cell*>(strip_grads), count, keys, low - j0, high - j0,
                                  grad_q + s * k_columns);
        return true;
    }

    // Row r of a strip: gradients by logits become gradients by scores.
    void through_softcap(int r, int first, int last, T* d) const {
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> tanh = load(tanhs + r * pitch + j), factor = broadcast<T>(T(1)) - tanh * tanh;
            const Vec<T> grad = load(d + j);
            store(d + j, grad == Vec<T>{} ? grad : grad * factor);  // 0·NaN is NaN
        }
    }

    // One row: scores become weights, and doutput·value becomes the gradient by the logit. Both are 0 where the row may
    // not see the key.
    template <bool VALUES, bool MORE>
    void differentiate(const Row& row, int64_t index, int first, int last, T* a, T* d) const {
        const Normalizer<T> normalizer(want.states, index, rules.scale_of(row.head));
        const Vec<T> row_grad = broadcast<T>(static_cast<const T*>(want.rows)[index]);
        const Vec<T> hidden = broadcast<T>(-kInfinity<T>), ln2 = broadcast<T>(T(kLn2));
        const Vec<T> entropy_grad = broadcast<T>(want.entropy ? static_cast<const T*>(want.entropy)[index] : T(0));
        const Vec<T> distance_grad = broadcast<T>(want.distance ? static_cast<const T*>(want.distance)[index] : T(0));
        for (int j = first; j < last; j += kLanes<T>) {
            const Vec<T> score = load(a + j), weight = normalizer.weight(score);
            Vec<T> grad = row_grad;  // by the weight
            if constexpr (VALUES) grad = grad + load(d + j);
            if constexpr (MORE) {
                grad = grad + load(key_grads + j) - entropy_grad * (normalizer.exponent(score) * ln2);
                if (want.distance) grad = fma(distance_grad, rules.distance(row, j0 + j), grad);
            }
            store(a + j, weight);
            store(d + j, score == hidden ? Vec<T>{} : weight * grad);
        }
    }

    T* bias_at(int64_t head, int64_t i) const {
        return static_cast<T*>(want.bias) + batch * want.bias_batch + head * want.bias_head + i * want.bias_row;
    }

    // Adds the gradients of columns first … last of rows s … to the bias. Those of a bias that is broadcast over keys
    // are kept in grad_bias until it is the block's turn.
    void add_bias(int64_t head, int64_t i, int s, int count, int first, int last) {
        for (int j = 0; j < kBlock; ++j) line[j] = 0;
        for (int r = s; r < s + count; ++r) {
            const T* d = score_grads + r * pitch;
            T* to = want.bias_row ? bias_at(head, i + r) + j0 : line;
            if (want.bias_column)
                for (int j = first; j < last; ++j) to[j] += d[j];
            else
                for (int j = first; j < last; ++j) grad_bias[r] += d[j];
        }
        if (want.bias_column && !want.bias_row)
            for (int j = first; j < last; ++j) bias_at(head, i)[j0 + j] += line[j];
    }

    // Adds the gradients of columns first … last of rows s … to the table's.
    void add_spans(int s, int count, int first, int last) {
        const int64_t width = min_of(last, end - j0) - first;
        add_to_groups(score_grads + s * pitch + first, count, width, p.query_spans + batch * p.queries + rows[s].query,
                      p.key_spans + batch * p.keys + j0 + first, line, grad_table, p.span_keys);
    }

    // Adds this block's part to the gradient of the head's table, after all blocks before it.
    void add_grad_table(int64_t head) {
        const int64_t size = p.span_queries * p.span_keys, index = batch * p.heads + head;
        wait_for_turn(want.span_turns + index, int32_t(block));
        for (int64_t i = 0; i < size; ++i) want.span_table[index * size + i] += grad_table[i];
        __atomic_store_n(want.span_turns + index, int32_t(block + 1), __ATOMIC_RELEASE);
    }

    // Adds this block's part to the gradient of the tile's queries, when it is the block's turn.
    void add_grad_q(int64_t head, int64_t i) {
        const int count = int(min_of(kTile, p.queries - i));
        const T scale = rules.scale_of(head).scale;
        T* to = static_cast<T*>(want.q) + ((batch * p.heads + head) * p.queries + i) * p.d_k;
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < p.d_k; ++c) to[r * p.d_k + c] += scale * grad_q[r * k_columns + c];
        if (want.bias && !want.bias_column)
            for (int r = 0; r < count; ++r) *bias_at(head, i + r) += grad_bias[r];
    }
};

// Computes which keys the positions of each tile's queries let them see.
void gradient_spans(const Job& job, int64_t batch, void*) {
    const Problem& p = job.problem;
    int64_t* span = job.gradients.spans + batch * ((p.queries + kTile - 1) / kTile) * 2;
    for (int64_t i = 0; i < p.queries; i += kTile, span += 2) {
        Row rows[kTile];
        const int count = int(min_of(kTile, p.queries - i));
        for (int r = 0; r < count; ++r) rows[r] = row_at(p, batch, 0, i + r);
        const Strip tile = strip_of(rows, count);
        span[0] = tile.low, span[1] = tile.high;
    }
}

template <class M> int64_t gradient_scratch_bytes(const Job& job) {
    return GradientTask<M>{job, 0, 0, 0, nullptr}.arena.bytes;
}

// One block of keys of one unit. Blocks come in order, so that a task waits for earlier ones only. Units that share one
// bias are one task, which adds up their gradients of it.
template <class M> void gradients(const Job& job, int64_t index, void* scratch) {
    const Problem& p = job.problem;
    const GradientAnswers& want = job.gradients;
    const int64_t units = job.runs / p.batch, block = index / job.wave_runs, first = index % job.wave_runs;
    const bool all_batches = want.bias && !want.bias_batch, all_heads = want.bias && !want.bias_head;
    const int64_t batch = all_batches ? 0 : all_heads ? first : first / units, unit = all_heads ? 0 : first % units;
    for (int64_t b = batch; b < (all_batches ? p.batch : batch + 1); ++b)
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
