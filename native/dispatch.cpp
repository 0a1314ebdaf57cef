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

#if defined(__x86_64__)
void fill_avx512bf16(Level&);
void fill_avx512(Level&);
void fill_avx2(Level&);
void fill_sse2(Level&);
#elif defined(__aarch64__)
void fill_neon(Level&);
#endif

namespace {

struct Candidate {
    const char* name;
    bool available;
    void (*fill)(Level&);
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
    list[0] = {"avx512bf16", avx512 && all_bits(more.a, {5}), fill_avx512bf16};
    list[1] = {"avx512", avx512, fill_avx512};
    list[2] = {"avx2", avx2, fill_avx2};
    list[3] = {"sse2", true, fill_sse2};
    return 4;
#elif defined(__aarch64__)
    list[0] = {"neon", true, fill_neon};
    return 1;
#else
    return 0;
#endif
}

struct Choice {
    Level level{};
    bool found = false;
    std::string names;

    Choice() {
        Candidate list[4];
        const int count = candidates(list);
        const char* requested = std::getenv("CLEARHEAD_ISA");
        for (int i = 0; i < count; ++i) {
            if (!list[i].available) continue;
            names += names.empty() ? "" : " ";
            names += list[i].name;
            if (found || (requested && *requested && std::strcmp(requested, list[i].name) != 0)) continue;
            list[i].fill(level);
            found = true;
        }
    }
};

const Choice& choice() {
    static const Choice made;
    return made;
}

}  // namespace

const Level* level() { return choice().found ? &choice().level : nullptr; }
const char* level_names() { return choice().names.c_str(); }

}  // namespace clearhead
