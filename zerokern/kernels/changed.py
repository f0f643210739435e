"""Which elements of a tensor changed: the mask that updates fill, its packed form with the new values, and a sum of all
bits that tells two tensors apart."""

from __future__ import annotations

from ctypes import c_int64, c_uint64
from dataclasses import dataclass

import torch
from torch import Tensor

from zerokern.core import native
from zerokern.core.errors import KernelError, got
from zerokern.kernels import checks, formats

__all__ = [
    "MOST", "PARTS", "Packed", "Pause", "add_bits", "changed_mask", "pack_changed", "unpack_changed", "weighted_sum",
]  # fmt: skip

MOST = 0.75  # of the bytes of all values: where changes take more, packing costs more than it saves
PARTS = ("counts", "places", "values")
_PAUSE = 8  # times in a row that values are sent, of which the last alone is packed, where the last ones took more
_LISTED = 16  # from so many on the places of a block are its bits
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_CHUNK = 1 << 16  # words that are added up together by torch's operations
_DEVICE_CHUNK = 1 << 22  # on a device, where they are six launches


@dataclass(frozen=True)
class Packed:
    """The changed elements of one flat tensor, by blocks of 128 elements, of which the last may be shorter.

    `counts`: uint8, how many changed in each block. `places`: uint8, in the order of the blocks: nothing for a block
    where none or all changed, however short it is; a byte for each changed element, its place in the block, where fewer
    than 16 did; else the block's bits, the lowest first. `values`: the new values.

    >>> packed = pack_changed(torch.tensor([0b101], dtype=torch.uint8), torch.tensor([7.0, 8.0, 9.0, 10.0]))
    >>> packed.counts.tolist(), packed.places.tolist(), packed.values.tolist(), packed.nbytes
    ([2], [0, 2], [7.0, 9.0], 11)
    """

    numel: int
    counts: Tensor
    places: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.places.nbytes + self.values.nbytes

    @classmethod
    def none(cls, numel: int, dtype: torch.dtype, device: torch.device) -> Packed:
        """Returns what `pack_changed` does where nothing has changed."""
        counts = torch.zeros(formats.blocks(numel), dtype=torch.uint8, device=device)
        return cls(numel, counts, counts[:0], torch.empty(0, dtype=dtype, device=device))

    def write(self, out: Tensor) -> None:
        """Writes all parts to `nbytes` bytes, of which a rank or a device is sent a copy."""
        torch.cat([self.values.view(torch.uint8), self.counts, self.places], out=out)

    @classmethod
    def read(cls, sent: Tensor, numel: int, dtype: torch.dtype, nplaces: int) -> Packed:
        """Returns what `write` has written, in the same memory, which is aligned to elements.

        >>> packed, sent = pack_changed(torch.tensor([5], dtype=torch.uint8), torch.ones(4)), torch.empty(11).byte()
        >>> packed.write(sent); Packed.read(sent, 4, torch.float32, 2).values
        tensor([1., 1.])
        """
        ncounts = formats.blocks(numel)
        values, counts, places = sent.split([sent.numel() - ncounts - nplaces, ncounts, nplaces])
        return cls(numel, counts, places, values.view(dtype))


class Pause:
    """Says whether to pack what has changed of values that are sent again and again.

    >>> pause = Pause(); pause.begin(); [pause.is_over() for _ in range(8)].count(False)
    7
    """

    def __init__(self) -> None:
        self._left = 0

    def is_over(self) -> bool:
        """Returns whether to pack this time, and counts it."""
        left, self._left = self._left, max(self._left - 1, 0)
        return not left

    def begin(self) -> None:
        """All is sent for some time: what had changed took more than MOST."""
        self._left = _PAUSE - 1


def changed_mask(before: Tensor, after: Tensor) -> Tensor:
    """Returns which elements have other bits, one bit for each, the lowest first: what updates add to `changed`.

    >>> changed_mask(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, -0.0, 3.0]))
    tensor([6], dtype=torch.uint8)
    """
    word = _WORDS[before.element_size()]
    differ = before.reshape(-1).view(word) != after.reshape(-1).view(word)
    return _bytes_of(differ)


def add_bits(mask: Tensor, start: int, bits: Tensor) -> None:
    """Sets bits of elements from `start` on, as far as there is a mask.

    >>> mask = torch.zeros(2, dtype=torch.uint8); add_bits(mask, 7, torch.tensor([5], dtype=torch.uint8)); mask
    tensor([128,   2], dtype=torch.uint8)
    """
    begin, shift = divmod(start, 8)
    if shift:
        wide = torch.nn.functional.pad(bits.to(torch.int16), (0, 1)) << shift  # 15 bits at most
        wide[1:] |= wide[:-1] >> 8
        bits = (wide & 0xFF).to(torch.uint8)
    part = mask[begin : begin + bits.numel()]
    part |= bits[: part.numel()]


def pack_changed(mask: Tensor, values: Tensor) -> Packed:
    """Packs those elements of a flat tensor whose bits are set. Bits behind the last element count for nothing.

    >>> pack_changed(torch.tensor([0], dtype=torch.uint8), torch.ones(8)).nbytes
    1
    """
    _flat("values", values)
    numel = values.numel()
    why = f"one bit for each of {numel} elements"
    checks.tensor("mask", mask, (torch.uint8,), -(-numel // 8), why=why)
    device = checks.one_device([("values", values), ("mask", mask)])
    if device.type != "cpu":
        return _pack(mask, values)
    library, sizes = native.library(), (c_int64 * 2)()
    counts = torch.empty(formats.blocks(numel), dtype=torch.uint8, device="cpu")  # whatever torch's default is
    native.check(library.zk_changed_count(mask.data_ptr(), numel, counts.data_ptr(), sizes), context="zk_changed_count")
    # one more of each: an empty tensor has no address
    places, chosen = counts.new_empty(sizes[0] + 1), values.new_empty(sizes[1] + 1)
    into = formats.DTYPES[values.dtype], numel, places.data_ptr(), chosen.data_ptr()
    native.check(library.zk_changed_pack(mask.data_ptr(), values.data_ptr(), *into), context="zk_changed_pack")
    return Packed(numel, counts, places[:-1], chosen[:-1])


def unpack_changed(packed: Packed, out: Tensor) -> None:
    """Writes the changed values to where they belong in a flat tensor, and nothing elsewhere.

    Raises ValueError, and writes nothing, where `packed` is malformed or of another number of elements.

    >>> out = torch.zeros(4)
    >>> unpack_changed(pack_changed(torch.tensor([5], dtype=torch.uint8), torch.ones(4)), out); out
    tensor([1., 0., 1., 0.])
    """
    _flat("out", out)
    numel = out.numel()
    if packed.numel != numel:
        raise ValueError(got("packed.numel", packed.numel, f"{numel}, as out has elements"))
    checks.tensor("packed.counts", packed.counts, (torch.uint8,), formats.blocks(numel), why=formats.PER_BLOCK)
    checks.tensor("packed.places", packed.places, (torch.uint8,))
    checks.tensor("packed.values", packed.values, (out.dtype,))
    parts = [("out", out), ("packed.counts", packed.counts), ("packed.places", packed.places)]
    device = checks.one_device([*parts, ("packed.values", packed.values)])
    checks.no_overlap(parts[:1], [*parts[1:], ("packed.values", packed.values)])
    if device.type != "cpu":
        return _unpack(packed, out)
    code = native.library().zk_changed_unpack(
        packed.counts.data_ptr(),
        packed.places.data_ptr(),
        packed.places.numel(),
        packed.values.data_ptr(),
        packed.values.numel(),
        formats.DTYPES[out.dtype],
        numel,
        out.data_ptr(),
    )
    try:
        native.check(code)
    except KernelError as error:
        raise _malformed() from error


def weighted_sum(flat: Tensor, first: int = 0) -> int:
    """Returns the sum of (number + 1) * word over the elements, modulo 2**64; the first one has the number `first`.

    Words are the bits of an element as an integer without sign. Sums of the parts of a tensor add up to its own.

    >>> weighted_sum(torch.tensor([5, 0, 7], dtype=torch.uint8)), weighted_sum(torch.tensor([7], dtype=torch.uint8), 2)
    (26, 21)
    """
    words = flat.contiguous().view(_WORDS[flat.itemsize])
    if words.device.type != "cpu":
        return _weighted_sum(words, first)
    found = c_uint64()
    code = native.library().zk_weighted_sum(words.data_ptr(), words.itemsize, words.numel(), first, found)
    native.check(code, context="zk_weighted_sum")
    return found.value


def _weighted_sum(words: Tensor, first: int) -> int:
    """`weighted_sum` by torch's operations: the native call's meaning, and what runs on devices."""
    bits, chunk = (1 << 8 * words.itemsize) - 1, _CHUNK if words.device.type == "cpu" else _DEVICE_CHUNK
    weights = torch.arange(1, min(chunk, max(words.numel(), 1)) + 1, device=words.device)
    sums: list[Tensor] = []
    for some in words.split(chunk):
        wide = some.to(torch.int64)
        wide = wide.bitwise_and_(bits) if some.itemsize in (2, 4) else wide
        sums += [wide.sum(), (wide * weights[: len(wide)]).sum()]
    found = torch.stack(sums).tolist() if words.numel() else []
    return sum(
        (first + place * chunk) * one + weighted
        for place, (one, weighted) in enumerate(zip(found[::2], found[1::2], strict=True))
    ) % (1 << 64)


def _malformed() -> ValueError:
    return ValueError(
        "packed is malformed: its counts, places and values do not belong together; allowed: what pack_changed returns"
    )


def _flat(name: str, value: Tensor) -> None:
    checks.tensor(name, value)
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed: one dimension (call .view(-1))")


def _bytes_of(bits: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _bits_of(mask: Tensor) -> Tensor:
    return (mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1).bool().view(-1)


def _lengths(numel: int, device: torch.device) -> Tensor:
    begins = torch.arange(formats.blocks(numel), device=device) * formats.BLOCK
    return (numel - begins).clamp(max=formats.BLOCK)


def _shapes_of(counts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which blocks have lists, which have bits, and where their places end."""
    some = (counts > 0) & (counts < lengths)
    listed, masked = some & (counts < _LISTED), some & (counts >= _LISTED)
    return listed, masked, torch.cumsum(torch.where(listed, counts, torch.where(masked, (lengths + 7) // 8, 0)), 0)


def _runs(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Of runs of these sizes in a row: of each element, the number of its run and its number in it."""
    run = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
    return run, torch.arange(run.numel(), device=sizes.device) - (torch.cumsum(sizes, 0) - sizes)[run]


def _pack(mask: Tensor, values: Tensor) -> Packed:
    """`pack_changed` by torch's operations: the native call's meaning, and what runs on devices."""
    numel, lengths = values.numel(), _lengths(values.numel(), values.device)
    bits = _bits_of(mask)[:numel]
    blocks = torch.nn.functional.pad(bits, (0, -numel % formats.BLOCK)).view(-1, formats.BLOCK)
    counts = blocks.sum(1)
    listed, masked, ends = _shapes_of(counts, lengths)
    places = torch.empty(int(ends[-1]) if numel else 0, dtype=torch.uint8, device=values.device)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    begins = ends - sizes
    run, number = _runs(torch.where(listed, sizes, 0))
    places[begins[run] + number] = (blocks & listed[:, None]).nonzero()[:, 1].to(torch.uint8)
    run, number = _runs(torch.where(masked, sizes, 0))
    places[begins[run] + number] = _bytes_of(blocks.view(-1)).view(-1, formats.BLOCK // 8)[run, number]
    return Packed(numel, counts.to(torch.uint8), places, values[bits])


def _unpack(packed: Packed, out: Tensor) -> None:
    """`unpack_changed` by torch's operations."""
    lengths, counts = _lengths(packed.numel, out.device), packed.counts.long()
    listed, masked, ends = _shapes_of(counts, lengths)
    total = int(ends[-1]) if packed.numel else 0
    if bool((counts > lengths).any()) or total != packed.places.numel() or int(counts.sum()) != packed.values.numel():
        raise _malformed()
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    begins = ends - sizes
    bits = (counts == lengths)[:, None] & (torch.arange(formats.BLOCK, device=out.device) < lengths[:, None])
    run, number = _runs(torch.where(listed, sizes, 0))
    place = packed.places[begins[run] + number].long()
    after = torch.diff(place, prepend=place.new_full((1,), -1)) > 0
    wrong = (place >= lengths[run]) | ~(after | (number == 0))
    bits[run, place.clamp(max=formats.BLOCK - 1)] = True
    run, number = _runs(torch.where(masked, sizes, 0))
    of_blocks = torch.zeros(counts.numel(), formats.BLOCK // 8, dtype=torch.uint8, device=out.device)
    of_blocks[run, number] = packed.places[begins[run] + number]
    bits |= _bits_of(of_blocks.view(-1)).view(-1, formats.BLOCK)
    behind = bits.view(-1)[packed.numel :].any()
    if bool(wrong.any() | behind | (bits.sum(1) != counts).any()):
        raise _malformed()
    out[bits.view(-1)[: packed.numel]] = packed.values
