// Aligned memory. C++17's aligned `operator new` works on every system; std::aligned_alloc is missing on Windows.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace clearhead {

struct Free {
    std::align_val_t alignment{1};
    void operator()(char* p) const { ::operator delete(p, alignment); }
};
using Buffer = std::unique_ptr<char, Free>;

// Throws std::bad_alloc.
inline Buffer aligned_bytes(int64_t alignment, int64_t bytes) {
    const auto aligned = std::align_val_t(alignment);
    return Buffer(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), aligned)), Free{aligned});
}

}  // namespace clearhead
