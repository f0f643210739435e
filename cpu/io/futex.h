// Sleeping on one word, so that a thread waits for its own request and nothing else.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

namespace zk {
namespace io {

inline void futex_wake(int32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

// Sleeps while *word is `value`, at most until the monotonic time `deadline` (null: without end). Returns 0 or errno.
inline int futex_wait(int32_t *word, int32_t value, const timespec *deadline) {
    // FUTEX_WAIT takes a duration, its bitset form a point in time, which an interrupted sleep can go on with
    const long n =
        syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, value, deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
    return n < 0 ? errno : 0;
}

}  // namespace io
}  // namespace zk
