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

const Kernel& kernel_of(const Problem& p) {
    const Type type = p.type;
    const Level& here = *level();
    return type == Type::f64 ? here.f64 : type == Type::bf16 ? here.bf16 : here.f32;
}

// Tasks of one kind.
template <class J> struct Phase {
    const J* job;
    const Pass<J>* pass;
    int64_t count;
    int64_t first = 0;  // in the order of all phases that run together
};
template <class J> using Phases = std::vector<Phase<J>>;

// Runs all tasks of these phases, in any order; those of small jobs on the calling thread alone.
template <class J> bool run_phases(Phases<J> phases, bool single_thread, bool (*stop)()) {
    int64_t scratch = 0, count = 0;
    for (Phase<J>& phase : phases) {
        if (phase.pass->scratch_bytes) scratch = std::max(scratch, phase.pass->scratch_bytes(*phase.job));
        phase.first = count;
        count += phase.count;
    }
    if (!count) return true;
    const auto one = [](const void* context, int64_t task, void* thread_scratch) {
        const auto after = [](int64_t index, const Phase<J>& phase) { return index < phase.first; };
        const Phases<J>& all = *static_cast<const Phases<J>*>(context);
        const Phase<J>& phase = *(std::upper_bound(all.begin(), all.end(), task, after) - 1);
        phase.pass->run(*phase.job, task - phase.first, thread_scratch);
    };
    const J& any = *phases[0].job;
    if (single_thread) return run({count, 1, one, &phases, scratch, nullptr});
    return run({count, any.threads, one, &phases, scratch, stop, any.problem.team});
}

// Queries whose column sums are added up together: at most eight segments for each head, of whole tiles. They do not
// depend on the number of threads.
int64_t segment_rows(const Problem& p, const Kernel& kernel) {
    return ceil_div(ceil_div(p.queries, 8), kernel.tile_rows) * kernel.tile_rows;
}

// The passes over effects have a task for each segment of queries. All keys are loaded in the same chunks, whatever the
// number of threads.
void cut_into_segments(TileJob& job, const Kernel& kernel) {
    job.segment_rows = segment_rows(job.problem, kernel);
    job.segments = ceil_div(job.problem.queries, job.segment_rows);
    job.key_chunk = 4 * kernel.block_keys;
    job.key_chunks = ceil_div(job.problem.keys, job.key_chunk);
}

bool has_rows(const Problem& p) { return p.batch * p.heads * p.queries > 0; }
bool has_weights(const Problem& p) { return has_rows(p) && p.keys > 0; }

// The multiply-adds of products with so many numbers for each weight.
double work_of(const Problem& p, int64_t width) {
    return double(p.batch * p.heads) * double(p.queries) * double(p.keys) * double(width);
}

// Whether the two products of q with k and of what comes with v are too small to wake another thread for.
bool is_small(const Problem& p) { return work_of(p, p.d_k + p.d_v) < kSingleThread; }

// Rows of a task: as many as still leave several tasks for every thread.
int64_t rows_of_task(const RowJob& job, const Kernel& kernel) {
    int64_t rows = 8 * kernel.strip_rows;
    while (rows > 2 * kernel.strip_rows && job.runs * ceil_div(job.run_rows, rows) < 6 * job.threads) rows /= 2;
    // A run that fits into one task packs its keys itself, shortly before it reads them.
    if (job.run_rows <= 2 * rows && job.runs >= 6 * job.threads) rows = job.run_rows;
    return job.run_rows < rows ? job.run_rows : rows;
}

// A job's tasks on some of its runs, with memory for what they share.
struct Wave {
    const Kernel& kernel;
    RowJob job;
    int64_t bytes;

    Wave(const RowJob& whole, int64_t first_run, int64_t runs) : kernel(kernel_of(whole.problem)), job(whole) {
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
    int64_t place(char* room, Phases<RowJob>* phases) {
        const Problem& p = job.problem;
        const int64_t batch_runs = p.heads / job.group, tasks = job.wave_runs * job.blocks;
        int64_t taken = 0;
        const auto take = [&](int64_t count) {
            char* piece = room ? room + taken : nullptr;
            taken += ceil_div(count, 64) * 64;
            return piece;
        };
        const auto add = [&](int phase, const Pass<RowJob>& pass, int64_t count) {
            if (phases && count) phases[phase].push_back({&job, &pass, count});
        };
        const auto pack = [&](const Pass<RowJob>& pass, int64_t heads, int64_t head_bytes) {
            const int64_t here = job.wave_runs * heads / batch_runs;
            add(0, pass, here * ceil_div(p.keys, kernel.block_keys));
            return take(here * head_bytes);
        };
        if (job.packed) {
            job.packed_keys = pack(kernel.pack_keys, p.kv_heads, kernel.packed_key_bytes(p));
            if (job.output && !job.direct_values)
                job.packed_values = pack(kernel.pack_values, p.v_heads, kernel.packed_value_bytes(p));
        }
        if (job.received) {
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
        for (int64_t i = 0; job.received && i < job.wave_runs * segments; ++i, sums += keys)
            for (int64_t j = 0; j < keys; ++j) job.received[(job.first_run + i / segments) * keys + j] += sums[j];
    }
};

// Runs these waves together; then there are none.
bool run_waves(std::vector<Wave>& waves, KeptMemory<true>& memory, bool single_thread, bool (*stop)()) {
    int64_t bytes = 0;
    for (const Wave& wave : waves) bytes += wave.bytes;
    char* room = memory.at_least(bytes);
    Phases<RowJob> phases[3];
    for (Wave& wave : waves) room += wave.place(room, phases);
    for (const Phases<RowJob>& each : phases)
        if (!run_phases(each, single_thread, stop)) return false;
    for (Wave& wave : waves) wave.add_segments();
    waves.clear();
    return true;
}

// Cuts a job into tasks; returns the multiply-adds that they take, or as long.
double cut_into_tasks(RowJob& job, const Kernel& kernel) {
    Problem& p = job.problem;
    if (!job.output) p.v_heads = p.kv_heads;
    const int64_t shared = std::gcd(p.heads / p.kv_heads, p.heads / p.v_heads);
    job.group = job.received ? 1 : shared;
    job.segment_rows = segment_rows(job.problem, kernel);
    job.runs = p.batch * p.heads / job.group;
    job.run_rows = job.group * p.queries;
    job.block_rows = job.received ? 4 * kernel.strip_rows : rows_of_task(job, kernel);
    job.blocks = ceil_div(job.run_rows, job.block_rows);
    job.spans = ceil_div(p.keys, kernel.span_keys);
    job.packed = job.received || job.blocks > 1 || job.group < p.heads / p.kv_heads;
    job.direct_values = job.output && kernel.values_in_place(job);
    job.split = !job.received && job.blocks == 1 && job.spans > 1 && job.runs < 4 * job.threads;
    const double bytes = double(p.batch) * double(p.keys) * double(bytes_of(p.type)) *
                         double(p.kv_heads * p.d_k + p.v_heads * p.d_v);  // of keys and values
    return work_of(p, p.d_k + p.d_v) + kPerByte * bytes;
}

}  // namespace

bool attend(std::vector<RowJob> jobs, bool (*stop)()) {
    std::erase_if(jobs, [](const Job& job) { return !has_rows(job.problem); });
    double work = 0;
    for (RowJob& job : jobs) work += cut_into_tasks(job, kernel_of(job.problem));
    KeptMemory<true> memory;
    std::vector<Wave> waves;  // that run together
    int64_t bytes = 0;
    for (const RowJob& job : jobs) {
        const Problem& p = job.problem;
        const Kernel& kernel = kernel_of(job.problem);
        // A wave has whole key heads and whole value heads.
        const int64_t units = p.batch * std::gcd(p.kv_heads, p.v_heads), unit_runs = job.runs / units;
        int64_t take = units;
        if (job.packed) {
            const int64_t key_bytes = p.batch * p.kv_heads / units * kernel.packed_key_bytes(p);
            const int64_t value_bytes =
                job.direct_values || !job.output ? 0 : p.batch * p.v_heads / units * kernel.packed_value_bytes(p);
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

bool observe(std::vector<ColumnJob> jobs, bool (*stop)()) {
    Phases<ColumnJob> phases;
    double work = 0;
    for (ColumnJob& job : jobs) {
        const Problem& p = job.problem;
        const Kernel& kernel = kernel_of(job.problem);
        const int64_t heads = p.batch * p.heads;
        if (!has_weights(p)) continue;
        job.segment_rows = segment_rows(job.problem, kernel);
        job.key_chunk = 4 * kernel.block_keys;
        while (job.key_chunk > kernel.block_keys && heads * ceil_div(p.keys, job.key_chunk) < 4 * job.threads)
            job.key_chunk /= 2;
        const bool one_task = job.image || job.groups;  // all chunks of a head add to the same sums
        job.key_chunks = one_task ? 0 : ceil_div(p.keys, job.key_chunk);
        work += work_of(p, p.d_k);
        phases.push_back({&job, &kernel.columns, one_task ? heads : heads * job.key_chunks});
    }
    return run_phases(phases, work < kSingleThread, stop);
}

bool find_others(OtherJob job, bool (*stop)()) {
    const Problem& p = job.problem;
    const Kernel& kernel = kernel_of(p);
    if (!has_rows(p)) return true;
    cut_into_segments(job, kernel);
    const Phases<OtherJob> phases = {{&job, &kernel.others, p.batch * p.heads * job.segments}};
    return run_phases(phases, is_small(p), stop);
}

bool find_effects(EffectJob job, bool (*stop)()) {
    const Problem& p = job.problem;
    const Kernel& kernel = kernel_of(p);
    const int64_t heads = p.batch * p.heads;
    if (!has_weights(p)) return true;
    cut_into_segments(job, kernel);
    KeptMemory<true> memory;
    if (job.received || job.image || job.groups || job.strongest_count) {
        job.turns = reinterpret_cast<int32_t*>(memory.at_least(heads * int64_t(sizeof(int32_t))));
        std::fill_n(job.turns, heads, 0);
    }
    const int64_t pieces = job.transposed ? job.key_chunks : job.segments;
    const Phases<EffectJob> phases = {{&job, &kernel.effects, heads * pieces}};
    return run_phases(phases, is_small(p), stop);
}

bool differentiate(GradientJob job, bool (*stop)()) {
    const Problem& p = job.problem;
    const Kernel& kernel = kernel_of(p);
    const int64_t heads = p.batch * p.heads;
    if (!has_weights(p)) return true;
    const int64_t tiles = ceil_div(p.queries, kernel.tile_rows), blocks = ceil_div(p.keys, kernel.gradient_keys);
    const int64_t units = std::gcd(p.kv_heads, job.v ? p.v_heads : p.kv_heads);
    job.unit_heads = p.heads / units;
    job.wave_units = (job.bias && !job.bias_batch ? 1 : p.batch) * (job.bias && !job.bias_head ? 1 : units);
    const int64_t spans = p.batch * tiles * 2, turns = heads * (tiles + 1);
    KeptMemory<true> memory;
    job.spans = reinterpret_cast<int64_t*>(
        memory.at_least(spans * int64_t(sizeof(int64_t)) + turns * int64_t(sizeof(int32_t))));
    job.turns = reinterpret_cast<int32_t*>(job.spans + spans);
    std::fill_n(job.turns, turns, 0);
    for (const Phase<GradientJob>& phase : {Phase<GradientJob>{&job, &kernel.gradient_spans, p.batch},
                                            Phase<GradientJob>{&job, &kernel.gradients, blocks * job.wave_units}})
        if (!run_phases<GradientJob>({phase}, is_small(p), stop)) return false;
    return true;
}

bool multiply(const ProductJob& whole, bool (*stop)()) {
    struct Context {
        ProductJob job;
        const ProductPass pass;
    } all{whole, level()->f32.products(whole.packing, whole.back)};
    ProductJob& job = all.job;
    const double work = double(job.rows) * double(job.columns) * double(job.tokens);
    const int threads = work < kSingleThread / 3 ? 1 : job.threads;  // unpacking takes most of the time
    KeptMemory<true> memory;
    for (int64_t token = 0; token < whole.tokens; token += kProductTokens) {
        job.tokens = std::min(whole.tokens - token, kProductTokens);
        job.x = whole.x + token * (job.back ? job.rows : job.columns);
        job.out = whole.out + token * (job.back ? job.columns : job.rows);
        if (all.pass.round) {
            job.rounded = memory.at_least(all.pass.rounded_bytes(job));
            const auto round = [](const void* given, int64_t token, void*) {
                static_cast<const Context*>(given)->pass.round(static_cast<const Context*>(given)->job, token);
            };
            if (!run({job.tokens, threads, round, &all, 0, stop})) return false;
        }
        const auto body = [](const void* given, int64_t task, void* scratch) {
            static_cast<const Context*>(given)->pass.run(static_cast<const Context*>(given)->job, task, scratch);
        };
        if (!run({all.pass.tasks(job), threads, body, &all, all.pass.scratch_bytes(job), stop})) return false;
    }
    return true;
}

}  // namespace clearhead
