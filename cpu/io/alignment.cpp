// What O_DIRECT asks of a file, as the file system itself says.
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../zerokern_io.h"

namespace {

// The kernel's struct statx, up to what is read here: system headers may be older.
struct Statx {
    uint32_t mask;
    uint32_t before[37];
    uint32_t memory_align, offset_align;
    uint64_t after[12];
};
static_assert(sizeof(Statx) == 256, "the kernel's layout");
constexpr unsigned ALIGNMENT = 0x2000;

}  // namespace

int zk_io_alignment(int fd, uint32_t *memory_align, uint32_t *offset_align) {
    if (!memory_align || !offset_align) return ZK_E_NULL;
    Statx found = {};
    constexpr int empty_path = 0x1000;
    if (syscall(SYS_statx, fd, "", empty_path, ALIGNMENT, &found) < 0) return errno == ENOSYS ? ENOTSUP : errno;
    if (!(found.mask & ALIGNMENT)) return ENOTSUP;
    *memory_align = found.memory_align;
    *offset_align = found.offset_align;
    return ZK_OK;
}
