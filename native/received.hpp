// The row pass with the statistic `received`, the sum of the weights on each key, in the order of the column pass
// (columns.hpp). A block of rows stays in the cache until their log-sum-exp is known. If there is an output, it stays
// as weights, each relative to its row's maximum at the time, and each sum costs a multiply-add. If there is none, it
// stays as scores, for the same bits as a column pass, which may run instead.
#pragma once

#include "row_results.hpp"

namespace clearhead {
namespace {

template <class M> void add_received(RowTask<M>& task, double* received) {
    using T = typename M::T;
    const Problem& p = task.p;
    T line[kBlock];
    for (int s = 0; s < task.strip_count; ++s) {
        const Strip& strip = task.strips[s];
        const int64_t n = s * kStrip;
        Normalizer<T> normalizers[kStrip];
        for (int r = 0; r < strip.rows; ++r) {
            const Row& row = task.rows[n + r];
            const int64_t index = answer_index(p, task.batch * p.heads + row.head, row.query);
            normalizers[r] = Normalizer<T>({task.job.largest, task.job.log_sum}, index, task.scale_of(n + r));
        }
        for (int64_t j0 = strip.low / kBlock * kBlock; j0 < strip.high; j0 += kBlock) {
            const Seen seen = task.rules.see(task.rows + n, strip, j0, j0 + kBlock);
            if (seen.visibility == Visibility::none) continue;
            const int64_t block = j0 / kBlock;
            const T* x = task.kept + (s * key_blocks(p) + block) * kStrip * kPitch<T>;
            Vec<T> factors[kStrip];
            for (int r = 0; task.maxima && r < strip.rows; ++r)
                factors[r] = normalizers[r].weight(broadcast<T>(task.maxima[block * task.padded_rows + n + r]));
            const auto sum = [&](auto weight) {  // line[j] = Σ weight(r, x[r][j])
                for (int j = seen.first, last = seen.last; j < last; j += kLanes<T>) {
                    Vec<T> total = {};
                    for (int r = 0; r < strip.rows; ++r) total = total + weight(r, load(x + r * kPitch<T> + j));
                    store(line + j, total);
                }
            };
            if (!task.maxima)
                sum([&](int r, Vec<T> score) { return normalizers[r].weight(score); });
            else  // -0 is the weight of a key that a row with NaN may not see
                sum([&](int r, Vec<T> weight) {
                    const auto hidden = (IntVec<T>)weight == (IntVec<T>)broadcast<T>(T(-0.0));
                    const Vec<T> x = weight * factors[r];
                    return normalizers[r].is_nan ? (hidden ? Vec<T>{} : x) : x;
                });
            for (int64_t j = seen.low; j < seen.high; ++j) received[j] += double(line[j - j0]);
        }
    }
}

// The queries of one segment of one head, a few strips at a time. A run is one head here.
template <class M> void rows_and_received(const RowJob& job, int64_t index, void* scratch) {
    const Problem& p = job.problem;
    const int64_t segments = (p.queries + job.segment_rows - 1) / job.segment_rows;
    const auto [head, segment] = position_of(job, index, segments);
    double* received = job.segment_sums + ((head - job.first_run) * segments + segment) * p.keys;
    for (int64_t j = 0; j < p.keys; ++j) received[j] = 0;
    const int64_t stop = min_of(p.queries, (segment + 1) * job.segment_rows);
    for (int64_t i = segment * job.segment_rows; i < stop; i += job.block_rows) {
        RowTask<M> task{job, head, i / job.block_rows, scratch};
        task.load_queries();
        RowResults<M>{task}.run();
        add_received(task, received);
    }
}

template <class M> void fill(Kernel& kernel) {
    kernel.strip_rows = kStrip;
    kernel.tile_rows = kTile;
    kernel.block_keys = kBlock;
    kernel.span_keys = kSpan;
    kernel.packed_key_bytes = packed_key_bytes<M>;
    kernel.packed_value_bytes = packed_value_bytes<M>;
    kernel.values_in_place = values_in_place<M>;
    kernel.part_bytes = part_bytes<M>;
    kernel.pack_keys = {key_staging_bytes<M>, pack_keys<M>};
    kernel.pack_values = {nullptr, pack_values<M>};
    kernel.rows = {row_scratch_bytes<M>, rows<M>};
    kernel.merge = {row_scratch_bytes<M>, merge<M>};
    kernel.received = {row_scratch_bytes<M>, rows_and_received<M>};
}

}  // namespace
}  // namespace clearhead
