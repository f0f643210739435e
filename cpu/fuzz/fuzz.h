// What the harnesses share: a generator, heap buffers of exact sizes, a comparison that treats every NaN alike, and a
// digest of results that is the same on every processor.
#pragma once

#include <cfenv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../zerokern_cpu.h"

namespace fuzz {

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {
        for (int i = 0; i < 8; ++i) next();
    }
    uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ * 0x2545F4914F6CDD1Dull;
    }
    uint64_t below(uint64_t n) { return (next() >> 11) % n; }
    bool one_in(uint64_t n) { return below(n) == 0; }
    double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    template <class T, size_t N>
    T pick(const T (&choices)[N]) {
        return choices[below(N)];
    }

  private:
    uint64_t state_;
};

enum class Kind { bytes, words, fp32, bf16, fp16, fp64 };

inline int64_t width_of(Kind kind) {
    switch (kind) {
        case Kind::bytes:
            return 1;
        case Kind::fp32:
            return 4;
        case Kind::fp64:
            return 8;
        default:
            return 2;
    }
}

inline Kind kind_of(uint32_t dtype) {
    return dtype == ZK_BF16 ? Kind::bf16 : dtype == ZK_F16 ? Kind::fp16 : Kind::fp32;
}

// numel elements that end where their heap block ends, `offset` bytes after its start: one byte further is a finding.
class Buffer {
  public:
    Buffer(Kind kind, int64_t numel, int64_t offset) : kind(kind), nbytes(numel * width_of(kind)), offset_(offset) {
        base_ = static_cast<char *>(std::malloc(static_cast<size_t>(offset + nbytes)));
        if (!base_) std::abort();
    }
    Buffer(const Buffer &other) : Buffer(other.kind, other.nbytes / width_of(other.kind), other.offset_) {
        std::memcpy(data(), other.data(), static_cast<size_t>(nbytes));
    }
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { std::free(base_); }

    char *data() const { return base_ + offset_; }

    // Any bits, NaNs and infinities among them; or every exponent; or values of a training run; or what lies on the
    // edge between two roundings, or next to it. All but the first with zeros.
    void fill(Random &random) {
        const uint64_t style = random.below(8);
        if (style == 0 || kind == Kind::bytes || kind == Kind::words) {
            for (int64_t i = 0; i < nbytes; ++i) data()[i] = static_cast<char>(random.next() >> 24);
            return;
        }
        for (int64_t i = 0; i < nbytes / width_of(kind); ++i) {
            const uint64_t exponent = style == 1 || style == 2 ? random.below(255) : 100 + random.below(30);
            const uint64_t bits = random.one_in(16) ? 0 : (exponent << 23) | (random.next() & 0x807FFFFF);
            put(i, static_cast<uint32_t>(style == 2 ? edge(bits, random) : bits));
        }
    }
    // The same values without a sign, as a sum of squares has none.
    void make_positive() {
        const int64_t width = width_of(kind);
        for (int64_t i = width - 1; i < nbytes; i += width) data()[i] = static_cast<char>(data()[i] & 0x7F);
    }

    const Kind kind;
    const int64_t nbytes;

  private:
    // The upper half of `bits` above a tie of bf16, fp16 or 24 bits, or above its neighbour.
    static uint64_t edge(uint64_t bits, Random &random) {
        static const uint64_t ties[] = {0, 0x80, 0x180, 0x1000, 0x3000, 0x7F80, 0x8000, 0xFF80};
        const uint64_t tie = random.pick(ties);
        return (bits & 0xFFFF0000) + (tie - 1 + random.below(3)) % 0x10000;
    }

    void put(int64_t i, uint32_t bits) {
        const uint16_t half = static_cast<uint16_t>(bits >> 16);
        const double wide = static_cast<double>(bits);
        if (kind == Kind::fp32)
            std::memcpy(data() + 4 * i, &bits, 4);
        else if (kind == Kind::fp64)
            std::memcpy(data() + 8 * i, &wide, 8);
        else
            std::memcpy(data() + 2 * i, &half, 2);
    }

    const int64_t offset_;
    char *base_;
};

inline bool is_nan(Kind kind, const char *p) {
    uint32_t word = 0;
    uint64_t wide = 0;
    uint16_t half = 0;
    switch (kind) {
        case Kind::fp32:
            std::memcpy(&word, p, 4);
            return (word & 0x7FFFFFFF) > 0x7F800000;
        case Kind::fp64:
            std::memcpy(&wide, p, 8);
            return (wide & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000;
        case Kind::bf16:
            std::memcpy(&half, p, 2);
            return (half & 0x7FFF) > 0x7F80;
        case Kind::fp16:
            std::memcpy(&half, p, 2);
            return (half & 0x7FFF) > 0x7C00;
        default:
            return false;
    }
}

// The codes of a block whose scale is not finite mean nothing. Without scales every element means something.
inline bool means_nothing(const Buffer *scales, int64_t i) {
    if (!scales) return false;
    uint32_t scale;
    std::memcpy(&scale, scales->data() + i / ZK_BLOCK * 4, 4);
    return (scale & 0x7F800000) == 0x7F800000;
}

// The first element that differs, or -1.
inline int64_t first_difference(const Buffer &a, const Buffer &b, const Buffer *scales) {
    const int64_t width = width_of(a.kind);
    for (int64_t i = 0; i < a.nbytes / width; ++i) {
        if (means_nothing(scales, i)) continue;
        const char *x = a.data() + i * width, *y = b.data() + i * width;
        if (std::memcmp(x, y, static_cast<size_t>(width)) != 0 && !(is_nan(a.kind, x) && is_nan(b.kind, y))) return i;
    }
    return -1;
}

// FNV-1a of what the scalar set wrote, where every NaN is the same: processors differ in the NaN that they make.
class Digest {
  public:
    void add(const Buffer &buffer, const Buffer *scales) {
        static const char nan[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        const int64_t width = width_of(buffer.kind);
        for (int64_t i = 0; i < buffer.nbytes / width; ++i) {
            if (means_nothing(scales, i)) continue;
            const char *p = buffer.data() + i * width;
            if (is_nan(buffer.kind, p)) p = nan;
            nbytes_ += static_cast<uint64_t>(width);
            for (int64_t byte = 0; byte < width; ++byte)
                state_ = (state_ ^ static_cast<unsigned char>(p[byte])) * 0x100000001B3ull;
        }
    }
    uint64_t value() const { return state_; }
    uint64_t nbytes() const { return nbytes_; }

  private:
    uint64_t nbytes_ = 0;
    uint64_t state_ = 0xCBF29CE484222325ull;
};

// Sizes around everything that a kernel cuts at.
inline int64_t some_numel(Random &random) {
    static const int64_t edges[] = {0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 383, 385};
    return random.one_in(3) ? static_cast<int64_t>(random.below(300)) : random.pick(edges);
}

// Elements lie where their type may; vectors lie anywhere.
inline int64_t some_offset(Random &random, Kind kind) {
    return random.one_in(2) ? 0 : static_cast<int64_t>(random.below(64)) / width_of(kind) * width_of(kind);
}

[[noreturn]] inline void fail(const char *entry, uint64_t execution, const char *what, int64_t detail) {
    std::fflush(stdout);
    std::fprintf(stderr, "%s, execution %llu: %s (%lld), on %s\n", entry, static_cast<unsigned long long>(execution),
                 what, static_cast<long long>(detail), zk_isa_active());
    std::exit(1);
}

// A caller may round as it likes; no result shows it.
inline void round_somehow(Random &random) { std::fesetround(random.one_in(4) ? FE_UPWARD : FE_TONEAREST); }

// The instruction sets of this machine, worst first.
inline std::vector<const char *> usable_sets() {
    std::vector<const char *> names;
    for (int i = 0; i < zk_isa_count(); ++i)
        if (zk_isa_usable(i)) names.push_back(zk_isa_name(i));
    return names;
}

// The bytes of one element of both, lowest first.
inline void print_element(const Buffer &got, const Buffer &scalar, int64_t i) {
    const int64_t width = width_of(got.kind);
    for (int64_t byte = i * width; byte < (i + 1) * width; ++byte)
        std::fprintf(stderr, "byte %lld: %02x, scalar has %02x\n", static_cast<long long>(byte),
                     got.data()[byte] & 0xFF, scalar.data()[byte] & 0xFF);
}

struct Counts {
    uint64_t accepted = 0, refused = 0;
    Digest digest{};  // of the arithmetic, after valid calls
};

using Entry = Counts (*)(Random &random, uint64_t executions);

Counts fuzz_update(Random &random, uint64_t executions);
Counts fuzz_sumsq(Random &random, uint64_t executions);
Counts fuzz_accumulate(Random &random, uint64_t executions);
Counts fuzz_collect(Random &random, uint64_t executions);
Counts fuzz_accumulate_sumsq(Random &random, uint64_t executions);
Counts fuzz_convert(Random &random, uint64_t executions);
Counts fuzz_stream(Random &random, uint64_t executions);
Counts fuzz_copies(Random &random, uint64_t executions);
Counts fuzz_gradients(Random &random, uint64_t executions);
Counts fuzz_control(Random &random, uint64_t executions);
Counts fuzz_crc32c(Random &random, uint64_t executions);
Counts fuzz_changed(Random &random, uint64_t executions);
Counts fuzz_weighted_sum(Random &random, uint64_t executions);
Counts fuzz_io(Random &random, uint64_t executions);

}  // namespace fuzz
