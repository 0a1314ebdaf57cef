// How model files pack numbers: blocks of small integers with a scale, and often an offset, for each group of 16. The
// layouts are those of ggml (the package gguf unpacks them too, and a test compares both).
#pragma once

#include "products.hpp"
#include "simd.hpp"

namespace clearhead {
namespace {

constexpr int kGroup = 16;  // numbers that share a scale and an offset: number = scale·code + offset

template <int NUMBERS> struct Codes {
    int8_t code[NUMBERS];
    float scale[NUMBERS / kGroup], offset[NUMBERS / kGroup];
};

CLEARHEAD_INLINE float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return from_f16(bits);
}

CLEARHEAD_INLINE uint32_t word_at(const uint8_t* from, int bytes) {
    uint32_t word = 0;
    for (int i = 0; i < bytes; ++i) word |= uint32_t(from[i]) << (8 * i);
    return word;
}

constexpr int8_t kCurve[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The lower and the upper halves of COUNT bytes, less `centre`. What is stored here is loaded in parts of 16 bytes: a
// processor waits where a load takes more than one store wrote.
template <int COUNT> CLEARHEAD_INLINE void halves(const uint8_t* bytes, int8_t* low, int8_t* high, int centre = 0) {
    for (int from = 0; from < COUNT; from += 16) {
        for (int i = from; i < from + 16; ++i) low[i] = int8_t((bytes[i] & 15) - centre);
        for (int i = from; i < from + 16; ++i) high[i] = int8_t((bytes[i] >> 4) - centre);
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
template <int BITS, bool OFFSET, int CENTRE> struct Plain {
    static constexpr int numbers = 32, bytes = 2 + 2 * OFFSET + 4 * (BITS == 5) + 16;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        to.scale[0] = to.scale[1] = half_at(block);
        to.offset[0] = to.offset[1] = OFFSET ? half_at(block + 2) : 0;
        halves<16>(block + bytes - 16, to.code, to.code + 16, CENTRE);
        if (BITS == 5) add_sixteen(to.code, word_at(block + bytes - 20, 4));
    }
};

struct Q8_0 {
    static constexpr int numbers = 32, bytes = 34;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        to.scale[0] = to.scale[1] = half_at(block);
        to.offset[0] = to.offset[1] = 0;
        std::memcpy(to.code, block + 2, 32);
    }
};

struct IQ4_NL {
    static constexpr int numbers = 32, bytes = 18;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        Plain<4, false, 0>::read(block, to);
        look_up<32>(to.code, kCurve);
    }
};

struct MXFP4 {  // a power of 2 as the scale
    static constexpr int numbers = 32, bytes = 17;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        // 2^(e − 128): the codes are twice the numbers. Below float's normal range it is a fraction's bit.
        const uint32_t e = block[0], bits = e >= 2 ? (e - 1) << 23 : uint32_t{0x200000} << e;
        std::memcpy(to.scale, &bits, 4);
        to.scale[1] = to.scale[0];
        to.offset[0] = to.offset[1] = 0;
        halves<16>(block + 1, to.code, to.code + 16);
        look_up<32>(to.code, kTwiceE2m1);
    }
};

// Scales and offsets of 6 bits for eight groups of 32, in 12 bytes.
CLEARHEAD_INLINE void read_eight(const uint8_t* block, const uint8_t* packed, Codes<256>& to) {
    const float scale = half_at(block), offset = -half_at(block + 2);
    for (int i = 0; i < 8; ++i) {
        const int j = i % 4, high = packed[8 + j];
        const int s = i < 4 ? packed[j] & 63 : (high & 15) | packed[j] >> 6 << 4;
        const int m = i < 4 ? packed[4 + j] & 63 : high >> 4 | packed[4 + j] >> 6 << 4;
        to.scale[2 * i] = to.scale[2 * i + 1] = scale * float(s);
        to.offset[2 * i] = to.offset[2 * i + 1] = offset * float(m);
    }
}

// Blocks of 256.
struct Q2_K {
    static constexpr int numbers = 256, bytes = 84;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        const float scale = half_at(block + 80), offset = -half_at(block + 82);
        for (int i = 0; i < 16; ++i)
            to.scale[i] = scale * float(block[i] & 15), to.offset[i] = offset * float(block[i] >> 4);
        for (int n = 0; n < 2; ++n)
            for (int j = 0; j < 4; ++j)
                for (int i = 0; i < 32; ++i)
                    to.code[128 * n + 32 * j + i] = int8_t(block[16 + 32 * n + i] >> 2 * j & 3);
    }
};

struct Q3_K {
    static constexpr int numbers = 256, bytes = 110;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
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

struct Q4_K {
    static constexpr int numbers = 256, bytes = 144;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        read_eight(block, block + 4, to);
        for (int n = 0; n < 4; ++n) halves<32>(block + 16 + 32 * n, to.code + 64 * n, to.code + 64 * n + 32);
    }
};

struct Q5_K {
    static constexpr int numbers = 256, bytes = 176;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        read_eight(block, block + 4, to);
        for (int n = 0; n < 4; ++n) halves<32>(block + 48 + 32 * n, to.code + 64 * n, to.code + 64 * n + 32);
        for (int n = 0; n < 8; ++n)
            for (int i = 0; i < 32; ++i) to.code[32 * n + i] |= int8_t((block[16 + i] >> n & 1) << 4);
    }
};

struct Q6_K {
    static constexpr int numbers = 256, bytes = 210;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
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

struct IQ4_XS {
    static constexpr int numbers = 256, bytes = 136;
    CLEARHEAD_INLINE void read(const uint8_t* block, Codes<numbers>& to) {
        const float scale = half_at(block);
        const uint32_t upper = word_at(block + 2, 2);
        for (int i = 0; i < 8; ++i) {
            const int six = (block[4 + i / 2] >> 4 * (i % 2) & 15) | int(upper >> 2 * i & 3) << 4;
            to.scale[2 * i] = to.scale[2 * i + 1] = scale * float(six - 32);
            to.offset[2 * i] = to.offset[2 * i + 1] = 0;
            halves<16>(block + 8 + 16 * i, to.code + 32 * i, to.code + 32 * i + 16);
        }
        look_up<256>(to.code, kCurve);
    }
};

// ── from codes to numbers ──

struct Group {  // of 16 numbers
    Vec<float> part[kGroup / kLanes<float>];
};

template <int NUMBERS> CLEARHEAD_INLINE Group group_of(const Codes<NUMBERS>& codes, int g) {
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
        part = fma(broadcast<float>(codes.scale[g]), part, broadcast<float>(codes.offset[g]));
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

template <int BYTES, bool BF16> struct Single16 {
    static constexpr int numbers = kGroup, bytes = BYTES * kGroup;
    CLEARHEAD_INLINE void read(const uint8_t* block, Sixteen& to) {
        if constexpr (BYTES == 4) {
            std::memcpy(to.number, block, bytes);
        } else {
            uint16_t half[kGroup];
            std::memcpy(half, block, bytes);
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

template <class K> struct Read {  // a block of packing K, as it is read from a file
    std::conditional_t<std::is_same_v<K, F32> || std::is_same_v<K, F16> || std::is_same_v<K, BF16>, Sixteen,
                       Codes<K::numbers>>
        block;
    Read(const uint8_t* from) { K::read(from, block); }
};

// Unpacks the numbers `first` … `last` of a row: whole blocks, or any count of single numbers, the last of them padded
// with zeros to 16.
template <class K> void unpack(const uint8_t* row, int64_t first, int64_t last, float* to) {
    const auto write = [&](const uint8_t* block) {
        const Read<K> read(block);
        for (int g = 0; g < K::numbers / kGroup; ++g) {
            const Group group = group_of(read.block, g);
            for (int i = 0; i < kGroup / kLanes<float>; ++i, to += kLanes<float>) store(to, group.part[i]);
        }
    };
    const uint8_t* block = row + first * K::bytes / K::numbers;
    for (; first + K::numbers <= last; first += K::numbers, block += K::bytes) write(block);
    if (first == last) return;
    uint8_t rest[K::bytes] = {};
    std::memcpy(rest, block, (last - first) * K::bytes / K::numbers);
    write(rest);
}

// sum[r] += Σ_k x[k]·row r [k], lane by lane, over all blocks but a last one that is not whole; returns their numbers.
template <class K, int ROWS> CLEARHEAD_INLINE int64_t dot(const uint8_t* const (&rows)[ROWS], int64_t columns,
                                                          const float* x, Vec<float> (&sum)[ROWS]) {
    int64_t k = 0;
    for (int64_t from = 0; k + K::numbers <= columns; k += K::numbers, from += K::bytes) {
        const Read<K> read[] = {rows[0] + from, rows[1] + from, rows[2] + from, rows[3] + from};
        for (int g = 0; g < K::numbers / kGroup; ++g) {
            Group group[ROWS];
            for (int r = 0; r < ROWS; ++r) group[r] = group_of(read[r].block, g);
            for (int i = 0; i < kGroup / kLanes<float>; ++i)
                for (int r = 0; r < ROWS; ++r)
                    sum[r] = fma(load(x + k + g * kGroup + i * kLanes<float>), group[r].part[i], sum[r]);
        }
    }
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
