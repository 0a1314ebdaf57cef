// Cuts a problem into tasks: runs of heads that share their keys and values, blocks of rows, waves that limit the
// memory for packed keys and values, and spans of keys where there are few rows. No cut changes a bit of the results.
#include <numeric>

#include "dispatch.hpp"
#include "memory.hpp"
#include "threads.hpp"

namespace clearhead {
namespace {

constexpr int64_t kWaveBytes = int64_t{64} << 20;  // packed keys and values at a time
constexpr double kSingleThread = 3e5;              // multiply-adds below which waking another thread does not pay
constexpr double kPerByte = 2;                     // multiply-adds in the time that reading a byte takes

int64_t ceil_div(int64_t x, int64_t size) { return (x + size - 1) / size; }

const Kernel& kernel_of(const Job& job) {
    const Type type = job.problem.type;
    const Level& here = *level();
    return type == Type::f64 ? here.f64 : type == Type::bf16 ? here.bf16 : here.f32;
}

struct Phase {
    const Job& job;
    const Pass& pass;
    int64_t count;  // of tasks
};

// Runs all tasks of one kind; those of a small job on the calling thread alone.
bool run_phase(const Phase& phase, bool single_thread, bool (*stop)()) {
    const int64_t scratch = phase.pass.scratch_bytes ? phase.pass.scratch_bytes(phase.job) : 0;
    const auto one = [](const void* context, int64_t task, void* thread_scratch) {
        const Phase& f = *static_cast<const Phase*>(context);
        f.pass.run(f.job, task, thread_scratch);
    };
    if (!single_thread)
        return run({phase.count, phase.job.threads, one, &phase, scratch, stop, phase.job.problem.team});
    const auto all = [](const void* context, int64_t, void* thread_scratch) {
        const Phase& f = *static_cast<const Phase*>(context);
        for (int64_t i = 0; i < f.count; ++i) f.pass.run(f.job, i, thread_scratch);
    };
    return run({1, 1, all, &phase, scratch, stop});
}

// Queries whose column sums are added up together: at most eight segments for each head, of whole tiles. They do not
// depend on the number of threads.
int64_t segment_rows(const Job& job, const Kernel& kernel) {
    return ceil_div(ceil_div(job.problem.queries, 8), kernel.tile_rows) * kernel.tile_rows;
}

// The passes over effects have a task for each segment of queries. All keys are loaded in the same chunks, whatever the
// number of threads.
void cut_into_segments(Job& job, const Kernel& kernel) {
    job.segment_rows = segment_rows(job, kernel);
    job.segments = ceil_div(job.problem.queries, job.segment_rows);
    job.key_chunk = 4 * kernel.block_keys;
    job.key_chunks = ceil_div(job.problem.keys, job.key_chunk);
}

// Whether the two products of q with k and of what comes with v are too small to wake another thread for.
bool is_small(const Problem& p) {
    return double(p.batch * p.heads) * double(p.queries) * double(p.keys) * double(p.d_k + p.d_v) < kSingleThread;
}

// Rows of a task: as many as still leave several tasks for every thread.
int64_t rows_of_task(const Job& job, const Kernel& kernel) {
    int64_t rows = 8 * kernel.strip_rows;
    while (rows > 2 * kernel.strip_rows && job.runs * ceil_div(job.run_rows, rows) < 6 * job.threads) rows /= 2;
    // A run that fits into one task packs its keys itself, shortly before it reads them.
    if (job.run_rows <= 2 * rows && job.runs >= 6 * job.threads) rows = job.run_rows;
    return job.run_rows < rows ? job.run_rows : rows;
}

// The same job on the tangents of q, k and v, for what reads keys and values.
Job moving_of(const Job& job, const Kernel& kernel) {
    Job moving = job;
    moving.problem.q = job.along.q;
    moving.problem.k = job.along.k;
    moving.problem.v = job.along.v;
    if (!job.along.v.data) moving.rows.output = moving.along.output = nullptr;
    moving.direct_values = moving.has_values() && kernel.values_in_place(moving);
    return moving;
}

bool run_wave(Job& job, const Kernel& kernel, KeptMemory<true>& memory, bool single_thread, bool (*stop)()) {
    const Problem& p = job.problem;
    const int64_t blocks = ceil_div(p.keys, kernel.block_keys);
    const int64_t batch_runs = p.heads / job.group;
    job.first_key_head = job.first_run * p.kv_heads / batch_runs;
    job.first_value_head = job.first_run * p.v_heads / batch_runs;
    const int64_t key_heads = job.wave_runs * p.kv_heads / batch_runs,
                  value_heads = job.wave_runs * p.v_heads / batch_runs;
    Job moving = moving_of(job, kernel);
    job.moving = job.along.used ? &moving : nullptr;
    const auto each = [&](const Job& of, int64_t count, const Pass& pass) {
        return run_phase({of, pass, count}, single_thread, stop);
    };
    const int64_t tasks = job.wave_runs * job.blocks, segments = ceil_div(p.queries, job.segment_rows);
    const bool values = job.packed && job.has_values() && !job.direct_values;
    const bool moving_values = job.packed && moving.has_values() && !moving.direct_values;
    const int64_t key_bytes = kernel.packed_key_bytes(job), value_bytes = kernel.packed_value_bytes(job);
    struct Packed {
        Job& of;
        char* Job::* to;
        const Pass& pass;
        int64_t heads, bytes;
    } const packed[] = {
        {job, &Job::packed_keys, kernel.pack_keys, job.packed ? key_heads : 0, key_bytes},
        {job, &Job::packed_values, kernel.pack_values, values ? value_heads : 0, value_bytes},
        {moving, &Job::packed_keys, kernel.pack_keys, job.packed && job.along.k.data ? key_heads : 0, key_bytes},
        {moving, &Job::packed_values, kernel.pack_values, moving_values ? value_heads : 0, value_bytes},
    };
    int64_t bytes = job.rows.received ? job.wave_runs * segments * p.keys * int64_t(sizeof(double))
                    : job.split       ? tasks * job.spans * kernel.part_bytes(job)
                                      : 0;
    for (const Packed& one : packed) bytes += ceil_div(one.heads * one.bytes, 64) * 64;
    char* partial = memory.at_least(bytes);
    for (const Packed& one : packed) {
        one.of.*one.to = partial;
        partial += ceil_div(one.heads * one.bytes, 64) * 64;
    }
    for (const Packed& one : packed)
        if (one.heads && !each(one.of, one.heads * blocks, one.pass)) return false;
    if (job.rows.received) {
        job.segment_sums = reinterpret_cast<double*>(partial);
        if (!each(job, job.wave_runs * segments, kernel.received)) return false;
        for (int64_t run = 0; run < job.wave_runs; ++run)
            for (int64_t s = 0; s < segments; ++s)
                for (int64_t j = 0; j < p.keys; ++j)
                    job.rows.received[(job.first_run + run) * p.keys + j] +=
                        job.segment_sums[(run * segments + s) * p.keys + j];
        return true;
    }
    if (!job.split) return each(job, tasks, kernel.rows);
    job.parts = partial;
    return each(job, tasks * job.spans, kernel.rows) && each(job, tasks, kernel.merge);
}

}  // namespace

bool attend(Job job, bool (*stop)()) {
    Problem& p = job.problem;
    const Kernel& kernel = kernel_of(job);
    if (p.batch * p.heads * p.queries == 0) return true;
    if (!job.has_values()) p.v_heads = p.kv_heads;
    const int64_t shared = std::gcd(p.heads / p.kv_heads, p.heads / p.v_heads);
    job.group = job.rows.received ? 1 : shared;
    job.segment_rows = segment_rows(job, kernel);
    job.runs = p.batch * p.heads / job.group;
    job.run_rows = job.group * p.queries;
    job.block_rows = job.rows.received ? 4 * kernel.strip_rows : rows_of_task(job, kernel);
    job.blocks = ceil_div(job.run_rows, job.block_rows);
    job.spans = ceil_div(p.keys, kernel.span_keys);
    job.direct_values = job.has_values() && kernel.values_in_place(job);
    job.packed = job.rows.received || job.blocks > 1 || job.group < p.heads / p.kv_heads;
    job.split = !job.rows.received && job.blocks == 1 && job.spans > 1 && job.runs < 4 * job.threads;
    const double bytes = double(p.batch) * double(p.keys) * double(bytes_of(p.type)) *
                         double(p.kv_heads * p.d_k + p.v_heads * p.d_v);  // of keys and values
    const bool single_thread =
        double(p.batch * p.heads) * double(p.queries) * double(p.keys) * double(p.d_k + p.d_v) + kPerByte * bytes <
        kSingleThread;
    // A wave has whole key heads and whole value heads.
    const int64_t units = p.batch * std::gcd(p.kv_heads, p.v_heads), unit_runs = job.runs / units;
    int64_t take = units;
    if (job.packed) {
        const int64_t key_bytes = p.batch * p.kv_heads / units * kernel.packed_key_bytes(job);
        const int64_t value_bytes =
            job.direct_values || !job.has_values() ? 0 : p.batch * p.v_heads / units * kernel.packed_value_bytes(job);
        const int64_t fit = kWaveBytes / ((key_bytes + value_bytes) * (job.along.used ? 2 : 1) + 1);
        take = fit < 1 ? 1 : fit < units ? fit : units;
    }
    KeptMemory<true> memory;
    for (int64_t first = 0; first < units; first += take) {
        job.first_run = first * unit_runs;
        job.wave_runs = (first + take < units ? take : units - first) * unit_runs;
        if (!run_wave(job, kernel, memory, single_thread, stop)) return false;
    }
    return true;
}

bool observe(Job job, bool (*stop)()) {
    const Problem& p = job.problem;
    const Kernel& kernel = kernel_of(job);
    const int64_t heads = p.batch * p.heads;
    if (heads * p.queries * p.keys == 0) return true;
    job.segment_rows = segment_rows(job, kernel);
    job.key_chunk = 4 * kernel.block_keys;
    while (job.key_chunk > kernel.block_keys && heads * ceil_div(p.keys, job.key_chunk) < 4 * job.threads)
        job.key_chunk /= 2;
    const bool one_task = job.columns.image || job.columns.groups;  // all chunks of a head add to the same sums
    job.key_chunks = one_task ? 0 : ceil_div(p.keys, job.key_chunk);
    const bool single_thread = double(heads) * double(p.queries) * double(p.keys) * double(p.d_k) < kSingleThread;
    return run_phase({job, kernel.columns, one_task ? heads : heads * job.key_chunks}, single_thread, stop);
}

bool find_others(Job job, bool (*stop)()) {
    const Kernel& kernel = kernel_of(job);
    const int64_t heads = job.problem.batch * job.problem.heads;
    if (heads * job.problem.queries == 0) return true;
    cut_into_segments(job, kernel);
    return run_phase({job, kernel.others, heads * job.segments}, is_small(job.problem), stop);
}

bool find_effects(Job job, bool (*stop)()) {
    const Problem& p = job.problem;
    const Kernel& kernel = kernel_of(job);
    const int64_t heads = p.batch * p.heads;
    if (heads * p.queries * p.keys == 0) return true;
    cut_into_segments(job, kernel);
    KeptMemory<true> memory;
    const ColumnAnswers& sums = job.columns;
    if (sums.received || job.effects.image_mean || sums.groups || job.effects.strongest_count) {
        job.effects.turns = reinterpret_cast<int32_t*>(memory.at_least(heads * int64_t(sizeof(int32_t))));
        for (int64_t i = 0; i < heads; ++i) job.effects.turns[i] = 0;
    }
    const int64_t pieces = sums.transposed ? job.key_chunks : job.segments;
    return run_phase({job, kernel.effects, heads * pieces}, is_small(p), stop);
}

bool differentiate(Job job, bool (*stop)()) {
    const Problem& p = job.problem;
    GradientAnswers& want = job.gradients;
    const Kernel& kernel = kernel_of(job);
    if (p.batch * p.heads * p.queries * p.keys == 0) return true;
    const int64_t tiles = ceil_div(p.queries, kernel.tile_rows), blocks = ceil_div(p.keys, kernel.gradient_keys);
    const int64_t units =
        std::gcd(p.kv_heads, want.v ? p.v_heads : p.kv_heads);  // of a batch: whole key heads and value heads
    job.runs = p.batch * units;
    job.wave_runs = (want.bias && !want.bias_batch ? 1 : p.batch) * (want.bias && !want.bias_head ? 1 : units);
    KeptMemory<true> memory;
    const int64_t spans = p.batch * tiles * 2;
    const int64_t heads = p.batch * p.heads, turns = heads * (tiles + 1);
    want.spans = reinterpret_cast<int64_t*>(
        memory.at_least(spans * int64_t(sizeof(int64_t)) + turns * int64_t(sizeof(int32_t))));
    want.turns = reinterpret_cast<int32_t*>(want.spans + spans);
    want.span_turns = want.turns + heads * tiles;
    for (int64_t i = 0; i < turns; ++i) want.turns[i] = 0;
    const bool single_thread = is_small(p);
    return run_phase({job, kernel.gradient_spans, p.batch}, single_thread, stop) &&
           run_phase({job, kernel.gradients, blocks * job.wave_runs}, single_thread, stop);
}

}  // namespace clearhead
