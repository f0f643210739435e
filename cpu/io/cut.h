// How a request becomes blocks: which bytes the next one moves, and whether they can move directly.
#pragma once

#include <cstdint>

namespace zk {
namespace io {

struct Span {
    uint64_t address, nbytes;
    uint32_t memory_align, offset_align;
    bool padded;  // the memory goes on to the next multiple of the alignment
};

struct Cut {
    uint64_t user_nbytes;    // of the caller's span
    uint64_t device_nbytes;  // with padding
    bool bounce;
};

inline uint64_t align_up(uint64_t n, uint64_t align) { return (n + align - 1) / align * align; }

// The block that begins `issued` bytes into the span. All but the last are whole blocks, so that offsets stay aligned;
// a last part below the alignment goes alone, so that only that part is copied.
inline Cut next_cut(const Span &span, uint64_t issued, uint64_t block) {
    const uint64_t rest = span.nbytes - issued;
    const uint64_t most = align_up(block, span.offset_align);
    const uint64_t user = rest < most ? rest : most;
    const uint64_t padded = align_up(user, span.offset_align);
    if ((span.address + issued) % span.memory_align != 0) return {user, padded, true};
    if (padded == user || span.padded) return {user, padded, false};
    const uint64_t body = padded - span.offset_align;
    if (body) return {body, body, false};
    return {user, padded, true};
}

}  // namespace io
}  // namespace zk
