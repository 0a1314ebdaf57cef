// What Python gives of a direction along which a pass is differentiated.
#pragma once

#include "named.hpp"

namespace clearhead {

// The tangents of the inputs, those of upstream gradients, and the answers of the row pass; call after take_values.
inline void take_along(Job& job, const nb::dict& names) {
    const Problem& p = job.problem;
    Along& along = job.along;
    Named named(names);
    along.used = true;
    const int64_t size = bytes_of(p.type), wide = p.type == Type::f64 ? 8 : 4, n = p.batch * p.heads * p.queries;
    if (const auto x = named.read("q")) along.q = view(*x, size, p.batch, p.heads, p.queries, p.d_k, "q's tangent");
    if (const auto x = named.read("k")) along.k = view(*x, size, p.batch, p.kv_heads, p.keys, p.d_k, "k's tangent");
    if (const auto x = named.read("v")) along.v = view(*x, size, p.batch, p.v_heads, p.keys, p.d_v, "v's tangent");
    if (const auto x = named.read("bias")) {
        const int type = named.number("bias_type");
        check(type >= 0 && type < 4, "the type of the bias's tangent");
        along.bias_type = Type(type);
        along.bias = view(*x, bytes_of(along.bias_type), p.batch, p.heads, p.queries, p.keys, "bias's tangent");
    }
    if (const auto x = named.read("spans")) {
        check(p.query_spans, "spans");
        along.span_table = view(*x, wide, p.batch, p.heads, p.span_queries, p.span_keys, "spans' tangent");
        check(along.span_table.column == 1 || p.span_keys <= 1 || p.batch * p.heads == 0, "spans' tangent");
    }
    along.sinks = whole<double>(named.read("sinks"), p.heads, "sinks' tangent");
    check(!along.sinks || p.sinks, "sinks");
    along.kept = per_query(named, p, "kept");
    along.known = numbers(named, p, "known", n * p.d_v);
    check(!along.known || (!job.rows.output && size == wide), "a known output");
    const auto output = named.write("output");
    along.output = room(output, n * p.d_v, job.rows.keep_float32 ? 4 : size, "output's tangent");
    along.logsumexp = room(named.write("logsumexp"), n, wide, "logsumexp's tangent");
    along.entropy = room(named.write("entropy"), n, wide, "entropy's tangent");
    along.distance = room(named.write("distance"), n, wide, "distance's tangent");
    along.diagonal = room(named.write("diagonal"), n, wide, "diagonal's tangent");
    check(!along.entropy || job.rows.entropy, "entropy");
    check(!along.distance || job.rows.distance, "distance");
    check(!along.diagonal || job.rows.diagonal, "diagonal");
    if (const auto x = named.read("output_gradient"))
        along.output_gradient = view(*x, size, p.batch, p.heads, p.queries, p.d_v, "the gradient's tangent");
    along.rows = per_query(named, p, "rows");
    along.entropy_gradient = per_query(named, p, "entropy_gradient");
    along.distance_gradient = per_query(named, p, "distance_gradient");
    along.diagonal_gradient = per_query(named, p, "diagonal_gradient");
    named.done();
}

}  // namespace clearhead
