// Integer products by packed codes, for processors that multiply bytes four times as fast as floats. A token's numbers
// become whole numbers of three digits times a scale; a block's sum of such numbers times codes is exact.
#pragma once

#include "attend.hpp"
#include "packings.hpp"

#if defined(__AVX512VNNI__)
namespace clearhead {
namespace {

constexpr int kTall = 2;               // vectors of rows of W in a tile
constexpr int kLong = 6;               // and its tokens
constexpr int64_t kStrips = 4;         // tiles above each other, whose codes are unpacked at once
constexpr int64_t kSpanColumns = 256;  // and their columns
constexpr int64_t kStripRows = kTall * kLanes<float>;
using Whole = IntVec<float>;

// SHARE numbers of a token, as whole numbers of three digits from -128 to 127, the highest first. All of a span have
// one scale.
template <int SHARE> struct Rounded {
    int8_t digit[3][SHARE];
    float scale, sum;  // sum: of the whole numbers
    int32_t less;      // what makes the sum of products by codes too large, to each of which kCentre is added
};

// What is added to a code, so that none is below 0.
template <class K> constexpr int kCentre = K::in_halves.size ? K::in_halves.centre : K::has_offset ? 0 : 128;

// Rounds a span of so many blocks to 24 bits, or to as many as keep the sums of whole numbers times codes, of which the
// largest is `largest`, below 2³¹. The scale is NaN where a number is not finite.
template <int SHARE> void round_span(const float* x, int64_t blocks, float largest, int centre, Rounded<SHARE>* to) {
    constexpr int lanes = kLanes<float>;
    Vec<float> most = {}, nothing = {};
    float sums = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        Vec<float> sum = {};
        for (int i = 0; i < SHARE; i += lanes) {
            const Vec<float> part = load(x + b * SHARE + i), size = larger(part, -part);
            most = larger(size, most);
            nothing = nothing + part * 0.0f;
            sum = sum + size;
        }
        sums = sum_of<float>(sum) > sums ? sum_of<float>(sum) : sums;
    }
    const float for_digits = largest_of<float>(most) / 8323000, for_sums = sums * (largest + 1) / 2147483648.0f;
    const float scale = (for_digits > for_sums ? for_digits : for_sums) + sum_of<float>(nothing);
    const float times = scale > 1e-30f ? 1 / scale : 0;
    for (int64_t b = 0; b < blocks; ++b, ++to) {
        int32_t sum = 0;
        for (int i = 0; i < SHARE; i += lanes) {
            const Vec<float> part = times > 0 ? load(x + b * SHARE + i) * times : Vec<float>{};
            Whole whole = (Whole)_mm512_cvtps_epi32((__m512)part);
            sum += _mm512_reduce_add_epi32((__m512i)whole);
            for (int d = 2; d >= 0; --d, whole = (whole + 128) >> 8)
                _mm_storeu_si128((__m128i*)(to->digit[d] + i), _mm512_cvtepi32_epi8((__m512i)whole));
        }
        to->scale = scale;
        to->sum = float(sum);
        to->less = int32_t(uint32_t(centre) * uint32_t(sum));
    }
}

// SHARE columns of the rows of a tile, four codes of a row in a lane.
template <int SHARE> struct Codes4 {
    Whole four[SHARE / 4][kTall];
    Vec<float> scale[kTall], offset[kTall];
};

CLEARHEAD_INLINE __m512i four_digits(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

// Adds to `kept` the products of T tokens with a tile's rows, over the blocks of a span.
template <int SHARE, bool CENTRED, bool OFFSET, int T> void multiply_tile(const Rounded<SHARE>* x, int64_t pitch,
                                                                          const Codes4<SHARE>* w, int64_t blocks,
                                                                          Vec<float> (*kept)[kTall]) {
    Vec<float> total[T][kTall] = {};
    const Rounded<SHARE>* const first = x;
    for (; blocks > 0; --blocks, ++x, ++w) {
        Whole sum[T][kTall];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int v = 0; v < kTall; ++v) sum[t][v] = Whole{};
#pragma GCC unroll 8
        for (int d = 0; d < 3; ++d) {
#pragma GCC unroll 8
            for (int t = 0; t < T && d > 0; ++t)
#pragma GCC unroll 8
                for (int v = 0; v < kTall; ++v) sum[t][v] = sum[t][v] << 8;
#pragma GCC unroll 8
            for (int g = 0; g < SHARE / 4; ++g)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const __m512i digits = four_digits(x[t * pitch].digit[d] + 4 * g);
#pragma GCC unroll 8
                    for (int v = 0; v < kTall; ++v)
                        sum[t][v] = (Whole)_mm512_dpbusd_epi32((__m512i)sum[t][v], (__m512i)w->four[g][v], digits);
                }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int v = 0; v < kTall; ++v) {
                if (CENTRED) sum[t][v] = sum[t][v] - x[t * pitch].less;
                total[t][v] = fma(__builtin_convertvector(sum[t][v], Vec<float>), w->scale[v], total[t][v]);
                if (OFFSET) total[t][v] = fma(broadcast<float>(x[t * pitch].sum), w->offset[v], total[t][v]);
            }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
        for (int v = 0; v < kTall; ++v)
            kept[t][v] = fma(total[t][v], broadcast<float>(first[t * pitch].scale), kept[t][v]);
}

CLEARHEAD_INLINE Vec<float> lower_halves(Whole words) {  // as float16
    return (Vec<float>)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
}

// The codes of a block of each row, as the vectors v of `to`. A lane has four codes of its row.
template <class K> CLEARHEAD_INLINE void lay_codes(const uint8_t* const* rows, Codes4<K::Block::share>* to, int v) {
    constexpr int fours = K::Block::share / 4;
    constexpr Halves halves = K::in_halves;
    Vec<float> words[4];
    const auto put = [&](int four, Whole codes) { to[four / fours].four[four % fours][v] = codes; };
#pragma GCC unroll 8
    for (int i = 0; i < K::numbers; i += 16) {
        if (halves.size && i / halves.size % 2) continue;  // in the upper halves of what was loaded before
        const int at = halves.size ? i / (2 * halves.size) * halves.size + i % halves.size : i;
        load_words(rows, (halves.size ? halves.first : 0) + at, words);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const Whole bytes = (Whole)words[c];
            put(i / 4 + c, halves.size ? bytes & 0x0f0f0f0f : kCentre<K> ? bytes ^ int32_t(0x80808080) : bytes);
            if (halves.size) put((i + halves.size) / 4 + c, bytes >> 4 & 0x0f0f0f0f);
        }
    }
}

template <class K> CLEARHEAD_INLINE void lay(const uint8_t* const* rows, Codes4<K::Block::share>* to, int v) {
    constexpr int lanes = kLanes<float>, groups = K::numbers / K::Block::share;
    typename K::Block read[lanes];
    const uint8_t *codes[lanes], *scales[lanes], *offsets[lanes];
    if constexpr (K::in_halves.size == 0)
        for (int r = 0; r < lanes; ++r) {
            K::read(rows[r], read[r]);
            codes[r] = reinterpret_cast<const uint8_t*>(read[r].code);
            scales[r] = reinterpret_cast<const uint8_t*>(read[r].scale);
            offsets[r] = reinterpret_cast<const uint8_t*>(read[r].offset);
        }
    lay_codes<K>(K::in_halves.size ? rows : codes, to, v);
    Vec<float> words[4];
    const auto word = [&](int i) { return (Whole)words[i]; };
    if constexpr (K::scales == Scales::in_front) {
        load_words(rows, 0, words);
        to->scale[v] = lower_halves(word(0));
        if (K::has_offset) to->offset[v] = lower_halves(word(0) >> 16);
    } else if constexpr (K::scales == Scales::eight) {  // as read_eight
        load_words(rows, 0, words);
        const Vec<float> scale = lower_halves(word(0)), offset = -lower_halves(word(0) >> 16);
        const Whole a = word(1), b = word(2), c = word(3);
        const int32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
        const Whole of_scales[2] = {a & six, (c & four) | (a >> 2 & two)};
        const Whole of_offsets[2] = {b & six, (c >> 4 & four) | (b >> 2 & two)};
        for (int g = 0; g < 8; ++g) {
            const int shift = g % 4 * 8;
            to[g].scale[v] = scale * __builtin_convertvector(of_scales[g / 4] >> shift & 255, Vec<float>);
            to[g].offset[v] = offset * __builtin_convertvector(of_offsets[g / 4] >> shift & 255, Vec<float>);
        }
    } else if constexpr (groups > 1) {
        for (int g = 0; g < groups; g += 4) {
            load_words(scales, 4 * g, words);
            for (int c = 0; c < 4; ++c) to[g + c].scale[v] = words[c];
            if (K::has_offset) load_words(offsets, 4 * g, words);
            for (int c = 0; c < 4; ++c) to[g + c].offset[v] = words[c];
        }
    } else {
        for (int r = 0; r < lanes; ++r) std::memcpy(reinterpret_cast<float*>(&to->scale[v]) + r, scales[r], 4);
    }
}

// Each task has a few strips of rows of W.
template <class K> struct InIntegers {
    static constexpr int share = K::Block::share;
    static constexpr int64_t span_blocks = kSpanColumns / share;
    using X = Rounded<share>;
    const ProductJob& job;
    const int64_t first, count;  // of its rows
    const int64_t blocks = job.columns / share;
    Codes4<share>* const weights;     // (strips, span_blocks)
    Vec<float> (*const kept)[kTall];  // (strips, tokens, rows)

    static int64_t rows_of(const ProductJob& job) {
        const int64_t some = job.rows / ((job.tokens > 1 ? 8 : 4) * job.threads) / kStripRows * kStripRows;
        const int64_t most = job.tokens > 1 ? kStrips * kStripRows : job.rows;
        return some < kStripRows ? kStripRows : some < most ? some : most;
    }
    static int64_t tasks(const ProductJob& job) { return (job.rows + rows_of(job) - 1) / rows_of(job); }
    static int64_t scratch_bytes(const ProductJob& job) {
        return kStrips * (span_blocks * int64_t(sizeof(Codes4<share>)) + job.tokens * kTall * kVectorBytes);
    }
    static int64_t rounded_bytes(const ProductJob& job) {
        return job.tokens * (job.columns / share) * int64_t(sizeof(X));
    }
    static void round(const ProductJob& job, int64_t token) {
        X* to = static_cast<X*>(job.rounded) + token * (job.columns / share);
        for (int64_t k = 0; k < job.columns; k += kSpanColumns, to += span_blocks)
            round_span<share>(job.x + token * job.columns + k, span_of(job, k) / share, K::in_halves.size ? 15 : 128,
                              kCentre<K>, to);
    }
    static int64_t span_of(const ProductJob& job, int64_t k) {
        return job.columns - k < kSpanColumns ? job.columns - k : kSpanColumns;
    }

    InIntegers(const ProductJob& job, int64_t task, void* scratch)
        : job(job),
          first(task * rows_of(job)),
          count(job.rows - first < rows_of(job) ? job.rows - first : rows_of(job)),
          weights(static_cast<Codes4<share>*>(scratch)),
          kept(reinterpret_cast<Vec<float> (*)[kTall]>(weights + kStrips * span_blocks)) {}

    void run() {  // of one token, strip by strip, as they lie in memory
        const int64_t step = job.tokens > 1 ? kStrips * kStripRows : kStripRows;
        for (int64_t r = first; r < first + count; r += step) {
            const int64_t left = first + count - r;
            multiply(r, r + (left < step ? left : step));
        }
    }

    void multiply(int64_t begin, int64_t end) {
        const int64_t strips = (end - begin + kStripRows - 1) / kStripRows;
        std::memset(kept, 0, strips * job.tokens * sizeof *kept);
        for (int64_t k = 0; k < job.columns; k += kSpanColumns) {
            for (int64_t s = 0; s < strips; ++s) unpack(begin + s * kStripRows, end, k, weights + s * span_blocks);
            for (int64_t t = 0, left; (left = job.tokens - t) > 0;)
                t += left >= kLong ? tiles<kLong>(t, k, strips)
                     : left >= 4   ? tiles<4>(t, k, strips)
                     : left >= 2   ? tiles<2>(t, k, strips)
                                   : tiles<1>(t, k, strips);
        }
        for (int64_t r = begin; r < end; r += kStripRows)
            for (int64_t t = 0; t < job.tokens; ++t)
                std::memcpy(job.out + t * job.rows + r, kept[(r - begin) / kStripRows * job.tokens + t],
                            4 * (end - r < kStripRows ? end - r : kStripRows));
    }

    template <int T> int64_t tiles(int64_t t, int64_t k, int64_t strips) {
        const X* x = static_cast<const X*>(job.rounded) + t * blocks + k / share;
        for (int64_t s = 0; s < strips; ++s)
            multiply_tile<share, kCentre<K> != 0, K::has_offset, T>(x, blocks, weights + s * span_blocks,
                                                                    span_of(job, k) / share, kept + s * job.tokens + t);
        return T;
    }

    // The columns of a span of the rows from `begin` on, at most a strip; the last one again where they are fewer.
    void unpack(int64_t begin, int64_t end, int64_t k, Codes4<share>* to) {
        constexpr int64_t bytes = kSpanColumns / K::numbers * K::bytes;
        const uint8_t* rows[kStripRows];
        for (int64_t r = 0; r < kStripRows; ++r) {
            const int64_t at = begin + r < end ? begin + r : end - 1;
            rows[r] = job.data + (job.order ? job.order[at] : at) * job.pitch + k / K::numbers * K::bytes;
        }
        for (int64_t i = 0; i < span_of(job, k); i += K::numbers, to += K::numbers / share)
            for (int v = 0; v < kTall; ++v) {
                lay<K>(rows + v * kLanes<float>, to, v);
                for (int r = 0; r < kLanes<float>; ++r) {
                    const uint8_t*& row = rows[v * kLanes<float> + r];
                    for (int b = 0; b < K::bytes; b += 64) {  // of the next span, and of the next strip
                        __builtin_prefetch(row + bytes + b);
                        __builtin_prefetch(row + kStripRows * job.pitch + b, 0, 2);
                    }
                    row += K::bytes;
                }
            }
    }
};

}  // namespace
}  // namespace clearhead
#endif
