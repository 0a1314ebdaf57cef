// What becomes of the rows' findings: parts over disjoint keys are merged, and the answers written.
#pragma once

#include "rows.hpp"

namespace clearhead {
namespace {

template <class M> struct Answers {
    using T = typename M::T;

    RowTask<M>& task;
    const Job& job = task.job;
    const Problem& p = task.p;
    const int64_t count = task.count, columns = task.columns;

    // Takes a part over later keys into the total; both are weighed from the larger maximum.
    void merge(Found<T>& total, const Found<T>& part) {
        for (int64_t r = 0; r < count; ++r) {
            if (part.reference[r] == -kInfinity<T> && part.sum[r] == 0) continue;
            const T highest = part.highest[r] > total.highest[r] ? part.highest[r] : total.highest[r];
            const T reference = part.highest[r] > total.highest[r] ? part.reference[r] : total.reference[r];
            const double down = total.reference[r] == -kInfinity<T> ? 0 : double(total.reference[r]) - double(reference);
            const double fall = part.reference[r] == -kInfinity<T> ? 0 : double(part.reference[r]) - double(reference);
            const double a = total.reference[r] == -kInfinity<T> ? 0 : exp2_of(down), b = fall == 0 ? 1 : exp2_of(fall);
            total.centred[r] = a * (total.centred[r] + total.sum[r] * down) + b * (part.centred[r] + part.sum[r] * fall);
            total.sum[r] = a * total.sum[r] + b * part.sum[r];
            total.far[r] = a * total.far[r] + b * part.far[r];
            total.highest[r] = highest;
            total.reference[r] = reference;
            const Vec<T> more = spread<T>(T(b)), less = spread<T>(T(a));
            T* out = total.out + r * columns;
            const T* add = part.out + r * columns;
            for (int64_t c = 0; c < columns; c += kLanes<T>) store(out + c, fma(load(add + c), more, load(out + c) * less));
            const int64_t k = job.rows.top;
            for (int64_t i = 0; i < k && part.top_key[r * k + i] >= 0; ++i)
                if (part.top[r * k + i] > total.top[r * k + k - 1])
                    insert(total.top + r * k, total.top_key + r * k, k, part.top[r * k + i], part.top_key[r * k + i]);
        }
    }

    // Writes the answers; false when an output is not finite and nobody has looked at why.
    bool finish(const Found<T>& found) {
        const RowAnswers& want = job.rows;
        const bool tells = want.logsumexp || want.max_logit || want.entropy || want.distance || want.top;
        bool fine = true;
        for (int64_t r = 0; r < count; ++r) {
            const int64_t at = (task.batch * p.heads + task.rows[r].head) * p.queries + task.rows[r].query;
            const bool empty = found.sum[r] == 0;
            double share = 1;
            if (tells || p.sinks) share = tell(found, r, at, empty);
            if (task.mixes) fine &= write_output(found.out + r * columns, empty ? 0 : share / found.sum[r], at);
        }
        return fine || task.careful;
    }

    // A row's statistics; returns the share of its mass that a sink leaves to the keys.
    double tell(const Found<T>& found, int64_t r, int64_t at, bool empty) {
        const double own = empty ? 0 : double(found.reference[r] == -kInfinity<T> ? T(0) : found.reference[r]) * kLn2 + log(found.sum[r]);
        double lse = own, share = 1;
        if (p.sinks && !empty) {
            const double sink = p.sinks[task.rows[r].head], top = sink > own ? sink : own;
            if (own == own) lse = top + log(exp(own - top) + exp(sink - top));
            share = exp(own - lse);
        }
        write(job.rows.logsumexp, at, empty ? -kInfinity<double> : lse);
        const double highest = double(found.highest[r]) * double(task.rules.natural);
        write(job.rows.max_logit, at, found.sum[r] != found.sum[r] && !(highest == kInfinity<double>) ? found.sum[r] : highest);
        write(job.rows.entropy, at, empty ? 0 : share * (log(found.sum[r]) - kLn2 * found.centred[r] / found.sum[r] + (lse - own)));
        write(job.rows.distance, at, empty ? 0 : found.far[r] * (share / found.sum[r]));
        for (int64_t i = 0; i < job.rows.top; ++i) {
            const T score = found.top[r * job.rows.top + i];
            write(job.rows.top_weights, at * job.rows.top + i, empty ? 0 : exp(double(score) * double(task.rules.natural) - lse));
            job.rows.top_indices[at * job.rows.top + i] = found.top_key[r * job.rows.top + i];
        }
        return share;
    }

    CLEARHEAD_INLINE_MEMBER void write(void* to, int64_t at, double x) const {
        if (to) static_cast<T*>(to)[at] = T(x);
    }

    bool write_output(T* out, double mass, int64_t at) const {
        for (int64_t c = 0; c < columns; ++c) out[c] = T(double(out[c]) * mass) + T(0);  // no -0
        Vec<T> bad = {};
        for (int64_t c = 0; c < columns; c += kLanes<T>) bad = bad + (load(out + c) - load(out + c));
        const bool rounds = bytes_of(p.type) == 2 && !job.rows.unrounded;
        char* to = static_cast<char*>(job.rows.output) + at * p.d_v * (rounds ? 2 : int64_t(sizeof(T)));
        if (rounds && p.type == Type::bf16)
            for (int64_t c = 0; c < p.d_v; ++c) reinterpret_cast<uint16_t*>(to)[c] = to_bf16(float(out[c]));
        else if (rounds)
            for (int64_t c = 0; c < p.d_v; ++c) reinterpret_cast<uint16_t*>(to)[c] = to_f16(float(out[c]));
        else
            std::memcpy(to, out, p.d_v * sizeof(T));
        return sum_of<T>(bad) == 0;
    }

    // All spans, one after the other.
    void run() {
        Arena arena = task.arena;
        Found<T> total = Found<T>::in(arena, job, columns), part = Found<T>::in(arena, job, columns);
        const Strip whole = strip_of(task.rows, int(count));
        for (;;) {
            total.clear(job, count, columns);
            const int64_t first = whole.low / kSpan;
            const bool single = whole.low < whole.high && whole.high <= (first + 1) * kSpan;
            if (single) task.add_span(first, total);  // to merge one span with nothing changes no bit
            for (int64_t span = first; !single && span * kSpan < whole.high; ++span) {
                part.clear(job, count, columns);
                task.add_span(span, part);
                merge(total, part);
            }
            if (finish(total)) break;
            task.careful = true;
        }
    }
};

template <class M> int64_t part_bytes(const Job& job) {
    Arena arena{nullptr};
    Found<typename M::T>::in(arena, job, job.rows.output ? value_columns<M>(job.problem) : 0);
    return arena.bytes;
}

template <class M> Found<typename M::T> part_of(const Job& job, int64_t run, int64_t block, int64_t span, int64_t columns) {
    const int64_t index = ((run - job.first_run) * job.blocks + block) * job.spans + span;
    Arena arena{job.parts + index * part_bytes<M>(job)};
    return Found<typename M::T>::in(arena, job, columns);
}

template <class M> int64_t row_scratch_bytes(const Job& job) {
    return RowTask<M>(job, 0, 0, nullptr).arena.bytes + 2 * part_bytes<M>(job);  // Answers::run has two parts
}

template <class M> void rows(const Job& job, int64_t run, int64_t block, int64_t span, void* scratch) {
    RowTask<M> task(job, run, block, scratch);
    task.open();
    if (!job.split) return Answers<M>{task}.run();
    Found<typename M::T> part = part_of<M>(job, run, block, span, task.columns);
    part.clear(job, task.count, task.columns);
    task.add_span(span, part);
}

template <class M> void merge(const Job& job, int64_t run, int64_t block, void* scratch) {
    RowTask<M> task(job, run, block, scratch);
    task.open();
    Answers<M> answers{task};
    Arena arena = task.arena;
    Found<typename M::T> total = Found<typename M::T>::in(arena, job, task.columns);
    total.clear(job, task.count, task.columns);
    for (int64_t span = 0; span < job.spans; ++span) answers.merge(total, part_of<M>(job, run, block, span, task.columns));
    if (answers.finish(total)) return;
    task.careful = true;
    answers.run();
}

}  // namespace
}  // namespace clearhead
