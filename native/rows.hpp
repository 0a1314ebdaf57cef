// The row pass: online softmax over blocks of keys, with its statistics (core/definition.py has the same of a block of
// rows with all its keys). A task computes a block of rows: for every block of keys, and every strip of rows, it
// computes the scores, turns them into weights in place, and adds weights · values to the output.
//
// A row's operations do not depend on where the row stands: blocks and spans of keys start at fixed keys, each span is
// summed separately and then merged, and a key that the row may not see adds an exact 0. So neither the other rows of
// the block, nor the cut into tasks, nor the number of threads changes a bit.
#pragma once

#include "key_blocks.hpp"
#include "rules.hpp"
#include "softmax_state.hpp"

namespace clearhead {
namespace {

template <class M> struct RowTask {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    int64_t run, block;
    void* scratch;
    const Problem& p = job.problem;
    Arena arena{static_cast<char*>(scratch)};
    int64_t batch = run / (p.heads / job.group), first_head = run % (p.heads / job.group) * job.group;
    // rows start … start + count of the run
    int64_t start = block * job.block_rows, count = min_of(job.block_rows, job.run_rows - start);
    Rules<T> rules{p, batch, arena};
    KeyBlocks<M> blocks{job, batch, first_head, count, arena};
    // the rows
    Row* rows = arena.take<Row>(job.block_rows);
    Strip* strips = arena.take<Strip>(job.block_rows);
    int strip_count = int((count + kStrip - 1) / kStrip);
    int64_t padded_rows = up_to_multiple(job.block_rows, kStrip);
    Cell* queries = arena.take<Cell>(padded_rows * blocks.depth + kLanes<T>);  // (strip, depth, kStrip)
    // scores
    T* scores = arena.take<T>(kStrip * pitch);  // (kStrip, pitch); the weights overwrite them
    // Kept for the column sums that follow, else null: (strip, block, kStrip, pitch), the scores, or with an output the
    // weights; and the maxima that these are relative to, (block, rows).
    T* kept = job.segment_sums ? arena.take<T>(padded_rows * key_blocks(p) * pitch) : nullptr;
    T* maxima = job.segment_sums && blocks.has_values ? arena.take<T>(padded_rows * key_blocks(p)) : nullptr;
    T* strip_scores = nullptr;  // those of the present strip and block, in `kept` or in `scores`
    // (kStrip, kBlock): which of them are not -infinity, with blocks.separate_nonfinite
    uint8_t* visible = arena.take<uint8_t>(kStrip * kBlock);
    Prefetch prefetch = {};  // of the next block, beside the scores
    T* rescale = arena.take<T>(kStrip);
    // sums of each row over the present span, lane by lane; SoftmaxState says what of
    Vec<T>* sums = arena.take<Vec<T>>(job.block_rows);
    Vec<T>* log2_sums = arena.take<Vec<T>>(job.block_rows);
    Vec<T>* distance_sums = arena.take<Vec<T>>(job.block_rows);

    // Determines which keys the rows may see, and packs the queries.
    void load_queries() {
        for (int r = 0; r < kStrip; ++r) rescale[r] = 1;
        for (int64_t r = 0; r < count; ++r)
            rows[r] = row_at(p, batch, first_head + (start + r) / p.queries, (start + r) % p.queries);
        for (int s = 0; s < strip_count; ++s)
            strips[s] = strip_of(rows + s * kStrip, int(min_of(kStrip, count - s * kStrip)));
        if (!job.packed) {
            const Strip all = strip_of(rows, int(count));
            blocks.prefetch_first_keys(all.low, all.high);
        }
        for (int s = 0; s < strip_count; ++s) {
            const char* from[kStrip];
            for (int r = 0; r < strips[s].rows; ++r) from[r] = query_at(rows[s * kStrip + r]);
            for (int64_t r = (s + 1) * kStrip; r < min_of((s + 2) * kStrip, count); ++r)  // the next strip
                for (int64_t i = 0; i < p.d_k * bytes_of(p.type); i += 64)
                    __builtin_prefetch(query_at(rows[r]) + i, 0, 3);
            pack_strip<M>(from, strips[s].rows, p.q, p.type, p.d_k, rules.negated(rows + s * kStrip, strips[s].rows),
                          blocks.staging, queries + s * kStrip * blocks.depth);
        }
    }

    const char* query_at(const Row& row) const { return row_of(p.q, p.type, batch, row.head, row.query); }

    // From now on, values that are not finite are added only to rows that may see them.
    void separate_nonfinite() { blocks.separate_nonfinite = true; }

    // Adds the keys of one span, for all rows. `state` starts cleared; its sums are complete afterwards.
    void add_span(int64_t span, SoftmaxState<T>& state) {
        const Strip all = strip_of(rows, int(count));
        for (int64_t r = 0; r < count; ++r) sums[r] = log2_sums[r] = distance_sums[r] = Vec<T>{};
        blocks.reset();
        const int64_t stop = min_of(all.high, (span + 1) * kSpan);
        for (int64_t j0 = max_of(all.low / kBlock * kBlock, span * kSpan); j0 < stop; j0 += kBlock) {
            blocks.load(j0, max_of(all.low, j0), min_of(all.high, j0 + kBlock));
            const bool more = job.packed && j0 + kBlock < stop;
            prefetch = more ? blocks.prefetch_next_block(j0 + kBlock, strip_count) : Prefetch{};
            for (int s = 0; s < strip_count; ++s) add_block(j0, s, state);
        }
        for (int64_t r = 0; r < count; ++r) {
            state.sum[r] = double(sum_of<T>(sums[r]));
            state.log2_sum[r] = double(sum_of<T>(log2_sums[r]));
            state.distance_sum[r] = double(sum_of<T>(distance_sums[r]));
        }
    }

    // Adds the block of keys that starts at j0 to the rows of strip s.
    void add_block(int64_t j0, int s, SoftmaxState<T>& state) {
        const Strip& strip = strips[s];
        const Row* strip_rows = rows + s * kStrip;
        const int64_t low = max_of(strip.low, j0), high = min_of(strip.high, j0 + kBlock);
        if (low >= high) return;
        const Visibility visibility = rules.content_visibility(strip_rows, strip.rows, j0, low, high);
        if (visibility == Visibility::none) return;
        const int from = int(low - j0) / kPanel<T>, to = int(high - j0 + kPanel<T> - 1) / kPanel<T>;
        const int first = from * kPanel<T>, last = to * kPanel<T>;
        const Cell* strip_queries = queries + s * kStrip * blocks.depth;
        strip_scores = kept ? kept + (s * key_blocks(p) + j0 / kBlock) * kStrip * pitch : scores;
        if (maxima && M::per_cell == 1) scores = strip_scores;  // else `scores` has the rounded weights
        if (blocks.direct_keys)
            score_keys_in_place(strip_queries, strip.rows, j0, first, last);
        else
            with_rows(strip.rows, [&]<int R>() {
                score_panels<M, R>(strip_queries, blocks.keys, blocks.depth, from, to, strip_scores, &prefetch);
            });
        rules.apply(strip_rows, strip.rows, j0, first, last, strip_scores);
        update_softmax(s * kStrip, strip.rows, visibility, j0, first, last, state);
        if (!blocks.has_values) return;
        T* out = state.output + s * kStrip * blocks.columns;
        add_values(strip.rows, j0, low, high, out);
        if (blocks.separate_nonfinite) add_nonfinite(strip.rows, first, last, out);
    }

    // The scores of a few queries. The keys are read where they lie, a square at a time, which saves packing them.
    void score_keys_in_place(const Cell* strip_queries, int row_count, int64_t j0, int first, int last) {
        constexpr int n = kLanes<T>;
        static_assert(kRun % n == 0);  // these keys lie in one run
        const int64_t head = blocks.key_head % p.kv_heads, depth = blocks.depth,
                      pitch_bytes = p.k.row * bytes_of(p.type);
        Cell* zeros = blocks.staging;  // stands for keys past the end
        for (int64_t k = 0; k < depth; ++k) zeros[k] = 0;
        Prefetch beside = blocks.prefetch_beside_keys(j0 + first, min_of(j0 + last, p.keys));
        if (in_tiles<M>()) return score_keys_in_tiles(strip_queries, row_count, j0, first, last, beside);
        for (int j = first; j < last; j += n) {
            const T* row[n];
            const char* start = row_of(p.k, p.type, batch, head, j0 + j);
            for (int i = 0; i < n; ++i)
                row[i] = j0 + j + i < p.keys ? reinterpret_cast<const T*>(start + i * pitch_bytes) : zeros;
            with_rows(row_count, [&]<int R>() {
                if constexpr (R <= kDirectRows) score_square<M, R>(strip_queries, row, depth, strip_scores + j, beside);
            });
        }
    }

    // The same in tile registers; past the last key the scores stay as they are, and are masked.
    void score_keys_in_tiles(const Cell* strip_queries, int row_count, int64_t j0, int first, int last,
                             Prefetch& beside) {
#if defined(__AMX_BF16__)
        constexpr int64_t n = kTileCells;
        const int64_t head = blocks.key_head % p.kv_heads, depth = blocks.depth, here = min_of(last, p.keys - j0),
                      stop = p.k.runs ? up_to_multiple(here, n) : here;  // a run has all its rows
        const auto multiply = [&]<int R>() {
            const float* keys[4];
            const auto groups = [&]<int C>(int64_t j, int64_t keys_of_each) {
                for (int i = 0; i < C; ++i)
                    keys[i] = reinterpret_cast<const float*>(row_of(p.k, p.type, batch, head, j0 + j + i * n));
                tile_squares<R, C>(strip_queries, kStrip, keys, p.k.row / 2, depth, strip_scores + j, pitch,
                                   int(keys_of_each), beside);
            };
            configure_tiles(n, n, R);
            int64_t j = first;
            for (; j + 4 * n <= stop; j += 4 * n) groups.template operator()<4>(j, n);
            for (; j + n <= stop; j += n) groups.template operator()<1>(j, n);
            if (j < stop) {
                configure_tiles(int(stop - j), n, R);
                groups.template operator()<1>(j, stop - j);
            }
            _tile_release();
        };
        if constexpr (M::per_cell == 2)
            with_rows(row_count, [&]<int R>() {
                if constexpr (R <= kDirectRows) multiply.template operator()<R>();
            });
#endif
    }

    // Online softmax for rows n … of the task: finds the new maxima of columns first … last, rescales the sums so far
    // to them, and turns the scores into weights, which are summed.
    void update_softmax(int64_t n, int row_count, Visibility visibility, int64_t j0, int first, int last,
                        SoftmaxState<T>& state) {
        Rescaling<T> rescaling;
        for (int r = 0; r < row_count; ++r) {
            T* x = strip_scores + r * pitch;
            rules.mask_row(rows[n + r], r, visibility, j0, first, last, x);
            if (blocks.separate_nonfinite)
                for (int j = first; j < last; ++j) visible[r * kBlock + j] = !(x[j] == -kInfinity<T>);
            const Vec<T> high = largest_lanes(x, first, last);
            rescaling.maximum[r] = largest_of<T>(larger(high, broadcast<T>(state.maximum[n + r])));
            if (job.rows.diagonal) {  // the key at the row's own position
                const int64_t to_position = rows[n + r].position - p.column_start, j = to_position / p.column_step - j0;
                if (to_position % p.column_step == 0 && j >= first && j < last) state.diagonal[n + r] = x[j];
            }
            const int64_t k = job.rows.top;
            if (k) enter_top(state.top + (n + r) * k, state.top_keys + (n + r) * k, k, x, j0, first, last, high);
        }
        rescaling.apply(n, row_count, state, rescale, [&](int r) { return rules.scale_of(rows[n + r].head); });
        const bool statistics = job.rows.entropy || job.rows.distance;
        for (int r = 0; r < row_count; ++r)
            if (rescaling.step[r] != 1)
                compute_weights<true, true>(n, r, j0, first, last, rescaling);
            else
                statistics ? compute_weights<true, false>(n, r, j0, first, last, rescaling)
                           : compute_weights<false, false>(n, r, j0, first, last, rescaling);
        for (int r = 0; maxima && r < row_count; ++r) {
            maxima[j0 / kBlock * padded_rows + n + r] = rescaling.maximum[r];
            for (int j = first; blocks.separate_nonfinite && j < last; ++j)  // -0: may not be seen
                if (!visible[r * kBlock + j]) strip_scores[r * pitch + j] = T(-0.0);
        }
    }

    // Row n + r, row r of its strip: weight = 2^t with t = (score·step - origin)·unit, where `step` is 1 unless the row
    // ROUNDS its logits. Adds to the sums, lane by lane, Σ weight; with STATISTICS also Σ weight·t and Σ
    // weight·distance.
    template <bool STATISTICS, bool ROUNDS>
    void compute_weights(int64_t n, int r, int64_t j0, int first, int last, const Rescaling<T>& rescaling) {
        constexpr int side = kLanes<T>;
        T* x = strip_scores + r * pitch;
        const Row& row = rows[n + r];
        const Vec<T> step = broadcast<T>(rescaling.step[r]), origin = broadcast<T>(rescaling.origin[r]);
        const Vec<T> unit = broadcast<T>(rescaling.unit[r]), factor = broadcast<T>(rescaling.factor[r]);
        const Vec<T> lowest = broadcast<T>(T(-1e30));
        Vec<T> sum_a = {}, sum_b = {}, log2_a = {}, log2_b = {};
        Vec<T>& distance_sum = distance_sums[n + r];
        if (STATISTICS && job.rows.distance) distance_sum = distance_sum * factor;
        const auto exponent = [&](Vec<T> score) { return ((ROUNDS ? score * step : score) - origin) * unit; };
        for (int j = first; j < last; j += 2 * side) {
            const Vec<T> t = exponent(load(x + j)), u = exponent(load(x + j + side));
            const Vec<T> a = power_of_two<T>(t), b = power_of_two<T>(u);
            sum_a = sum_a + a;
            sum_b = sum_b + b;
            if constexpr (STATISTICS) {
                log2_a = fma(a, larger(lowest, t), log2_a);  // bounded from below, since 0·(-infinity) is NaN
                log2_b = fma(b, larger(lowest, u), log2_b);
                if (job.rows.distance)
                    distance_sum =
                        fma(a, rules.distance(row, j0 + j), fma(b, rules.distance(row, j0 + j + side), distance_sum));
            }
            if (M::per_cell == 2 && maxima) {
                store(x + j, a);
                store(x + j + side, b);
            }
            M::store_weights(scores + r * pitch, j, a, b);
        }
        Vec<T>&sum = sums[n + r], &log2_sum = log2_sums[n + r];
        if constexpr (STATISTICS)  // rescaled weights, and log₂ of each moved by the shift
            log2_sum = fma(fma(sum, broadcast<T>(rescaling.shift[r]), log2_sum), factor, log2_a + log2_b);
        sum = fma(sum, factor, sum_a + sum_b);
    }

    // out = out·rescale + weights · values, over keys low … high.
    void add_values(int row_count, int64_t j0, int64_t low, int64_t high, T* out) {
        const int64_t begin = (low - j0) / M::per_cell;  // in cells
        const int64_t cells = (high - j0 + M::per_cell - 1) / M::per_cell - begin;
        const Cell* weights = reinterpret_cast<const Cell*>(scores);
        const int64_t v_pitch = blocks.value_pitch(), columns = blocks.columns;
        const bool few_rows = !job.packed && !blocks.separate_nonfinite && count <= kStrip;
        Prefetch beside = few_rows ? blocks.prefetch_beside_values(low, high) : Prefetch{};
        const bool in_pages = p.v.runs && !blocks.separate_nonfinite && (job.direct_values || blocks.pairs_in_place);
        Runs* runs = in_pages ? &blocks.runs : nullptr;
        blocks.runs.first = begin * M::per_cell;
        if constexpr (M::per_cell == 2)
            if (blocks.pairs_in_place && !blocks.separate_nonfinite) {
                const int64_t key = j0 + 2 * begin;
                const char* values = row_of(p.v, p.type, batch, blocks.value_head % p.v_heads, key);
                with_rows(row_count, [&]<int R>() {
                    if constexpr (R <= kDirectRows)
                        weighted_rows<M, R, pitch>(weights + begin, reinterpret_cast<const uint16_t*>(values), p.v.row,
                                                   high - key, rescale, out, columns, columns, beside, runs);
                });
                return;
            }
        const Cell* values = in_pages ? nullptr : blocks.values;
        with_rows(row_count, [&]<int R>() {
            weighted_sum<M, R, pitch, 1>(weights, values, v_pitch, begin, cells, rescale, out, columns, columns,
                                         few_rows ? &beside : nullptr, runs);
        });
    }

    // Adds the values that are not finite, of columns first … last of the block, times their weights, to the rows that
    // may see their keys.
    void add_nonfinite(int row_count, int first, int last, T* out) const {
        const NonfiniteValues<T>& list = blocks.nonfinite;
        for (int64_t i = 0; i < list.count; ++i) {
            const int64_t j = list.index[i] / blocks.columns, c = list.index[i] % blocks.columns;
            if (j < first || j >= last) continue;  // `visible` holds another strip's there
            for (int r = 0; r < row_count; ++r)
                if (visible[r * kBlock + j])
                    out[r * blocks.columns + c] += M::weight_at(scores + r * pitch, j) * list.value[i];
        }
    }
};

}  // namespace
}  // namespace clearhead
