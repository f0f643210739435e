// CRC-32C. The processor's own instruction takes three cycles and can begin one each cycle: three spans are summed side
// by side, and joined by shifting a sum over as many zeros as follow it (a linear map, tabulated by bytes).
#include <cstring>

#include "../zerokern_io.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define ZK_CRC_NAME "sse4.2"
#define ZK_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define ZK_CRC_NAME "crc32"
#define ZK_CRC_TARGET
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

#if defined(ZK_CRC_NAME)

#if defined(__x86_64__)

ZK_CRC_TARGET inline uint64_t sum_word(uint64_t sum, uint64_t word) { return _mm_crc32_u64(sum, word); }
ZK_CRC_TARGET inline uint64_t sum_byte(uint64_t sum, unsigned char byte) {
    return _mm_crc32_u8(static_cast<uint32_t>(sum), byte);
}

bool has_instruction() {
    static const bool has = __builtin_cpu_supports("sse4.2");
    return has;
}

#else

// By name: compilers differ in what their intrinsics are called and in which flags these want.
inline uint64_t sum_word(uint64_t sum, uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %1" : "+r"(sum) : "r"(word));
    return sum;
}
inline uint64_t sum_byte(uint64_t sum, unsigned char byte) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(sum) : "r"(byte));
    return sum;
}

bool has_instruction() {
    static const bool has = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;  // the first processors may lack it
    return has;
}

#endif

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

ZK_CRC_TARGET uint32_t by_instruction(uint32_t sum, const unsigned char *data, uint64_t nbytes) {
    static const Shift over_one = shift_over(SPAN);
    uint64_t a = sum;
    for (; nbytes >= 3 * SPAN; nbytes -= 3 * SPAN, data += 3 * SPAN) {
        uint64_t b = 0, c = 0;
        for (uint64_t i = 0; i < SPAN; i += 8) {
            a = sum_word(a, word(data + i));
            b = sum_word(b, word(data + SPAN + i));
            c = sum_word(c, word(data + 2 * SPAN + i));
        }
        a = over_one(over_one(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^ c;
    }
    for (; nbytes >= 8; nbytes -= 8, data += 8) a = sum_word(a, word(data));
    for (; nbytes; --nbytes, ++data) a = sum_byte(a, *data);
    return static_cast<uint32_t>(a);
}

#endif

}  // namespace

uint32_t zk_crc32c(uint32_t crc, const void *data, uint64_t nbytes) {
    const unsigned char *bytes = static_cast<const unsigned char *>(data);
    if (!bytes) return crc;
#if defined(ZK_CRC_NAME)
    if (has_instruction()) return ~by_instruction(~crc, bytes, nbytes);
#endif
    return ~by_table(~crc, bytes, nbytes);
}

const char *zk_crc32c_name() {
#if defined(ZK_CRC_NAME)
    if (has_instruction()) return ZK_CRC_NAME;
#endif
    return "table";
}
