// zk_update with valid and spoilt descriptors. Valid ones must give scalar's bits on every instruction set; spoilt ones
// must be refused, name the row at fault, and write nothing.
#include <cmath>
#include <limits>
#include <memory>

#include "fuzz.h"

namespace fuzz {
namespace {

constexpr uint32_t FLOATS[] = {ZK_F32, ZK_BF16, ZK_F16};
constexpr uint32_t HALVES[] = {ZK_BF16, ZK_F16};
constexpr uint32_t MASTERS[] = {ZK_MASTER_FP32, ZK_MASTER_SPLIT16, ZK_MASTER_SPLIT8, ZK_MASTER_NONE};
constexpr uint32_t ALGORITHMS[] = {ZK_ADAM, ZK_LION, ZK_ADAGRAD, ZK_SGD, ZK_MUON};

// The buffers of all rows, in the order in which they were made.
using Memory = std::vector<std::unique_ptr<Buffer>>;

struct Call {
    std::vector<zk_group> groups;
    std::vector<zk_segment> segments;
    Memory memory;
    // Of each buffer, what every instruction set gives the same bits of: all; all where divisions are exact; the codes
    // of blocks with a finite scale, which the next buffer holds; or nothing: what changed tells NaNs from each other.
    enum class Same { all, unless_approximate, codes, own };
    std::vector<Same> same;

    const Buffer *scales_of(size_t i, const Memory &of) const {
        return same[i] == Same::codes ? of[i + 1].get() : nullptr;
    }
};
using Same = Call::Same;

zk_group valid_group(Random &random) {
    zk_group g{};
    g.algorithm = random.pick(ALGORITHMS);
    g.grad = random.pick(FLOATS);
    g.param = random.pick(HALVES);
    g.master = random.pick(MASTERS);
    constexpr uint32_t averages[] = {ZK_F32, ZK_BF16, ZK_INT8}, sums[] = {ZK_F32, ZK_BF16},
                       momenta[] = {ZK_NONE, ZK_F32, ZK_BF16};
    g.state = g.algorithm == ZK_SGD       ? random.pick(momenta)
              : g.algorithm == ZK_ADAGRAD ? random.pick(sums)
                                          : random.pick(averages);
    constexpr uint32_t outs[] = {ZK_NONE, ZK_BF16, ZK_F16};
    constexpr uint32_t directions[] = {ZK_F32, ZK_BF16};
    g.out = g.algorithm == ZK_MUON ? random.pick(directions) : random.pick(outs);
    g.flags = static_cast<uint32_t>(random.below(16));
    if (g.master == ZK_MASTER_NONE && random.one_in(2)) g.flags |= ZK_STOCHASTIC;
    g.lr = random.unit();
    g.beta1 = random.one_in(8) ? 0.0 : random.unit();
    g.beta2 = random.one_in(8) ? 0.0 : random.unit();
    g.eps = 1e-8;
    g.weight_decay = random.one_in(2) ? 0.0 : random.unit();
    g.momentum = random.unit();
    g.dampening = random.unit();
    g.lr_decay = random.unit();
    g.step = 1 + static_cast<int64_t>(random.one_in(16) ? random.next() >> 1 >> random.below(63) : random.below(1000));
    if (g.step < 1) g.step = 1;
    g.seed = random.next();
    return g;
}

void *give(Call &call, Random &random, Kind kind, int64_t numel, bool positive = false, Same same = Same::all) {
    call.memory.push_back(std::make_unique<Buffer>(kind, numel, some_offset(random, kind)));
    call.memory.back()->fill(random);
    if (positive) call.memory.back()->make_positive();
    call.same.push_back(same);
    return call.memory.back()->data();
}

zk_segment valid_segment(Call &call, Random &random, const zk_group &g, uint64_t group) {
    zk_segment s{};
    s.numel = some_numel(random);
    s.group = group;
    s.key = random.next();
    s.first = static_cast<int64_t>(random.next() >> 2);
    // Adam's update may use an approximate division on int8 states; what follows from it is not compared.
    const Same exact = g.algorithm == ZK_ADAM && g.state == ZK_INT8 ? Same::unless_approximate : Same::all;
    if (random.one_in(2))
        s.changed = static_cast<uint8_t *>(give(call, random, Kind::bytes, (s.numel + 7) / 8, false, Same::own));
    s.grad = give(call, random, kind_of(g.grad), s.numel);
    const int64_t blocks = (s.numel + ZK_BLOCK - 1) / ZK_BLOCK;
    if (g.algorithm == ZK_MUON) {  // no parameter, and sums of chunks where others have a second average
        s.exp_avg = give(call, random, g.state == ZK_INT8 ? Kind::bytes : kind_of(g.state), s.numel, false,
                         g.state == ZK_INT8 ? Same::codes : Same::all);
        if (g.state == ZK_INT8) s.exp_avg_scale = static_cast<float *>(give(call, random, Kind::fp32, blocks, true));
        s.exp_avg_sq =
            give(call, random, Kind::fp64, s.numel / ZK_SUMSQ_CHUNK + (s.numel % ZK_SUMSQ_CHUNK != 0), false);
        s.out = give(call, random, kind_of(g.out), s.numel);
        return s;
    }
    if (g.master == ZK_MASTER_FP32)
        s.master = give(call, random, Kind::fp32, s.numel, false, exact);
    else
        s.param = give(call, random, g.master == ZK_MASTER_NONE ? kind_of(g.param) : Kind::bf16, s.numel, false, exact);
    if (g.master == ZK_MASTER_SPLIT16) s.remainder = give(call, random, Kind::words, s.numel, false, exact);
    if (g.master == ZK_MASTER_SPLIT8) s.remainder = give(call, random, Kind::bytes, s.numel, false, exact);
    if (g.state == ZK_INT8) {
        s.exp_avg = give(call, random, Kind::bytes, s.numel, false, Same::codes);
        s.exp_avg_scale = static_cast<float *>(give(call, random, Kind::fp32, blocks, true));
        if (g.algorithm == ZK_ADAM) s.exp_avg_sq = give(call, random, Kind::bytes, s.numel, false, Same::codes);
        if (g.algorithm == ZK_ADAM)
            s.exp_avg_sq_scale = static_cast<float *>(give(call, random, Kind::fp32, blocks, true));
    } else if (g.state != ZK_NONE) {
        s.exp_avg = give(call, random, kind_of(g.state), s.numel, g.algorithm == ZK_ADAGRAD);
        if (g.algorithm == ZK_ADAM) s.exp_avg_sq = give(call, random, kind_of(g.state), s.numel, true);
    }
    if (g.out != ZK_NONE) s.out = give(call, random, kind_of(g.out), s.numel, false, exact);
    return s;
}

Call valid_call(Random &random) {
    Call call;
    const uint64_t ngroups = random.one_in(64) ? 20 : 1 + random.below(2), nseg = random.below(4);
    for (uint64_t i = 0; i < ngroups; ++i) call.groups.push_back(valid_group(random));
    for (uint64_t i = 0; i < nseg; ++i) {
        const uint64_t group = random.below(ngroups);
        call.segments.push_back(valid_segment(call, random, call.groups[group], group));
    }
    return call;
}

int run(Call &call, Random &random, int64_t &bad) {
    constexpr float rare[] = {0.0f, 0x1p20f, -0x1p20f, 0x1.fffffep19f, INFINITY, -INFINITY, NAN};
    const float scale = random.one_in(8) ? random.pick(rare) : random.one_in(2) ? 1.0f : 0.37f;
    // One after the other: compilers differ in the order of arguments.
    const float *const given = random.one_in(4) ? nullptr : &scale;
    int64_t *const at_fault = random.one_in(8) ? nullptr : &bad;
    return zk_update(call.segments.data(), static_cast<int64_t>(call.segments.size()), call.groups.data(),
                     static_cast<int64_t>(call.groups.size()), given, at_fault);
}

std::vector<std::unique_ptr<Buffer>> copy(const Memory &memory) {
    Memory copies;
    for (const auto &buffer : memory) copies.push_back(std::make_unique<Buffer>(*buffer));
    return copies;
}

void restore(Memory &memory, const Memory &from) {
    for (size_t i = 0; i < memory.size(); ++i)
        std::memcpy(memory[i]->data(), from[i]->data(), static_cast<size_t>(memory[i]->nbytes));
}

uint32_t wrong_number(Random &random, uint32_t last) {
    return random.one_in(2) ? last + 1 + static_cast<uint32_t>(random.below(5))
                            : static_cast<uint32_t>(random.next() | 0x80000000u);
}

// Spoils one field of one group; gives the group's number.
int64_t spoil_group(Call &call, Random &random) {
    const double bad[] = {std::nan(""), std::numeric_limits<double>::infinity(),
                          -std::numeric_limits<double>::infinity()};
    const double not_a_fraction[] = {std::nan(""), 1.0, 1.5, -0.1, std::numeric_limits<double>::infinity()};
    const uint64_t number = random.below(call.groups.size());
    zk_group &g = call.groups[number];
    constexpr uint64_t of_muon[] = {0, 1, 4, 5, 6, 7, 8, 12};  // the others are ignored
    switch (g.algorithm == ZK_MUON ? random.pick(of_muon) : random.below(13)) {
        case 0:
            g.algorithm = random.one_in(2) ? 0 : wrong_number(random, ZK_MUON);
            break;
        case 1:
            g.grad = random.one_in(2) ? 0 : wrong_number(random, ZK_F16);
            break;
        case 2:
            g.master = random.one_in(2) ? 0 : wrong_number(random, ZK_MASTER_NONE);
            break;
        case 3:
            g.master = ZK_MASTER_NONE;
            g.param = random.one_in(2) ? FLOATS[0] : wrong_number(random, ZK_F16);
            break;
        case 4:
            g.state = g.algorithm == ZK_SGD || g.algorithm == ZK_ADAGRAD ? static_cast<uint32_t>(ZK_INT8)
                                                                         : wrong_number(random, ZK_INT8);
            break;
        case 5:
            g.state = ZK_F16;
            break;
        case 6:
            g.out = g.algorithm == ZK_MUON ? static_cast<uint32_t>(random.one_in(2) ? ZK_NONE : ZK_F16)
                    : random.one_in(2)     ? FLOATS[0]
                                           : wrong_number(random, ZK_F16);
            break;
        case 7:
            g.flags |= 32u << random.below(27);
            break;
        case 8:
            g.reserved = 1;
            break;
        case 9:
            g.lr = random.pick(bad);
            break;
        case 10:
            g.weight_decay = random.pick(bad);
            break;
        case 11:
            g.step = -static_cast<int64_t>(random.next() >> 2 >> random.below(62));
            break;
        default:
            if (g.algorithm == ZK_MUON)
                g.momentum = random.pick(not_a_fraction);
            else if (g.algorithm == ZK_SGD)
                g.momentum = random.pick(bad);
            else if (g.algorithm == ZK_ADAGRAD)
                g.lr_decay = random.one_in(2) ? -0.5 : random.pick(bad);
            else
                (random.one_in(2) ? g.beta1 : g.beta2) = random.pick(not_a_fraction);
    }
    return -1 - static_cast<int64_t>(number);
}

// Spoils one field of one row with elements; gives the row's number.
int64_t spoil_segment(Call &call, Random &random) {
    const uint64_t number = random.below(call.segments.size());
    zk_segment &s = call.segments[number];
    const uint64_t kind = random.below(s.numel ? 11 : 3);
    void **const pointers[] = {&s.param, &s.remainder, &s.master, &s.exp_avg, &s.exp_avg_sq, &s.out};
    if (kind == 0)
        s.numel = -1 - static_cast<int64_t>(random.next() >> 2 >> random.below(62));
    else if (kind == 1)
        s.group = call.groups.size() + (random.next() >> random.below(64));
    else if (kind == 2)
        s.first = random.one_in(2) ? INT64_MAX - static_cast<int64_t>(random.below(100))
                                   : -1 - static_cast<int64_t>(random.below(1000));
    else if (kind == 3)
        s.grad = nullptr;
    else if (kind == 4 && s.exp_avg_scale)
        s.exp_avg_scale = nullptr;
    else if (kind == 5 && s.exp_avg_sq_scale)
        s.exp_avg_sq_scale = nullptr;
    else {
        for (uint64_t i = random.below(6);; i = (i + 1) % 6) {
            if (!*pointers[i]) continue;
            *pointers[i] = nullptr;
            break;
        }
    }
    if (kind == 1 && s.group < call.groups.size()) s.group = ~0ull;  // the addition wrapped
    return static_cast<int64_t>(number);
}

void expect_refusal(Call &call, Random &random, int64_t fault, uint64_t execution) {
    const Memory before = copy(call.memory);
    int64_t bad = fault;
    const int code = run(call, random, bad);
    if (code == ZK_OK) fail("zk_update", execution, "a spoilt descriptor was accepted: row", fault);
    if (bad != fault) fail("zk_update", execution, "it blamed another row", bad);
    for (size_t i = 0; i < call.memory.size(); ++i)
        if (std::memcmp(call.memory[i]->data(), before[i]->data(), static_cast<size_t>(before[i]->nbytes)) != 0)
            fail("zk_update", execution, "it wrote although it refused: buffer", static_cast<int64_t>(i));
}

void describe(const Call &call, const Buffer &wide, const Buffer &scalar, int64_t at) {
    for (const zk_segment &s : call.segments) {
        const zk_group &g = call.groups[s.group];
        std::fprintf(
            stderr,
            "row: algorithm %u, grad %u, param %u, master %u, state %u, out %u, flags %u, step %lld, numel %lld\n",
            g.algorithm, g.grad, g.param, g.master, g.state, g.out, g.flags, static_cast<long long>(g.step),
            static_cast<long long>(s.numel));
    }
    print_element(wide, scalar, at);
}

// The values of a row that it publishes: where they are, or, with `before`, what they were, as words.
Buffer published(const Call &call, const zk_segment &s, const Memory *before) {
    const zk_group &g = call.groups[s.group];
    const auto was = [&](const void *now) -> const void * {
        for (size_t i = 0; before && i < call.memory.size(); ++i)
            if (call.memory[i]->data() == now) return (*before)[i]->data();
        return now;
    };
    const bool fp32 = g.master == ZK_MASTER_FP32, split = !fp32 && g.master != ZK_MASTER_NONE;
    const uint32_t kept = fp32 ? static_cast<uint32_t>(ZK_F32) : split ? static_cast<uint32_t>(ZK_BF16) : g.param;
    const bool copied = g.out != ZK_NONE && g.out != kept;
    const void *const from = was(fp32 ? s.master : s.param);
    Buffer words(kind_of(copied ? g.out : kept), s.numel, 0);
    if (!copied || !before) {
        std::memcpy(words.data(), copied ? s.out : from, static_cast<size_t>(words.nbytes));
        return words;
    }
    std::vector<float> joined(static_cast<size_t>(s.numel));
    if (split)
        zk_convert(g.master == ZK_MASTER_SPLIT16 ? ZK_JOIN16 : ZK_JOIN8, joined.data(), const_cast<void *>(from),
                   const_cast<void *>(was(s.remainder)), s.numel);
    const void *const source = split ? joined.data() : from;
    zk_accumulate(words.data(), g.out, &source, 1, split ? static_cast<uint32_t>(ZK_F32) : kept, s.numel, 0, 1.0f);
    return words;
}

// Of each mask: the bits from before, and one for each published value that has become another.
void expect_changed_bits(const Call &call, const Memory &before, uint64_t execution) {
    for (const zk_segment &s : call.segments) {
        if (!s.changed || !s.numel) continue;
        const bool directions = call.groups[s.group].algorithm == ZK_MUON;
        size_t mask = 0;
        while (call.memory[mask]->data() != reinterpret_cast<char *>(s.changed)) ++mask;
        std::vector<char> expected(before[mask]->data(), before[mask]->data() + before[mask]->nbytes);
        if (!directions) {
            const Buffer old = published(call, s, &before), now = published(call, s, nullptr);
            const int64_t width = width_of(old.kind);
            for (int64_t e = 0; e < s.numel; ++e)
                if (std::memcmp(old.data() + e * width, now.data() + e * width, static_cast<size_t>(width)) != 0)
                    expected[static_cast<size_t>(e / 8)] |= static_cast<char>(1 << e % 8);
        }
        for (size_t byte = 0; byte < expected.size(); ++byte)
            if (call.memory[mask]->data()[byte] != expected[byte]) {
                describe(call, *call.memory[mask], *before[mask], static_cast<int64_t>(byte));
                fail("zk_update", execution, "wrong bits of what changed in byte", static_cast<int64_t>(byte));
            }
    }
}

// Leaves scalar's results in the call's memory.
void expect_scalar_bits(Call &call, uint64_t choices, uint64_t execution) {
    const Memory before = copy(call.memory);
    int64_t bad = -1;
    Random random(choices);
    if (const int code = run(call, random, bad)) fail("zk_update", execution, "a valid call was refused", code);
    expect_changed_bits(call, before, execution);
    if (zk_isa_active() == zk_isa_name(0)) return;
    const Memory wide = copy(call.memory);
    restore(call.memory, before);
    const char *name = zk_isa_active();
    const bool approximate = std::strncmp(name, "avx512", 6) == 0;
    zk_isa_force("scalar");
    random = Random(choices);
    run(call, random, bad);
    zk_isa_force(name);
    for (size_t i = 0; i < wide.size(); ++i) {
        if (call.same[i] == Same::own || (approximate && call.same[i] == Same::unless_approximate)) continue;
        const int64_t at = first_difference(*wide[i], *call.memory[i], call.scales_of(i, call.memory));
        if (at < 0) continue;
        describe(call, *wide[i], *call.memory[i], at);
        fail("zk_update", execution, "other bits than scalar's at element", at);
    }
}

}  // namespace

Counts fuzz_update(Random &random, uint64_t executions) {
    const std::vector<const char *> sets = usable_sets();
    Counts counts;
    for (uint64_t i = 0; i < executions; ++i) {
        zk_isa_force(sets[i % sets.size()]);
        round_somehow(random);
        Call call = valid_call(random);
        if (!call.segments.empty() && random.one_in(4)) {
            const int64_t fault = random.one_in(2) ? spoil_group(call, random) : spoil_segment(call, random);
            expect_refusal(call, random, fault, i);
            ++counts.refused;
        } else {
            expect_scalar_bits(call, random.next(), i);
            for (size_t b = 0; b < call.memory.size(); ++b)
                if (call.same[b] != Same::own) counts.digest.add(*call.memory[b], call.scales_of(b, call.memory));
            ++counts.accepted;
        }
    }
    zk_isa_force(nullptr);
    std::fesetround(FE_TONEAREST);
    return counts;
}

}  // namespace fuzz
