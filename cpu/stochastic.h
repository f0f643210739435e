// Counter-based random bits: a function of (seed, parameter key, step, element number) alone, so that neither threads
// nor sharding show.
#pragma once

#include <cstdint>

namespace zk {

inline uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline uint64_t stochastic_key(uint64_t seed_mix, uint64_t key, int64_t step) {
    return splitmix64(splitmix64(seed_mix + key) + static_cast<uint64_t>(step));
}

// 32 random bits of one element. The two multipliers and shifts after the first line are murmur3's finaliser.
inline uint32_t stochastic_bits(uint64_t k, uint64_t element) {
    uint32_t x = static_cast<uint32_t>(element) * 0x9E3779B1u + static_cast<uint32_t>(k);
    x ^= static_cast<uint32_t>(k >> 32) + static_cast<uint32_t>(element >> 32) * 0x85EBCA77u;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ (x >> 16);
}

}  // namespace zk
