// The packed form of a delta: of each block of ZK_BLOCK elements how many changed, which, and their new words. And the
// checksum of all words that tells whether a delta fits.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "work.h"

namespace {

constexpr int64_t LISTED = 16;  // from so many on a block's places are its bits

int64_t length_of(int64_t numel, int64_t base) { return numel - base < ZK_BLOCK ? numel - base : ZK_BLOCK; }
int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }
int64_t place_bytes(int64_t count, int64_t length) {
    return count == 0 || count == length ? 0 : count < LISTED ? count : bytes_of(length);
}

// The bits of one block in two words; what lies behind its end is 0.
struct BlockBits {
    uint64_t words[2] = {0, 0};

    BlockBits(const uint8_t *mask, int64_t length) {
        static_assert(sizeof words == ZK_BLOCK / 8, "a block's bits");
        if (length == ZK_BLOCK) {
            std::memcpy(words, mask, sizeof words);
            return;
        }
        for (int64_t byte = 0; byte < bytes_of(length); ++byte)
            words[byte / 8] |= static_cast<uint64_t>(mask[byte]) << (byte % 8 * 8);
        for (int64_t w = 0; w < 2; ++w)
            if (length < 64 * (w + 1)) words[w] &= length <= 64 * w ? 0 : (1ull << (length - 64 * w)) - 1;
    }
    int64_t count() const { return __builtin_popcountll(words[0]) + __builtin_popcountll(words[1]); }
    template <class Each>
    void for_each(const Each &each) const {
        for (int w = 0; w < 2; ++w)
            for (uint64_t rest = words[w]; rest; rest &= rest - 1) each(64 * w + __builtin_ctzll(rest));
    }
};

template <class Word>
void pack(const uint8_t *mask, const Word *from, int64_t numel, uint8_t *places, Word *values) {
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base);
        const BlockBits bits(mask + base / 8, length);
        const int64_t count = bits.count(), nbytes = place_bytes(count, length);
        if (nbytes && count < LISTED) {
            bits.for_each([&](int64_t place) {
                *values++ = from[base + place];
                *places++ = static_cast<uint8_t>(place);
            });
            continue;
        }
        bits.for_each([&](int64_t place) { *values++ = from[base + place]; });
        for (int64_t byte = 0; byte < nbytes; ++byte)
            *places++ = static_cast<uint8_t>(bits.words[byte / 8] >> (byte % 8 * 8));
    }
}

struct Sizes {
    int64_t places = 0, values = 0;
};

// What the packed form takes, and how many changed in each block.
Sizes count(const uint8_t *mask, int64_t numel, uint8_t *counts) {
    Sizes sizes;
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base), count = BlockBits(mask + base / 8, length).count();
        if (counts) counts[base / ZK_BLOCK] = static_cast<uint8_t>(count);
        sizes.places += place_bytes(count, length);
        sizes.values += count;
    }
    return sizes;
}

// Packs GRAIN elements after GRAIN elements. Where they go follows from the mask, so that threads take them in order.
template <class Word>
struct PackWork {
    const uint8_t *mask;
    const Word *from;
    int64_t numel;
    uint8_t *places;
    Word *values;
    int64_t next = 0;
    std::mutex taking{};

    static void task(void *context) {
        PackWork &w = *static_cast<PackWork *>(context);
        for (;;) {
            std::unique_lock<std::mutex> lock(w.taking);
            const int64_t begin = w.next, numel = std::min(w.numel - begin, zk::GRAIN);
            if (numel <= 0) return;
            uint8_t *const places = w.places;
            Word *const values = w.values;
            const Sizes sizes = count(w.mask + begin / 8, numel, nullptr);
            w.next += numel;
            w.places += sizes.places;
            w.values += sizes.values;
            lock.unlock();
            pack(w.mask + begin / 8, w.from + begin, numel, places, values);
        }
    }
};

template <class Word>
void pack_in_pool(const uint8_t *mask, const void *from, int64_t numel, uint8_t *places, void *values) {
    PackWork<Word> work{mask, static_cast<const Word *>(from), numel, places, static_cast<Word *>(values)};
    zk::pool_run(PackWork<Word>::task, &work, zk::workers_for(numel));
}

// Whether places are those of a block: ascending, within it, as many as were counted.
bool fit(const uint8_t *places, int64_t count, int64_t length) {
    if (count < LISTED) {
        for (int64_t i = 0; i < count; ++i)
            if (places[i] >= length || (i > 0 && places[i] <= places[i - 1])) return false;
        return true;
    }
    return BlockBits(places, length).count() == count && (length % 8 == 0 || !(places[length / 8] >> length % 8));
}

int check(const uint8_t *counts, const uint8_t *places, int64_t nplaces, int64_t nvalues, int64_t numel) {
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base), count = counts[base / ZK_BLOCK];
        const int64_t nbytes = place_bytes(count, length);
        if (count > length || (nplaces -= nbytes) < 0 || (nvalues -= count) < 0) return ZK_E_COUNT;
        if (nbytes && !fit(places, count, length)) return ZK_E_VALUE;
        places += nbytes;
    }
    return nplaces || nvalues ? ZK_E_COUNT : ZK_OK;
}

template <class Word>
void unpack(const uint8_t *counts, const uint8_t *places, const Word *values, int64_t numel, Word *to) {
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base), count = counts[base / ZK_BLOCK];
        const int64_t nbytes = place_bytes(count, length);
        if (count == length) {
            std::memcpy(to + base, values, sizeof(Word) * static_cast<size_t>(count));
        } else if (count < LISTED) {
            for (int64_t i = 0; i < count; ++i) to[base + places[i]] = values[i];
        } else {
            const Word *next = values;
            BlockBits(places, length).for_each([&](int64_t place) { to[base + place] = *next++; });
        }
        places += nbytes;
        values += count;
    }
}

// The sum of (number + 1) * word, in vectors that every baseline has. A lane holds as many words as it has parts. With
// A the sum of the words of a part, and B that of its A after each of R rows: B counts row r R - r times, so that the
// sum of r * word is R A - B, without a product for each word.
template <class Word, class Lane>
struct WeightedSum {
    typedef Lane Lanes __attribute__((vector_size(16)));
    static constexpr int PARTS = sizeof(Lane) / sizeof(Word), BITS = 8 * sizeof(Word), ROW = 16 / sizeof(Word);
    static constexpr int ROWS = 256;  // of 16-bit words B is below 2^32

    // Of ROWS rows; the first word has the number `first`.
    static uint64_t of_rows(const Word *words, uint64_t first) {
        Lanes a[PARTS] = {}, b[PARTS] = {};
        for (int row = 0; row < ROWS; ++row) {
            Lanes x;
            std::memcpy(&x, words + row * ROW, sizeof x);
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) {
                const Lanes shifted = x >> static_cast<Lane>(BITS * part);
                a[part] += part == PARTS - 1 ? shifted : shifted & static_cast<Lane>(static_cast<Word>(-1));
                b[part] += a[part];
            }
        }
        uint64_t sum = 0;
        for (int place = 0; place < ROW; ++place) {
            const uint64_t all = a[place % PARTS][place / PARTS], running = b[place % PARTS][place / PARTS];
            sum += (first + static_cast<uint64_t>(place) + 1) * all + ROW * (ROWS * all - running);
        }
        return sum;
    }
    static uint64_t of(const void *from, int64_t begin, int64_t end, uint64_t first) {
        const Word *const words = static_cast<const Word *>(from);
        uint64_t sum = 0;
        int64_t i = begin;
        for (; i + ROWS * ROW <= end; i += ROWS * ROW) sum += of_rows(words + i, first + static_cast<uint64_t>(i));
        for (; i < end; ++i) sum += (first + static_cast<uint64_t>(i) + 1) * words[i];
        return sum;
    }
};

struct SumWork {
    uint64_t (*of)(const void *words, int64_t begin, int64_t end, uint64_t first);
    const void *words;
    int64_t numel, grain;
    uint64_t first;
    std::atomic<int64_t> next{0};
    std::atomic<uint64_t> sum{0};
};

void sum_task(void *context) {
    SumWork &w = *static_cast<SumWork *>(context);
    uint64_t sum = 0;
    for (int64_t begin; (begin = w.next.fetch_add(w.grain, std::memory_order_relaxed)) < w.numel;)
        sum += w.of(w.words, begin, begin + w.grain < w.numel ? begin + w.grain : w.numel, w.first);
    w.sum.fetch_add(sum, std::memory_order_relaxed);
}

}  // namespace

extern "C" {

int zk_changed_count(const uint8_t *mask, int64_t numel, uint8_t *counts, int64_t *sizes) {
    if (numel < 0) return ZK_E_COUNT;
    if (!sizes || (numel && (!mask || !counts))) return ZK_E_NULL;
    const Sizes found = count(mask, numel, counts);
    sizes[0] = found.places;
    sizes[1] = found.values;
    return ZK_OK;
}

int zk_changed_pack(const uint8_t *mask, const void *from, uint32_t dtype, int64_t numel, uint8_t *places,
                    void *values) {
    if (numel < 0) return ZK_E_COUNT;
    if (!zk::is_float(dtype)) return ZK_E_FORMAT;
    if (numel && (!mask || !from || !places || !values)) return ZK_E_NULL;
    (dtype == ZK_F32 ? pack_in_pool<uint32_t> : pack_in_pool<uint16_t>)(mask, from, numel, places, values);
    return ZK_OK;
}

int zk_changed_unpack(const uint8_t *counts, const uint8_t *places, int64_t nplaces, const void *values,
                      int64_t nvalues, uint32_t dtype, int64_t numel, void *to) {
    if (numel < 0 || nplaces < 0 || nvalues < 0) return ZK_E_COUNT;
    if (!zk::is_float(dtype)) return ZK_E_FORMAT;
    if ((numel && (!counts || !to)) || (nplaces && !places) || (nvalues && !values)) return ZK_E_NULL;
    if (const int code = check(counts, places, nplaces, nvalues, numel)) return code;
    if (dtype == ZK_F32)
        unpack(counts, places, static_cast<const uint32_t *>(values), numel, static_cast<uint32_t *>(to));
    else
        unpack(counts, places, static_cast<const uint16_t *>(values), numel, static_cast<uint16_t *>(to));
    return ZK_OK;
}

int zk_weighted_sum(const void *words, uint32_t width, int64_t numel, uint64_t first, uint64_t *sum) {
    if (numel < 0) return ZK_E_COUNT;
    if (!sum || (numel && !words)) return ZK_E_NULL;
    const auto of = width == 1   ? WeightedSum<uint8_t, uint32_t>::of
                    : width == 2 ? WeightedSum<uint16_t, uint32_t>::of
                    : width == 4 ? WeightedSum<uint32_t, uint64_t>::of
                    : width == 8 ? WeightedSum<uint64_t, uint64_t>::of
                                 : nullptr;
    if (!of) return ZK_E_FORMAT;
    SumWork work{of, words, numel, zk::GRAIN, first};
    zk::pool_run(sum_task, &work, zk::workers_for(numel));
    *sum = work.sum.load(std::memory_order_relaxed);
    return ZK_OK;
}

}  // extern "C"
