// The row pass: online softmax over blocks of keys, with its statistics (engines/running.py is the same in NumPy).
//
// Every row goes through the same operations wherever it stands: blocks and spans start at fixed keys, a span is summed on
// its own and then merged, and what a row may not see adds exact zeros. So neither the neighbours, nor the cut into tasks,
// nor the number of threads changes a bit.
#pragma once

#include "found.hpp"
#include "rules.hpp"

namespace clearhead {
namespace {

CLEARHEAD_INLINE int64_t key_blocks(const Problem& p) { return (p.keys + kBlock - 1) / kBlock; }

constexpr int64_t kNear = 32;              // keys
constexpr int kFew = kStrip > 8 ? 8 : 4;  // rows

template <class M> struct RowTask {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    const Problem& p;
    Arena arena;
    int64_t batch, first_head, start, count, depth, columns;
    int64_t key_head, value_head;
    bool mixes, careful = false, direct_keys;
    Rules<T> rules;
    Row* rows;
    Strip* strips;
    int strip_count;
    Cell* queries;  // (strip, depth, kStrip)
    T* scores;      // (kStrip, pitch), then the weights in the same place
    T* kept;        // (strip, block, kStrip, pitch): all scores, where column sums follow; else null
    T* logits;      // the scores of this strip and block: in `kept`, or in `scores`
    Cell* keys;     // a block of packed keys, where the job has none
    Cell* values;   // a block of packed values, where the job has none, and in careful mode
    Cell* room;
    T* shrink;
    Vec<T>*sums, *centred, *far;  // of each row, over this span, lane by lane
    int64_t own_keys = -1, own_values = -1;  // which block `keys` and `values` hold
    const Cell *block_keys, *block_values;
    Ahead ahead;
    int64_t* poison;  // in careful mode: which values are not finite, as key · columns + column
    T* poison_value;
    int64_t poison_count = 0;
    uint8_t* visible;  // in careful mode: (kStrip, kBlock)

    RowTask(const Job& j, int64_t run, int64_t block, void* scratch)
        : job(j), p(j.problem), arena{static_cast<char*>(scratch)}, batch(run / (p.heads / j.group)), rules(p, batch, arena) {
        first_head = run % (p.heads / job.group) * job.group;
        start = block * job.block_rows;
        count = least(job.block_rows, job.run_rows - start);
        depth = depth_of<M>(p.d_k);
        mixes = job.rows.output != nullptr;
        columns = mixes ? value_columns<M>(p) : 0;
        key_head = batch * p.kv_heads + first_head * p.kv_heads / p.heads;
        value_head = mixes ? batch * p.v_heads + first_head * p.v_heads / p.heads : 0;
        direct_keys = !job.packed && count <= kFew && depth % kLanes<T> == 0 && in_cells<M>(p.k, p.type, p.d_k);
        strip_count = int((count + kStrip - 1) / kStrip);
        rows = arena.take<Row>(job.block_rows);
        strips = arena.take<Strip>(job.block_rows);
        queries = arena.take<Cell>(up_to_multiple(job.block_rows, kStrip) * depth + kLanes<T>);
        scores = arena.take<T>(kStrip * pitch);
        kept = job.segment_sums ? arena.take<T>(kept_numbers(job)) : nullptr;
        const int64_t padded = up_to_multiple(depth, kLanes<T>);
        room = arena.take<Cell>(most(kPanel<T>, kStrip + 1) * padded);
        keys = job.packed ? nullptr : arena.take<Cell>(kBlock * depth);
        values = arena.take<Cell>(kBlock * columns);
        shrink = arena.take<T>(kStrip);
        sums = arena.take<Vec<T>>(job.block_rows);
        centred = arena.take<Vec<T>>(job.block_rows);
        far = arena.take<Vec<T>>(job.block_rows);
        poison = arena.take<int64_t>(kBlock * columns);
        poison_value = arena.take<T>(kBlock * columns);
        visible = arena.take<uint8_t>(kStrip * kBlock);
    }

    // Finds the rows and what they may see, and packs the queries.
    void open() {
        for (int r = 0; r < kStrip; ++r) shrink[r] = 1;
        for (int64_t r = 0; r < count; ++r)
            rows[r] = row_at(p, batch, first_head + (start + r) / p.queries, (start + r) % p.queries);
        for (int s = 0; s < strip_count; ++s)
            strips[s] = strip_of(rows + s * kStrip, int(least(kStrip, count - s * kStrip)));
        if (!job.packed) {
            const Strip whole = strip_of(rows, int(count));
            Ahead soon;
            ask_rows(soon, 0, p.k, key_head % p.kv_heads, p.d_k, whole.low, least(whole.low + kNear, whole.high));
            soon.bytes = kNear * p.d_k * bytes_of(p.type);
            soon.template ask<3>();
        }
        pack_queries();
    }

    static int64_t kept_numbers(const Job& job) {
        return up_to_multiple(job.block_rows, kStrip) * key_blocks(job.problem) * pitch;
    }

    void pack_queries() {
        for (int s = 0; s < strip_count; ++s) {
            const char* row[kStrip];
            for (int r = 0; r < strips[s].rows; ++r) {
                const Row& own = rows[s * kStrip + r];
                row[r] = row_of(p.q, p.type, batch, own.head, own.query);
            }
            for (int64_t r = (s + 1) * kStrip; r < least((s + 2) * kStrip, count); ++r)  // the next strip
                ask_for(row_of(p.q, p.type, batch, rows[r].head, rows[r].query), p.d_k * bytes_of(p.type));
            pack_strip<M>(row, strips[s].rows, p.q, p.type, p.d_k, rules.negated, room, queries + s * kStrip * depth);
        }
    }

    static void ask_for(const char* from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
    }

    // Points block_keys and block_values at the block that starts at j0, packing the keys first … last where nobody has.
    void open_block(int64_t j0, int64_t first, int64_t last) {
        if (job.packed)
            block_keys = reinterpret_cast<const Cell*>(job.packed_keys + (key_head - job.first_key_head) * packed_key_bytes<M>(job)) + j0 * depth;
        else if (direct_keys)
            block_keys = nullptr;
        else if (own_keys != j0) {
            Ahead soon = near_keys(first, last);
            for (int64_t j = first / kPanel<T> * kPanel<T>; j < last; j += kPanel<T>)
                pack_panel<M>(p.k, p.type, batch, key_head % p.kv_heads, j, p.keys, p.d_k, room, keys + (j - j0) * depth, &soon);
            block_keys = keys;
            own_keys = j0;
        }
        if (!mixes || (own_values == j0 && !careful)) return;
        if (careful)
            open_careful(j0, first, last);
        else if (job.direct_values)
            block_values = reinterpret_cast<const Cell*>(row_of(p.v, p.type, batch, value_head % p.v_heads, j0));
        else if (job.packed)
            block_values = reinterpret_cast<const Cell*>(job.packed_values + (value_head - job.first_value_head) * packed_value_bytes<M>(job)) +
                           j0 / M::per_cell * columns;
        else {
            const int64_t from = first / M::per_cell * M::per_cell;
            pack_value_rows<M>(p.v, p.type, batch, value_head % p.v_heads, from, last, p.d_v, columns,
                               values + (from - j0) / M::per_cell * columns);
            block_values = values;
            own_values = j0;
        }
    }

    // Few rows are bound by memory. What they read is asked for in the order of the memory, kNear rows before it is needed:
    // while keys are read, the later ones and the first values; while values are read, the later ones and the next keys.
    Ahead near_keys(int64_t first, int64_t last) const {
        Ahead soon;
        ask_rows(soon, 0, p.k, key_head % p.kv_heads, p.d_k, first + kNear, last);
        if (mixes) ask_rows(soon, 1, p.v, value_head % p.v_heads, p.d_v, first, least(first + kNear, last));
        soon.bytes = kLanes<T> * kVectorBytes;
        return soon;
    }

    Ahead near_values(int64_t first, int64_t last) const {
        Ahead soon;
        if (job.direct_values) ask_rows(soon, 0, p.v, value_head % p.v_heads, p.d_v, first + kNear, last);
        ask_rows(soon, 1, p.k, key_head % p.kv_heads, p.d_k, last, least(last + kNear, p.keys));
        soon.bytes = kClose * columns * int64_t(sizeof(T));
        return soon;
    }

    void ask_rows(Ahead& soon, int which, const View& x, int64_t head, int64_t d, int64_t first, int64_t last) const {
        const int64_t size = bytes_of(p.type);
        if (x.column != 1 || first >= last) return;
        soon.add(which, row_of(x, p.type, batch, head, first), d * size, x.row * size, last - first);
    }

    // Values that are NaN or infinite become 0 here and are listed, so that only rows that see them meet them.
    void open_careful(int64_t j0, int64_t first, int64_t last) {
        const int64_t from = first / M::per_cell * M::per_cell;
        pack_value_rows<M>(p.v, p.type, batch, value_head % p.v_heads, from, last, p.d_v, columns,
                           values + (from - j0) / M::per_cell * columns);
        block_values = values;
        poison_count = 0;
        for (int64_t j = from - j0; j < last - j0; ++j)
            for (int64_t c = 0; c < p.d_v; ++c) {
                T x;
                if constexpr (M::per_cell == 1)
                    x = values[j * columns + c];
                else
                    x = from_bf16(reinterpret_cast<uint16_t*>(values)[(j / 2 * columns + c) * 2 + j % 2]);
                if (x - x == 0) continue;
                poison[poison_count] = j * columns + c;
                poison_value[poison_count++] = x;
                if constexpr (M::per_cell == 1)
                    values[j * columns + c] = 0;
                else
                    reinterpret_cast<uint16_t*>(values)[(j / 2 * columns + c) * 2 + j % 2] = 0;
            }
    }

    // Where the block that starts at j0 will be read, shared out among the products of the block before it.
    Ahead next_block(int64_t j0) const {
        const int64_t keys_here = least(kBlock, p.keys - j0), size = int64_t(sizeof(T));
        Ahead next;
        const int64_t key_bytes = keys_here * depth * size, v_pitch = value_pitch();
        next.add(0, block_keys + kBlock * depth, key_bytes, key_bytes, 1);
        if (mixes && !careful)
            next.add(1, block_values + kBlock / M::per_cell * v_pitch, columns * size, v_pitch * size, keys_here / M::per_cell);
        const int64_t lines = keys_here * (depth + columns / M::per_cell) * size / 64;
        next.bytes = (lines / (strip_count * (kBlock / kPanel<T>) * ((depth + kClose - 1) / kClose)) + 1) * 64;
        return next;
    }

    int64_t value_pitch() const { return job.direct_values && !careful ? p.v.row : columns; }

    // All keys of one span, for all rows: `part` starts cleared and ends closed.
    void add_span(int64_t span, Found<T>& part) {
        const Strip whole = strip_of(rows, int(count));
        for (int64_t r = 0; r < count; ++r) sums[r] = centred[r] = far[r] = Vec<T>{};
        own_keys = own_values = -1;
        const int64_t stop = least(whole.high, (span + 1) * kSpan);
        for (int64_t j0 = most(whole.low / kBlock * kBlock, span * kSpan); j0 < stop; j0 += kBlock) {
            open_block(j0, most(whole.low, j0), least(whole.high, j0 + kBlock));
            ahead = job.packed && j0 + kBlock < stop ? next_block(j0 + kBlock) : Ahead{};
            for (int s = 0; s < strip_count; ++s) add_block(j0, s, part);
        }
        for (int64_t r = 0; r < count; ++r) {
            part.sum[r] = double(sum_of<T>(sums[r]));
            part.centred[r] = double(sum_of<T>(centred[r]));
            part.far[r] = double(sum_of<T>(far[r]));
        }
    }

    void add_block(int64_t j0, int s, Found<T>& part) {
        const Strip& strip = strips[s];
        const Row* own = rows + s * kStrip;
        const int64_t first = most(strip.low, j0), last = least(strip.high, j0 + kBlock);
        if (first >= last) return;
        const Sight sight = rules.look(own, strip.rows, j0, first, last);
        if (sight == Sight::nobody) return;
        const int from = int(first - j0) / kPanel<T>, to = int(last - j0 + kPanel<T> - 1) / kPanel<T>;
        const Cell* strip_queries = queries + s * kStrip * depth;
        logits = kept ? kept + (s * key_blocks(p) + j0 / kBlock) * kStrip * pitch : scores;
        if (direct_keys)
            score_rows(strip_queries, strip.rows, j0, from * kPanel<T>, to * kPanel<T>);
        else
            with_rows(strip.rows, [&]<int R>() { score_panels<M, R>(strip_queries, block_keys, depth, from, to, logits, &ahead); });
        rules.apply(own, strip.rows, j0, from * kPanel<T>, to * kPanel<T>, logits);
        soften(s * kStrip, strip.rows, sight, j0, from * kPanel<T>, to * kPanel<T>, part);
        if (!mixes) return;
        const int64_t begin = (first - j0) / M::per_cell, depth_here = (last - j0 + M::per_cell - 1) / M::per_cell - begin;
        const Cell* weights = reinterpret_cast<const Cell*>(scores) + begin;
        const int64_t v_pitch = value_pitch();
        T* out = part.out + s * kStrip * columns;
        const bool near = !job.packed && !careful && count <= kStrip;
        Ahead soon = near ? near_values(first, last) : Ahead{};
        with_rows(strip.rows, [&]<int R>() {
            mix_rows<M, R, pitch, 1>(weights, block_values + begin * v_pitch, v_pitch, depth_here, shrink, out, columns, columns,
                                     near ? &soon : nullptr);
        });
        if (careful) add_poison(strip.rows, from * kPanel<T>, to * kPanel<T>, out);
    }

    // Few rows: keys are read where they are, a square at a time, which spares writing panels and reading them again.
    void score_rows(const Cell* strip_queries, int count_here, int64_t j0, int first, int last) {
        constexpr int n = kLanes<T>;
        const int64_t head = key_head % p.kv_heads;
        for (int64_t k = 0; k < depth; ++k) room[k] = 0;
        Ahead soon = near_keys(j0 + first, least(j0 + last, p.keys));
        for (int j = first; j < last; j += n) {
            const T* row[n];
            for (int i = 0; i < n; ++i) {
                const int64_t key = j0 + j + i;
                row[i] = key < p.keys ? reinterpret_cast<const T*>(row_of(p.k, p.type, batch, head, key)) : room;
            }
            if (count_here == 1)
                score_square<M, 1>(strip_queries, row, depth, logits + j, soon);
            else if (count_here == 2)
                score_square<M, 2>(strip_queries, row, depth, logits + j, soon);
            else if (count_here <= 4)
                score_square<M, 4>(strip_queries, row, depth, logits + j, soon);
            else
                score_square<M, kFew>(strip_queries, row, depth, logits + j, soon);
        }
    }

    // The scores of columns first … last become weights; the running sums follow the maxima.
    void soften(int64_t n, int count_here, Sight sight, int64_t j0, int first, int last, Found<T>& part) {
        constexpr int side = kLanes<T>;
        Turn turn;
        for (int r = 0; r < count_here; ++r) {
            T* x = logits + r * pitch;
            rules.forbid(rows[n + r], r, sight, j0, first, last, x);
            if (careful)
                for (int j = first; j < last; ++j) visible[r * kBlock + j] = !(x[j] == -kInfinity<T>);
            Vec<T> high_a = spread<T>(-kInfinity<T>), high_b = high_a;
            for (int j = first; j < last; j += 2 * side) {
                high_a = larger(load(x + j), high_a);
                high_b = larger(load(x + j + side), high_b);
            }
            high_a = larger(high_a, high_b);
            turn.highest[r] = largest_of<T>(larger(high_a, spread<T>(part.highest[n + r])));
            const int64_t k = job.rows.top;
            if (k) enter_top(part.top + (n + r) * k, part.top_key + (n + r) * k, k, x, j0, first, last, high_a);
        }
        turn.take(n, count_here, rules.factor, part, shrink);
        const bool looks = job.rows.entropy || job.rows.distance;
        for (int r = 0; r < count_here; ++r)
            if (looks)
                weigh<true>(n + r, j0, first, last, logits + r * pitch, scores + r * pitch, turn, r);
            else
                weigh<false>(n + r, j0, first, last, logits + r * pitch, scores + r * pitch, turn, r);
    }

    // A strip's maxima after another block, and how the sums so far follow them: all rows at once.
    struct Turn {
        static constexpr int room = (kStrip + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
        T highest[room], origin[room], fall[room], less[room];

        void take(int64_t n, int count, T factor, Found<T>& part, T* shrink) {
            T before[room], reference[room];
            for (int r = 0; r < room; ++r) {
                before[r] = part.highest[n + (r < count ? r : 0)];
                reference[r] = part.reference[n + (r < count ? r : 0)];
                if (r >= count) highest[r] = before[r];
            }
            for (int r = 0; r < room; r += kLanes<T>) {
                const Vec<T> high = load(highest + r), old = load(reference + r), none = spread<T>(-kInfinity<T>);
                const auto same = high == load(before + r);
                const Vec<T> next = same ? old : high * spread<T>(factor);
                const Vec<T> down = same || old == none ? Vec<T>{} : old - next;
                store(fall + r, down);
                store(less + r, !same && old == none ? Vec<T>{} : power_of_two<T>(down));
                store(origin + r, next == none ? Vec<T>{} : -next);
                store(reference + r, next);
            }
            for (int r = 0; r < count; ++r) {
                part.highest[n + r] = highest[r];
                part.reference[n + r] = reference[r];
                shrink[r] = less[r];
            }
        }
    };

    // Scores become weights, 2^(score·factor + origin), and are summed lane by lane; some are also looked at.
    template <bool LOOKS>
    void weigh(int64_t n, int64_t j0, int first, int last, const T* x, T* weights, const Turn& turn, int r) {
        constexpr int side = kLanes<T>;
        const Vec<T> factor = spread<T>(rules.factor), origin = spread<T>(turn.origin[r]), lowest = spread<T>(T(-1e30));
        const Vec<T> less = spread<T>(turn.less[r]);
        Vec<T> sum_a = {}, sum_b = {}, centred_a = {}, centred_b = {};
        if (LOOKS && job.rows.distance) far[n] = far[n] * less;
        for (int j = first; j < last; j += 2 * side) {
            const Vec<T> t = fma(load(x + j), factor, origin), u = fma(load(x + j + side), factor, origin);
            const Vec<T> a = power_of_two<T>(t), b = power_of_two<T>(u);
            sum_a = sum_a + a;
            sum_b = sum_b + b;
            if constexpr (LOOKS) {
                centred_a = fma(a, larger(lowest, t), centred_a);  // 0·(-infinity) is NaN
                centred_b = fma(b, larger(lowest, u), centred_b);
                if (job.rows.distance)
                    far[n] = fma(a, rules.distance(rows[n], j0 + j), fma(b, rules.distance(rows[n], j0 + j + side), far[n]));
            }
            M::store_weights(weights, j, a, b);
        }
        if constexpr (LOOKS) centred[n] = fma(fma(sums[n], spread<T>(turn.fall[r]), centred[n]), less, centred_a + centred_b);
        sums[n] = fma(sums[n], less, sum_a + sum_b);
    }

    // What is poison in keys first … last of the block goes to the rows that see it; elsewhere `visible` is another strip's.
    void add_poison(int count_here, int first, int last, T* out) {
        for (int64_t i = 0; i < poison_count; ++i) {
            const int64_t j = poison[i] / columns, c = poison[i] % columns;
            if (j < first || j >= last) continue;
            for (int r = 0; r < count_here; ++r)
                if (visible[r * kBlock + j]) out[r * columns + c] += M::weight_at(scores + r * pitch, j) * poison_value[i];
        }
    }
};

}  // namespace
}  // namespace clearhead
