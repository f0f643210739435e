// zk_crc32c and zk_weighted_sum against their definitions, a bit or a word at a time; and in two parts as in one.
#include "../zerokern_io.h"
#include "fuzz.h"

namespace fuzz {
namespace {

uint32_t by_bits(uint32_t crc, const char *data, int64_t nbytes) {
    crc = ~crc;
    for (int64_t i = 0; i < nbytes; ++i) {
        crc ^= static_cast<unsigned char>(data[i]);
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ 0x82F63B78u : crc >> 1;
    }
    return ~crc;
}

uint64_t by_words(const char *data, uint32_t width, int64_t numel, uint64_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < numel; ++i) {
        uint64_t word = 0;  // the lowest byte first
        for (uint32_t byte = 0; byte < width; ++byte)
            word |= static_cast<uint64_t>(static_cast<unsigned char>(data[i * width + byte])) << (8 * byte);
        sum += (first + static_cast<uint64_t>(i) + 1) * word;
    }
    return sum;
}

}  // namespace

Counts fuzz_crc32c(Random &random, uint64_t executions) {
    Counts counts;
    if (zk_crc32c(0, "123456789", 9) != 0xE3069283u) fail("zk_crc32c", 0, "not Castagnoli's", 0);
    if (zk_crc32c(7, nullptr, 4096) != 7) fail("zk_crc32c", 0, "read from null", 0);
    for (uint64_t i = 0; i < executions; ++i) {
        Buffer data(Kind::bytes, some_numel(random) * (random.one_in(64) ? 40 : 1), some_offset(random, Kind::bytes));
        data.fill(random);
        const uint32_t before = random.one_in(2) ? 0 : static_cast<uint32_t>(random.next());
        const uint64_t nbytes = static_cast<uint64_t>(data.nbytes), cut = random.below(nbytes + 1);
        const uint32_t whole = zk_crc32c(before, data.data(), nbytes);
        const uint32_t parts = zk_crc32c(zk_crc32c(before, data.data(), cut), data.data() + cut, nbytes - cut);
        if (whole != parts) fail("zk_crc32c", i, "parts differ from the whole, of bytes", data.nbytes);
        if (random.one_in(8) && whole != by_bits(before, data.data(), data.nbytes))
            fail("zk_crc32c", i, "not the definition's, of bytes", data.nbytes);
        ++counts.accepted;
    }
    return counts;
}

Counts fuzz_weighted_sum(Random &random, uint64_t executions) {
    const uint32_t widths[] = {1, 2, 4, 8};
    Counts counts;
    for (uint64_t i = 0; i < executions; ++i) {
        const uint32_t width = random.pick(widths);
        const int64_t numel = some_numel(random) * (random.one_in(16) ? 40 : 1);
        Buffer data(Kind::bytes, numel * width, static_cast<int64_t>(random.below(8)) * width);
        data.fill(random);
        if (random.one_in(8)) std::memset(data.data(), 0xFF, static_cast<size_t>(data.nbytes));
        const uint64_t first = random.next() >> random.below(64), expected = by_words(data.data(), width, numel, first);
        const int64_t cut = static_cast<int64_t>(random.below(static_cast<uint64_t>(numel) + 1));
        uint64_t whole = 0, begin = 0, end = 0, untouched = 7;
        if (const int code = zk_weighted_sum(data.data(), width, numel, first, &whole))
            fail("zk_weighted_sum", i, "a valid call was refused", code);
        zk_weighted_sum(data.data(), width, cut, first, &begin);
        zk_weighted_sum(data.data() + cut * width, width, numel - cut, first + static_cast<uint64_t>(cut), &end);
        if (whole != expected) fail("zk_weighted_sum", i, "not the definition's, of words", numel);
        if (begin + end != whole) fail("zk_weighted_sum", i, "parts differ from the whole, of words", numel);
        ++counts.accepted;
        if (!random.one_in(4)) continue;
        const uint32_t wrong[] = {0, 3, 5, 16, 0xFFFFFFFFu};
        const uint64_t how = random.below(4);
        if (zk_weighted_sum(how == 0 ? nullptr : data.data(), how == 1 ? random.pick(wrong) : width,
                            how == 2 ? -1 - numel : numel + (how == 0), first,
                            how == 3 ? nullptr : &untouched) == ZK_OK)
            fail("zk_weighted_sum", i, "spoilt arguments were accepted", static_cast<int64_t>(how));
        if (untouched != 7) fail("zk_weighted_sum", i, "it wrote although it refused", 0);
        ++counts.refused;
    }
    return counts;
}

}  // namespace fuzz
