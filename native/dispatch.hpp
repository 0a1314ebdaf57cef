// The choice of the instruction set, and the passes over a problem.
#pragma once

#include <vector>

#include "attend.hpp"

namespace clearhead {

// The fastest level that the processor has and CLEARHEAD_ISA allows; chosen at the first call. Null when CLEARHEAD_ISA
// names a level that this build or this processor lacks.
const Level* level();
// Names of levels, fastest first, separated by spaces: those that this build and this processor have, those that this
// build has, and those that there are for this kind of processor.
const char* level_names();
const char* compiled_names();
const char* all_names();

// The row pass and the column pass, each of any number of jobs, whose tasks share the threads; the backward pass, and
// the two passes over what single edges did, of one job. They return false when `stop` ended the work early, and throw
// std::bad_alloc.
using Jobs = std::vector<Job>;
bool attend(Jobs jobs, bool (*stop)());
bool observe(Jobs jobs, bool (*stop)());
bool differentiate(Jobs jobs, bool (*stop)());
bool find_others(Jobs jobs, bool (*stop)());
bool find_effects(Jobs jobs, bool (*stop)());

}  // namespace clearhead
