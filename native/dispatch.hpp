// The one decision about the processor, and the cut of a problem into tasks.
#pragma once

#include "attend.hpp"

namespace clearhead {

// What the processor and CLEARHEAD_ISA allow; decided when first asked. Null when CLEARHEAD_ISA names a level that this
// build or this processor has not.
const Level* level();
const char* level_names();  // those that this processor can run, fastest first, separated by spaces

// Both return false when `stop` ended the work early, and throw std::bad_alloc.
bool attend(Job job, bool (*stop)());
bool observe(Job job, bool (*stop)());
bool differentiate(Job job, bool (*stop)());

}  // namespace clearhead
