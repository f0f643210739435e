// CRC-32C. The processor's own instruction takes three cycles and can begin one each cycle: three spans are summed side
// by side, and joined by shifting a sum over as many zeros as follow it (a linear map, tabulated by bytes).
#include <cstring>

#include "../zerokern_io.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace {

constexpr uint32_t POLYNOMIAL = 0x82F63B78u;  // reflected

struct Table {
    uint32_t of[256];
};

constexpr Table byte_table() {
    Table table = {};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? POLYNOMIAL : 0);
        table.of[i] = value;
    }
    return table;
}

constexpr Table BYTES = byte_table();

constexpr uint32_t over_zeros(uint32_t sum, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) sum = (sum >> 8) ^ BYTES.of[sum & 0xFF];
    return sum;
}

uint32_t by_table(uint32_t sum, const unsigned char *data, uint64_t nbytes) {
    for (uint64_t i = 0; i < nbytes; ++i) sum = (sum >> 8) ^ BYTES.of[(sum ^ data[i]) & 0xFF];
    return sum;
}

#if defined(__x86_64__)

constexpr uint64_t SPAN = 2048;

struct Shift {
    Table by[4];
    constexpr uint32_t operator()(uint32_t sum) const {
        return by[0].of[sum & 0xFF] ^ by[1].of[sum >> 8 & 0xFF] ^ by[2].of[sum >> 16 & 0xFF] ^ by[3].of[sum >> 24];
    }
};

// The map is linear: the image of each single bit gives all of it.
Shift shift_over(uint64_t zeros) {
    Shift shift = {};
    uint32_t image[32];
    for (int bit = 0; bit < 32; ++bit) image[bit] = over_zeros(1u << bit, zeros);
    for (int place = 0; place < 4; ++place)
        for (uint32_t i = 0; i < 256; ++i)
            for (int bit = 0; bit < 8; ++bit)
                if (i >> bit & 1) shift.by[place].of[i] ^= image[8 * place + bit];
    return shift;
}

inline uint64_t word(const unsigned char *data) {
    uint64_t value;
    std::memcpy(&value, data, 8);
    return value;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t sum, const unsigned char *data, uint64_t nbytes) {
    static const Shift over_one = shift_over(SPAN);
    uint64_t a = sum;
    for (; nbytes >= 3 * SPAN; nbytes -= 3 * SPAN, data += 3 * SPAN) {
        uint64_t b = 0, c = 0;
        for (uint64_t i = 0; i < SPAN; i += 8) {
            a = _mm_crc32_u64(a, word(data + i));
            b = _mm_crc32_u64(b, word(data + SPAN + i));
            c = _mm_crc32_u64(c, word(data + 2 * SPAN + i));
        }
        a = over_one(over_one(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^ c;
    }
    for (; nbytes >= 8; nbytes -= 8, data += 8) a = _mm_crc32_u64(a, word(data));
    uint32_t last = static_cast<uint32_t>(a);
    for (; nbytes; --nbytes, ++data) last = _mm_crc32_u8(last, *data);
    return last;
}

bool has_instruction() {
    static const bool has = __builtin_cpu_supports("sse4.2");
    return has;
}

#endif

}  // namespace

uint32_t zk_crc32c(uint32_t crc, const void *data, uint64_t nbytes) {
    const unsigned char *bytes = static_cast<const unsigned char *>(data);
    if (!bytes) return crc;
#if defined(__x86_64__)
    if (has_instruction()) return ~by_instruction(~crc, bytes, nbytes);
#endif
    return ~by_table(~crc, bytes, nbytes);
}

const char *zk_crc32c_name() {
#if defined(__x86_64__)
    if (has_instruction()) return "sse4.2";
#endif
    return "table";
}
