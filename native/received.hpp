// The row pass with the statistic `received`, the sum of the weights on each key. The scores of a block of rows stay in
// the cache until the log-sum-exp of the rows is known, so the sums cost an exponential and an addition for each weight
// instead of a second q·kᵀ.
//
// They are taken in the order of the column pass (columns.hpp), to the same bits: over the queries of a strip in T,
// over the strips of a segment in double, and then segment by segment.
#pragma once

#include "rates.hpp"
#include "row_results.hpp"

namespace clearhead {
namespace {

template <class M> void add_received(RowTask<M>& task, double* received) {
    using T = typename M::T;
    constexpr int64_t pitch = kPitch<T>;
    const Problem& p = task.p;
    T line[kBlock];
    for (int s = 0; s < task.strip_count; ++s) {
        const Strip& strip = task.strips[s];
        const Row* strip_rows = task.rows + s * kStrip;
        for (int64_t j0 = strip.low / kBlock * kBlock; j0 < strip.high; j0 += kBlock) {
            const int64_t low = max_of(strip.low, j0), high = min_of(strip.high, j0 + kBlock);
            if (task.rules.content_visibility(strip_rows, strip.rows, j0, low, high) == Visibility::none) continue;
            const int first = int(low - j0) / kPanel<T> * kPanel<T>, last = int(up_to_multiple(high - j0, kPanel<T>));
            const T* scores = task.all_scores + (s * key_blocks(p) + j0 / kBlock) * kStrip * pitch;
            for (int j = first; j < last; ++j) line[j] = 0;
            for (int r = 0; r < strip.rows; ++r) {
                const Row& row = strip_rows[r];
                const int64_t index = (task.batch * p.heads + row.head) * p.queries + row.query;
                const Normalizer<T> normalizer(static_cast<const T*>(task.job.rows.logsumexp)[index],
                                               task.rules.scale_of(row.head).log2);
                const T* x = scores + r * pitch;
                for (int j = first; j < last; j += kLanes<T>)
                    store(line + j, load(line + j) + normalizer.weight(load(x + j)));
            }
            for (int64_t j = low; j < high; ++j) received[j] += double(line[j - j0]);
        }
    }
}

// The queries of one segment of one head, a few strips at a time. A run is one head here.
template <class M> void rows_and_received(const Job& job, int64_t index, void* scratch) {
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
    kernel.exercise = exercise;
    kernel.read = read;
}

}  // namespace
}  // namespace clearhead
