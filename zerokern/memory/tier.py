"""Tiers: where parts of a training state rest between their uses. "device": beside what computes; "cpu": in host memory
of exactly the planned bytes; or what a `TierConfig` opens, such as a disk (`zerokern.io.tier`).

Memory is handed out zeroed, laid out as `memory/layout.py` says, so that a plan and what the system counts agree to the
page. Each tensor has a storage of its own size, because saving a tensor saves its storage. What does not fit into host
memory is refused before anything is taken, with who would have held how much.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zerokern.core.errors import BudgetError, got
from zerokern.memory.arena import HUGE_PAGE, Arena
from zerokern.memory.copies import Copies
from zerokern.memory.layout import nbytes_of, offsets_of
from zerokern.memory.pages import on_huge_pages
from zerokern.memory.room import amount, check_fits
from zerokern.memory.staging import Ticket, stream_ticket

__all__ = [
    "AnyTier",
    "DevicePool",
    "DeviceTier",
    "HostTier",
    "OpenedTier",
    "Tier",
    "TierConfig",
    "Wanted",
    "check_tier",
    "config_of",
    "name_of",
]

Part = TypeVar("Part")


class Wanted(NamedTuple):
    """One tensor that is to rest somewhere. `role`: what it is, for refusals and for who asks what a place holds."""

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
    not been stored yet is not to be fetched. `budget`: the most bytes that may rest there; None: what there is.

    >>> tier: Tier[Tensor] = HostTier("example", budget=1 << 20)
    >>> (part,) = tier.lay_out([Wanted("weights", torch.Size([3]), torch.float32)])
    >>> tier.store(part, torch.ones(3)).wait()
    >>> out = torch.empty(3); tier.fetch(part, out).wait(); out
    tensor([1., 1., 1.])
    >>> tier.held(); tier.evict([part]); tier.held()
    {'weights': 12}
    {}
    """

    @property
    def budget(self) -> int | None: ...

    def lay_out(self, wanted: Sequence[Wanted]) -> list[Part]:
        """Room for all of these, or BudgetError and nothing taken."""
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
        """Bytes at rest, by role."""
        ...


class OpenedTier(Tier[Part], Protocol[Part]):
    """A tier outside of memory: its parts have to be fetched before anything is computed with them.

    `gives_way`: called when another tier of this process needs what this one has opened. Returns why this one is
    closed, for who uses it from then on; nothing if it is at work.
    """

    gives_way: Callable[[], str] | None

    def open(self, arena: Arena | None = None) -> None:
        """Takes what it needs, once. `arena`: memory that is fetched into and stored from most of the time."""
        ...

    def close(self, because: str) -> None:
        """Gives everything back; parts are gone, and who uses one is told why."""
        ...


class TierConfig(Protocol):
    """What `tier=` and `keep=` take beside "device" and "cpu", as `zk.Nvme(path)`: a tier that is yet to be opened."""

    @property
    def ring_nbytes(self) -> int:
        """Host memory that parts stream through."""
        ...

    def open(self, name: str, owner: str) -> OpenedTier[Any]:
        """A tier for parts of this owner. `name`: of the room that is its own; empty: all there is."""
        ...


AnyTier = str | TierConfig
TIERS = "'device', 'cpu' or zk.Nvme(path)"


def check_tier(argument: str, value: object) -> AnyTier:
    """Returns the tier that was asked for, or raises an error that says what there is.

    >>> check_tier("tier", "cpu")
    'cpu'
    """
    if isinstance(value, str):
        if value in ("device", "cpu"):
            return value
    elif hasattr(value, "open") and hasattr(value, "ring_nbytes"):
        config: Any = value
        return config
    do = "a folder becomes a tier with zk.Nvme(path)" if isinstance(value, str | os.PathLike) else ""
    raise ValueError(got(argument, value, TIERS, do))


def config_of(tier: AnyTier) -> TierConfig | None:
    """A tier that has to be opened; None for "device" and "cpu", which are memory."""
    return None if isinstance(tier, str) else tier


def name_of(tier: AnyTier | None) -> str:
    """A word for the kind of tier, to be compared between ranks, whose paths may differ.

    >>> name_of("cpu")
    'cpu'
    """
    return str(tier) if tier is None or isinstance(tier, str) else type(tier).__name__


class _Laid:
    """What was laid out together: each tensor, as long as somebody has it, and the arena, which goes with the last."""

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


class _InMemory:
    """What places in memory have in common: their tensors are what stands for them."""

    def __init__(
        self, owner: str, advice: str = "", *, budget: int | None = None, copies: Copies | None = None
    ) -> None:
        """`advice`: what whoever is refused may do. `copies`: of the device that computes, on its streams."""
        self._owner, self._advice, self.budget, self.copies = owner, advice, budget, copies
        self._laid: list[_Laid] = []

    def held(self) -> dict[str, int]:
        """Bytes of the tensors that somebody has, by role."""
        held: Counter[str] = Counter()
        for laid in self._laid:
            for ref, one in laid.tensors:
                if ref() is not None:
                    held[one.role] += one.nbytes
        return dict(held)

    def evict(self, kept: Iterable[Tensor]) -> None:
        """They are not to be used any more; their memory is free once nobody has them."""
        gone = {*map(id, kept), id(None)}
        for laid in self._laid:
            laid.keep(lambda tensor: id(tensor) not in gone)

    def _sweep(self) -> None:
        self._laid = [laid for laid in self._laid if any(ref() is not None for ref, _ in laid.tensors)]

    def _add(self, wanted: Sequence[Wanted], tensors: list[Tensor], arena: Arena | None = None) -> list[Tensor]:
        self._sweep()
        self._laid.append(_Laid(arena, tensors, wanted))
        return tensors

    def _refuse_beyond_budget(self, wanted: Sequence[Wanted]) -> None:
        asked = sum(one.nbytes for one in wanted)
        if self.budget is None or asked <= (left := self.budget - sum(self.held().values())):
            return
        raise BudgetError(
            f"{amount(asked)} more for {self._owner} do not fit into budget={amount(self.budget)}, of which "
            f"{amount(max(left, 0))} are left"
        )


def _moved(src: Tensor, dst: Tensor, after: Ticket | None) -> Ticket:
    """A copy within one memory; on a GPU its stream puts it in order."""
    if (src.shape, src.dtype) != (dst.shape, dst.dtype):
        both = f"{src.dtype} of shape {tuple(src.shape)}"
        raise ValueError(got("tensor", f"{dst.dtype} of shape {tuple(dst.shape)}", f"{both}, as on the other side"))
    if after is not None:
        after.wait()
    dst.detach().copy_(src.detach())
    return stream_ticket(dst.device if src.is_cuda else src.device)


class DeviceTier(_InMemory):
    """Where a parameter is: on its device, in a pool for what stays, or in a private mapping of host memory, on huge
    pages where there are any.

    Private, because a forked worker must not share it. A tensor keeps the memory mapped.

    >>> (made,) = DeviceTier(torch.device("cpu"), "state").lay_out([Wanted("exp_avg", torch.Size([3]), torch.float32)])
    >>> made
    tensor([0., 0., 0.])
    """

    def __init__(
        self,
        device: torch.device,
        owner: str,
        advice: str = "",
        *,
        budget: int | None = None,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(owner, advice, budget=budget, copies=copies)
        self._device = device
        self._pool = DevicePool(device)

    def lay_out(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Zeroed tensors, side by side in host memory."""
        with _explained(wanted, self._advice):
            self._refuse_beyond_budget(wanted)
        offsets, nbytes = offsets_of(one.nbytes for one in wanted)
        if self._device.type != "cpu" or not nbytes:
            with self._pool.lasting():
                made = [torch.zeros(one.shape, dtype=one.dtype, device=self._device) for one in wanted]
            return self._add(wanted, made)
        slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        if slack:  # beyond a control group's limit the system grants all, and ends the process when it is touched
            with _explained(wanted, self._advice):
                check_fits(nbytes, self._owner)
        try:
            mapping = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{self._owner} needs {nbytes + slack} bytes of host memory: {error}") from error
        if slack:
            with contextlib.suppress(OSError):  # advice: a kernel without huge pages keeps small ones
                mapping.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE if slack else 0
        return self._add(
            wanted,
            [
                torch.frombuffer(mapping, dtype=one.dtype, count=one.shape.numel(), offset=start + at).view(one.shape)
                if one.nbytes
                else torch.zeros(one.shape, dtype=one.dtype, device="cpu")
                for at, one in zip(offsets, wanted, strict=True)
            ],
        )

    def store(self, kept: Tensor, value: Tensor, after: Ticket | None = None) -> Ticket:
        """From the host, where there are `copies`."""
        return _moved(value, kept, after) if self.copies is None else self.copies.to_device(value, kept, after=after)

    def fetch(self, kept: Tensor, out: Tensor, after: Ticket | None = None) -> Ticket:
        """To the host, where there are `copies`."""
        return _moved(kept, out, after) if self.copies is None else self.copies.to_host(kept, out, after=after)


class HostTier(_InMemory):
    """Host memory that a device reaches: resident, locked, known to CUDA where that is in use. For what stays.

    What is taken together lies in one arena, which goes with the last of its tensors. A forked child has none of it:
    there `check` raises, where touching a tensor would crash. A tensor may belong to an owner, for whom it is found
    again by its role: what is loaded is written where its predecessor lay.

    >>> place = HostTier("AdamW")
    >>> (kept,) = place.lay_out([Wanted("exp_avg", torch.Size([3]), torch.float32)])
    >>> kept.shape, place.nbytes
    (torch.Size([3]), 4096)
    """

    def __init__(
        self, owner: str, advice: str = "", *, budget: int | None = None, copies: Copies | None = None
    ) -> None:
        super().__init__(owner, advice, budget=budget, copies=copies)
        self._kept: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._untouched: set[tuple[int, str]] = set()  # of these, what nobody has been handed yet: zeros

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, whole pages."""
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def arenas(self) -> list[Arena]:
        """Those that a tensor lies in."""
        self._sweep()
        return [laid.arena for laid in self._laid if laid.arena is not None]

    def check(self) -> None:
        """Raises in a forked child, which has none of this memory."""
        for arena in self.arenas:
            arena.check()

    def lay_out(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Zeroed tensors side by side."""
        nbytes = nbytes_of([(one.shape, one.dtype) for one in wanted])
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
        """From the device, where there are `copies`: then the ticket is theirs. Beside the program, if it is pinned."""
        if self.copies is None or not self.copies.driver.pinned(kept):
            return self._moved(value, kept, after)
        return self.copies.to_host(value, kept, after=after)

    def fetch(self, kept: Tensor, out: Tensor, after: Ticket | None = None) -> Any:
        """To the device, as `store`."""
        if self.copies is None or not self.copies.driver.pinned(kept):
            return self._moved(kept, out, after)
        return self.copies.to_device(kept, out, after=after)

    def _moved(self, src: Tensor, dst: Tensor, after: Ticket | None) -> Any:
        """On the current stream; where it is not pinned memory, the host waits with it."""
        ticket = _moved(src, dst, after)
        return ticket if self.copies is None else self.copies.here()

    def keep(self, owner: Tensor, wanted: Sequence[Wanted], tensors: Sequence[Tensor]) -> None:
        """These were taken for the owner."""
        for one, tensor in zip(wanted, tensors, strict=True):
            self._kept[id(owner), one.role] = owner, tensor
            self._untouched.add((id(owner), one.role))

    def forget(self, owners: Sequence[Tensor]) -> None:
        """These have nothing here any more."""
        gone = set(map(id, owners))
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in gone}
        self._untouched &= self._kept.keys()

    def addresses(self) -> dict[int, tuple[int, str]]:
        """Whose each address is: the owner's id, and the role."""
        return {tensor.data_ptr(): key for key, (_, tensor) in self._kept.items() if tensor.numel()}

    def of(self, owner: Tensor, wanted: Wanted) -> Tensor | None:
        """What the owner has here."""
        _, tensor = self._kept.get((id(owner), wanted.role), (None, None))
        return tensor if tensor is not None and (tensor.shape, tensor.dtype) == wanted[1:] else None

    def rest(self, wanted: Sequence[tuple[Tensor, Wanted]], *, zeroed: bool = False) -> list[Tensor]:
        """The tensors of these owners: new ones hold zeros, the others what they did, or zeros if `zeroed`."""
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
        """A value in the tensor that it has here: itself, unless it was moved elsewhere."""
        found = self.of(owner, wanted)
        is_there = found is not None and found.data_ptr() == value.data_ptr()
        if is_there and value.dtype == wanted.dtype and value.is_contiguous():
            return value
        (tensor,) = self.rest([(owner, wanted)])
        shown = value.detach().reshape(tensor.shape)
        return tensor.copy_(shown.clone() if is_there else shown)  # a transposed view of itself, say


class DevicePool:
    """Pools of torch's allocator on a GPU: one for what comes and goes as a whole, one for what stays. What a program
    allocates besides lies in neither, so that none is cut up by what has another life; elsewhere the system serves.

    >>> pool = DevicePool(torch.device("cpu"))
    >>> with pool.allocating(), pool.lasting():
    ...     torch.zeros(2)
    tensor([0., 0.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[str, Any] = {}

    def allocating(self) -> AbstractContextManager[object]:
        """What this thread allocates within comes from the pool, and goes back to it."""
        return self._using("comes and goes")

    def lasting(self) -> AbstractContextManager[object]:
        """As `allocating`, of what stays for many steps."""
        return self._using("stays")

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """What stays for many steps, and is asked for amid what does not."""
        return self.empty(numel, dtype).zero_()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """As `zeros`, for who writes all of it."""
        with self.lasting():
            made = torch.empty(numel, dtype=dtype, device=self.device)
        return on_huge_pages(made) if made.is_cpu else made

    def _using(self, name: str) -> AbstractContextManager[object]:
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph has a pool of its own
            return nullcontext()
        if name not in self._pools:
            with torch.cuda.device(self.device):
                self._pools[name] = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pools[name], self.device)


@contextlib.contextmanager
def _explained(wanted: Sequence[Wanted], advice: str) -> Iterator[None]:
    """A refusal says who would have held how much, and what would take less."""
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
