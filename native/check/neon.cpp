// Checks the NEON kernel on one head against plain loops. CI compiles it for ARM and runs it in an emulator.
#include <cmath>
#include <cstdio>
#include <vector>

#include "../dispatch.hpp"

using namespace clearhead;

int main() {
    constexpr int64_t n = 45, m = 333, d = 24;
    std::vector<float> q(n * d), k(m * d), v(m * d), output(n * d), largest(n), log_sum(n);
    uint32_t state = 1;
    for (auto* x : {&q, &k, &v})
        for (float& number : *x) number = float(int32_t(state = state * 1664525u + 1013904223u)) / 2147483648.0f;
    const int64_t offset = m - n;
    RowJob job;
    job.threads = 2;
    Problem& p = job.problem;
    p = Problem{};
    p.type = p.bias_type = Type::f32;
    p.batch = p.heads = p.kv_heads = p.v_heads = 1;
    p.queries = n, p.keys = m, p.d_k = p.d_v = d;
    p.row_step = p.column_step = 1;
    p.scale = 2.0;
    p.left = kNoLimit, p.right = 0;
    p.query_offset = &offset;
    p.q = {q.data(), n * d, n * d, d, 1};
    p.k = {k.data(), m * d, m * d, d, 1};
    p.v = {v.data(), m * d, m * d, d, 1};
    job.output = output.data();
    job.largest = largest.data();
    job.log_sum = log_sum.data();
    if (!level() || !attend({job}, nullptr)) return std::puts("the kernel did not run"), 2;
    double worst = 0;
    for (int64_t i = 0; i < n; ++i) {
        double sum = 0;
        std::vector<double> mean(d);
        for (int64_t j = 0; j <= i + offset; ++j) {
            double score = 0;
            for (int64_t c = 0; c < d; ++c) score += double(q[i * d + c]) * double(k[j * d + c]);
            const double weight = std::exp(2.0 * score);
            sum += weight;
            for (int64_t c = 0; c < d; ++c) mean[c] += weight * double(v[j * d + c]);
        }
        for (int64_t c = 0; c < d; ++c) worst = std::fmax(worst, std::fabs(mean[c] / sum - double(output[i * d + c])));
        worst = std::fmax(worst, std::fabs(std::log(sum) - double(largest[i]) - double(log_sum[i])));
    }
    std::printf("%s: largest difference %.2g\n", level()->name, worst);
    return worst < 2e-6 ? 0 : 1;
}
