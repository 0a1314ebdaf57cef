#include "dispatch.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace clearhead {

bool multiplies_in_tiles = false;

// Fills a level, of which each part is a unit of its own.
#define CLEARHEAD_LEVEL(which)                                                                    \
    void fill_received_##which(Level&);                                                           \
    void fill_gradients_##which(Level&);                                                          \
    void fill_effects_##which(Level&);                                                            \
    void fill_packed_##which(Level&);                                                             \
    [[maybe_unused]] static inline void fill_##which(Level& level) {                              \
        fill_received_##which(level), fill_gradients_##which(level), fill_effects_##which(level); \
        fill_packed_##which(level), level.name = #which;                                          \
    }
CLEARHEAD_LEVEL(avx512bf16)
[[maybe_unused]] static inline void fill_amx(Level& level) {  // the same code, which looks at multiplies_in_tiles
    fill_avx512bf16(level), level.name = "amx", multiplies_in_tiles = true;
}
CLEARHEAD_LEVEL(avx512)
CLEARHEAD_LEVEL(avx2)
CLEARHEAD_LEVEL(sse2)
CLEARHEAD_LEVEL(neon)
// CLEARHEAD_HAS_…: whether CMakeLists.txt chose to compile the level.
#define CLEARHEAD_CANDIDATE(name, available) {#name, available, CLEARHEAD_HAS_##name ? fill_##name : nullptr}

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

// Whether this process may use the tile registers, which Linux saves only for those that ask.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}
#endif

// Asked of the processor itself: __builtin_cpu_supports knows no avx512bf16 in some compilers, and does not link with
// clang-cl.
std::vector<Candidate> candidates() {
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
    const bool pairs = avx512 && all_bits(more.a, {5}) && all_bits(extended.c, {11});        // BF16, VNNI
    const bool amx = pairs && all_bits(saved, {17, 18}) && all_bits(extended.d, {22, 24}) && may_use_tiles();
    return {CLEARHEAD_CANDIDATE(amx, amx), CLEARHEAD_CANDIDATE(avx512bf16, pairs), CLEARHEAD_CANDIDATE(avx512, avx512),
            CLEARHEAD_CANDIDATE(avx2, avx2), CLEARHEAD_CANDIDATE(sse2, true)};
#elif defined(__aarch64__)
    return {CLEARHEAD_CANDIDATE(neon, true)};
#else
    return {};
#endif
}

}  // namespace

Choice::Choice() {
    const char* requested = std::getenv("CLEARHEAD_ISA");
    const auto add = [](std::string& to, const char* name) { (to += to.empty() ? "" : " ") += name; };
    for (const Candidate& one : candidates()) {
        add(all, one.name);
        if (!one.fill) continue;
        add(compiled, one.name);
        if (!one.available) continue;
        add(names, one.name);
        if (chosen || (requested && *requested && std::strcmp(requested, one.name) != 0)) continue;
        one.fill(level);
        chosen = true;
    }
}

const Choice& choice() {
    static const Choice made;
    return made;
}

}  // namespace clearhead
