"""Units that all layers share: the block of int8 state, a piece of a parameter, formats, ring sizes, and numbers of
bytes ("8GB", "8GiB"). The values of public arguments are types, so that a type checker finds `stage=4`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

from zerokern.core.errors import got, nearest, one_of

__all__ = [
    "BINARY", "BLOCK", "BUCKET_BYTES", "BUFFERS", "LEAST_BARE", "MASTERS", "MASTER_FORMATS", "MOST", "NS_FORMS",
    "PUBLISH", "RING_NBYTES", "SMALL_GRADIENT", "STATE_FORMATS", "UPDATES", "MasterFormat", "NsForm", "Piece",
    "Publish", "Reduce", "Schedule", "Stage", "StateFormat", "StateTensor", "Tier", "Update", "in_units", "itemsize",
    "master_of", "meant_tier", "parse_nbytes", "refuse_bare", "scratch_numel", "state_tensors",
]  # fmt: skip

Stage = Literal[0, 1, 2, 3]
Tier = Literal["device", "cpu"]  # or zk.Nvme(path)
Schedule = Literal["sync", "overlap"]  # or zk.Delayed(after=N)
Update = Literal["host", "device"]
StateFormat = Literal["fp32", "bf16", "int8"]
MasterFormat = Literal["fp32", "split16", "split8", "none"]
NsForm = Literal["standard", "gram"]  # of Muon's iteration
Publish = Literal["all", "delta"]
PUBLISH = get_args(Publish)
Reduce = Literal["mean", "sum"]

BLOCK = 128
"""elements under one scale of an int8 state; a cut between two ranks falls on a multiple of it"""
MASTER_FORMATS = get_args(MasterFormat)
NS_FORMS = get_args(NsForm)
UPDATES = get_args(Update)
MASTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": ("own", ()),
    "bfloat16": ("split16", ("split16", "fp32", "split8", "none")),
    "float16": ("fp32", ("fp32", "none")),
}
"""by the name of a parameter's dtype: its master format unless another is chosen, and those there are to choose from"""
STATE_FORMATS = get_args(StateFormat)
_STATE_NBYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # of one element of a moment
_REMAINDERS = {"split16": "int16", "split8": "int8"}  # by master format, what a remainder consists of
BUCKET_BYTES = 32 << 20
"""of parameters that are reduced and gathered together, unless told otherwise"""
BUFFERS = 2
"""of gradients: one is filled by backward while the other is reduced"""
SMALL_GRADIENT = 64 << 10
"""bytes of a gradient on a CPU up to which a call costs more than copying at once saves"""
AUTO: Literal["auto"] = "auto"
"""the budget in "device:auto": what a step leaves free on the device, less a margin"""
FILLED = 0.9
"""of a device's memory: as far as state may fill it beside a step's peak; beyond that, fragments of the allocator and
buffers of libraries may not fit"""
RING_NBYTES = 64 << 20
"""of host memory that state on a disk streams through, unless told otherwise"""
BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""a letter behind a number of elements or tokens, and behind one of bytes where no B follows"""
_BITS = re.compile(r"(?:b?float|u?int|complex)(\d+)")
_BYTES = re.compile(r"(\d*\.?\d+)\s*(?:([KMGT])(I?B)?|B)?", re.IGNORECASE | re.ASCII)
TIER_NAMES = ("device", "cpu", "nvme")
_OTHER_NAMES = {  # for them
    "gpu": "device", "cuda": "device", "vram": "device", "hbm": "device", "host": "cpu", "ram": "cpu", "memory": "cpu",
    "disk": "nvme", "ssd": "nvme",
}  # fmt: skip
LEAST_BARE = 10**6  # bytes that anybody writes in digits alone, as text
MOST, _LONGEST = (1 << 63) - 1, 100  # what native calls can count, and digits


class Piece(NamedTuple):
    """Elements [start, start + numel) of the parameter of this number, at `offset` of what holds several: a bucket, a
    record, a slot."""

    param: int
    start: int
    numel: int
    offset: int

    @property
    def elements(self) -> slice:
        """Its elements, in the parameter as a vector."""
        return slice(self.start, self.start + self.numel)


def parse_nbytes(argument: str, value: object) -> int:
    """Parses bytes from a whole number, or from text. GB is 1000^3; GiB, and G alone, is 1024^3.

    >>> [parse_nbytes("budget", text) for text in ("8GB", "8GiB", "8G", 77)]
    [8000000000, 8589934592, 8589934592, 77]
    """
    allowed = "a positive number of bytes, or text such as '8G' or '512MiB' (powers of 1024) or '8GB' (powers of 1000)"
    if isinstance(value, str):
        found = _BYTES.fullmatch(value.strip())
        letter, ending = ((found[2] or "").upper(), (found[3] or "").upper()) if found else ("", "")
        unit = 1000 ** list(BINARY).index(letter) if ending == "B" else BINARY[letter]
        nbytes = in_units(found[1], unit) if found else 0
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise TypeError(got(argument, value, allowed))
    if not 1 <= nbytes <= MOST:
        raise ValueError(got(argument, value, allowed))
    return nbytes


def master_of(dtype: str, master_format: str | None) -> str:
    """Returns the master format of parameters of this dtype; "own" where they are their own masters, whatever is asked.

    >>> master_of("bfloat16", None), master_of("float16", "none"), master_of("float32", "split8")
    ('split16', 'none', 'own')
    """
    default, allowed = MASTERS[dtype]
    if default == "own" or master_format is None:
        return default
    return str(one_of("master_format", master_format, allowed, where=f" for {dtype} parameters"))


def scratch_numel(numel: int, ranks: int, replicas: int = 1) -> tuple[int, int]:
    """Returns the elements that a reduction on CPUs receives besides its own: of the spans that `ranks` have, then of
    what `replicas` of such a span have.

    >>> scratch_numel(1024, 4), scratch_numel(1024, 4, replicas=3)
    ((768, 0), (768, 172))
    """
    span = numel // ranks
    return (ranks - 1) * span, (replicas - 1) * -(-span // replicas)


class StateTensor(NamedTuple):
    """One tensor of a parameter's optimizer state: `nbytes` for every `per` elements. The codes and the scales of an
    int8 moment have one role."""

    role: str
    format: str
    nbytes: int
    per: int = 1

    @property
    def is_scale(self) -> bool:
        return self.per > 1

    @property
    def key(self) -> str:
        """Its key in the optimizer's state."""
        return f"{self.role}_scale" if self.is_scale else self.role

    def nbytes_of(self, numel: int) -> int:
        """Returns its bytes for a parameter of so many elements."""
        return -(-numel // self.per) * self.nbytes


def state_tensors(
    moments: Iterable[str], dtype: str, state_format: str, master_format: str | None
) -> list[StateTensor]:
    """Returns the tensors that an update keeps of a parameter of this dtype: its moments, then what makes it exact.

    >>> [(one.key, one.nbytes_of(130)) for one in state_tensors(["exp_avg"], "bfloat16", "int8", None)]
    [('exp_avg', 130), ('exp_avg_scale', 8), ('remainder', 260)]
    """
    found = []
    for key in moments:
        found.append(StateTensor(key, state_format, _STATE_NBYTES[state_format]))
        if state_format == "int8":
            found.append(StateTensor(key, state_format, 4, BLOCK))
    master = master_of(dtype, master_format)
    if master == "fp32":
        found.append(StateTensor("master", "fp32", 4))
    elif master in _REMAINDERS:
        found.append(StateTensor("remainder", _REMAINDERS[master], itemsize(_REMAINDERS[master])))
    return found


def meant_tier(tier: object) -> str:
    """Returns what a message asks about text that is no tier: whether the nearest one was meant.

    >>> meant_tier("gpu:8GB"), meant_tier("nmve:/x"), meant_tier("host"), meant_tier("/mnt/disk"), meant_tier(7)
    ("Did you mean 'device:8GB'?", "Did you mean 'nvme:/x'?", "Did you mean 'cpu'?", '', '')
    """
    name, colon, rest = tier.strip().partition(":") if isinstance(tier, str) else ("", "", "")
    kind = nearest(name, (*TIER_NAMES, *_OTHER_NAMES), cutoff=0.7) if name.isalpha() else ""
    kind = _OTHER_NAMES.get(kind, kind)
    meant = "nvme:/path" if kind == "nvme" and not rest else f"{kind}{colon}{rest}"
    return f"Did you mean {meant!r}?" if kind and meant != tier else ""


def refuse_bare(argument: str, text: str, nbytes: int) -> None:
    """Raises for bytes in digits alone, as text, which nobody means that are so few.

    >>> refuse_bare("disk", "64", 64)
    Traceback (most recent call last):
    ...
    ValueError: disk='64': must be bytes with their unit, such as 64GiB. 64 alone are bytes; 64GB may be meant
    """
    text = text.strip()
    if nbytes < LEAST_BARE and not text[-1].isalpha():
        do = f"{text} alone are bytes; {text}GB may be meant"
        raise ValueError(got(argument, text, f"bytes with their unit, such as {text}GiB", do))


def in_units(digits: str, unit: int) -> int:
    """Returns digits times a unit, to the nearest whole number, by exact arithmetic; 0 if 64 bits do not hold it.

    >>> in_units("9007199254740993", 1), in_units(".5", 10**9), in_units("9" * 400, 1)
    (9007199254740993, 500000000, 0)
    """
    found = round(Fraction(digits) * unit) if len(digits) <= _LONGEST else 0
    return found if found <= MOST else 0


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element of a dtype, by its name in torch.

    >>> itemsize("bfloat16"), itemsize("bool"), itemsize("float8_e4m3fn"), itemsize("complex64")
    (2, 1, 1, 8)
    """
    if dtype == "bool":
        return 1
    match = _BITS.match(dtype)
    if match is None:
        raise ValueError(f"{dtype!r} is the name of no dtype")
    return max(1, int(match[1]) // 8)
