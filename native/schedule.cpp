// Cuts a problem into tasks: runs of heads that share their keys and values, blocks of rows, waves that limit the
// memory for packed keys and values, and spans of keys where there are few rows. No cut changes a bit of the results.
#include <algorithm>
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

// Tasks of one kind.
struct Phase {
    const Job* job;
    const Pass* pass;
    int64_t count;
    int64_t first = 0;  // in the order of all phases that run together
};
using Phases = std::vector<Phase>;

// Runs all tasks of these phases, in any order; those of small jobs on the calling thread alone.
bool run_phases(Phases phases, bool single_thread, bool (*stop)()) {
    int64_t scratch = 0, count = 0;
    for (Phase& phase : phases) {
        if (phase.pass->scratch_bytes) scratch = std::max(scratch, phase.pass->scratch_bytes(*phase.job));
        phase.first = count;
        count += phase.count;
    }
    if (!count) return true;
    const auto one = [](const void* context, int64_t task, void* thread_scratch) {
        const auto after = [](int64_t index, const Phase& phase) { return index < phase.first; };
        const Phases& all = *static_cast<const Phases*>(context);
        const Phase& phase = *(std::upper_bound(all.begin(), all.end(), task, after) - 1);
        phase.pass->run(*phase.job, task - phase.first, thread_scratch);
    };
    const Job& any = *phases[0].job;
    if (!single_thread) return run({count, any.threads, one, &phases, scratch, stop, any.problem.team});
    const auto each = [](const void* context, int64_t, void* thread_scratch) {
        for (const Phase& phase : *static_cast<const Phases*>(context))
            for (int64_t i = 0; i < phase.count; ++i) phase.pass->run(*phase.job, i, thread_scratch);
    };
    return run({1, 1, each, &phases, scratch, stop});
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

// A job's tasks on some of its runs, with memory for what they share.
struct Wave {
    const Kernel& kernel;
    Job job;
    int64_t bytes;

    Wave(const Job& whole, int64_t first_run, int64_t runs) : kernel(kernel_of(whole)), job(whole) {
        const Problem& p = job.problem;
        const int64_t batch_runs = p.heads / job.group;
        job.first_run = first_run;
        job.wave_runs = runs;
        job.first_key_head = first_run * p.kv_heads / batch_runs;
        job.first_value_head = first_run * p.v_heads / batch_runs;
        bytes = place(nullptr, nullptr);
    }

    // Uses the memory from `room` on, and adds the tasks to the phases; returns how many bytes it takes. Without room
    // it only counts.
    int64_t place(char* room, Phases* phases) {
        const Problem& p = job.problem;
        const int64_t batch_runs = p.heads / job.group, tasks = job.wave_runs * job.blocks;
        int64_t taken = 0;
        const auto take = [&](int64_t count) {
            char* piece = room ? room + taken : nullptr;
            taken += ceil_div(count, 64) * 64;
            return piece;
        };
        const auto add = [&](int phase, const Pass& pass, int64_t count) {
            if (phases && count) phases[phase].push_back({&job, &pass, count});
        };
        const auto pack = [&](const Pass& pass, int64_t heads, int64_t head_bytes) {
            const int64_t here = job.wave_runs * heads / batch_runs;
            add(0, pass, here * ceil_div(p.keys, kernel.block_keys));
            return take(here * head_bytes);
        };
        if (job.packed) {
            job.packed_keys = pack(kernel.pack_keys, p.kv_heads, kernel.packed_key_bytes(job));
            if (job.has_values() && !job.direct_values)
                job.packed_values = pack(kernel.pack_values, p.v_heads, kernel.packed_value_bytes(job));
        }
        if (job.rows.received) {
            const int64_t parts = job.wave_runs * ceil_div(p.queries, job.segment_rows);
            job.segment_sums = reinterpret_cast<double*>(take(parts * p.keys * int64_t(sizeof(double))));
            add(1, kernel.received, parts);
        } else {
            if (job.split) job.parts = take(tasks * job.spans * kernel.part_bytes(job));
            add(1, kernel.rows, job.split ? tasks * job.spans : tasks);
            add(2, kernel.merge, job.split ? tasks : 0);
        }
        return taken;
    }

    // Adds up what each key received.
    void add_segments() {
        const int64_t keys = job.problem.keys, segments = ceil_div(job.problem.queries, job.segment_rows);
        const double* sums = job.segment_sums;
        for (int64_t i = 0; job.rows.received && i < job.wave_runs * segments; ++i, sums += keys)
            for (int64_t j = 0; j < keys; ++j) job.rows.received[(job.first_run + i / segments) * keys + j] += sums[j];
    }
};

// Runs these waves together; then there are none.
bool run_waves(std::vector<Wave>& waves, KeptMemory<true>& memory, bool single_thread, bool (*stop)()) {
    int64_t bytes = 0;
    for (const Wave& wave : waves) bytes += wave.bytes;
    char* room = memory.at_least(bytes);
    Phases phases[3];
    for (Wave& wave : waves) room += wave.place(room, phases);
    for (const Phases& each : phases)
        if (!run_phases(each, single_thread, stop)) return false;
    for (Wave& wave : waves) wave.add_segments();
    waves.clear();
    return true;
}

// Cuts a job into tasks; returns the multiply-adds that they take, or as long.
double cut_into_tasks(Job& job, const Kernel& kernel) {
    Problem& p = job.problem;
    if (!job.has_values()) p.v_heads = p.kv_heads;
    const int64_t shared = std::gcd(p.heads / p.kv_heads, p.heads / p.v_heads);
    job.group = job.rows.received ? 1 : shared;
    job.segment_rows = segment_rows(job, kernel);
    job.runs = p.batch * p.heads / job.group;
    job.run_rows = job.group * p.queries;
    job.block_rows = job.rows.received ? 4 * kernel.strip_rows : rows_of_task(job, kernel);
    job.blocks = ceil_div(job.run_rows, job.block_rows);
    job.spans = ceil_div(p.keys, kernel.span_keys);
    job.packed = job.rows.received || job.blocks > 1 || job.group < p.heads / p.kv_heads;
    job.direct_values = job.has_values() && kernel.values_in_place(job);
    job.split = !job.rows.received && job.blocks == 1 && job.spans > 1 && job.runs < 4 * job.threads;
    const double bytes = double(p.batch) * double(p.keys) * double(bytes_of(p.type)) *
                         double(p.kv_heads * p.d_k + p.v_heads * p.d_v);  // of keys and values
    return double(p.batch * p.heads) * double(p.queries) * double(p.keys) * double(p.d_k + p.d_v) + kPerByte * bytes;
}

}  // namespace

bool attend(Jobs jobs, bool (*stop)()) {
    std::erase_if(jobs,
                  [](const Job& job) { return job.problem.batch * job.problem.heads * job.problem.queries == 0; });
    double work = 0;
    for (Job& job : jobs) work += cut_into_tasks(job, kernel_of(job));
    KeptMemory<true> memory;
    std::vector<Wave> waves;  // that run together
    int64_t bytes = 0;
    for (const Job& job : jobs) {
        const Problem& p = job.problem;
        const Kernel& kernel = kernel_of(job);
        // A wave has whole key heads and whole value heads.
        const int64_t units = p.batch * std::gcd(p.kv_heads, p.v_heads), unit_runs = job.runs / units;
        int64_t take = units;
        if (job.packed) {
            const int64_t key_bytes = p.batch * p.kv_heads / units * kernel.packed_key_bytes(job);
            const int64_t value_bytes = job.direct_values || !job.has_values()
                                            ? 0
                                            : p.batch * p.v_heads / units * kernel.packed_value_bytes(job);
            const int64_t fit = kWaveBytes / (key_bytes + value_bytes + 1);
            take = fit < 1 ? 1 : fit < units ? fit : units;
        }
        for (int64_t first = 0; first < units; first += take) {
            const Wave wave(job, first * unit_runs, std::min(take, units - first) * unit_runs);
            if (!waves.empty() && bytes + wave.bytes > kWaveBytes) {
                if (!run_waves(waves, memory, work < kSingleThread, stop)) return false;
                bytes = 0;
            }
            bytes += wave.bytes;
            waves.push_back(wave);
        }
    }
    return run_waves(waves, memory, work < kSingleThread, stop);
}

bool observe(Jobs jobs, bool (*stop)()) {
    Phases phases;
    double work = 0;
    for (Job& job : jobs) {
        const Problem& p = job.problem;
        const Kernel& kernel = kernel_of(job);
        const int64_t heads = p.batch * p.heads;
        if (heads * p.queries * p.keys == 0) continue;
        job.segment_rows = segment_rows(job, kernel);
        job.key_chunk = 4 * kernel.block_keys;
        while (job.key_chunk > kernel.block_keys && heads * ceil_div(p.keys, job.key_chunk) < 4 * job.threads)
            job.key_chunk /= 2;
        const bool one_task = job.columns.image || job.columns.groups;  // all chunks of a head add to the same sums
        job.key_chunks = one_task ? 0 : ceil_div(p.keys, job.key_chunk);
        work += double(heads) * double(p.queries) * double(p.keys) * double(p.d_k);
        phases.push_back({&job, &kernel.columns, one_task ? heads : heads * job.key_chunks});
    }
    return run_phases(phases, work < kSingleThread, stop);
}

bool find_others(Jobs jobs, bool (*stop)()) {
    Job& job = jobs.front();
    const Kernel& kernel = kernel_of(job);
    const int64_t heads = job.problem.batch * job.problem.heads;
    if (heads * job.problem.queries == 0) return true;
    cut_into_segments(job, kernel);
    return run_phases({{&job, &kernel.others, heads * job.segments}}, is_small(job.problem), stop);
}

bool find_effects(Jobs jobs, bool (*stop)()) {
    Job& job = jobs.front();
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
    return run_phases({{&job, &kernel.effects, heads * pieces}}, is_small(p), stop);
}

bool differentiate(Jobs jobs, bool (*stop)()) {
    Job& job = jobs.front();
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
    return run_phases({{&job, &kernel.gradient_spans, p.batch}}, single_thread, stop) &&
           run_phases({{&job, &kernel.gradients, blocks * job.wave_runs}}, single_thread, stop);
}

}  // namespace clearhead
