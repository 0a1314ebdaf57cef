// From the final softmax state of a block of rows to the results: the output and the statistics of each row.
#pragma once

#include "rows.hpp"

namespace clearhead {
namespace {

template <class M> struct RowResults {
    using T = typename M::T;

    RowTask<M>& task;
    const RowJob& job = task.job;
    const Problem& p = task.p;
    const int64_t count = task.count, columns = task.blocks.columns;

    // Writes the results. False where an output is not finite and the task has not yet separated the values that are
    // not: it must then be computed again with `separate_nonfinite`.
    bool write(const SoftmaxState<T>& state) {
        const bool statistics = job.largest || job.max_logit || job.entropy || job.distance || job.diagonal || job.top;
        Vec<T> nonfinite = {};  // 0·x is 0 for finite x, else NaN
        for (int64_t r = 0; r < count; ++r) {
            const int64_t index = answer_index(p, task.batch * p.heads + task.rows[r].head, task.rows[r].query);
            const bool empty = state.rows[r].sum == 0;
            double keys_share = 1;
            if (statistics || p.sinks) keys_share = write_statistics(state, r, index, empty);
            if (task.blocks.has_values)
                write_output(state.output + r * columns, empty ? 0 : keys_share / state.rows[r].sum, index, nonfinite);
        }
        return sum_of<T>(nonfinite) == 0 || task.blocks.separate_nonfinite;
    }

    // Writes a row's statistics; returns the share of the softmax that its sink leaves to the keys.
    double write_statistics(const SoftmaxState<T>& state, int64_t r, int64_t index, bool empty) {
        const Scale<T> scale = task.scale_of(r);
        const RowState<T>& row = state.rows[r];
        const T score = row.maximum, logit = score * scale.logit;
        const double sum = row.sum, max_logit = double(score) * double(scale.logit);
        const double sink = p.sinks && !empty ? p.sinks[task.rows[r].head] : -kInfinity<double>;
        const T largest = T(sink > max_logit ? sink : max_logit);
        const double above = Exponent<T>(logit, scale).rounds ? double(logit) - double(largest)
                                                              : difference(score, scale.logit, largest);
        const double of_keys = empty ? 0 : log(sum) + above;
        double log_sum = of_keys, share = 1;  // of_keys: ln Σ exp(logit - largest) without the sink
        if (p.sinks && !empty && of_keys == of_keys) {
            const double by = sink - double(largest), top = by > of_keys ? by : of_keys;
            log_sum = top + log(exp(of_keys - top) + exp(by - top));
            share = exp(of_keys - log_sum);
        }
        store_at(job.largest, index, largest);
        store_at(job.log_sum, index, log_sum);
        const bool is_nan = sum != sum && !(max_logit == kInfinity<double>);
        store_at(job.max_logit, index, is_nan ? sum : max_logit);
        const double entropy = share * (log(sum) - kLn2 * row.log2_sum / sum + (log_sum - of_keys));
        store_at(job.entropy, index, empty || share == 0 ? 0 : entropy);
        store_at(job.distance, index, empty ? 0 : row.distance_sum * (share / sum));
        if (!job.diagonal && !job.top) return share;
        const Normalizer<T> normalizer(largest, T(log_sum), scale);
        const auto weight = [&](T x) { return empty ? T(0) : normalizer.weight(broadcast<T>(x))[0]; };
        store_at(job.diagonal, index, weight(row.diagonal));
        for (int64_t i = r * job.top, to = index * job.top; i < (r + 1) * job.top; ++i, ++to) {
            store_at(job.top_weights, to, log_sum == log_sum ? weight(state.top[i]) : log_sum);  // NaN in all
            job.top_indices[to] = state.top_keys[i];
        }
        return share;
    }

    CLEARHEAD_INLINE_MEMBER void store_at(void* to, int64_t index, double x) const {
        if (to) static_cast<T*>(to)[index] = T(x);
    }

    // Writes one row of the output times `factor`, rounded to the problem's type, and adds 0 times it to `nonfinite`.
    void write_output(T* out, double factor, int64_t index, Vec<T>& nonfinite) const {
        const bool rounds = bytes_of(p.type) == 2 && !job.keep_float32;
        char* to = static_cast<char*>(job.output) + index * p.d_v * (rounds ? 2 : int64_t(sizeof(T)));
        T* products = rounds || columns != p.d_v ? out : reinterpret_cast<T*>(to);
        const Vec<T> high = broadcast<T>(T(factor)), low = broadcast<T>(T(factor - double(T(factor))));
        const bool separate = task.blocks.separate_nonfinite;
        for (int64_t c = 0, end = columns; c < end; c += kLanes<T>) {
            const Vec<T> x = load(out + c);
            Vec<T> product = fma(x, high, x * low) + T(0);  // in one rounding; + 0 turns -0 into 0
            if (separate) product = x - x == Vec<T>{} ? product : x * high;
            store(products + c, product);
            nonfinite = fma(product, Vec<T>{}, nonfinite);
        }
        if (rounds && p.type == Type::bf16)
            for (int64_t c = 0; c < p.d_v; ++c) reinterpret_cast<uint16_t*>(to)[c] = to_bf16(float(out[c]));
        else if (rounds)
            for (int64_t c = 0; c < p.d_v; ++c) reinterpret_cast<uint16_t*>(to)[c] = to_f16(float(out[c]));
        else if (products == out)
            std::memcpy(to, out, p.d_v * sizeof(T));
    }

    // Computes all spans, one after the other, and writes the results.
    void run() {
        Arena arena = task.arena;
        SoftmaxState<T> total{arena, job, columns}, part{arena, job, columns};
        const Strip& all = task.all;
        for (;;) {
            const int64_t first = all.low / kSpan;
            const bool single = all.low < all.high && all.high <= (first + 1) * kSpan;
            if (single)
                task.add_span(first, total);  // merging one span into a cleared state would change no bit
            else
                total.clear(count);
            for (int64_t span = first; !single && span * kSpan < all.high; ++span) {
                task.add_span(span, part);
                total.merge(part, task);
            }
            if (write(total)) break;
            task.blocks.separate_nonfinite = true;
        }
    }
};

template <class M> int64_t part_bytes(const RowJob& job) {
    Arena arena{nullptr};
    return SoftmaxState<typename M::T>{arena, job, job.output ? value_columns<M>(job.problem) : 0}.arena.bytes;
}

// Where the state of one span of a job that is split by spans lies until it is merged.
template <class M> Arena part_of(const RowJob& job, int64_t index) { return {job.parts + index * part_bytes<M>(job)}; }

// A task's run and its piece of it, in the order of the tasks: a few runs at a time, so that their keys and values stay
// in the caches, and of these the last rows first, since with `causal` they see the most keys.
CLEARHEAD_INLINE std::pair<int64_t, int64_t> position_of(const RowJob& job, int64_t task, int64_t pieces) {
    const int64_t together = job.threads, first = task / (together * pieces) * together;
    const int64_t here = min_of(job.wave_runs - first, together), rest = task % (together * pieces);
    return {job.first_run + first + rest % here, pieces - 1 - rest / here};
}

template <class M> int64_t row_scratch_bytes(const RowJob& job) {
    return RowTask<M>{job, 0, 0, nullptr}.arena.bytes + 2 * part_bytes<M>(job);  // RowResults::run has two states
}

// One block of rows, or, in a job that is split, what one span of keys gives to them.
template <class M> void rows(const RowJob& job, int64_t index, void* scratch) {
    const int64_t block = job.split ? index / job.spans : 0;
    const auto [run, piece] = job.split ? std::pair{job.first_run + block / job.blocks, block % job.blocks}
                                        : position_of(job, index, job.blocks);
    RowTask<M> task{job, run, piece, scratch};
    task.load_queries();
    if (!job.split) return RowResults<M>{task}.run();
    Arena arena = part_of<M>(job, index);
    SoftmaxState<typename M::T> part{arena, job, task.blocks.columns};
    task.add_span(index % job.spans, part);
}

template <class M> void merge(const RowJob& job, int64_t index, void* scratch) {
    RowTask<M> task{job, job.first_run + index / job.blocks, index % job.blocks, scratch};
    task.load_queries();
    RowResults<M> results{task};
    Arena arena = task.arena;
    SoftmaxState<typename M::T> total{arena, job, results.columns};
    total.clear(task.count);
    for (int64_t span = 0; span < job.spans; ++span) {
        Arena part = part_of<M>(job, index * job.spans + span);
        total.merge({part, job, results.columns}, task);
    }
    if (results.write(total)) return;
    task.blocks.separate_nonfinite = true;
    results.run();
}

}  // namespace
}  // namespace clearhead
