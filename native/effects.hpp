// The pass over what single edges did: contributions and cuts, computed a tile at a time and added to every requested
// sum and list. core/effects.py has the formulas.
//
// A task has a segment of the queries of one head and goes through all their keys. What is one number per query it
// writes itself. Its sums over queries are added to the head's, segment by segment in the order of the queries,
// whichever threads compute them: so their number changes no bit. A product with the transposed matrix is cut into
// chunks of keys instead.
#pragma once

#include "columns.hpp"
#include "others.hpp"
#include "strongest.hpp"
#include "threads.hpp"

namespace clearhead {
namespace {

template <class M> struct EffectTask {
    using T = typename M::T;
    static constexpr int64_t pitch = kPitch<T>;

    const Job& job;
    int64_t head_index;
    void* scratch;
    const Problem& p = job.problem;
    const ColumnAnswers& want = job.columns;
    const EffectAnswers& more = job.effects;
    Arena arena{static_cast<char*>(scratch)};
    int64_t start = 0, stop = p.queries;  // queries start … stop
    WeightTiles<M> tiles{job, head_index, arena};
    EdgeTerms<M> terms{job, head_index, arena};
    TransposedProduct<T> transposed{job, head_index, arena};
    int64_t x_columns = up_to_multiple(want.x_columns, kLanes<T>);
    // the right-hand side of `product`, of one block; the product of one tile, (kTile, x_columns)
    Operand<Single<T>> x = Operand<Single<T>>::in(arena, more.product ? kBlock : 0, x_columns);
    T* product = arena.take<T>(more.product ? (kTile + kStrip) * x_columns : 0);
    Picture<T> picture{p, want.height, want.width, arena};
    Rank<T> rank{more.order}, magnitude{Order::magnitude};
    T *line = arena.take<T>(kBlock), *ranks = arena.take<T>(kBlock);
    // what this segment adds to the head's sums; of a picture, the pixel rows from first_pixel on
    double* by_key = arena.take<double>(want.received ? p.keys : 0);
    double* groups = arena.take<double>(want.groups ? want.query_groups * want.key_groups : 0);
    int64_t first_pixel = 0;
    int64_t pixel_rows =
        more.image_mean ? min_of(want.height, int64_t(double(job.segment_rows) / picture.tall) + 3) : 0;
    double* means = arena.take<double>(pixel_rows * want.width);
    T* largest = arena.take<T>(pixel_rows * want.width);
    StrongestList<T> strongest{arena.take<T>(more.strongest_count), arena.take<int64_t>(more.strongest_count),
                               more.strongest_count, 0};

    // The queries of one segment.
    void run_segment(int64_t segment) {
        start = segment * job.segment_rows, stop = min_of(p.queries, start + job.segment_rows);
        clear();
        const Strip seen = tiles.seen_by(start, stop);
        for (int64_t first = seen.low / kBlock * kBlock; first < seen.high; first += job.key_chunk)
            add_chunk(first, min_of(p.keys, first + job.key_chunk));
        for (int64_t i = start; more.top && i < stop; ++i) list_of(i).finish(more.order);
        if (!more.turns) return;
        wait_for_turn(more.turns + head_index, int32_t(segment));
        add_to_head(segment == 0, segment + 1 == job.segments);
        __atomic_store_n(more.turns + head_index, int32_t(segment + 1), __ATOMIC_RELEASE);
    }

    // One chunk of keys of the product with the transposed matrix.
    void run_chunk(int64_t chunk) {
        const int64_t first = chunk * job.key_chunk, last = min_of(p.keys, first + job.key_chunk);
        transposed.clear(last - first);
        add_chunk(first, last);
        transposed.write(first, last);
    }

    void add_chunk(int64_t first, int64_t last) {
        tiles.load_keys(first, last);
        terms.load_values(first, last);
        const bool lists = more.top || more.strongest_count;
        const auto finish = [&]<bool CUT, bool LISTS>(const TilePart& part) {
            terms.multiply(part, first);
            for (int r = 0; r < part.rows; ++r) add_row<CUT, LISTS>(part, r);
        };
        tiles.each(
            start, stop, first, last,
            [&](int64_t i, int count) {
                if (want.transposed && !transposed.load_rows(i, count)) return false;
                return terms.load_tile(i, count), true;
            },
            [&](const TilePart& part) {
                if (more.whole)
                    lists ? finish.template operator()<true, true>(part)
                          : finish.template operator()<true, false>(part);
                else
                    lists ? finish.template operator()<false, true>(part)
                          : finish.template operator()<false, false>(part);
            },
            [&](int64_t i, int count, int64_t j0, int64_t end) { add_tile(i, count, j0, end, first); });
    }

    // Row r of a part: its scores become effects, which enter the lists and the query's sum.
    template <bool CUT, bool LISTS> void add_row(const TilePart& part, int r) {
        const int64_t index = head_index * p.queries + part.query + r;
        T* e = tiles.tile + (part.row + r) * pitch;  // first scores
        const T* t = terms.terms + r * pitch;
        const Normalizer<T> normalizer(want.states, index, tiles.rules.scale_of(tiles.head));
        const Vec<T> whole = broadcast<T>(CUT ? static_cast<const T*>(more.whole)[index] : T(0));
        const Vec<T> one = broadcast<T>(1), hidden = broadcast<T>(-kInfinity<T>);
        // Only the strongest key's weight can be near 1.
        const int64_t alone = CUT && more.strongest[index] >= 0 ? more.strongest[index] - part.j0 : -1;
        Vec<T> sum = {}, high = hidden, highest = hidden;
        for (int j = part.first; j < part.last; j += kLanes<T>) {
            const Vec<T> score = load(e + j), weight = normalizer.weight(score), term = load(t + j);
            Vec<T> effect = CUT ? weight / (one - weight) * (whole - term) : weight * term;
            if (CUT && alone >= j && alone < j + kLanes<T>)
                effect = cut_of_strongest(index, int(alone - j), weight, term, effect);
            effect = score == hidden ? Vec<T>{} : effect;
            sum = sum + effect;
            store(e + j, effect);
            if constexpr (LISTS) {
                const Vec<T> by = rank.of(effect, score == hidden);
                high = larger(by, high);
                highest = larger(magnitude.of(effect, score == hidden), highest);
                store(ranks + j, by);
            }
        }
        if (more.by_query) more.by_query[index] += double(sum_of<T>(sum));
        if constexpr (LISTS) {
            if (more.top && lanes_above<T>(high, list_of(part.query + r).rank[more.top - 1]))
                list_of(part.query + r).enter(ranks, e, part.j0, part.first, part.last, high);
            if (strongest.k && lanes_above<T>(highest, strongest.below)) enter_strongest(part, part.query + r, e);
        }
    }

    // The effects with that of the strongest key, in lane `lane`, by the answer of the others.
    Vec<T> cut_of_strongest(int64_t index, int lane, Vec<T> weight, Vec<T> term, Vec<T> effect) const {
        const Vec<T> others = broadcast<T>(static_cast<const T*>(more.others)[index]);
        return lanes<T>() == broadcast<T>(T(lane)) ? weight * (others - term) : effect;
    }

    FirstList<T> list_of(int64_t i) const {
        const int64_t from = (head_index * p.queries + i) * more.top;
        return {static_cast<T*>(more.top_values) + from, more.top_indices + from, more.top};
    }

    // `ranks` says what is hidden.
    void enter_strongest(const TilePart& part, int64_t i, const T* e) {
        for (int j = part.first; j < part.last; j += kLanes<T>) {
            const auto none = load(ranks + j) == broadcast<T>(-kInfinity<T>);
            T by[kLanes<T>];
            store(by, magnitude.of(load(e + j), none));
            for (uint32_t above = lanes_above<T>(load(by), strongest.below); above; above &= above - 1) {
                const int lane = __builtin_ctz(above);
                const int64_t place = i * p.keys + part.j0 + j + lane;
                strongest.enter(by[lane], e[j + lane] < 0 ? place | kNegative : place);
            }
        }
    }

    // Adds a tile of effects to every requested sum.
    void add_tile(int64_t i, int count, int64_t j0, int64_t end, int64_t first) {
        const T* effects = tiles.tile;
        const int64_t width = end - j0;
        if (want.weights) copy_tile(effects, count, width, want.weights, head_index * p.queries + i, j0, p.keys);
        if (want.received) add_to_keys(effects, count, width, line, by_key + j0);
        if (more.image_mean) picture.template add<true>(effects, i, count, j0, int(width), first_pixel, means, largest);
        if (want.groups)
            add_to_groups(effects, count, width, want.query_labels + tiles.batch * p.queries + i,
                          want.key_labels + tiles.batch * p.keys + j0, line, groups, want.key_groups);
        if (want.transposed) transposed.add(effects, count, j0 - first, width);
        if (more.product) add_product(i, count, j0, width);
    }

    // product[i] += Σ_j effects[i][j]·x[j] for the keys of one block.
    void add_product(int64_t i, int count, int64_t j0, int64_t width) {
        x.load_rows(want.x, want.x_type, tiles.batch, tiles.head * want.x_heads / p.heads, j0, j0 + width,
                    want.x_columns);
        for (int64_t c = 0; c < count * x.columns; ++c) product[c] = 0;
        for (int s = 0; s < count; s += kStrip)
            add_products<Single<T>, pitch, 1>(tiles.tile + s * pitch, int(min_of(kStrip, count - s)), x, 0, width,
                                              product + s * x.columns);
        for (int r = 0; r < count; ++r)
            for (int64_t c = 0; c < want.x_columns; ++c)
                more.product[(head_index * p.queries + i + r) * want.x_columns + c] +=
                    double(product[r * x.columns + c]);
    }

    void clear() {
        for (int64_t i = start; more.top && i < stop; ++i) list_of(i).clear();
        if (strongest.k) strongest.clear();
        if (want.received) std::memset(by_key, 0, p.keys * sizeof(double));
        if (want.groups) std::memset(groups, 0, want.query_groups * want.key_groups * sizeof(double));
        if (more.image_mean) first_pixel = picture.first_of(start);
        std::memset(means, 0, pixel_rows * want.width * sizeof(double));
        std::memset(largest, 0, pixel_rows * want.width * sizeof(T));
    }

    void add_to_head(bool first, bool last) {
        double* keys = want.received ? want.received + head_index * p.keys : nullptr;
        for (int64_t j = 0; keys && j < p.keys; ++j) keys[j] += by_key[j];
        const int64_t group_count = want.query_groups * want.key_groups;
        for (int64_t n = 0; want.groups && n < group_count; ++n) want.groups[head_index * group_count + n] += groups[n];
        const int64_t pixel = (head_index * want.height + first_pixel) * want.width;
        const int64_t pixels = min_of(pixel_rows, want.height - first_pixel) * want.width;
        for (int64_t n = 0; n < pixels; ++n) {
            static_cast<T*>(more.image_mean)[pixel + n] += T(means[n]);
            T& most = static_cast<T*>(more.image_largest)[pixel + n];
            most = Picture<T>::larger_of(most, largest[n]);
        }
        StrongestList<T> all = head_list();
        if (first) all.clear();
        for (int64_t n = 0; n < strongest.k; ++n) all.enter(strongest.rank[n], strongest.place[n]);
        if (last) all.finish();
    }

    StrongestList<T> head_list() const {
        const int64_t from = head_index * strongest.k;
        return {static_cast<T*>(more.strongest_values) + from, more.strongest_indices + from, strongest.k, 0};
    }
};

template <class M> int64_t effect_scratch_bytes(const Job& job) { return EffectTask<M>{job, 0, nullptr}.arena.bytes; }

// One segment of the queries of a head, or one chunk of its keys for a product with the transposed matrix. The segments
// of a head come in order, so that a task waits for earlier ones only.
template <class M> void effects(const Job& job, int64_t index, void* scratch) {
    const bool chunks = job.columns.transposed;
    const int64_t pieces = chunks ? job.key_chunks : job.segments;
    EffectTask<M> task{job, index / pieces, scratch};
    chunks ? task.run_chunk(index % pieces) : task.run_segment(index % pieces);
}

template <class M> void fill(Kernel& kernel) {
    kernel.columns = {column_scratch_bytes<M>, columns<M>};
    kernel.others = {other_scratch_bytes<M>, others<M>};
    kernel.effects = {effect_scratch_bytes<M>, effects<M>};
}

}  // namespace
}  // namespace clearhead
