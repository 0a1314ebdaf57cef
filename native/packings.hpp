// How model files pack numbers: blocks of small integers with a scale, and often an offset, for each group of 16. The
// layouts are those of ggml (the package gguf unpacks them too, and a test compares both).
#pragma once

#include "products.hpp"
#include "simd.hpp"

namespace clearhead {
namespace {

constexpr int kGroup = 16;  // numbers that are unpacked at a time

// A block: number = scale·code + offset, of which SHARE numbers have the same scale and offset.
template <int NUMBERS, int SHARE = 32> struct Codes {
    static constexpr int share = SHARE;
    int8_t code[NUMBERS];
    float scale[NUMBERS / SHARE], offset[NUMBERS / SHARE];
};

// Codes that are halves of bytes, less `centre`: each `size` bytes, from the byte `first` on, have as many codes in
// their lower halves and the next ones in their upper halves; 0: other codes.
struct Halves {
    int size, first, centre;
};

// Where a block has its scale: as its first float16, before its offset where it has one; as those of `read_eight`.
enum class Scales { elsewhere, in_front, eight };

template <int NUMBERS, int BYTES, Scales SCALES, bool OFFSET, Halves HALVES = Halves{}> struct Packed {
    static constexpr int numbers = NUMBERS, bytes = BYTES;
    static constexpr Scales scales = SCALES;
    static constexpr bool has_offset = OFFSET;
    static constexpr Halves in_halves = HALVES;
};

CLEARHEAD_INLINE float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return from_f16(bits);
}

// All these processors store the lowest byte first, as files do.
CLEARHEAD_INLINE uint32_t word_at(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

constexpr int8_t kCurve[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The lower and the upper halves of COUNT bytes, less `centre`. What is stored here is loaded in parts of 16 bytes: a
// processor waits where a load takes more than one store wrote.
template <int COUNT> CLEARHEAD_INLINE void halves(const uint8_t* bytes, int8_t* low, int8_t* high, int centre = 0) {
    constexpr int some = COUNT % 32 ? 16 : 32;
    for (int from = 0; from < COUNT; from += some) {
        for (int i = from; i < from + some; ++i) low[i] = int8_t((bytes[i] & 15) - centre);
        for (int i = from; i < from + some; ++i) high[i] = int8_t((bytes[i] >> 4) - centre);
    }
}

// What COUNT codes of 4 bits stand for.
template <int COUNT> CLEARHEAD_INLINE void look_up(int8_t* codes, const int8_t (&table)[16]) {
    for (int i = 0; i < COUNT; i += 16) {
#if defined(__SSSE3__)
        const __m128i all = _mm_loadu_si128((const __m128i*)table), here = _mm_loadu_si128((__m128i*)(codes + i));
        _mm_storeu_si128((__m128i*)(codes + i), _mm_shuffle_epi8(all, here));
#elif defined(__aarch64__)
        vst1q_s8(codes + i, vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(vld1q_s8(codes + i))));
#else
        for (int j = i; j < i + 16; ++j) codes[j] = table[codes[j]];
#endif
    }
}

// Adds 16 to each of 32 codes whose bit is set.
CLEARHEAD_INLINE void add_sixteen(int8_t* codes, uint32_t bits) {
#if defined(__AVX2__)
    const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201)),
                  byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), byte_of), each);
    const __m256i more = _mm256_and_si256(_mm256_cmpeq_epi8(own, each), _mm256_set1_epi8(16));
    for (int i = 0; i < 2; ++i) {
        __m128i* here = (__m128i*)(codes + 16 * i);
        const __m128i half = i ? _mm256_extracti128_si256(more, 1) : _mm256_castsi256_si128(more);
        _mm_storeu_si128(here, _mm_add_epi8(_mm_loadu_si128(here), half));
    }
#else
    for (int i = 0; i < 32; ++i) codes[i] = int8_t(codes[i] + (bits >> i & 1) * 16);
#endif
}

// Blocks of 32: a scale, an offset where OFFSET, the fifth bits where BITS is 5, and 16 bytes of which the lower halves
// come first. CENTRE is what a code of 0 stands for.
template <int BITS, bool OFFSET, int CENTRE, int BYTES = 18 + 2 * OFFSET + 4 * (BITS == 5)> struct Plain
    : Packed<32, BYTES, Scales::in_front, OFFSET, Halves{BITS == 4 ? 16 : 0, BYTES - 16, CENTRE}> {
    using Block = Codes<32>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        to.scale[0] = half_at(block);
        to.offset[0] = OFFSET ? half_at(block + 2) : 0;
        halves<16>(block + BYTES - 16, to.code, to.code + 16, CENTRE);
        if (BITS == 5) add_sixteen(to.code, word_at(block + BYTES - 20));
    }
};

struct Q8_0 : Packed<32, 34, Scales::in_front, false> {
    using Block = Codes<numbers>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        to.scale[0] = half_at(block);
        to.offset[0] = 0;
        std::memcpy(to.code, block + 2, 32);
    }
};

struct IQ4_NL : Packed<32, 18, Scales::in_front, false> {
    using Block = Codes<numbers>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        Plain<4, false, 0>::read(block, to);
        look_up<32>(to.code, kCurve);
    }
};

struct MXFP4 : Packed<32, 17, Scales::elsewhere, false> {  // a power of 2 as the scale
    using Block = Codes<numbers>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        // 2^(e − 128): the codes are twice the numbers. Below float's normal range it is a fraction's bit.
        const uint32_t e = block[0], bits = e >= 2 ? (e - 1) << 23 : uint32_t{0x200000} << e;
        std::memcpy(to.scale, &bits, 4);
        to.offset[0] = 0;
        halves<16>(block + 1, to.code, to.code + 16);
        look_up<32>(to.code, kTwiceE2m1);
    }
};

// Scales and offsets of 6 bits for eight groups of 32, in 12 bytes, four bytes at a time.
CLEARHEAD_INLINE void read_eight(const uint8_t* block, const uint8_t* packed, Codes<256>& to) {
    const uint32_t a = word_at(packed), b = word_at(packed + 4), c = word_at(packed + 8);
    const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    const uint32_t words[4] = {a & six, (c & four) | (a >> 2 & two), b & six, (c >> 4 & four) | (b >> 2 & two)};
    uint8_t each[16];
    std::memcpy(each, words, 16);
    const float scale = half_at(block), offset = -half_at(block + 2);
    for (int i = 0; i < 8; ++i) to.scale[i] = scale * float(each[i]);
    for (int i = 0; i < 8; ++i) to.offset[i] = offset * float(each[8 + i]);
}

// Blocks of 256.
struct Q2_K : Packed<256, 84, Scales::elsewhere, true> {
    using Block = Codes<numbers, 16>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        const float scale = half_at(block + 80), offset = -half_at(block + 82);
        for (int i = 0; i < 16; ++i)
            to.scale[i] = scale * float(block[i] & 15), to.offset[i] = offset * float(block[i] >> 4);
        for (int n = 0; n < 2; ++n)
            for (int j = 0; j < 4; ++j)
                for (int i = 0; i < 32; ++i)
                    to.code[128 * n + 32 * j + i] = int8_t(block[16 + 32 * n + i] >> 2 * j & 3);
    }
};

struct Q3_K : Packed<256, 110, Scales::elsewhere, false> {
    using Block = Codes<numbers, 16>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        const uint8_t* packed = block + 96;  // 16 scales of 6 bits
        const float scale = half_at(block + 108);
        for (int i = 0; i < 16; ++i) {
            const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
            to.scale[i] = scale * float((low | high << 4) - 32), to.offset[i] = 0;
        }
        for (int n = 0; n < 2; ++n)
            for (int j = 0; j < 4; ++j)
                for (int i = 0; i < 32; ++i) {
                    const int third = block[i] >> (4 * n + j) & 1;
                    to.code[128 * n + 32 * j + i] = int8_t((block[32 + 32 * n + i] >> 2 * j & 3) + 4 * third - 4);
                }
    }
};

struct Q4_K : Packed<256, 144, Scales::eight, true, Halves{32, 16, 0}> {
    using Block = Codes<numbers>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        read_eight(block, block + 4, to);
        for (int n = 0; n < 4; ++n) halves<32>(block + 16 + 32 * n, to.code + 64 * n, to.code + 64 * n + 32);
    }
};

struct Q5_K : Packed<256, 176, Scales::eight, true> {
    using Block = Codes<numbers>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        read_eight(block, block + 4, to);
        for (int n = 0; n < 4; ++n) halves<32>(block + 48 + 32 * n, to.code + 64 * n, to.code + 64 * n + 32);
        for (int n = 0; n < 8; ++n)
            for (int i = 0; i < 32; ++i) to.code[32 * n + i] |= int8_t((block[16 + i] >> n & 1) << 4);
    }
};

struct Q6_K : Packed<256, 210, Scales::elsewhere, false> {
    using Block = Codes<numbers, 16>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        const float scale = half_at(block + 208);
        for (int i = 0; i < 16; ++i) to.scale[i] = scale * float(int8_t(block[192 + i])), to.offset[i] = 0;
        for (int n = 0; n < 2; ++n) {
            const uint8_t *low = block + 64 * n, *high = block + 128 + 32 * n;
            int8_t* code = to.code + 128 * n;
            halves<64>(low, code, code + 64, 32);
            for (int j = 0; j < 4; ++j)
                for (int i = 0; i < 32; ++i) code[32 * j + i] = int8_t(code[32 * j + i] + (high[i] >> 2 * j & 3) * 16);
        }
    }
};

struct IQ4_XS : Packed<256, 136, Scales::elsewhere, false> {
    using Block = Codes<numbers>;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        const float scale = half_at(block);
        const uint32_t upper = word_at(block + 2);  // and two bytes more
        for (int i = 0; i < 8; ++i) {
            const int six = (block[4 + i / 2] >> 4 * (i % 2) & 15) | int(upper >> 2 * i & 3) << 4;
            to.scale[i] = scale * float(six - 32);
            to.offset[i] = 0;
            halves<16>(block + 8 + 16 * i, to.code + 32 * i, to.code + 32 * i + 16);
        }
        look_up<256>(to.code, kCurve);
    }
};

// ── from codes to numbers ──

struct Group {  // of 16 numbers
    Vec<float> part[kGroup / kLanes<float>];
};

template <int NUMBERS, int SHARE> CLEARHEAD_INLINE Group group_of(const Codes<NUMBERS, SHARE>& codes, int g) {
    const int8_t* code = codes.code + g * kGroup;
    Group group;
#if defined(__AVX512F__)
    group.part[0] = (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)code)));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i) {
        const __m128i eight = _mm_loadl_epi64((const __m128i*)(code + 8 * i));
        group.part[i] = (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    }
#else
    float whole[kGroup];
    for (int i = 0; i < kGroup; ++i) whole[i] = float(code[i]);
    for (int i = 0; i < kGroup / kLanes<float>; ++i) group.part[i] = load(whole + i * kLanes<float>);
#endif
    for (Vec<float>& part : group.part)
        part = fma(broadcast<float>(codes.scale[g * kGroup / SHARE]), part,
                   broadcast<float>(codes.offset[g * kGroup / SHARE]));
    return group;
}

// Numbers that are stored one by one: 16 are a block. A file may have them at odd places.
struct Sixteen {
    float number[kGroup];
};

CLEARHEAD_INLINE Group group_of(const Sixteen& block, int) {
    Group group;
    for (int i = 0; i < kGroup / kLanes<float>; ++i) group.part[i] = load(block.number + i * kLanes<float>);
    return group;
}

template <int BYTES, bool BF16> struct Single16 : Packed<kGroup, BYTES * kGroup, Scales::elsewhere, false> {
    using Block = Sixteen;
    CLEARHEAD_INLINE void read(const uint8_t* block, Block& to) {
        if constexpr (BYTES == 4) {
            std::memcpy(to.number, block, BYTES * kGroup);
        } else {
            uint16_t half[kGroup];
            std::memcpy(half, block, BYTES * kGroup);
            widen(half, to.number, kGroup, BF16);
        }
    }
};
using F32 = Single16<4, false>;
using F16 = Single16<2, false>;
using BF16 = Single16<2, true>;
using Q4_0 = Plain<4, false, 8>;
using Q4_1 = Plain<4, true, 0>;
using Q5_0 = Plain<5, false, 16>;
using Q5_1 = Plain<5, true, 0>;

// The same of a block that lies there. AVX2 spreads codes of 4 bits, and widens their scale, as it loads them: both
// halves of a vector have the 16 bytes, and each takes the four that are its numbers.
template <class K> CLEARHEAD_INLINE Group group_at(const uint8_t* block, const typename K::Block& read, int g) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (K::in_halves.size == 16) {
        const auto wide = [&](int at) {
            int16_t half;
            std::memcpy(&half, block + at, 2);
            return (Vec<float>)_mm256_cvtph_ps(_mm_set1_epi16(half));
        };
        const Vec<float> scale = wide(0), offset = K::has_offset ? wide(2) : scale * -float(K::in_halves.centre);
        __m256i code = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(block + K::in_halves.first)));
        code = _mm256_and_si256(g ? _mm256_srli_epi16(code, 4) : code, _mm256_set1_epi8(15));
        Group group;
        for (int i = 0; i < 2; ++i) {
            const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            const __m256i place = _mm256_add_epi32(lane, _mm256_set1_epi32(8 * i - 256));  // one byte, then three of 0
            group.part[i] = fma(scale, (Vec<float>)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(code, place)), offset);
        }
        return group;
    }
#endif
    return group_of(read, g);
}

// A block as it is read from a file.
template <class K> CLEARHEAD_INLINE typename K::Block block_at(const uint8_t* from) {
    typename K::Block block;
    K::read(from, block);
    return block;
}

// Unpacks the numbers `first` … `last` of a row: whole blocks, or any count of single numbers, the last of them padded
// with zeros to 16.
template <class K> CLEARHEAD_INLINE void unpack_block(const uint8_t* block, float* to) {
    const typename K::Block read = block_at<K>(block);
    for (int g = 0; g < K::numbers / kGroup; ++g) {
        const Group group = group_at<K>(block, read, g);
        for (int i = 0; i < kGroup / kLanes<float>; ++i) store(to + g * kGroup + i * kLanes<float>, group.part[i]);
    }
}

template <class K> void unpack(const uint8_t* row, int64_t first, int64_t last, float* to) {
    const uint8_t* block = row + first * K::bytes / K::numbers;
    for (; first + K::numbers <= last; first += K::numbers, block += K::bytes, to += K::numbers)
        unpack_block<K>(block, to);
    if (first == last) return;
    uint8_t rest[K::bytes] = {};
    std::memcpy(rest, block, (last - first) * K::bytes / K::numbers);
    unpack_block<K>(rest, to);
}

// sum[r] += Σ_k x[k]·row r [k], lane by lane, over all blocks but a last one that is not whole; returns their numbers.
template <class K, int ROWS> CLEARHEAD_INLINE int64_t dot(const uint8_t* const (&rows)[ROWS], int64_t ahead,
                                                          int64_t columns, const float* x, Vec<float> (&sum)[ROWS]) {
    int64_t k = 0;
    Vec<float> here[ROWS];  // in registers
    std::memcpy(here, sum, sizeof here);
    for (int64_t from = 0; k + K::numbers <= columns; k += K::numbers, from += K::bytes) {
        typename K::Block read[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            for (int i = 0; i < K::bytes; i += 64) __builtin_prefetch(rows[r] + from + ahead + i);
            K::read(rows[r] + from, read[r]);
        }
#pragma GCC unroll 8
        for (int g = 0; g < K::numbers / kGroup; ++g)
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const Group group = group_at<K>(rows[r] + from, read[r], g);
                for (int i = 0; i < kGroup / kLanes<float>; ++i)
                    here[r] = fma(load(x + k + g * kGroup + i * kLanes<float>), group.part[i], here[r]);
            }
    }
    std::memcpy(sum, here, sizeof here);
    return k;
}

// Calls work.template operator()<K>() for the packing of that name.
template <class Work> CLEARHEAD_INLINE void with_packing(Packing packing, Work work) {
    switch (packing) {
#define CLEARHEAD_PACKING_CASE(name, numbers, bytes) \
    case Packing::name:                              \
        return work.template operator()<name>();
        CLEARHEAD_PACKINGS(CLEARHEAD_PACKING_CASE)
    }
}

}  // namespace
}  // namespace clearhead
