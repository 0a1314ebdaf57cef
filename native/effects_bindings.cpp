// Python's door to what single edges did; no arithmetic.
#include <cstdint>
#include <optional>

#include "named.hpp"

namespace clearhead {
namespace {

// The values and the derivatives g of edges.
void take_edges(Job& job, const Given& v, const Given& g) {
    Problem& p = job.problem;
    take_values(p, v);
    job.effects.g = view(g, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_v, "g");
}

void others(int threads, const Described& d, const Given& q, const Given& k, const Given& v, const Given& g,
            nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    take_edges(job, v, g);
    Named named(answers);
    const int64_t count = job.problem.batch * job.problem.heads * job.problem.queries;
    const auto take = [&](const char* name) {
        check(answers.contains(name), name);
        return room(named.write(name), count, 8, name);
    };
    OtherAnswers& want = job.others;
    want.strongest = static_cast<int64_t*>(take("strongest"));
    want.logit = static_cast<double*>(take("logit"));
    want.term = static_cast<double*>(take("term"));
    want.logsumexp = static_cast<double*>(take("logsumexp"));
    want.others = static_cast<double*>(take("others"));
    named.done();
    work(find_others, job, threads);
}

// `known`: as for columns, and what each row must know for a cut; `answers`: what is to be filled.
void effects(int threads, const Described& d, const Given& q, const Given& k, const Given& v, const Given& g,
             nb::dict known, nb::dict answers) {
    Job job;
    job.problem = d.with(q, k);
    take_edges(job, v, g);
    const Problem& p = job.problem;
    EffectAnswers& want = job.effects;
    ColumnAnswers& sums = job.columns;
    Named inputs(known), named(answers);
    take_columns(job, inputs, named);
    const int64_t heads = p.batch * p.heads, n = heads * p.queries, wide = p.type == Type::f64 ? 8 : 4;
    want.whole = per_query(inputs, p, "whole");
    want.others = per_query(inputs, p, "others");
    want.strongest = whole<int64_t>(inputs.read("strongest"), n, "strongest");
    const bool cuts = known.contains("whole");
    check(cuts == known.contains("others") && cuts == known.contains("strongest"), "whole, others and strongest");
    want.by_query = static_cast<double*>(room(named.write("by_query"), n, 8, "by_query"));
    const auto values = named.write("top_values"), indices = named.write("top_indices");
    want.top = values ? int64_t(values->shape(values->ndim() - 1)) : 0;
    want.top_values = room(values, n * want.top, wide, "top_values");
    want.top_indices = static_cast<int64_t*>(room(indices, n * want.top, 8, "top_indices"));
    check(!values == !indices && (!values || want.top > 0), "top");
    if (values) {
        const int order = inputs.number("order");
        check(order >= 0 && order < 3, "order");
        want.order = Order(order);
    }
    const auto strongest = named.write("strongest_values"), places = named.write("strongest_indices");
    want.strongest_count = strongest ? int64_t(strongest->shape(strongest->ndim() - 1)) : 0;
    want.strongest_values = room(strongest, heads * want.strongest_count, wide, "strongest_values");
    want.strongest_indices = static_cast<int64_t*>(room(places, heads * want.strongest_count, 8, "strongest_indices"));
    check(!strongest == !places && (!strongest || want.strongest_count > 0), "strongest");
    const auto mean = named.write("image_mean"), largest = named.write("image_largest");
    if (mean) take_picture(sums, *mean);
    want.image_mean = room(mean, heads * sums.height * sums.width, wide, "image_mean");
    want.image_largest = room(largest, heads * sums.height * sums.width, wide, "image_largest");
    check(!mean == !largest, "a picture's two parts");
    if (const auto product = named.write("product")) {
        check(!sums.transposed, "one product");
        take_operand(sums, inputs, p, p.keys);
        want.product = static_cast<double*>(room(product, n * sums.x_columns, 8, "product"));
    }
    inputs.done();
    named.done();
    work(find_effects, job, threads);
}

}  // namespace

void bind_effects(nb::module_& m) {
    m.def("others", &others);
    m.def("effects", &effects);
}

}  // namespace clearhead
