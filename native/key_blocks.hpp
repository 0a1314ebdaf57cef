// The keys and values that a row task reads, one block at a time, and its products with them: they lie in place, or
// the job has packed them for all tasks, or they are packed here; and they are prefetched.
#pragma once

#include "rules.hpp"

namespace clearhead {
namespace {

constexpr int64_t kPrefetchRows = 32;  // keys or values that are prefetched before they are read
// Whether there are so few registers that values are read in several passes, a few columns in each: the first one alone
// would wait for memory.
constexpr bool kInPasses = kRegisters < 32;

// The NaN and infinite values of a block. In the packed block they are replaced by 0, since 0·NaN would put NaN into
// the output of every query; they are added afterwards, to the queries that may see their key.
template <class T> struct NonfiniteValues {
    int64_t* index;  // key in the block · columns + column
    T* value;
    int64_t count = 0;

    static NonfiniteValues in(Arena& arena, int64_t most) { return {arena.take<int64_t>(most), arena.take<T>(most)}; }
};

template <class M> struct KeyBlocks {
    using T = typename M::T;
    using Cell = typename M::Cell;

    static constexpr int64_t pitch = kPitch<T>;

    const RowJob& job;
    int64_t batch, first_head, rows;
    Arena& arena;
    const Problem& p = job.problem;
    // modes
    bool has_values = job.output;
    Matrix all_keys = keys_of(p, batch, first_head* p.kv_heads / p.heads);
    Matrix all_values = values_of(p, batch, has_values ? first_head * p.v_heads / p.heads : 0);
    bool few_rows = !job.packed && rows <= kDirectRows;
    bool direct_keys =  // scores read the keys where they lie; `keys` is null
        few_rows && depth_of<M>(p.d_k) % kLanes<T> == 0 && in_cells<M>(all_keys) &&
        !(in_tiles<M>() && p.k.row % M::per_cell);
    bool pairs_in_place =  // pairs of values are made as they are read; `values` is null
        few_rows && has_values && M::per_cell == 2 && !in_tiles<M>() && p.type == Type::bf16 && p.v.column == 1 &&
        !p.v.runs && p.d_v % (2 * kLanes<T>) == 0;
    bool packs_values =  // straight from memory, a block at a time, before its keys are read
        in_tiles<M>() && direct_keys && has_values && !job.direct_values;
    bool separate_nonfinite = false;  // values that are not finite are listed in `nonfinite`
    int64_t depth = depth_of<M>(p.d_k), columns = has_values ? value_columns<M>(p) : 0;  // in cells
    // the block that load() was last called for
    const Cell *keys = nullptr, *values = nullptr;
    NonfiniteValues<T> nonfinite = NonfiniteValues<T>::in(arena, kBlock* columns);
    // work memory
    Cell* staging = arena.take<Cell>(staging_cells<M>(depth));  // rows on their way into a panel or a strip
    Cell* packed_keys = job.packed ? nullptr : arena.take<Cell>(kBlock * depth);  // one block
    Cell* packed_values = arena.take<Cell>(kBlock * columns);  // one block, where the job's are not read
    Runs runs = {};            // of values that are read in place from pages; the first row is set by the reader
    Prefetch next_block = {};  // issued beside the scores
    int64_t packed_keys_start = -1, packed_values_start = -1;  // the first key of the blocks that they hold

    // Forgets what is packed: another span follows.
    void reset() { packed_keys_start = packed_values_start = -1; }

    // Points `keys` and `values` at the block that starts at j0; keys first … last of it are going to be read.
    void load(int64_t j0, int64_t first, int64_t last) {
        if (p.k.data) load_keys(j0, first, last);
        if (has_values) load_values(j0, first, last);
    }

    void load_keys(int64_t j0, int64_t first, int64_t last) {
        if (job.packed) {
            const int64_t head = batch * p.kv_heads + all_keys.head - job.first_key_head;
            keys = reinterpret_cast<const Cell*>(job.packed_keys + head * packed_key_bytes<M>(p)) + j0 * depth;
        } else if (direct_keys)
            keys = nullptr;
        else if (packed_keys_start != j0) {
            Prefetch prefetch = rows <= kStrip ? prefetch_beside_keys(first, last) : Prefetch{};
            const int64_t from = first / kPanel<T> * kPanel<T>;
            pack_panels<M>(all_keys, from, last, staging, packed_keys + (from - j0) * depth, &prefetch);
            keys = packed_keys;
            packed_keys_start = j0;
        }
    }

    void load_values(int64_t j0, int64_t first, int64_t last) {
        if (separate_nonfinite) {
            pack_values_of_block(j0, first, last);
            list_nonfinite(first / M::per_cell * M::per_cell - j0, last - j0);
        } else if (packed_values_start == j0 || pairs_in_place)
            return;
        else if (p.v.runs && job.direct_values) {
            runs.pitch = p.v.row * bytes_of(p.type);
            for (int64_t j = first / kRun * kRun; j < last; j += kRun) runs.start[(j - j0) / kRun] = all_values.row(j);
        } else if (job.direct_values)
            values = reinterpret_cast<const Cell*>(all_values.row(j0));
        else if (job.packed) {
            const int64_t head = batch * p.v_heads + all_values.head - job.first_value_head;
            values = reinterpret_cast<const Cell*>(job.packed_values + head * packed_value_bytes<M>(p)) +
                     j0 / M::per_cell * columns;
        } else {
            pack_values_of_block(j0, first, last);
            packed_values_start = j0;
        }
    }

    void pack_values_of_block(int64_t j0, int64_t first, int64_t last) {
        const int64_t from = first / M::per_cell * M::per_cell;
        Prefetch beside = prefetch_beside_packing(first, last);
        pack_value_rows<M>(all_values, from, last, columns, packed_values + (from - j0) / M::per_cell * columns,
                           &beside);
        values = packed_values;
    }

    // Moves what is not finite from keys first … last of the packed block into `nonfinite`.
    void list_nonfinite(int64_t first, int64_t last) {
        nonfinite.count = 0;
        for (int64_t j = first; j < last; ++j)
            for (int64_t c = 0; c < p.d_v; ++c) {
                Cell* cell = packed_values + j / M::per_cell * columns + c;
                const T x = element_of<M>(cell, j);
                if (x - x == 0) continue;
                nonfinite.index[nonfinite.count] = j * columns + c;
                nonfinite.value[nonfinite.count++] = x;
                clear_element<M>(cell, j);
            }
    }

    // Cells from one row of `values` to the next.
    int64_t value_pitch() const { return job.direct_values && !separate_nonfinite ? p.v.row : columns; }

    // The scores of a strip of queries with the seen columns of the block.
    void score(const Cell* queries, int row_count, const Seen& seen, T* scores) {
        if (direct_keys) return score_in_place(queries, row_count, seen, scores);
        with_rows(row_count, [&]<int R>() {
            score_panels<M, R>(queries, keys, depth, seen.first / kPanel<T>, seen.last / kPanel<T>, scores,
                               &next_block);
        });
    }

    // The scores of a few queries. The keys are read where they lie, a square at a time, which saves packing them.
    void score_in_place(const Cell* queries, int row_count, const Seen& seen, T* scores) {
        constexpr int n = kLanes<T>;
        static_assert(kRun % n == 0);  // these keys lie in one run
        const int64_t j0 = seen.j0, pitch_bytes = p.k.row * bytes_of(p.type);
        Cell* zeros = staging;  // stands for keys past the end
        for (int64_t k = 0; k < depth; ++k) zeros[k] = 0;
        Prefetch beside = prefetch_beside_keys(j0 + seen.first, min_of(j0 + seen.last, p.keys));
        if (in_tiles<M>()) return score_in_tiles(queries, row_count, seen, scores, beside);
        for (int j = seen.first; j < seen.last; j += n) {
            const T* row[n];
            const char* start = all_keys.row(j0 + j);
            for (int i = 0; i < n; ++i)
                row[i] = j0 + j + i < p.keys ? reinterpret_cast<const T*>(start + i * pitch_bytes) : zeros;
            with_few_rows(row_count, [&]<int R>() { score_square<M, R>(queries, row, depth, scores + j, beside); });
        }
    }

    // The same in tile registers; past the last key the scores stay as they are, and are masked.
    void score_in_tiles(const Cell* queries, int row_count, const Seen& seen, T* scores, Prefetch& beside) {
#if defined(__AMX_BF16__)
        constexpr int64_t n = kTileCells;
        const int64_t here = min_of(seen.last, p.keys - seen.j0),
                      stop = p.k.runs ? up_to_multiple(here, n) : here;  // a run has all its rows
        const auto multiply = [&]<int R>() {
            const float* rows_of[4];
            for (int64_t k = 0; k < depth; ++k)
                for (int r = 0; r < R; ++r) staging[k * R + r] = queries[in_strip(k) + r * kStripRow];
            const auto groups = [&]<int C>(int64_t j, int64_t keys_of_each) {
                for (int i = 0; i < C; ++i)
                    rows_of[i] = reinterpret_cast<const float*>(all_keys.row(seen.j0 + j + i * n));
                tile_squares<R, C>(staging, rows_of, p.k.row / 2, depth, scores + j, pitch, int(keys_of_each), beside);
            };
            configure_tiles(n, n, R);
            int64_t j = seen.first;
            for (; j + 4 * n <= stop; j += 4 * n) groups.template operator()<4>(j, n);
            for (; j + n <= stop; j += n) groups.template operator()<1>(j, n);
            if (j < stop) {
                configure_tiles(int(stop - j), n, R);
                groups.template operator()<1>(j, stop - j);
            }
            _tile_release();
        };
        if constexpr (M::per_cell == 2) with_few_rows(row_count, multiply);
#endif
    }

    // out = out·rescale + weights · values, over the seen keys; without `rescale`, the product alone.
    void add_values(const T* strip_weights, int row_count, const Seen& seen, const T* rescale, T* out) {
        const int64_t begin = (seen.low - seen.j0) / M::per_cell;  // in cells
        const int64_t cells = (seen.high - seen.j0 + M::per_cell - 1) / M::per_cell - begin;
        const Cell* weights = reinterpret_cast<const Cell*>(strip_weights);
        const bool one_strip = !job.packed && !separate_nonfinite && rows <= kStrip;
        Prefetch beside = one_strip ? prefetch_beside_values(seen.low, seen.high) : Prefetch{};
        const bool in_pages = p.v.runs && !separate_nonfinite && job.direct_values;
        const Runs* pages = in_pages ? &runs : nullptr;
        runs.first = begin * M::per_cell;
        if constexpr (M::per_cell == 2)
            if (pairs_in_place && !separate_nonfinite) {
                const int64_t key = seen.j0 + 2 * begin;
                const uint16_t* numbers = reinterpret_cast<const uint16_t*>(all_values.row(key));
                with_few_rows(row_count, [&]<int R>() {
                    weighted_rows<M, R, pitch>(weights + begin, numbers, p.v.row, seen.high - key, rescale, out,
                                               columns, columns, beside);
                });
                return;
            }
        const auto add = [&]<int R>() {
            weighted_sum<M, R, pitch, 1>(weights, in_pages ? nullptr : values, value_pitch(), begin, cells, rescale,
                                         out, columns, columns, one_strip ? &beside : nullptr, pages);
        };
        few_rows ? with_few_rows(row_count, add) : with_rows(row_count, add);
    }

    // A task of few queries is limited by memory. So it prefetches what it reads in the order of the memory,
    // kPrefetchRows rows ahead: while keys are read, the later keys and the first values; while values are read, the
    // later values and the next keys. With kInPasses it is a block ahead: its values, and then the next block's keys.
    Prefetch prefetch_beside_keys(int64_t first, int64_t last) const {
        Prefetch prefetch;
        if (packs_values) {  // the values that are packed next
            prefetch_rows(prefetch, 0, all_values, last, min_of(last + kBlock, p.keys));
            prefetch.bytes = kRun * p.d_v * bytes_of(p.type) * kDepthChunk / depth;
            return prefetch;
        }
        if (!kInPasses || !has_values) prefetch_rows(prefetch, 0, all_keys, first + kPrefetchRows, last);
        if (has_values)
            prefetch_rows(prefetch, 1, all_values, first, kInPasses ? last : min_of(first + kPrefetchRows, last));
        prefetch.bytes = kDepthChunk * kVectorBytes;
        return prefetch;
    }

    // While values are packed: the keys of their block, and, at a task's start, the values themselves.
    Prefetch prefetch_beside_packing(int64_t first, int64_t last) const {
        Prefetch prefetch;
        if (!packs_values) return prefetch;
        const bool start = packed_values_start < 0;
        if (start) prefetch_rows(prefetch, 0, all_values, first + kPrefetchRows, last);
        prefetch_rows(prefetch, 1, all_keys, first, last);
        prefetch.bytes = kPackedRows * (p.d_k + start * p.d_v) * bytes_of(p.type);
        return prefetch;
    }

    Prefetch prefetch_beside_values(int64_t first, int64_t last) const {
        Prefetch prefetch;
        const int64_t vectors = columns / kLanes<T>;
        const bool whole_rows =  // are read at once: the processor itself sees what follows
            vectors <= columns_at_once(int(rows)) && (vectors & (vectors - 1)) == 0;
        if ((job.direct_values || pairs_in_place) && !whole_rows && !kInPasses)
            prefetch_rows(prefetch, 0, all_values, first + kPrefetchRows, last);
        prefetch_rows(prefetch, 1, all_keys, last, min_of(last + (kInPasses ? kBlock : kPrefetchRows), p.keys));
        prefetch.bytes = kPrefetchCells * (kInPasses ? 2 * kVectorBytes : columns * int64_t(sizeof(T)));
        return prefetch;
    }

    // The first keys of a task, all at once.
    void prefetch_first_keys(int64_t first, int64_t last) const {
        Prefetch prefetch;
        prefetch_rows(prefetch, 0, all_keys, first, min_of(first + kPrefetchRows, last));
        prefetch.bytes = kPrefetchRows * p.d_k * bytes_of(p.type);
        prefetch.template issue<3>();
    }

    // The packed block that starts at j0, after the present one, in equal parts beside the products of `strips` strips.
    Prefetch prefetch_packed(int64_t j0, int strips) const {
        const int64_t keys_here = min_of(kBlock, p.keys - j0), size = int64_t(sizeof(T));
        Prefetch next;
        const int64_t key_bytes = keys_here * depth * size, v_pitch = value_pitch();
        next.add(0, keys + kBlock * depth, key_bytes, key_bytes, 1);
        if (has_values && !separate_nonfinite)
            next.add(1, values + kBlock / M::per_cell * v_pitch, columns * size, v_pitch * size,
                     keys_here / M::per_cell);
        const int64_t lines = keys_here * (depth + columns / M::per_cell) * size / 64;
        const int64_t products = strips * (kBlock / kPanel<T>)*((depth + kDepthChunk - 1) / kDepthChunk);
        next.bytes = (lines / products + 1) * 64;
        return next;
    }

    // Where tasks pack for themselves: the block that starts at j0, or past the last key, of the run that this thread
    // probably takes next, the first block and the queries.
    Prefetch prefetch_unpacked(int64_t j0, int strips) const {
        Prefetch next;
        const bool later = j0 >= p.keys;
        const int64_t run = (batch * p.heads + first_head) / job.group + (later ? job.threads : 0);
        if (run >= job.first_run + job.wave_runs) return next;
        const int64_t of = run * job.group / p.heads, head = run * job.group % p.heads;
        const int64_t first = later ? 0 : j0, stop = min_of(first + kBlock, p.keys);
        prefetch_rows(next, 0, keys_of(p, of, head * p.kv_heads / p.heads), first, stop);
        if (has_values) prefetch_rows(next, 1, values_of(p, of, head * p.v_heads / p.heads), first, stop);
        const bool with_queries = later && job.group == 1;
        if (with_queries) prefetch_rows(next, 2, queries_of(p, of, head), 0, p.queries);
        const int64_t numbers = (stop - first) * (p.d_k + p.d_v) + (with_queries ? p.queries * p.d_k : 0);
        const int64_t panels = up_to_multiple(min_of(kBlock, p.keys), kPanel<T>) / kPanel<T>;
        const int64_t products = strips * panels * ((depth + kDepthChunk - 1) / kDepthChunk);
        next.bytes = (numbers * bytes_of(p.type) / 64 / max_of(products, 1) + 1) * 64;
        return next;
    }

    void prefetch_rows(Prefetch& prefetch, int which, const Matrix& rows_of, int64_t first, int64_t last) const {
        const View& x = rows_of.x;
        const int64_t size = bytes_of(p.type), row_bytes = rows_of.d * size;
        const int64_t together = x.runs && x.row == rows_of.d ? kRun : 1;  // rows that are one piece
        if (x.column != 1 || first >= last) return;
        first = first / together * together;
        const char* row = rows_of.row(first);
        prefetch.add(which, row, row_bytes, x.row * size, last - first);
        if (!x.runs) return;
        Prefetch::Rows& ahead = prefetch.rows[which];
        ahead = {row, together * row_bytes, x.row * size, (last - first + together - 1) / together};
        ahead.pages = static_cast<const char*>(x.data) + rows_of.head * x.head * size;
        ahead.run = x.runs + first / kRun + 1, ahead.in_run = first % kRun;
        ahead.per_run = kRun / together, ahead.size = size;
    }
};

}  // namespace
}  // namespace clearhead
