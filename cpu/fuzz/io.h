// What the harnesses of the disk engine share: scratch files with a model of their bytes, memory with guards around it.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <string>

#include "../zerokern_io.h"
#include "fuzz.h"

namespace fuzz {

constexpr uint64_t FILE_NBYTES = 384 << 10;
constexpr uint64_t MOST_NBYTES = 72 << 10;  // of one transfer
constexpr uint64_t SLOT_NBYTES = 96 << 10;  // that, what precedes it, and padding
constexpr unsigned char GUARD = 0xA5;

inline uint64_t up(uint64_t n, uint64_t align) { return (n + align - 1) / align * align; }

// A file that is gone when this object is. `known` says which bytes of the model are certain: after a write that
// failed, its span may hold anything.
class ScratchFile {
  public:
    // Direct where the file system beside the program has O_DIRECT; `coarse` asks for more alignment than needed.
    ScratchFile(bool direct, uint32_t coarse) : bytes(FILE_NBYTES), known(FILE_NBYTES, 1) {
        std::string path = folder() + "/scratch-XXXXXX";
        plain_ = mkstemp(&path[0]);
        if (plain_ < 0) std::perror(path.c_str()), std::abort();
        fd = direct ? open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT) : -1;
        if (fd >= 0 && zk_io_alignment(fd, &memory_align, &offset_align) != ZK_OK) memory_align = offset_align = 4096;
        if (fd < 0 || !memory_align) {
            if (fd >= 0) close(fd);
            fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
            memory_align = offset_align = 1;
        }
        memory_align *= coarse;
        offset_align *= coarse;
        unlink(path.c_str());
        if (fd < 0 || ftruncate(fd, FILE_NBYTES) != 0) std::perror("scratch file"), std::abort();
    }
    ScratchFile(const ScratchFile &) = delete;
    ScratchFile &operator=(const ScratchFile &) = delete;
    ~ScratchFile() {
        close(fd);
        close(plain_);
    }

    void cut_off(uint64_t end) {
        if (ftruncate(fd, static_cast<off_t>(end)) != 0) std::perror("ftruncate"), std::abort();
    }

    // The offset of a byte on the disk that is not the model's, or -1.
    int64_t first_wrong_byte() const {
        std::vector<unsigned char> found(FILE_NBYTES);
        if (pread(plain_, found.data(), FILE_NBYTES, 0) != static_cast<ssize_t>(FILE_NBYTES)) return FILE_NBYTES;
        for (uint64_t i = 0; i < FILE_NBYTES; ++i)
            if (known[i] && found[i] != bytes[i]) return static_cast<int64_t>(i);
        return -1;
    }

    int fd = -1;
    int32_t number = -1;
    uint32_t memory_align = 0, offset_align = 0;
    std::vector<unsigned char> bytes;
    std::vector<char> known;

  private:
    static std::string folder() {
        char path[4096];
        const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
        const std::string program(path, length > 0 ? static_cast<size_t>(length) : 0);
        return program.substr(0, program.find_last_of('/'));
    }

    int plain_ = -1;
};

// A span of memory with guards: in a slot of registered memory, or in a heap block that ends where the span does.
class Memory {
  public:
    // `slot`: null, or SLOT_NBYTES at a page. `lead`: how far from the page the span begins.
    Memory(char *slot, uint64_t lead, uint64_t nbytes, uint64_t padded)
        : nbytes_(nbytes), padded_(padded), own_(!slot) {
        const uint64_t whole = own_ ? 4096 + lead + padded : SLOT_NBYTES;
        void *base = slot;
        if (own_ && posix_memalign(&base, 4096, whole) != 0) std::abort();
        begin_ = static_cast<char *>(base);
        end_ = begin_ + whole;
        address = begin_ + (own_ ? 4096 : 0) + lead;
        std::memset(begin_, GUARD, whole);
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() {
        if (own_) std::free(begin_);
    }

    void fill(Random &random) {
        for (uint64_t i = 0; i < nbytes_; i += 8) {
            const uint64_t word = random.next();
            std::memcpy(address + i, &word, nbytes_ - i < 8 ? nbytes_ - i : 8);
        }
    }
    bool guards_are_whole() const { return is_guard(begin_, address) && is_guard(address + padded_, end_); }

    char *address;

  private:
    static bool is_guard(const char *begin, const char *end) {
        for (; begin < end; ++begin)
            if (static_cast<unsigned char>(*begin) != GUARD) return false;
        return true;
    }

    const uint64_t nbytes_, padded_;
    const bool own_;
    char *begin_, *end_;
};

}  // namespace fuzz
