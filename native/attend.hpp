// One attention problem in plain C types, and a job for each pass over it. The bindings fill them in; the kernel of
// every instruction set reads them.
#pragma once

#include <cstdint>

#include "products.hpp"

namespace clearhead {

enum class Type : int32_t { f64, f32, bf16, f16 };

constexpr int64_t bytes_of(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2; }

constexpr int64_t kNoLimit = int64_t{1} << 62;
constexpr int64_t kRun = 16;  // the rows of a page are a multiple of it

// An array (batch, heads, rows, columns) in any strides, counted in elements; null where the rule is not used.
struct View {
    const void* data = nullptr;
    int64_t batch = 0, head = 0, row = 0, column = 0;
    const int64_t* runs = nullptr;  // for pages: where each run of kRun rows of a batch item begins, in elements
};

// A row of the table of spans as sets of labels of keys, as bits; labels that are 64 apart share a bit.
struct LabelSets {
    uint64_t forbidden = 0;  // all labels of the bit are forbidden
    uint64_t hidden = 0;     // some are
    uint64_t added = 0;      // something is added to some of them, or they are forbidden
};

// Shapes and score rules; core/visibility.py defines the meaning of every field.
struct Problem {
    Type type, bias_type;
    bool team;  // the arrays are PyTorch's: compute on its threads
    int64_t batch, heads, kv_heads, v_heads, queries, keys, d_k, d_v;
    int64_t row_start, row_step, column_start, column_step;  // which queries and keys of the whole matrix these are
    double scale, softcap;                                   // softcap 0: none
    const double* scales;                                    // (heads,); null where all are `scale`
    int64_t left, right;                                     // kNoLimit: none; causal is right = 0
    const int64_t* query_offset;                             // (batch,)
    const int64_t* kv_lengths;                               // (batch,) or null, as all below
    const int64_t* query_lengths;                            // (batch,)
    const int64_t* query_segments;                           // (batch, queries)
    const int64_t* kv_segments;                              // (batch, keys)
    const double* alibi_slopes;                              // (heads,)
    const double* sinks;                                     // (heads,)
    const int64_t* query_spans;                              // (batch, queries); below 0 adds nothing
    const int64_t* key_spans;                                // (batch, keys), each below span_keys
    View span_table;                                         // (batch, heads, query labels, key labels), of T; rows
                                                             // are contiguous
    int64_t span_queries, span_keys;                         // how many labels there are
    const LabelSets* span_sets;  // of each row of the table: batch · span_sets_batch + head · span_sets_head + row
    int64_t span_sets_batch, span_sets_head;
    bool large_spans;  // the table's numbers may not be divided by the scale: they could overflow
    bool ragged;       // a request of a ragged batch: what is answered per query is (queries, heads, …); batch is 1
    View bias, mask;
    View q, k, v;
};

// The statistics that are one number per query. RowJob's members, what Python may name and what the kernel says it
// computes are made from this one list.
#define CLEARHEAD_PER_QUERY(EACH) \
    EACH(largest) EACH(log_sum) EACH(max_logit) EACH(entropy) EACH(distance) EACH(diagonal)
#define CLEARHEAD_MEMBER(name) void* name = nullptr;

// A problem for a pass. Each pass adds its further inputs, its results and how it is cut into tasks. Results are
// contiguous, (batch, heads, queries, …) unless stated otherwise, in the statistics' type (float, or double for f64),
// and null if not asked for. The cut into tasks changes no bit of them.
struct Job {
    Problem problem;
    int threads = 1;  // read once by the caller: another thread may change the setting while this call runs
};

// The row pass. The rows of a run are (head in run, query), flattened: all heads of a run share one key head and one
// value head.
struct RowJob : Job {
    CLEARHEAD_PER_QUERY(CLEARHEAD_MEMBER)
    void* output = nullptr;  // in the problem's type; in the statistics' for keep_float32
    bool keep_float32 = false;
    void* top_weights = nullptr;
    int64_t* top_indices = nullptr;
    int64_t top = 0;
    double* received = nullptr;  // (batch, heads, keys): the one column statistic that this pass can finish itself
    // the cut
    int64_t group = 1;       // heads in a run
    int64_t runs = 0;        // over all batches
    int64_t run_rows = 0;    // group · queries
    int64_t block_rows = 0;  // rows of one task
    int64_t blocks = 0;      // tasks in a run
    int64_t first_run = 0;   // of this wave
    int64_t wave_runs = 0;
    bool split = false;  // one task per span of keys; `parts` has their states until they are merged
    int64_t spans = 0;
    char* parts = nullptr;
    bool packed = false;         // the keys and values of this wave are packed first; else each task packs its own
    bool direct_values = false;  // values are read in place
    int64_t first_key_head = 0, first_value_head = 0;  // of this wave, counted over batches
    char* packed_keys = nullptr;
    char* packed_values = nullptr;
    int64_t segment_rows = 0;        // queries whose weights are added up separately for `received`, as one segment
    double* segment_sums = nullptr;  // (runs of the wave, segments, keys)
};

// The state of each row, (batch, heads, queries): its largest logit m, and l = ln Σ exp(logit - m), both with its sink.
// A weight is exp((logit - m) - l). A row that sees nothing has -infinity and 0.
struct RowStates {
    const void *largest = nullptr, *log_sum = nullptr;
};

// A pass over tiles of weights.
struct TileJob : Job {
    int64_t segment_rows = 0, segments = 0;  // queries whose numbers are added up separately, as one segment of a head
    int64_t key_chunk = 0, key_chunks = 0;   // keys whose tiles follow one another
};

// Results of the column pass, over weights, and of the pass over effects, over effects.
struct SumJob : TileJob {
    RowStates states = {};
    double* received = nullptr;             // (batch, heads, keys)
    double* groups = nullptr;               // (batch, heads, query groups, key groups)
    const int64_t* query_labels = nullptr;  // (batch, queries)
    const int64_t* key_labels = nullptr;    // (batch, keys)
    int64_t query_groups = 0, key_groups = 0;
    double* image = nullptr;  // (batch, heads, height, width)
    int64_t height = 0, width = 0;
    void* matrix = nullptr;      // (batch, heads, queries, keys)
    void* transposed = nullptr;  // (batch, heads, keys, x_columns): matrixᵀ · x
    View x = {};
    Type x_type = Type::f32;
    int64_t x_columns = 0, x_heads = 1;  // x_heads divides the heads
};

struct ColumnJob : SumJob {
    double* peak = nullptr;  // (batch, heads, keys)
};

// The state of each row's others (core/effects.py, Others).
struct OtherJob : TileJob {
    View g = {};  // (batch, heads, queries, d_v) in the problem's type
    int64_t* strongest = nullptr;
    double *logit = nullptr, *term = nullptr, *largest = nullptr, *log_sum = nullptr, *others = nullptr;
};

// The pass over effects of edges: each row's terms (core/effects.py, Terms), and results that weights do not have.
struct EffectJob : SumJob {
    View g = {};                         // as OtherJob's
    const void* whole = nullptr;         // (batch, heads, queries): g_i·o_i, and m_i; null for contributions
    const void* others = nullptr;        // (batch, heads, queries)
    const int64_t* strongest = nullptr;  // (batch, heads, queries)
    double* by_query = nullptr;
    void* top_values = nullptr;  // (batch, heads, queries, top)
    int64_t* top_indices = nullptr;
    int64_t top = 0;
    void* strongest_values = nullptr;  // (batch, heads, strongest_count)
    int64_t* strongest_indices = nullptr;
    int64_t strongest_count = 0;
    double* product = nullptr;  // (batch, heads, queries, x_columns): effects · x
    int32_t* turns = nullptr;   // (batch, heads): how many segments have been added to the head's sums
};

// The backward pass: the upstream gradients, and the gradients by the inputs, which must start at 0.
struct GradientJob : Job {
    RowStates states = {};
    const void* by_row = nullptr;    // (batch, heads, queries)
    const void* by_key = nullptr;    // (batch, heads, keys)
    const void* entropy = nullptr;   // (batch, heads, queries)
    const void* distance = nullptr;  // (batch, heads, queries)
    View output = {};                // (batch, heads, queries, d_v) in the problem's type
    void* q = nullptr;               // (batch, heads, queries, d_k)
    void* k = nullptr;               // (batch, kv_heads, keys, d_k)
    void* v = nullptr;               // (batch, v_heads, keys, d_v)
    void* bias = nullptr;            // its strides are 0 where it is broadcast
    int64_t bias_batch = 0, bias_head = 0, bias_row = 0, bias_column = 0;
    double* span_table = nullptr;  // (batch, heads, query labels, key labels)
    // the cut
    int64_t unit_heads = 0;    // query heads of a unit, which has whole key heads and whole value heads
    int64_t wave_units = 0;    // over all batches, but for those that share one bias
    int64_t* spans = nullptr;  // (batch, tiles, 2): the keys that positions let some query of a tile see
    // (batch, heads, tiles + 1): how many blocks of keys have been added to a tile's queries; last, to the table
    int32_t* turns = nullptr;
};

// One kind of task.
template <class J> struct Pass {
    int64_t (*scratch_bytes)(const J&);  // each thread's work memory
    void (*run)(const J&, int64_t task, void* scratch);
};

// The functions of one instruction set for one type of numbers.
struct Kernel {
    int64_t strip_rows, tile_rows, block_keys, span_keys, gradient_keys;  // gradient_keys: a block of the backward pass
    int64_t (*packed_key_bytes)(const Problem&);                          // one key head
    int64_t (*packed_value_bytes)(const Problem&);                        // one value head
    bool (*values_in_place)(const RowJob&);
    int64_t (*part_bytes)(const RowJob&);  // the state of a task's rows after one span
    Pass<RowJob> pack_keys, pack_values, rows, merge, received;
    Pass<ColumnJob> columns;
    Pass<OtherJob> others;
    Pass<EffectJob> effects;
    Pass<GradientJob> gradient_spans, gradients;
    ProductPass (*products)(Packing, bool back);
};

// One instruction set.
struct Level {
    const char* name;
    Kernel f64, f32, bf16;  // f16 runs in f32
};

extern bool multiplies_in_tiles;  // bfloat16, in AMX's tile registers; chosen with the level

}  // namespace clearhead
