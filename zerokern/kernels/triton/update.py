"""The one update kernel: a tile of a row is loaded, its rule applied, and stored, whatever the formats. Each byte moves
once.

Every array of a kernel is read and written with the same number of elements per thread, as many as fill 16 bytes of
the widest of them. So no value changes threads between a load and a store, and the accesses of a warp are contiguous.
Rows that are not aligned that way take the same path one element at a time.

Formats of few bytes go through a ring in shared memory (`variants`): by loads into registers alone an SM would have
less in flight than its memory needs, for the assembler moves arithmetic between the loads of one tile and the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels import formats
from zerokern.kernels.triton.adagrad import adagrad
from zerokern.kernels.triton.adam import adam, adam_int8
from zerokern.kernels.triton.codecs import (
    block_scale,
    encode_root,
    encode_signed,
    join8,
    join16,
    random_bits,
    round_random_bf16,
    round_random_fp16,
    rounded,
    split8,
    split16,
    splitmix64,
    value_of_code,
    widened,
)
from zerokern.kernels.triton.lion import lion
from zerokern.kernels.triton.muon import muon
from zerokern.kernels.triton.prepare import CONSTANTS, WIDE
from zerokern.kernels.triton.sgd import sgd

__all__ = ["BLOCK", "ROW_WORDS", "WORDS", "update"]

# Words of a row: addresses and counts, 128 bytes, in the order of the C ABI.
WORDS = {name: i for i, name in enumerate((*formats.POINTERS, "numel", "group", "key", "first", "aligned"))}
WORDS |= {name: i for i, name in enumerate((one for one in formats.COLUMNS if one not in (*WORDS, "grad")), len(WORDS))}
ROW_WORDS = tl.constexpr(16)
BLOCK = tl.constexpr(formats.BLOCK)


@triton.jit
def _at(words, word, base, TYPE: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr):
    """The place of element `base` of the array whose address is in a word; WIDTH is the bytes of an element."""
    pointer = words[word].to(tl.pointer_type(TYPE)) + base
    if VEC > 1:
        pointer = tl.multiple_of(pointer, VEC * WIDTH)
    return pointer


@triton.jit
def _words(at):
    """A row's words. All that a program reads of its table is read before its first store, which might change it for
    all that the compiler knows."""
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10), tl.load(at + 11),
        tl.load(at + 12), tl.load(at + 13),
    )  # fmt: skip


@triton.jit
def _constants(at):
    """A group's fp32 constants, in the order in which `prepare` writes them."""
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10), tl.load(at + 11),
        tl.load(at + 12), tl.load(at + 13), tl.load(at + 14), tl.load(at + 15), tl.load(at + 16), tl.load(at + 17),
        tl.load(at + 18), tl.load(at + 19), tl.load(at + 20), tl.load(at + 21), tl.load(at + 22), tl.load(at + 23),
    )  # fmt: skip


@triton.jit
def _wides(at):
    """And its float64 constants."""
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _load_param(words, base, at, mask, PARAM: tl.constexpr, MASTER: tl.constexpr, VEC: tl.constexpr):
    """(the parameter's most precise value, in fp32; what is kept of it in the widest of its arrays)."""
    if MASTER == "fp32":
        kept = tl.load(_at(words, 2, base, tl.float32, 4, VEC) + at, mask=mask, other=0.0)
        p = kept
    elif MASTER == "none":
        kept = tl.load(_at(words, 0, base, PARAM, 2, VEC) + at, mask=mask, other=0.0)
        p = widened(kept)
    else:
        kept = tl.load(_at(words, 0, base, tl.int16, 2, VEC) + at, mask=mask, other=0)
        if MASTER == "split16":
            p = join16(kept, tl.load(_at(words, 1, base, tl.int16, 2, VEC) + at, mask=mask, other=0))
        else:
            p = join8(kept, tl.load(_at(words, 1, base, tl.int8, 1, VEC) + at, mask=mask, other=0))
    return p, kept


@triton.jit
def _publish(
    words, base, at, mask, p, key, PARAM: tl.constexpr, MASTER: tl.constexpr, OUT: tl.constexpr,
    RANDOM: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Stores the new value in its formats; `out` has the parameter's own rounding where it has its dtype.

    Returns what is kept, as `_load_param`.
    """
    if MASTER == "fp32":
        kept = p
        tl.store(_at(words, 2, base, tl.float32, 4, VEC) + at, kept, mask=mask)
        if OUT is not None:
            tl.store(_at(words, 7, base, OUT, 2, VEC) + at, rounded(p, OUT), mask=mask)
    elif MASTER == "none":
        if RANDOM:
            random = random_bits(key, words[11] + base + at)
            kept = round_random_bf16(p, random) if PARAM == tl.bfloat16 else round_random_fp16(p, random)
        else:
            kept = rounded(p, PARAM)
        tl.store(_at(words, 0, base, PARAM, 2, VEC) + at, kept, mask=mask)
        if OUT is not None:
            out = _at(words, 7, base, OUT, 2, VEC) + at
            tl.store(out, kept if OUT == PARAM else rounded(p, OUT), mask=mask)
    else:
        if MASTER == "split16":
            kept, low = split16(p)
            tl.store(_at(words, 1, base, tl.int16, 2, VEC) + at, low, mask=mask)
        else:
            kept, low = split8(p)
            tl.store(_at(words, 1, base, tl.int8, 1, VEC) + at, low, mask=mask)
        tl.store(_at(words, 0, base, tl.int16, 2, VEC) + at, kept, mask=mask)
        if OUT is not None:
            out = _at(words, 7, base, OUT, 2, VEC) + at
            tl.store(out, kept.to(tl.bfloat16, bitcast=True) if OUT == tl.bfloat16 else rounded(p, OUT), mask=mask)
    return kept


@triton.jit
def _published(p, kept, PARAM: tl.constexpr, MASTER: tl.constexpr, OUT: tl.constexpr):
    """The bits of what others read: `out`, which has what is kept where it has its dtype, or else what is kept."""
    if OUT is not None and (MASTER == "fp32" or OUT != PARAM):
        kept = rounded(p, OUT)
    return kept.to(tl.int32 if kept.dtype == tl.float32 else tl.int16, bitcast=True)


@triton.jit
def _bytes(words, base, numel, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The places of a tile's bits in the row's mask, 16 bytes for a block, and which there are; LANES threads have one.

    A tile begins at a byte of its row's mask, and no other program has elements of its bytes: no atomics are needed.
    """
    byte = tl.arange(0, ROWS)[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8 * LANES)[None, :] // LANES
    return words[13].to(tl.pointer_type(tl.uint8)) + base // 8 + byte, byte * 8 < numel - base


@triton.jit
def _known(words, base, numel, CHANGED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The bits that a tile's mask has, 0 where rows have none."""
    if CHANGED:
        byte, there = _bytes(words, base, numel, ROWS, LANES)
        return tl.load(byte, mask=there, other=0)
    else:
        return 0


@triton.jit
def _packed(bits, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The byte of each 8 neighbours, the lowest bit first, in each of the LANES threads that have a part of them."""
    PART: tl.constexpr = 8 // LANES
    bits = tl.reshape(bits.to(tl.int32), (ROWS, BLOCK // PART, PART)) << tl.arange(0, PART)[None, None, :]
    parts = tl.sum(bits, axis=2) << (tl.arange(0, BLOCK // PART) % LANES * PART)[None, :]
    if LANES > 1:
        parts = tl.sum(tl.reshape(parts, (ROWS, BLOCK // 8, LANES)), axis=2, keep_dims=True)
        parts = tl.reshape(tl.broadcast_to(parts, (ROWS, BLOCK // 8, LANES)), (ROWS, BLOCK // PART))
    return parts.to(tl.uint8)


@triton.jit
def _coded(
    words, base, at, block, mask, some, g, p, c,
    ALGORITHM: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The rules on int8 states: decoded, applied and coded anew, a block to a row of the tile."""
    scale_at = _at(words, 5, base // BLOCK, tl.float32, 4, 1) + block
    m_at = _at(words, 3, base, tl.uint8, 1, VEC) + at
    codes = tl.load(m_at, mask=mask, other=0)
    scale = tl.load(scale_at, mask=some, other=0.0)
    factor, coupled = c[0], c[16] != 0.0
    if ALGORITHM == "adam":
        root_at = _at(words, 4, base, tl.uint8, 1, VEC) + at
        root_scale_at = _at(words, 6, base // BLOCK, tl.float32, 4, 1) + block
        p, m, root = adam_int8(
            p, g, codes, tl.load(root_at, mask=mask, other=0), scale, tl.load(root_scale_at, mask=some, other=0.0),
            factor, c[6], c[10], c[8], c[11], c[4], coupled,
            c[12], c[13], c[2],
        )  # fmt: skip
        root_scale = block_scale(root)
        tl.store(root_scale_at, root_scale, mask=some)
        tl.store(root_at, encode_root(root, root_scale), mask=mask)
    elif ALGORITHM == "muon":
        p, m = muon(g * factor, value_of_code(codes) * scale, c[6], c[8], c[18] != 0.0)
    else:
        p, m = lion(
            p, g * factor, value_of_code(codes) * scale, c[6], c[7], 0.0, 0.0, 0.0, c[1],
            c[2], False, 1, 1,
        )  # fmt: skip
    scale = block_scale(m)
    tl.store(scale_at, scale, mask=some)
    tl.store(m_at, encode_signed(m, scale), mask=mask)
    return p


@triton.jit
def _plain(
    words, base, at, mask, g, p, c, d,
    ALGORITHM: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The rules on states that are numbers. The update uses them as they are before they are rounded to bf16."""
    g = g * c[0]
    coupled = c[16] != 0.0
    EXACT: tl.constexpr = STATE != tl.bfloat16
    APART: tl.constexpr = 8 // GROUP  # rows of a tile that a thread has a part of
    if STATE is not None:
        m_at = _at(words, 3, base, STATE, WIDTH, VEC) + at
        m = widened(tl.load(m_at, mask=mask, other=0.0))
    else:
        m = g
    if ALGORITHM == "adam":
        v_at = _at(words, 4, base, STATE, WIDTH, VEC) + at
        v = widened(tl.load(v_at, mask=mask, other=0.0))
        p, m, v = adam(
            p, g, m, v, c[6], c[7], c[8], c[9], c[4], coupled,
            c[12], c[13], c[2],
        )  # fmt: skip
        tl.store(v_at, rounded(v, STATE), mask=mask)
    elif ALGORITHM == "lion":
        p, m = lion(p, g, m, c[6], c[7], c[19], d[0], d[1], c[1], c[2], EXACT, APART, GROUP)
    elif ALGORITHM == "muon":
        p, m = muon(g, m, c[6], c[8], c[18] != 0.0)
    elif ALGORITHM == "adagrad":
        p, m = adagrad(p, g, m, c[5], c[3], c[4], c[20], d[2], coupled, EXACT, APART, GROUP)
    else:
        p, m = sgd(
            p, g, m, c[1], c[21], d[3], c[4], c[20], d[2], c[14], c[22], d[4],
            c[15], c[23], d[5], coupled, c[17] != 0.0, c[18] != 0.0,
            EXACT, STATE is not None, APART, GROUP,
        )  # fmt: skip
    if STATE is not None:
        tl.store(m_at, rounded(m, STATE), mask=mask)
    return p


@triton.jit
def _tile(
    words, grad, base, numel, c, d, key, known,
    ALGORITHM: tl.constexpr, GRAD: tl.constexpr, GRAD_WIDTH: tl.constexpr, PARAM: tl.constexpr, MASTER: tl.constexpr,
    STATE: tl.constexpr, STATE_WIDTH: tl.constexpr, OUT: tl.constexpr, RANDOM: tl.constexpr, ROWS: tl.constexpr,
    CHANGED: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    left = tl.minimum(numel - base, ROWS * BLOCK).to(tl.int32)  # not above 0 behind the end
    block = tl.arange(0, ROWS)[:, None]
    at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < left
    some = block * BLOCK < left
    if VEC > 1:
        mask = tl.max_constancy(mask, [1, VEC])
    g = tl.load(_at((grad,), 0, base, GRAD, GRAD_WIDTH, VEC) + at, mask=mask, other=0.0)
    g = widened(g)
    if ALGORITHM == "muon":  # no parameter; what the rule returns for one is the direction
        p = g
    else:
        p, kept = _load_param(words, base, at, mask, PARAM, MASTER, VEC)
        if CHANGED:
            before = _published(p, kept, PARAM, MASTER, OUT)
    if STATE == tl.int8:
        p = _coded(words, base, at, block, mask, some, g, p, c, ALGORITHM, VEC)
    else:
        p = _plain(words, base, at, mask, g, p, c, d, ALGORITHM, STATE, STATE_WIDTH, VEC, GROUP)
    if ALGORITHM == "muon":
        WIDTH: tl.constexpr = 4 if OUT == tl.float32 else 2
        tl.store(_at(words, 7, base, OUT, WIDTH, VEC) + at, rounded(p, OUT), mask=mask)
    else:
        kept = _publish(words, base, at, mask, p, key, PARAM, MASTER, OUT, RANDOM, VEC)
        if CHANGED:
            byte, there = _bytes(words, base, numel, ROWS, 8 // GROUP)
            bits = (before != _published(p, kept, PARAM, MASTER, OUT)) & mask
            tl.store(byte, known | _packed(bits, ROWS, 8 // GROUP), mask=there)


@triton.jit(do_not_specialize=["each"])
def update(
    outcome, constants, wides, marks, rows, grads, tiles, each,
    ALGORITHM: tl.constexpr, GRAD: tl.constexpr, GRAD_WIDTH: tl.constexpr, PARAM: tl.constexpr, MASTER: tl.constexpr,
    STATE: tl.constexpr, STATE_WIDTH: tl.constexpr, OUT: tl.constexpr, RANDOM: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, CHANGED: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Program i updates `each` tiles, at most TILES: piece `tiles[i]` = (row, piece within the row). A step that
    `prepare` skips writes nothing.

    STAGES: the compiler makes a ring in shared memory, of which each tile is loaded STAGES - 1 tiles ahead. How many
    tiles there are is known at run time alone: else the loop would be unrolled, and take twice the registers.

    STATE and OUT are None where there is none. `aligned` of a row: its length and its fixed addresses fit VEC.
    """
    if tl.load(outcome + 2) != 0.0:
        return
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(tiles + 2 * program).to(tl.int64)
    base = tl.load(tiles + 2 * program + 1).to(tl.int64) * (ROWS * BLOCK) * each
    grad = tl.load(grads + row)
    words = _words(rows + row * ROW_WORDS)
    numel, group = words[8], words[9]
    c = _constants(constants + group * CONSTANTS)
    d = _wides(wides + group * WIDE)
    key = group
    if RANDOM:
        key = splitmix64(tl.load(marks + group * 2).to(tl.uint64) + words[10].to(tl.uint64))
        key = splitmix64(key + tl.load(marks + group * 2 + 1).to(tl.uint64))
    aligned = (words[12] != 0) & (grad % (VEC * GRAD_WIDTH) == 0)
    known = _known(words, base, numel, CHANGED, ROWS, 8 // VEC)
    if TILES == 1:
        if aligned:
            _tile(
                words, grad, base, numel, c, d, key, known, ALGORITHM, GRAD, GRAD_WIDTH, PARAM, MASTER, STATE,
                STATE_WIDTH, OUT, RANDOM, ROWS, CHANGED, VEC, VEC,
            )  # fmt: skip
        else:
            _tile(
                words, grad, base, numel, c, d, key, known, ALGORITHM, GRAD, GRAD_WIDTH, PARAM, MASTER, STATE,
                STATE_WIDTH, OUT, RANDOM, ROWS, CHANGED, 1, VEC,
            )  # fmt: skip
        return
    count = tl.minimum(tl.cdiv(numel - base, ROWS * BLOCK), each).to(tl.int32)
    if aligned:
        for i in tl.range(0, count, num_stages=STAGES):
            start = base + i * (ROWS * BLOCK)
            # the ring holds no single bytes: these are carried from one tile to the next
            ahead = _known(words, start + ROWS * BLOCK, numel, CHANGED, ROWS, 8 // VEC)
            _tile(
                words, grad, start, numel, c, d, key, known, ALGORITHM, GRAD, GRAD_WIDTH, PARAM, MASTER, STATE,
                STATE_WIDTH, OUT, RANDOM, ROWS, CHANGED, VEC, VEC,
            )  # fmt: skip
            known = ahead
    else:
        for i in range(count):
            start = base + i * (ROWS * BLOCK)
            _tile(
                words, grad, start, numel, c, d, key, _known(words, start, numel, CHANGED, ROWS, 8 // VEC), ALGORITHM,
                GRAD, GRAD_WIDTH, PARAM, MASTER, STATE, STATE_WIDTH, OUT, RANDOM, ROWS, CHANGED, 1, VEC,
            )  # fmt: skip
