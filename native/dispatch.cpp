#include "dispatch.hpp"

#include <cstdlib>
#include <cstring>
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
bool has_avx512bf16() {  // not among __builtin_cpu_supports' names in every compiler
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif

int candidates(Candidate (&list)[4]) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    list[0] = {"avx512bf16", avx512 && has_avx512bf16(), fill_avx512bf16};
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
