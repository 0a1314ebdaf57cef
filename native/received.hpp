// The row pass that also finishes what each key received: the scores of a block of rows stay in the cache until the rows'
// log-sum-exp is known, so that looking costs an exponential and an addition instead of a second q·kᵀ.
//
// The sums are taken in the order of the column pass (columns.hpp), to the same bits: strips of queries in float, segments
// of strips in double, segments one after the other.
#pragma once

#include "answers.hpp"

namespace clearhead {
namespace {

template <class M> void receive(RowTask<M>& task, double* received) {
    using T = typename M::T;
    constexpr int64_t pitch = kPitch<T>;
    const Problem& p = task.p;
    T line[kBlock];
    for (int s = 0; s < task.strip_count; ++s) {
        const Strip& strip = task.strips[s];
        const Row* own = task.rows + s * kStrip;
        for (int64_t j0 = strip.low / kBlock * kBlock; j0 < strip.high; j0 += kBlock) {
            const int64_t low = most(strip.low, j0), high = least(strip.high, j0 + kBlock);
            if (task.rules.look(own, strip.rows, j0, low, high) == Sight::nobody) continue;
            const int first = int(low - j0) / kPanel<T> * kPanel<T>, last = int(up_to_multiple(high - j0, kPanel<T>));
            const T* scores = task.kept + (s * key_blocks(p) + j0 / kBlock) * kStrip * pitch;
            for (int j = first; j < last; ++j) line[j] = 0;
            for (int r = 0; r < strip.rows; ++r) {
                const int64_t at = (task.batch * p.heads + own[r].head) * p.queries + own[r].query;
                const Normal<T> normal(static_cast<const T*>(task.job.rows.logsumexp)[at], task.rules.factor);
                const T* x = scores + r * pitch;
                for (int j = first; j < last; j += kLanes<T>) store(line + j, load(line + j) + normal.weight(load(x + j)));
            }
            for (int64_t j = low; j < high; ++j) received[j] += double(line[j - j0]);
        }
    }
}

// The queries of one segment of one head, a few strips at a time. Runs are heads here.
template <class M> void rows_and_received(const Job& job, int64_t head, int64_t segment, void* scratch) {
    const Problem& p = job.problem;
    const int64_t segments = (p.queries + job.segment_rows - 1) / job.segment_rows;
    double* received = job.segment_sums + ((head - job.first_run) * segments + segment) * p.keys;
    for (int64_t j = 0; j < p.keys; ++j) received[j] = 0;
    const int64_t stop = least(p.queries, (segment + 1) * job.segment_rows);
    for (int64_t i = segment * job.segment_rows; i < stop; i += job.block_rows) {
        RowTask<M> task(job, head, i / job.block_rows, scratch);
        task.open();
        Answers<M>{task}.run();
        receive(task, received);
    }
}

}  // namespace
}  // namespace clearhead
