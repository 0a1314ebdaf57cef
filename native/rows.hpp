// The row pass: online softmax over blocks of keys, with its statistics (core/definition.py has the same of a block of
// rows with all its keys). A task has a block of rows: for every block of keys, and every strip of rows, it computes
// the scores, turns them into weights in place, and adds weights · values to the output.
//
// A row's operations do not depend on where the row stands: blocks and spans of keys start at fixed keys, each span is
// summed separately and then merged, and a key that the row may not see adds an exact 0. So neither the other rows of
// the block, nor the cut into tasks, nor the number of threads changes a bit.
#pragma once

#include "key_blocks.hpp"
#include "softmax_state.hpp"

namespace clearhead {
namespace {

template <class M> struct RowTask {
    using T = typename M::T;
    using Cell = typename M::Cell;
    static constexpr int64_t pitch = kPitch<T>;

    const RowJob& job;
    int64_t run, block;
    void* scratch;
    const Problem& p = job.problem;
    Arena arena{static_cast<char*>(scratch)};
    int64_t batch = run / (p.heads / job.group), first_head = run % (p.heads / job.group) * job.group;
    // rows start … start + count of the run
    int64_t start = block * job.block_rows, count = min_of(job.block_rows, job.run_rows - start);
    Rules<T> rules{p, batch, arena};
    KeyBlocks<M> blocks{job, batch, first_head, count, arena};
    Row* rows = arena.take<Row>(job.block_rows);
    Strip* strips = arena.take<Strip>(job.block_rows);
    int strip_count = int((count + kStrip - 1) / kStrip);
    Strip all = {int(count), kNoLimit, 0};  // strips in one
    int64_t padded_rows = up_to_multiple(job.block_rows, kStrip);
    Cell* queries = arena.take<Cell>(padded_rows / kStrip * strip_cells(blocks.depth));
    // (kStrip, pitch), of the present strip and block: the scores, which become weights; and the weights that values
    // are multiplied by, in another place where they are rounded or the scores are kept
    T* one_strip = arena.take<T>(kStrip * pitch);
    T *scores = one_strip, *weights = one_strip;
    // Kept for the column sums that follow, else null: (strip, block, kStrip, pitch), the scores, or with an output the
    // weights; and the maxima that these are relative to, (block, rows).
    T* kept = job.segment_sums ? arena.take<T>(padded_rows * key_blocks(p) * pitch) : nullptr;
    T* maxima = job.segment_sums && blocks.has_values ? arena.take<T>(padded_rows * key_blocks(p)) : nullptr;
    // (kStrip, kBlock): which scores are not -infinity, with blocks.separate_nonfinite
    uint8_t* visible = arena.take<uint8_t>(kStrip * kBlock);
    T* rescale = arena.take<T>(kStrip);
    struct Sums {  // of a row over the present span, lane by lane; RowState says what of
        Vec<T> sum, log2_sum, distance_sum;
    }* sums = arena.take<Sums>(job.block_rows);

    // Determines which keys the rows may see, and packs the queries.
    void load_queries() {
        for (int r = 0; r < kStrip; ++r) rescale[r] = 1;
        int64_t head = first_head + start / p.queries, query = start % p.queries;
        for (int64_t r = 0; r < count; ++r, ++query) {
            if (query == p.queries) ++head, query = 0;
            rows[r] = row_at(p, batch, head, query);
        }
        for (int s = 0; s < strip_count; ++s) {
            strips[s] = strip_of(rows + s * kStrip, int(min_of(kStrip, count - s * kStrip)));
            all.low = min_of(all.low, strips[s].low), all.high = max_of(all.high, strips[s].high);
        }
        if (!job.packed && count <= kStrip) blocks.prefetch_first_keys(all.low, all.high);
        const auto query_at = [&](int64_t r) { return queries_of(p, batch, rows[r].head).row(rows[r].query); };
        for (int s = 0; s < strip_count; ++s) {
            const char* from[kStrip];
            for (int r = 0; r < strips[s].rows; ++r) from[r] = query_at(s * kStrip + r);
            pack_strip<M>(from, strips[s].rows, queries_of(p, batch, first_head),
                          rules.negated(rows + s * kStrip, strips[s].rows), queries_of_strip(s));
        }
    }

    Cell* queries_of_strip(int s) const { return queries + s * strip_cells(blocks.depth); }
    Scale<T> scale_of(int64_t r) const { return rules.scale_of(rows[r].head); }

    // Computes what the keys of one span give to all rows.
    void add_span(int64_t span, SoftmaxState<T>& state) {
        state.clear(count, false);
        for (int s = 0; s < strip_count; ++s) strips[s].fresh = true;
        for (int64_t r = 0; r < count; ++r) sums[r] = Sums{};
        blocks.reset();
        const int64_t stop = min_of(all.high, (span + 1) * kSpan);
        for (int64_t j0 = max_of(all.low / kBlock * kBlock, span * kSpan); j0 < stop; j0 += kBlock) {
            blocks.load(j0, max_of(all.low, j0), min_of(all.high, j0 + kBlock));
            const bool more = j0 + kBlock < stop;
            if (job.packed)
                blocks.next_block = more ? blocks.prefetch_packed(j0 + kBlock, strip_count) : Prefetch{};
            else if (!blocks.few_rows)
                blocks.next_block =
                    blocks.prefetch_unpacked(j0 + kBlock < all.high ? j0 + kBlock : p.keys, strip_count);
            for (int s = 0; s < strip_count; ++s) add_block(j0, s, state);
        }
        for (int s = 0; s < strip_count; ++s)
            if (strips[s].fresh) state.clear_output(s * kStrip, min_of((s + 1) * kStrip, count));
        for (int64_t r = 0; r < count; ++r) {
            state.rows[r].sum = double(sum_of<T>(sums[r].sum));
            if (job.entropy) state.rows[r].log2_sum = double(sum_of<T>(sums[r].log2_sum));
            if (job.distance) state.rows[r].distance_sum = double(sum_of<T>(sums[r].distance_sum));
        }
    }

    // Adds the block of keys that starts at j0 to the rows of strip s.
    void add_block(int64_t j0, int s, SoftmaxState<T>& state) {
        const int64_t n = s * kStrip;
        const int row_count = strips[s].rows;
        const Seen seen = rules.see(rows + n, strips[s], j0, j0 + kBlock);
        if (seen.visibility == Visibility::none) return;
        if (kept) scores = kept + (s * key_blocks(p) + j0 / kBlock) * kStrip * pitch;
        if (maxima && M::per_cell == 1) weights = scores;
        blocks.score(queries_of_strip(s), row_count, seen, scores);
        rules.apply(rows + n, row_count, seen, scores);
        update_softmax(n, row_count, seen, state);
        if (!blocks.has_values) return;
        T* out = state.output + n * blocks.columns;
        blocks.add_values(weights, row_count, seen, strips[s].fresh ? nullptr : rescale, out);
        strips[s].fresh = false;
        if (blocks.separate_nonfinite) add_nonfinite(row_count, seen, out);
    }

    // Online softmax for rows n … of the task: finds the new maxima, rescales the sums so far to them, and turns the
    // scores into weights, which are summed.
    void update_softmax(int64_t n, int row_count, const Seen& seen, SoftmaxState<T>& state) {
        Rescaling<T> rescaling;
        for (int r = 0; r < row_count; ++r) enter_scores(n, r, seen, state, rescaling);
        rescaling.apply(*this, n, row_count, state, rescale);
        const bool statistics = job.entropy || job.distance;
        for (int r = 0; r < row_count; ++r)
            if (rescaling.step[r] != 1)
                compute_weights<true, true>(n, r, seen, rescaling);
            else
                statistics ? compute_weights<true, false>(n, r, seen, rescaling)
                           : compute_weights<false, false>(n, r, seen, rescaling);
        for (int r = 0; maxima && r < row_count; ++r) {
            maxima[seen.j0 / kBlock * padded_rows + n + r] = rescaling.maximum[r];
            for (int j = seen.first; blocks.separate_nonfinite && j < seen.last; ++j)  // -0: may not be seen
                if (!visible[r * kBlock + j]) scores[r * pitch + j] = T(-0.0);
        }
    }

    // Row n + r, row r of its strip: hides what it may not see, and finds its new maximum, its largest scores and the
    // score at its own position.
    void enter_scores(int64_t n, int r, const Seen& seen, SoftmaxState<T>& state, Rescaling<T>& rescaling) {
        T* x = scores + r * pitch;
        rules.mask_row(rows[n + r], r, seen, x);
        if (blocks.separate_nonfinite)
            for (int j = seen.first; j < seen.last; ++j) visible[r * kBlock + j] = !(x[j] == -kInfinity<T>);
        const Vec<T> high = largest_lanes(x, seen.first, seen.last);
        rescaling.maximum[r] = largest_of<T>(larger(high, broadcast<T>(state.rows[n + r].maximum)));
        if (job.diagonal) {
            const int64_t to_position = rows[n + r].position - p.column_start,
                          j = to_position / p.column_step - seen.j0;
            if (to_position % p.column_step == 0 && j >= seen.first && j < seen.last) state.rows[n + r].diagonal = x[j];
        }
        const int64_t k = job.top;
        if (k)
            enter_top(state.top + (n + r) * k, state.top_keys + (n + r) * k, k, x, seen.j0, seen.first, seen.last,
                      high);
    }

    // Row n + r, row r of its strip: weight = 2^t with t = (score·step - origin)·unit, where `step` is 1 unless the row
    // ROUNDS its logits. Adds to the sums, lane by lane, Σ weight; with STATISTICS also Σ weight·t and Σ
    // weight·distance.
    template <bool STATISTICS, bool ROUNDS>
    void compute_weights(int64_t n, int r, const Seen& seen, const Rescaling<T>& rescaling) {
        constexpr int side = kLanes<T>;
        const int64_t j0 = seen.j0;
        const int first = seen.first, last = seen.last;
        T* x = scores + r * pitch;
        const Row& row = rows[n + r];
        const Vec<T> step = broadcast<T>(rescaling.step[r]), origin = broadcast<T>(rescaling.origin[r]);
        const Vec<T> unit = broadcast<T>(rescaling.unit[r]), factor = broadcast<T>(rescaling.factor[r]);
        const Vec<T> lowest = broadcast<T>(T(-1e30));
        Vec<T> sum_a = {}, sum_b = {}, log2_a = {}, log2_b = {};
        auto& [sum, log2_sum, distance_sum] = sums[n + r];
        if (STATISTICS && job.distance) distance_sum = distance_sum * factor;
        const auto exponent = [&](Vec<T> score) { return ((ROUNDS ? score * step : score) - origin) * unit; };
        for (int j = first; j < last; j += 2 * side) {
            const Vec<T> t = exponent(load(x + j)), u = exponent(load(x + j + side));
            const Vec<T> a = power_of_two<T>(t), b = power_of_two<T>(u);
            sum_a = sum_a + a;
            sum_b = sum_b + b;
            if constexpr (STATISTICS) {
                log2_a = fma(a, larger(lowest, t), log2_a);  // bounded from below, since 0·(-infinity) is NaN
                log2_b = fma(b, larger(lowest, u), log2_b);
                if (job.distance)
                    distance_sum =
                        fma(a, rules.distance(row, j0 + j), fma(b, rules.distance(row, j0 + j + side), distance_sum));
            }
            if (M::per_cell == 2 && maxima) {
                store(x + j, a);
                store(x + j + side, b);
            }
            M::store_weights(weights + r * pitch, j, a, b);
        }
        if constexpr (STATISTICS)  // rescaled weights, and log₂ of each moved by the shift
            log2_sum = fma(fma(sum, broadcast<T>(rescaling.shift[r]), log2_sum), factor, log2_a + log2_b);
        sum = fma(sum, factor, sum_a + sum_b);
    }

    // Adds the values that are not finite times their weights, to the rows that may see their keys.
    void add_nonfinite(int row_count, const Seen& seen, T* out) const {
        const NonfiniteValues<T>& list = blocks.nonfinite;
        for (int64_t i = 0; i < list.count; ++i) {
            const int64_t j = list.index[i] / blocks.columns, c = list.index[i] % blocks.columns;
            if (j < seen.first || j >= seen.last) continue;  // `visible` holds another strip's there
            for (int r = 0; r < row_count; ++r)
                if (visible[r * kBlock + j])
                    out[r * blocks.columns + c] += M::weight_at(weights + r * pitch, j) * list.value[i];
        }
    }
};

}  // namespace
}  // namespace clearhead
