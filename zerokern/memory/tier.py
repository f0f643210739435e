"""Tiers, in which parts of a training state rest between their uses: "cpu" (host memory), or what a `TierConfig` opens,
such as a disk (`zerokern.io.tier`); and memory beside what computes (`DevicePool`), where nothing has to be fetched.

Memory is zeroed and laid out as `memory/layout.py` computes it, so that a plan and the system agree to the page. Each
tensor has a storage of its own size, because saving a tensor saves its storage. What does not fit into host memory is
refused before anything is allocated, with a table of what each role would have held.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zerokern.core.errors import BudgetError, got
from zerokern.core.ports import plugs
from zerokern.core.units import AUTO, meant_tier, parse_nbytes
from zerokern.memory.arena import HUGE_PAGE, Arena, touch_later
from zerokern.memory.copies import Copies
from zerokern.memory.layout import nbytes_of, offsets_of
from zerokern.memory.pages import on_huge_pages
from zerokern.memory.room import amount, check_fits
from zerokern.memory.staging import DoneTicket, Ticket

__all__ = [
    "AnyTier", "DevicePool", "HostTier", "OpenedTier", "Tier", "TierConfig", "Wanted", "check_tier",
    "config_of", "name_of",
]  # fmt: skip

Part = TypeVar("Part")


class Wanted(NamedTuple):
    """One tensor that is to rest in a tier. `role`: what it is, for error messages and `held`."""

    role: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Tier(Protocol[Part]):
    """Where parts rest: parameters, gradients, masters and moments, kept activations, all by these calls alone.

    A part is what `lay_out` returns: in memory the tensor itself, elsewhere whatever the tier makes of it. Transfers
    have tickets; those of one part happen in the order of the calls, and `after` is one more to come after. What has
    not been stored yet is not to be fetched.

    >>> tier: Tier[Tensor] = HostTier("example", budget=1 << 20)
    >>> (part,) = tier.lay_out([Wanted("weights", torch.Size([3]), torch.float32)])
    >>> tier.store(part, torch.ones(3)).wait()
    >>> out = torch.empty(3); tier.fetch(part, out).wait(); out
    tensor([1., 1., 1.])
    >>> tier.held(); tier.evict([part]); tier.held()
    {'weights': 12}
    {}
    """

    def lay_out(self, wanted: Sequence[Wanted]) -> list[Part]:
        """Allocates room for all of these, or raises BudgetError and allocates nothing."""
        ...

    def store(self, part: Part, value: Tensor, after: Ticket | None = None) -> Ticket:
        """Starts to store a value of that shape and dtype, whose memory must not change until the ticket has ended."""
        ...

    def fetch(self, part: Part, out: Tensor, after: Ticket | None = None) -> Ticket:
        """Starts to fetch what was stored into `out`, which is undefined until the ticket has ended."""
        ...

    def evict(self, parts: Iterable[Part]) -> None:
        """Frees their room; they are not to be used any more."""
        ...

    def held(self) -> Mapping[str, int]:
        """Returns the bytes at rest, by role."""
        ...


class OpenedTier(Tier[Part], Protocol[Part]):
    """A tier outside of memory: its parts must be fetched before they are used.

    `gives_way`: called when another tier of this process needs what this one has opened. Returns the reason for closing
    it, which later uses raise; "" if it is in use.
    """

    gives_way: Callable[[], str] | None

    def open(self, arena: Arena | None = None) -> None:
        """Acquires its resources, once. `arena`: memory that most fetches and stores use."""
        ...

    def close(self, because: str) -> None:
        """Releases everything, parts included; later uses raise the reason."""
        ...


class TierConfig(Protocol):
    """A tier to be opened, as `tier=` and `keep=` take it besides "device" and "cpu": `zk.Nvme(path)`."""

    @property
    def ring_nbytes(self) -> int:
        """Host memory that parts stream through."""
        ...

    def open(self, name: str, owner: str) -> OpenedTier[Any]:
        """Returns a tier for the parts of an owner. `name`: of its own room within; empty for all of it."""
        ...


AnyTier = str | TierConfig
TIERS = "'device', 'cpu' or zk.Nvme(path), as text 'nvme:/path'"


def _is_budget(text: str) -> bool:
    """Whether text is bytes with a unit, or "auto": what other tiers have behind a colon."""
    with suppress(ValueError):
        return text == AUTO or (not text.strip().isdecimal() and parse_nbytes("budget", text) > 0)
    return False


def check_tier(argument: str, value: object) -> AnyTier:
    """Returns the tier that was asked for, or raises an error that says what there is.

    A disk may be text, for configuration files: `nvme:` and the path of a folder.

    >>> check_tier("tier", "cpu"), check_tier("tier", "nvme:swap").path
    ('cpu', 'swap')
    """
    if isinstance(value, str):
        if value in ("device", "cpu"):
            return value
        kind, _, path = value.partition(":")
        path = path.strip()
        if kind == "nvme" and _is_budget(path.rpartition(":")[2]):
            do = "A disk has its budget as zk.Nvme(path, budget=...); a folder of such a name is 'nvme:./NAME'"
            raise ValueError(got(argument, value, TIERS, do))
        if kind == "nvme" and path:
            for opens in plugs("disk"):
                return opens(path)
    elif hasattr(value, "open") and hasattr(value, "ring_nbytes"):
        config: Any = value
        return config
    folder = "A folder becomes a tier with zk.Nvme(path)" if isinstance(value, str | os.PathLike) else ""
    do = meant_tier(value) or folder
    raise ValueError(got(argument, value, TIERS, do))


def config_of(tier: AnyTier) -> TierConfig | None:
    """Returns the tier if it must be opened; None for "device" and "cpu"."""
    return None if isinstance(tier, str) else tier


def name_of(tier: AnyTier) -> str:
    """Returns the name of the kind of tier, to compare between ranks, whose paths may differ.

    >>> name_of("cpu")
    'cpu'
    """
    return tier if isinstance(tier, str) else type(tier).__name__


class _Laid:
    """Tensors that were laid out together, held weakly, and their arena, which is dropped with the last of them."""

    def __init__(self, arena: Arena | None, tensors: Sequence[Tensor], wanted: Sequence[Wanted]) -> None:
        self.arena, self._left = arena, len(tensors)
        ended = partial(_one_less, weakref.ref(self))
        self.tensors = [(weakref.ref(one, ended), of) for one, of in zip(tensors, wanted, strict=True)]

    def keep(self, stays: Callable[[Tensor | None], bool]) -> None:
        self.tensors = [(ref, one) for ref, one in self.tensors if stays(ref())]
        self._left = len(self.tensors)

    def one_less(self) -> None:
        self._left -= 1
        if not self._left:
            self.arena = None


def _one_less(laid: weakref.ref[_Laid], _: object) -> None:
    found = laid()
    if found is not None:
        found.one_less()


class HostTier:
    """The tier in host memory: resident, locked, and pinned if CUDA is in use.

    Tensors that are laid out together share an arena, which is freed with the last of them. A forked child has none of
    it: `check` raises there, where touching a tensor would crash. A tensor may have an owner, for whom it is found
    again by its role, so that a load writes into the same memory.

    >>> place = HostTier("AdamW")
    >>> (kept,) = place.lay_out([Wanted("exp_avg", torch.Size([3]), torch.float32)])
    >>> kept.shape, place.nbytes
    (torch.Size([3]), 4096)
    """

    def __init__(
        self, owner: str, advice: str = "", *, budget: int | None = None, copies: Copies | None = None
    ) -> None:
        """`advice`: ends the message of a BudgetError. `budget`: the most bytes of tensors. `copies`: of the device
        that computes, on its streams."""
        self._owner, self._advice, self._budget, self.copies = owner, advice, budget, copies
        self._laid: list[_Laid] = []
        self._kept: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._owners: set[int] = set()
        self._untouched: set[tuple[int, str]] = set()  # those that nobody has used yet, which are zeros
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, whole pages."""
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def arenas(self) -> list[Arena]:
        """The arenas whose tensors are still referenced."""
        self._sweep()
        return [laid.arena for laid in self._laid if laid.arena is not None]

    def check(self) -> None:
        """Raises in a forked child, which has none of this memory."""
        if os.getpid() != self._process:
            for arena in self.arenas:  # the child may have laid out others since
                arena.check()

    def held(self) -> dict[str, int]:
        """Returns the bytes of the tensors that are still referenced, by role."""
        held: Counter[str] = Counter()
        for laid in self._laid:
            for ref, one in laid.tensors:
                if ref() is not None:
                    held[one.role] += one.nbytes
        return dict(held)

    def evict(self, kept: Iterable[Tensor]) -> None:
        """Forgets tensors, whose memory is freed with their last reference."""
        gone = {*map(id, kept), id(None)}
        for laid in self._laid:
            laid.keep(lambda tensor: id(tensor) not in gone)

    def lay_out(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Allocates zeroed tensors side by side."""
        nbytes = nbytes_of(one.nbytes for one in wanted)
        if not nbytes:
            return self._add(wanted, [torch.zeros(one.shape, dtype=one.dtype, device="cpu") for one in wanted])
        with _explained(wanted, self._advice):
            self._refuse_beyond_budget(wanted)
            check_fits(nbytes, f"host memory for {self._owner}")
            arena = Arena(nbytes)
        lease = arena.lease(nbytes, self._owner)
        if arena.poison:
            lease.tensor().zero_()
        offsets, _ = offsets_of(one.nbytes for one in wanted)
        tensors = [lease.tensor(one.dtype, one.shape, at) for at, one in zip(offsets, wanted, strict=True)]
        return self._add(wanted, tensors, arena)

    def store(self, kept: Tensor, value: Tensor, after: Ticket | None = None) -> Any:
        """Copies into a part; with `copies`, from the device, asynchronously if the part is pinned."""
        if self.copies is None or not self.copies.driver.pinned(kept):
            return self._moved(value, kept, after)
        return self.copies.to_host(value, kept, after=after)

    def fetch(self, kept: Tensor, out: Tensor, after: Ticket | None = None) -> Any:
        """Copies out of a part; with `copies`, to the device, as `store`."""
        if self.copies is None or not self.copies.driver.pinned(kept):
            return self._moved(kept, out, after)
        return self.copies.to_device(kept, out, after=after)

    def _moved(self, src: Tensor, dst: Tensor, after: Ticket | None) -> Any:
        """Copies on the current stream; if the memory is not pinned, the host waits for it."""
        if (src.shape, src.dtype) != (dst.shape, dst.dtype):
            both = f"{src.dtype} of shape {tuple(src.shape)}"
            raise ValueError(got("tensor", f"{dst.dtype} of shape {tuple(dst.shape)}", f"{both}, as on the other side"))
        if after is not None:
            after.wait()
        dst.detach().copy_(src.detach())  # the host waits, but for a device that torch does not know
        return DoneTicket() if self.copies is None else self.copies.here()

    def _sweep(self) -> None:
        self._laid = [laid for laid in self._laid if any(ref() is not None for ref, _ in laid.tensors)]

    def _add(self, wanted: Sequence[Wanted], tensors: list[Tensor], arena: Arena | None = None) -> list[Tensor]:
        self._sweep()
        self._laid.append(_Laid(arena, tensors, wanted))
        return tensors

    def _refuse_beyond_budget(self, wanted: Sequence[Wanted]) -> None:
        asked = sum(one.nbytes for one in wanted)
        if self._budget is None or asked <= (left := self._budget - sum(self.held().values())):
            return
        raise BudgetError(
            f"{amount(asked)} more for {self._owner} do not fit into budget={amount(self._budget)}, of which "
            f"{amount(max(left, 0))} are left"
        )

    def keep(self, owner: Tensor, wanted: Sequence[Wanted], tensors: Sequence[Tensor]) -> None:
        """Records that an owner's tensors lie here, these among them."""
        self._owners.add(id(owner))
        for one, tensor in zip(wanted, tensors, strict=True):
            self._kept[id(owner), one.role] = owner, tensor
            self._untouched.add((id(owner), one.role))

    def forget(self, owners: Iterable[Tensor]) -> None:
        """Forgets owners and their tensors."""
        gone = set(map(id, owners))
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in gone}
        self._untouched &= self._kept.keys()
        self._owners -= gone

    def forget_others(self, owners: Iterable[Tensor]) -> None:
        """Forgets all but these owners."""
        present = set(map(id, owners))
        self.forget([owner for owner, _ in self._kept.values() if id(owner) not in present])
        self._owners &= present

    def keeps(self, owner: Tensor) -> bool:
        """Whether tensors of this owner lie here."""
        return id(owner) in self._owners

    def kept_by(self) -> Counter[int]:
        """Returns the bytes of each owner's tensors, by the owner's id."""
        found = Counter[int]()
        for owner, tensor in self._kept.values():
            found[id(owner)] += tensor.nbytes
        return found

    def addresses(self) -> dict[int, tuple[int, str]]:
        """Returns the owner's id and the role of each address."""
        return {tensor.data_ptr(): key for key, (_, tensor) in self._kept.items() if tensor.numel()}

    def of(self, owner: Tensor, wanted: Wanted) -> Tensor | None:
        """Returns the owner's tensor of this role, shape and dtype; None if there is none."""
        _, tensor = self._kept.get((id(owner), wanted.role), (None, None))
        return tensor if tensor is not None and (tensor.shape, tensor.dtype) == wanted[1:] else None

    def rest(self, wanted: Sequence[tuple[Tensor, Wanted]], *, zeroed: bool = False) -> list[Tensor]:
        """Returns the tensors of these owners. New ones are zeros; the others keep their values unless `zeroed`."""
        missing = [(owner, one) for owner, one in wanted if self.of(owner, one) is None]
        for (owner, one), tensor in zip(missing, self.lay_out([one for _, one in missing]), strict=True):
            self.keep(owner, [one], [tensor])
        found = []
        for owner, one in wanted:
            key = (id(owner), one.role)
            found.append(self._kept[key][1])
            if zeroed and key not in self._untouched:  # what the system has just handed out is not written twice
                found[-1].zero_()
            self._untouched.discard(key)
        return found

    def settled(self, owner: Tensor, wanted: Wanted, value: Tensor) -> Tensor:
        """Returns the owner's tensor with this value: the value itself, unless it was moved out of the tier."""
        found = self.of(owner, wanted)
        is_there = found is not None and found.data_ptr() == value.data_ptr()
        if is_there and value.dtype == wanted.dtype and value.is_contiguous():
            return value
        (tensor,) = self.rest([(owner, wanted)])
        shown = value.detach().reshape(tensor.shape)
        return tensor.copy_(shown.clone() if is_there else shown)  # a transposed view of itself, say


class DevicePool:
    """Two memory pools of torch's allocator on a GPU, for buffers that come and go together and for those that stay.

    They keep allocations of different lifetimes apart, and apart from the program's own. On a CPU there are none.

    >>> pool = DevicePool(torch.device("cpu"))
    >>> with pool.allocating(), pool.lasting():
    ...     torch.zeros(2)
    tensor([0., 0.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[str, Any] = {}

    def allocating(self) -> AbstractContextManager[object]:
        """Context manager: this thread allocates from the pool for what comes and goes."""
        return self._using("comes and goes")

    def lasting(self) -> AbstractContextManager[object]:
        """Context manager: this thread allocates from the pool for what stays for many steps."""
        return self._using("stays")

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros from the pool for what stays."""
        return self.empty(numel, dtype).zero_()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory from the pool for what stays."""
        with self.lasting():
            made = torch.empty(numel, dtype=dtype, device=self.device)
        return on_huge_pages(made) if made.is_cpu else made

    def lay_out(self, wanted: Sequence[Wanted], owner: str, advice: str = "") -> list[Tensor]:
        """Allocates zeroed tensors that stay, on a CPU side by side in a private mapping of host memory.

        It is private because a forked worker must not share it. A tensor keeps the memory mapped. `advice`: ends the
        message of a BudgetError.

        >>> pool = DevicePool(torch.device("cpu"))
        >>> pool.lay_out([Wanted("exp_avg", torch.Size([3]), torch.float32)], "state")
        [tensor([0., 0., 0.])]
        """
        offsets, nbytes = offsets_of(one.nbytes for one in wanted)
        if self.device.type != "cpu" or not nbytes:
            with self.lasting():
                return [torch.zeros(one.shape, dtype=one.dtype, device=self.device) for one in wanted]
        slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        if slack:  # beyond a control group's limit the system grants all, and ends the process when it is touched
            with _explained(wanted, advice):
                check_fits(nbytes, owner)
        try:
            mapping = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{owner} needs {nbytes + slack} bytes of host memory: {error}") from error
        if slack:
            with contextlib.suppress(OSError):  # advice: a kernel without huge pages keeps small ones
                mapping.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE if slack else 0
        touch_later(mapping, start, nbytes)
        return [
            torch.frombuffer(mapping, dtype=one.dtype, count=one.shape.numel(), offset=start + at).view(one.shape)
            if one.nbytes
            else torch.zeros(one.shape, dtype=one.dtype, device="cpu")
            for at, one in zip(offsets, wanted, strict=True)
        ]

    def _using(self, name: str) -> AbstractContextManager[object]:
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph has a pool of its own
            return nullcontext()
        if name not in self._pools:
            with torch.cuda.device(self.device):
                self._pools[name] = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pools[name], self.device)


@contextlib.contextmanager
def _explained(wanted: Sequence[Wanted], advice: str) -> Iterator[None]:
    """Context manager that adds to a BudgetError what each role would have held, and advice."""
    try:
        yield
    except BudgetError as error:
        held: dict[str, int] = {}
        for one in wanted:
            held[one.role] = held.get(one.role, 0) + one.nbytes
        rows = [*sorted(held.items(), key=lambda row: -row[1]), ("in all", sum(held.values()))]
        lines = [f"{role:<20}{nbytes:>20,}" for role, nbytes in rows]
        said = [str(error), f"{'role':<20}{'bytes':>20}", *lines, *filter(None, [advice])]
        raise BudgetError("\n".join(said)) from None
