// The choice of the instruction set, and the passes over a problem.
#pragma once

#include <string>
#include <vector>

#include "attend.hpp"

namespace clearhead {

// The instruction sets; chosen at the first call.
struct Choice {
    Level level{};
    bool chosen = false;  // false when CLEARHEAD_ISA names a level that this build or this processor lacks
    // Names of levels, fastest first, separated by spaces: those that this build and this processor have, those that
    // this build has, and those that there are for this kind of processor.
    std::string names, compiled, all;

    Choice();
};
const Choice& choice();
// The fastest level that the processor has and CLEARHEAD_ISA allows; null where none is chosen.
inline const Level* level() { return choice().chosen ? &choice().level : nullptr; }

// The row pass and the column pass, each of any number of jobs, whose tasks share the threads; the backward pass, and
// the two passes over what single edges did, of one job. They return false when `stop` ended the work early, and throw
// std::bad_alloc.
bool attend(std::vector<RowJob> jobs, bool (*stop)());
bool observe(std::vector<ColumnJob> jobs, bool (*stop)());
bool differentiate(GradientJob job, bool (*stop)());
bool find_others(OtherJob job, bool (*stop)());
bool find_effects(EffectJob job, bool (*stop)());

// A product by packed weights.
bool multiply(const ProductJob& whole, bool (*stop)());

}  // namespace clearhead
