// zk_crc32c against its definition, a bit at a time; and in two parts as in one.
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

}  // namespace fuzz
