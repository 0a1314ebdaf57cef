// A ragged batch: the queries of all requests one after the other, each request with keys of its own, which lie one
// after the other too, or in pages. It becomes one job for each request.
#pragma once

#include <algorithm>
#include <type_traits>

#include "named.hpp"

namespace clearhead {

// The keys, or the values, of all requests: (tokens, heads, d), or pages (blocks, page, heads, d).
struct RaggedRows {
    const Input& x;
    const bool paged = x.ndim() == 4;
    const int64_t page = paged ? int64_t(x.shape(1)) : 1;
    std::vector<int64_t> runs = {};  // View::runs of one request after the other

    int64_t shape(int axis) const { return int64_t(x.shape(x.ndim() - 3 + axis)); }
    int64_t stride(int axis) const { return x.stride(x.ndim() - 3 + axis); }

    // A request's rows, `count` from row `first` on, or in blocks of pages, whose numbers lie `step` apart.
    View view(int64_t first, const int32_t* blocks, int64_t step, int64_t count, int64_t bytes) {
        const char* data = static_cast<const char*>(x.data());
        View view{data, 0, stride(1), stride(0), stride(2)};
        if (!paged) {
            check(first >= 0 && first <= shape(0) - count, "a request's first key");
            view.data = data + first * stride(0) * bytes;
            return view;
        }
        view.runs = runs.data() + runs.size();  // there is room for all
        for (int64_t row = 0; row < count; row += page, blocks += step) {
            check(*blocks >= 0 && *blocks < int64_t(x.shape(0)), "a block number");
            for (int64_t i = 0; i < std::min(page, count - row); i += kRun)
                runs.push_back(*blocks * x.stride(0) + i * stride(0));
        }
        runs.push_back(0);  // the place of one row past the end may be computed
        return view;
    }
};

// The problem of all queries together; the requests' problems differ in their queries, keys and arrays.
inline Problem ragged_problem(const Described& d, const Input& q, const RaggedRows& keys, const RaggedRows& values) {
    Problem p = d.p;
    check(q.ndim() == 3 && (keys.paged || keys.x.ndim() == 3) && keys.x.ndim() == values.x.ndim(), "axes");
    check(!keys.paged || (keys.page > 0 && keys.page % kRun == 0), "page");
    for (const Input* x : {&q, &keys.x, &values.x}) check(x->itemsize() == size_t(bytes_of(p.type)), "type");
    p.batch = 1;
    p.ragged = true;
    p.queries = int64_t(q.shape(0));
    p.v_heads = values.shape(1);
    p.d_v = values.shape(2);
    check(int64_t(q.shape(1)) == p.heads && int64_t(q.shape(2)) == p.d_k, "q");
    check(keys.shape(1) == p.kv_heads && keys.shape(2) == p.d_k && p.v_heads == p.kv_heads, "k");
    check(keys.shape(0) == values.shape(0) && keys.x.shape(0) == values.x.shape(0), "v");
    return p;
}

// Moves a job's answers on by so many queries of all heads.
inline void skip_queries(RowJob& job, int64_t queries, int64_t wide) {
    const Problem& p = job.problem;
    const auto move = [&](auto*& x, int64_t bytes) {
        char* to = reinterpret_cast<char*>(x) + queries * p.heads * bytes;
        if (x) x = reinterpret_cast<std::remove_reference_t<decltype(x)>>(to);
    };
    move(job.output, p.d_v * (job.keep_float32 ? 4 : bytes_of(p.type)));
#define CLEARHEAD_MOVE(name) move(job.name, wide);
    CLEARHEAD_PER_QUERY(CLEARHEAD_MOVE)
    move(job.top_weights, job.top * wide);
    move(job.top_indices, job.top * 8);
}

// From what each key received, (heads, keys) of one request after the other, to (keys, heads).
template <class T>
void turn_received(const double* from, const int64_t* length, int64_t requests, int64_t heads, void* to) {
    T* x = static_cast<T*>(to);
    for (int64_t r = 0; r < requests; from += heads * length[r], ++r)
        for (int64_t j = 0; j < length[r]; ++j)
            for (int64_t h = 0; h < heads; ++h) *x++ = T(from[h * length[r] + j]);
}

inline bool is_whole(const Input& x) { return x.dtype().code == uint8_t(nb::dlpack::dtype_code::Int); }

// Whole numbers of 32 or 64 bits.
inline std::vector<int64_t> whole_numbers(const Input& x, const char* what) {
    const bool wide = x.itemsize() == 8;
    check(x.ndim() == 1 && (wide || x.itemsize() == 4) && is_whole(x), what);
    std::vector<int64_t> numbers(x.size());
    for (int64_t i = 0; i < int64_t(numbers.size()); ++i)
        numbers[i] = wide ? static_cast<const int64_t*>(x.data())[i * x.stride(0)]
                          : static_cast<const int32_t*>(x.data())[i * x.stride(0)];
    return numbers;
}

// Where requests begin, checked: from 0 up to `count`.
inline std::vector<int64_t> starts_of(const Input& ends, int64_t count, const char* what) {
    const std::vector<int64_t> starts = whole_numbers(ends, what);
    check(!starts.empty() && starts.front() == 0 && starts.back() == count, what);
    check(std::is_sorted(starts.begin(), starts.end()), what);
    return starts;
}

// `cu_seq_q` (requests + 1,): where each one's queries begin; `cu_seq_k`: likewise for keys, without the block `table`
// (requests, pages) of int32; `used` (requests,): how many keys each has, needed with a table. A request's last query
// is at its last key. The row pass computes `received` of requests with so many queries and keys, as
// engines/native.py says.
inline void ragged(int threads, const Described& d, const Input& q, const Input& k, const Input& v,
                   const Input& cu_seq_q, std::optional<Input> cu_seq_k, std::optional<Input> used,
                   std::optional<Input> table, nb::dict answers, int64_t least_queries, int64_t most_keys) {
    RaggedRows keys{k}, values{v};
    const Problem all = ragged_problem(d, q, keys, values);
    const int64_t bytes = bytes_of(all.type);
    const std::vector<int64_t> start = starts_of(cu_seq_q, all.queries, "cu_seq_q");
    const int64_t requests = int64_t(start.size()) - 1;
    check(keys.paged == table.has_value() && (table ? used.has_value() : cu_seq_k.has_value()), "arguments");
    const std::vector<int64_t> first =
        table ? std::vector<int64_t>(requests + 1) : starts_of(*cu_seq_k, keys.shape(0), "cu_seq_k");
    check(!table || (table->ndim() == 2 && is_whole(*table) && table->itemsize() == 4 &&
                     int64_t(table->shape(0)) == requests),
          "block_table");
    check(int64_t(first.size()) == requests + 1, "cu_seq_k");
    std::vector<int64_t> length(requests);
    if (used) length = whole_numbers(*used, "seqused_k");
    check(int64_t(length.size()) == requests, "seqused_k");
    int64_t total = 0;
    for (int64_t r = 0; r < requests; total += length[r], ++r) {
        const int64_t room = table ? int64_t(table->shape(1)) * keys.page : first[r + 1] - first[r];
        if (!used) length[r] = room;
        check(length[r] >= 0 && length[r] <= room, "seqused_k");
    }
    for (RaggedRows* rows : {&keys, &values}) rows->runs.reserve(table ? total / kRun + 2 * requests : 0);

    RowJob whole{{all, threads}};
    Named named(all, answers);
    take_rows(whole, named);
    void* received = named.statistics("received", all.heads * total);
    named.done();

    std::vector<double> sums(received ? all.heads * total : 0);
    std::vector<int64_t> offsets(requests);
    std::vector<RowJob> rows;
    std::vector<ColumnJob> columns;
    for (int64_t r = 0, before = 0; r < requests; before += length[r], ++r) {
        RowJob job = whole;
        Problem& p = job.problem;
        p.queries = start[r + 1] - start[r];
        p.keys = length[r];
        offsets[r] = p.keys - p.queries;
        p.query_offset = &offsets[r];
        const int64_t step = table ? table->stride(1) : 0;
        const int32_t* blocks = table ? static_cast<const int32_t*>(table->data()) + r * table->stride(0) : nullptr;
        const char* queries = static_cast<const char*>(q.data()) + start[r] * q.stride(0) * bytes;
        p.q = {queries, 0, q.stride(1), q.stride(0), q.stride(2)};
        p.k = keys.view(first[r], blocks, step, p.keys, bytes);
        p.v = values.view(first[r], blocks, step, p.keys, bytes);
        skip_queries(job, start[r], named.wide);
        double* sum = received ? sums.data() + all.heads * before : nullptr;
        const bool in_rows = p.queries >= least_queries && p.keys <= most_keys;
        if (in_rows) job.received = sum;
        rows.push_back(job);
        if (!received || in_rows || p.queries == 0) continue;
        columns.push_back({{{job}, {job.largest, job.log_sum}, sum}});
    }
    work(attend, std::move(rows));
    if (!columns.empty()) work(observe, std::move(columns));
    if (received)
        (named.wide == 8 ? turn_received<double> : turn_received<float>)(sums.data(), length.data(), requests,
                                                                         all.heads, received);
}

}  // namespace clearhead
