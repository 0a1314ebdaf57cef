// A ragged batch: the queries of all requests one after the other, each request with keys of its own, which lie one
// after the other too, or in pages. It becomes one job for each request.
#pragma once

#include <algorithm>
#include <type_traits>

#include "named.hpp"

namespace clearhead {

// The keys, or the values, of all requests: (tokens, heads, d), or pages (blocks, page, heads, d).
struct RaggedRows {
    const Given& x;
    const bool paged = x.ndim() == 4;
    const int64_t page = paged ? int64_t(x.shape(1)) : 1;
    std::vector<int64_t> runs = {};  // View::runs of one request after the other

    int64_t rows() const { return paged ? page : shape(0); }  // in one place
    int64_t shape(int axis) const { return int64_t(x.shape(x.ndim() - 3 + axis)); }
    int64_t stride(int axis) const { return x.stride(x.ndim() - 3 + axis); }

    // A request's rows, `count` from row `first` on, or in these blocks of pages.
    View view(int64_t first, const int32_t* blocks, int64_t count, int64_t bytes) {
        const char* data = static_cast<const char*>(x.data());
        View view{data, 0, stride(1), stride(0), stride(2)};
        if (!paged) {
            check(first >= 0 && first <= shape(0) - count, "a request's first key");
            view.data = data + first * stride(0) * bytes;
            return view;
        }
        view.runs = runs.data() + runs.size();  // there is room for all
        for (int64_t row = 0; row < count; row += page, ++blocks) {
            check(*blocks >= 0 && *blocks < int64_t(x.shape(0)), "a block number");
            for (int64_t i = 0; i < std::min(page, count - row); i += kRun)
                runs.push_back(*blocks * x.stride(0) + i * stride(0));
        }
        runs.push_back(0);  // the place of one row past the end may be computed
        return view;
    }
};

// The problem of all queries together; the requests' problems differ in their queries, keys and arrays.
inline Problem ragged_problem(const Described& d, const Given& q, const RaggedRows& keys, const RaggedRows& values) {
    Problem p = d.p;
    check(q.ndim() == 3 && (keys.paged || keys.x.ndim() == 3) && keys.x.ndim() == values.x.ndim(), "axes");
    check(!keys.paged || (keys.page > 0 && keys.page % kRun == 0), "page");
    for (const Given* x : {&q, &keys.x, &values.x}) check(x->itemsize() == size_t(bytes_of(p.type)), "type");
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

// What `all` has for the queries from `first` on.
inline RowAnswers answers_from(RowAnswers all, const Problem& p, int64_t first, int64_t wide) {
    const auto move = [&](auto*& x, int64_t bytes) {
        if (x)
            x = reinterpret_cast<std::remove_reference_t<decltype(x)>>(reinterpret_cast<char*>(x) +
                                                                       first * p.heads * bytes);
    };
    move(all.output, p.d_v * bytes_of(p.type));
#define CLEARHEAD_MOVE(name) move(all.name, wide);
    CLEARHEAD_PER_QUERY(CLEARHEAD_MOVE)
    move(all.top_weights, all.top * wide);
    move(all.top_indices, all.top * 8);
    return all;
}

// From what each key received, (heads, keys) of one request after the other, to (keys, heads).
template <class T>
void turn_received(const double* from, const int64_t* length, int64_t requests, int64_t heads, void* to) {
    T* x = static_cast<T*>(to);
    for (int64_t r = 0; r < requests; from += heads * length[r], ++r)
        for (int64_t j = 0; j < length[r]; ++j)
            for (int64_t h = 0; h < heads; ++h) *x++ = T(from[h * length[r] + j]);
}

// `starts` (requests + 1,): where each one's queries begin; `lengths` (requests,): how many keys it has; `places`: the
// block table (requests, blocks), else (requests,) its first key. A request's last query is at its last key. The row
// pass computes `received` of requests with so many queries and keys, as engines/native.py says.
inline void ragged(int threads, const Described& d, const Given& q, const Given& k, const Given& v, const Given& starts,
                   const Given& lengths, const Given& places, nb::dict answers, int64_t least_queries,
                   int64_t most_keys) {
    RaggedRows keys{k}, values{v};
    const Problem all = ragged_problem(d, q, keys, values);
    const int64_t requests = int64_t(lengths.size()), n = all.heads * all.queries, bytes = bytes_of(all.type);
    const int64_t width = keys.paged && requests ? int64_t(places.size()) / requests : 1;
    const auto *start = whole<int64_t>(starts, requests + 1, "starts"),
               *length = whole<int64_t>(lengths, requests, "lengths"),
               *first = keys.paged ? nullptr : whole<int64_t>(places, requests, "places");
    const int32_t* table = keys.paged ? whole<int32_t>(places, requests * width, "places") : nullptr;
    check(start[0] == 0 && start[requests] == all.queries, "starts");
    int64_t total = 0;
    for (int64_t r = 0; r < requests; total += length[r], ++r)
        check(start[r] <= start[r + 1] && length[r] >= 0 && length[r] <= width * keys.rows(), "starts and lengths");
    for (RaggedRows* rows : {&keys, &values}) rows->runs.reserve(total / kRun + 2 * requests);

    Named named(answers, all);
    RowAnswers want;
    want.output = room(named.write("output"), n * all.d_v, bytes, "output");
#define CLEARHEAD_TAKE_ALL(name) want.name = named.statistics(#name, n);
    CLEARHEAD_PER_QUERY(CLEARHEAD_TAKE_ALL)
    want.top = named.lists("top_weights", "top_indices", n, want.top_weights, want.top_indices);
    void* received = named.statistics("received", all.heads * total);
    check(!received || want.logsumexp || n == 0, "received needs logsumexp");
    named.done();

    std::vector<double> sums(received ? all.heads * total : 0);
    std::vector<int64_t> offsets(requests);
    Jobs rows, columns;
    for (int64_t r = 0, before = 0; r < requests; before += length[r], ++r) {
        Job job;
        Problem& p = job.problem = all;
        p.queries = start[r + 1] - start[r];
        p.keys = length[r];
        offsets[r] = p.keys - p.queries;
        p.query_offset = &offsets[r];
        const int32_t* blocks = table ? table + r * width : nullptr;
        const char* queries = static_cast<const char*>(q.data()) + start[r] * q.stride(0) * bytes;
        p.q = {queries, 0, q.stride(1), q.stride(0), q.stride(2)};
        p.k = keys.view(first ? first[r] : 0, blocks, p.keys, bytes);
        p.v = values.view(first ? first[r] : 0, blocks, p.keys, bytes);
        job.rows = answers_from(want, p, start[r], named.wide);
        double* sum = received ? sums.data() + all.heads * before : nullptr;
        const bool in_rows = p.queries >= least_queries && p.keys <= most_keys;
        if (in_rows) job.rows.received = sum;
        rows.push_back(job);
        if (!received || in_rows || p.queries == 0) continue;
        job.columns.logsumexp = job.rows.logsumexp;
        job.columns.received = sum;
        columns.push_back(job);
    }
    work(attend, std::move(rows), threads);
    if (!columns.empty()) work(observe, std::move(columns), threads);
    if (received)
        (named.wide == 8 ? turn_received<double> : turn_received<float>)(sums.data(), length, requests, all.heads,
                                                                         received);
}

}  // namespace clearhead
