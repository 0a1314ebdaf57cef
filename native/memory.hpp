// Aligned memory, and how a thread keeps it from call to call.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace clearhead {

struct Free {
    std::align_val_t alignment{1};
    void operator()(char* p) const { ::operator delete(p, alignment); }
};
using Buffer = std::unique_ptr<char, Free>;

// Memory that a thread keeps from call to call: with CALL that of a whole call, else one thread's scratch. The thread
// gives it away while a call uses it: a signal's handler may call the kernel again, and gets other memory. A call's is
// kept unless it is large: the system clears fresh pages, and that takes longer than packing keys into them.
template <bool CALL> class KeptMemory {
  public:
    KeptMemory() : data(std::move(kept)), bytes(std::exchange(kept_bytes, 0)) {}
    ~KeptMemory() {
        if (bytes < kept_bytes || (CALL && bytes > kMost)) return;
        kept = std::move(data);
        kept_bytes = bytes;
    }
    char* at_least(int64_t wanted) {
        if (wanted <= bytes) return data.get();
        data.reset();
        bytes = 0;
        const int64_t page = CALL && wanted >= kHugePage ? kHugePage : 4096, size = (wanted + page - 1) / page * page;
        const auto aligned = std::align_val_t(page);  // std::aligned_alloc is missing on Windows
        data = Buffer(static_cast<char*>(::operator new(std::size_t(size), aligned)), Free{aligned});
#if defined(__linux__)
        if (page == kHugePage) madvise(data.get(), size, MADV_HUGEPAGE);
#endif
        bytes = size;
        return data.get();
    }

  private:
    static constexpr int64_t kMost = int64_t{16} << 20, kHugePage = int64_t{2} << 20;
    inline static thread_local Buffer kept;
    inline static thread_local int64_t kept_bytes = 0;
    Buffer data;
    int64_t bytes;
};

}  // namespace clearhead
