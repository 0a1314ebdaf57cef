#include "dispatch.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace clearhead {

// The levels that CMakeLists.txt chose to compile, each in units that fill a part of it.
#define CLEARHEAD_LEVEL(name)                                                                                          \
    void fill_rows_##name(Level&);                                                                                     \
    void fill_columns_##name(Level&);                                                                                  \
    void fill_gradients_##name(Level&);                                                                                \
    void fill_effects_##name(Level&);                                                                                  \
    static void fill_##name(Level& level) {                                                                            \
        fill_rows_##name(level), fill_columns_##name(level), fill_gradients_##name(level), fill_effects_##name(level); \
    }
#if defined(CLEARHEAD_HAS_avx512bf16)
CLEARHEAD_LEVEL(avx512bf16)
#define CLEARHEAD_FILL_avx512bf16 fill_avx512bf16
#else
#define CLEARHEAD_FILL_avx512bf16 nullptr
#endif
#if defined(CLEARHEAD_HAS_avx512)
CLEARHEAD_LEVEL(avx512)
#define CLEARHEAD_FILL_avx512 fill_avx512
#else
#define CLEARHEAD_FILL_avx512 nullptr
#endif
#if defined(CLEARHEAD_HAS_avx2)
CLEARHEAD_LEVEL(avx2)
#define CLEARHEAD_FILL_avx2 fill_avx2
#else
#define CLEARHEAD_FILL_avx2 nullptr
#endif
#if defined(CLEARHEAD_HAS_sse2)
CLEARHEAD_LEVEL(sse2)
#define CLEARHEAD_FILL_sse2 fill_sse2
#else
#define CLEARHEAD_FILL_sse2 nullptr
#endif
#if defined(CLEARHEAD_HAS_neon)
CLEARHEAD_LEVEL(neon)
#define CLEARHEAD_FILL_neon fill_neon
#else
#define CLEARHEAD_FILL_neon nullptr
#endif

namespace {

struct Candidate {
    const char* name;
    bool available;        // on this processor
    void (*fill)(Level&);  // null where the level is not compiled
};

#if defined(__x86_64__)
struct Cpuid {  // one leaf of what the processor says of itself; all 0 where it has no such leaf
    unsigned a = 0, b = 0, c = 0, d = 0;
    Cpuid(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

bool all_bits(uint64_t word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!(word >> bit & 1)) return false;
    return true;
}

// Which registers the operating system saves for each thread (XCR0).
uint64_t saved_registers() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
}
#endif

// Asked of the processor itself: __builtin_cpu_supports knows no avx512bf16 in some compilers, and does not link with
// clang-cl.
int candidates(Candidate (&list)[4]) {
#if defined(__x86_64__)
    const Cpuid basic(1, 0), extended(7, 0), more(7, 1);
    const uint64_t saved = all_bits(basic.c, {27}) ? saved_registers() : 0;  // OSXSAVE
#if defined(__APPLE__)
    const bool saves_avx512 = true;  // macOS saves these registers from their first use on
#else
    const bool saves_avx512 = all_bits(saved, {5, 6, 7});
#endif
    const bool avx2 = all_bits(saved, {1, 2}) && all_bits(basic.c, {12, 28, 29}) &&          // FMA, AVX, F16C
                      all_bits(extended.b, {3, 5, 8});                                       // BMI1, AVX2, BMI2
    const bool avx512 = avx2 && saves_avx512 && all_bits(extended.b, {16, 17, 28, 30, 31});  // F, DQ, CD, BW, VL
    list[0] = {"avx512bf16", avx512 && all_bits(more.a, {5}), CLEARHEAD_FILL_avx512bf16};
    list[1] = {"avx512", avx512, CLEARHEAD_FILL_avx512};
    list[2] = {"avx2", avx2, CLEARHEAD_FILL_avx2};
    list[3] = {"sse2", true, CLEARHEAD_FILL_sse2};
    return 4;
#elif defined(__aarch64__)
    list[0] = {"neon", true, CLEARHEAD_FILL_neon};
    return 1;
#else
    return 0;
#endif
}

struct Choice {
    Level level{};
    bool chosen = false;
    std::string names, compiled, all;  // of this processor and this build; of this build; of any

    Choice() {
        Candidate list[4];
        const int count = candidates(list);
        const char* requested = std::getenv("CLEARHEAD_ISA");
        const auto add = [](std::string& to, const char* name) {
            if (!to.empty()) to += ' ';
            to += name;
        };
        for (int i = 0; i < count; ++i) {
            add(all, list[i].name);
            if (!list[i].fill) continue;
            add(compiled, list[i].name);
            if (!list[i].available) continue;
            add(names, list[i].name);
            if (chosen || (requested && *requested && std::strcmp(requested, list[i].name) != 0)) continue;
            list[i].fill(level);
            chosen = true;
        }
    }
};

const Choice& choice() {
    static const Choice made;
    return made;
}

}  // namespace

const Level* level() { return choice().chosen ? &choice().level : nullptr; }
const char* level_names() { return choice().names.c_str(); }
const char* compiled_names() { return choice().compiled.c_str(); }
const char* all_names() { return choice().all.c_str(); }

}  // namespace clearhead
