// What the entry points share: how work is cut, and which dtypes there are. Internal.
#pragma once

#include "pool.h"
#include "table.h"

namespace zk {

// Elements a thread takes at a time: long runs for the prefetchers, fair shares at the end.
constexpr int64_t GRAIN = 1 << 16;
constexpr int64_t INLINE = 1 << 15;     // elements below which waking threads costs more than it brings
constexpr int64_t STREAMED = 16 << 20;  // bytes of written-only output from which it goes past the caches

inline int workers_for(int64_t numel) { return numel < INLINE ? 1 : pool_threads(); }

inline bool is_float(uint32_t dtype) { return dtype == ZK_F32 || dtype == ZK_BF16 || dtype == ZK_F16; }

}  // namespace zk
