"""Twins in host memory of parameters that are elsewhere, or that nobody may see change while they are updated.

A twin has its parameter's dtype and values, and a gradient of its own. An update fetches gradients, steps the twins,
and stores them: into the parameters, or, with a delay, into shadows on the device that are put in place later.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.core import env
from zerokern.kernels.ops import fingerprints
from zerokern.memory import NextRest, Wanted, placement
from zerokern.memory.copies import Copies, Copy
from zerokern.optim import device
from zerokern.optim.device import driver_of, put_in_place
from zerokern.optim.formats import Slot
from zerokern.zero.fetching import fetched, in_turns
from zerokern.zero.kinds import present, rest_of
from zerokern.zero.shard import alias

__all__ = ["Host", "Twin"]

ColumnsOf = Callable[[int, torch.dtype], Sequence[Slot]]
"""Which tensors of its state lie beside a parameter's values, by its place and dtype."""
_DROPPED = (
    "%d parameters were written while an update of them was pending; what was written stays, and that update of their "
    "values is dropped. opt.flush() before writing keeps it; a model is loaded before its optimizer"
)


@dataclass(eq=False)
class Twin:
    """One parameter, `near` to the compute, and what the host has of it.

    `rest`: where its values are while nobody uses them, if the parameter rests too. They are the parameter's then, and
    nowhere else, until an update changes them.
    """

    near: Tensor
    values: nn.Parameter
    grad: Tensor
    shadow: Tensor | None = None
    rest: NextRest | None = None
    shown: Tensor | None = None  # the values, for who shows them: other views would keep them in memory
    others: dict[torch.dtype, Tensor] = field(default_factory=dict)  # room for gradients of other dtypes than the last
    seen: tuple[int, int] = (0, 0)  # version and address of `near`, as of the last time both agreed
    fetched: tuple[Tensor, int] | None = None  # the gradient that left before `step()`, and its version then
    checked: bool = False  # copies to and from it have been checked
    free: bool = True  # no update has yet to read the gradient that is here
    last: weakref.ref[Tensor] | None = None  # the gradient that the last step was made of
    loaded: int | None = None  # the fingerprint of `near` when pending values were loaded, until they are published
    pending: bool = False  # the values are those of an update that has yet to be published

    def look(self) -> bool:
        """Whether somebody wrote or moved the parameter. Who loads a model after its optimizer may change nothing."""
        if (self.near._version, self.near.data_ptr()) == self.seen:
            return False
        if self.loaded is None or self.bits != self.loaded:
            return True
        self.agree()
        return False

    @property
    def bits(self) -> int:
        """The parameter's fingerprint."""
        with present(self.near):
            return int(fingerprints(self.near.detach().contiguous()))

    def agree(self) -> None:
        self.seen = (self.near._version, self.near.data_ptr())

    def keeps(self, grad: Tensor) -> bool:
        """Whether its gradients may be written where they are, as far as is known: the last step's was the same."""
        kept = self.last is None or self.last() is grad
        self.last = weakref.ref(grad)
        return kept

    def holds(self, grad: Tensor) -> bool:
        """Whether this gradient, as it is now, has been fetched."""
        if self.fetched is None or self.fetched[1] != grad._version:
            return False
        left = self.fetched[0]  # it may be shown through another view of the same memory
        return left.data_ptr() == grad.data_ptr() and left.dtype == grad.dtype and left.numel() == grad.numel()


@dataclass(eq=False)
class Host:
    """The twins of one optimizer. `delays`: parameters change when they are published, not when twins are stored."""

    room: Any  # a HostTier; None where there are no twins
    delays: bool
    twins: dict[int, Twin] = field(default_factory=dict)
    late: bool = False  # an update waits to be published: on all ranks or none, whatever is pending on this one
    driver: Any = None
    copies: Copies | None = None
    freed: Callable[[], None] = lambda: None  # is called when gradients have been read
    _put: list[Twin] = field(default_factory=list)  # in place, and not yet accounted for
    _cells: list[Tensor] = field(default_factory=list)
    _poisons: bool = field(default_factory=lambda: env.switched_on("ZEROKERN_POISON"))

    def reach(self, param: Tensor, *, measured: bool) -> None:
        """Makes the way to the device that parameters lie on, if they do. `measured`: copies know when they ran."""
        if self.copies is not None:
            return
        if device.serves(param.device):
            placement.settle_beside(param.device)
        self.driver = driver_of(param)
        if self.driver is not None:
            if measured:
                self.driver.measure()
            self.copies = Copies(self.driver)

    def take_in(
        self, near: Sequence[Tensor], grad_dtypes: Sequence[torch.dtype], columns_of: ColumnsOf
    ) -> list[Tensor]:
        """What stands for each of these here: the values of its twin, or itself where it is not trained."""
        trained = [i for i, one in enumerate(near) if one.requires_grad]
        new = [i for i in trained if id(near[i]) not in self.twins]
        if new:
            self._of_one_device([near[i] for i in trained])
            self._make(
                [near[i] for i in new], [grad_dtypes[i] for i in new], [columns_of(i, near[i].dtype) for i in new]
            )
        present = set(map(id, near))  # frozen ones keep theirs: they may be trained again
        gone = [twin for key, twin in self.twins.items() if key not in present]
        self.twins = {key: twin for key, twin in self.twins.items() if key in present}
        self.room.forget([twin.values for twin in gone])
        return [self.twins[id(one)].values if one.requires_grad else one for one in near]

    def _of_one_device(self, near: Sequence[Tensor]) -> None:
        home = near[0].device
        for one in near:
            if one.device != home:
                raise ValueError(
                    f"parameters are on {home} and on {one.device}; allowed: one optimizer for the parameters of each "
                    "device"
                )

    def _make(
        self, near: Sequence[Tensor], grad_dtypes: Sequence[torch.dtype], columns: Sequence[Sequence[Slot]]
    ) -> None:
        places = self._beside(near)
        loose = [one for one, place in zip(near, places, strict=True) if place is None]
        wanted = [Wanted("values", one.shape, one.dtype) for one in loose]
        wanted += [Wanted("gradients", one.shape, dtype) for one, dtype in zip(near, grad_dtypes, strict=True)]
        slots = [(one, slot) for one, some in zip(near, columns, strict=True) for slot in some]
        slots.sort(key=lambda pair: pair[1].key)
        wanted += [slot.wanted(one) for one, slot in slots]
        tensors = self.room.lay_out(wanted)
        there, count = iter(tensors), len(loose) + len(near)
        made: list[Twin] = []
        for one, place, grad in zip(near, places, tensors[len(loose) : count], strict=True):
            twin = Twin(one, nn.Parameter(next(there)), grad) if place is None else _resting(one, grad, place)
            if grad.dtype != twin.values.dtype:
                twin.values.grad_dtype = grad.dtype
            made.append(twin)
        kept: dict[int, dict[str, Tensor]] = {}
        for (one, slot), tensor in zip(slots, tensors[count:], strict=True):
            kept.setdefault(id(one), {})[slot.key] = tensor
        for twin, some in zip(made, columns, strict=True):
            state = kept.get(id(twin.near), {})
            wanted = [slot.wanted(twin.values) for slot in some]
            self.room.keep(twin.values, wanted, [state[one.role] for one in wanted])
            if self.delays and self.driver is not None:
                twin.shadow = torch.empty_like(twin.near.detach())
            self.twins[id(twin.near)] = twin
        self.refetch(made)

    def _beside(self, near: Sequence[Tensor]) -> list[NextRest | None]:
        """Where the values of twins rest: together with those of all whose parameters rest together."""
        found = {twin.rest.base: twin.rest for twin in self.twins.values() if twin.rest is not None}
        bases = list(map(rest_of, near))
        for base in bases:
            if base is not None and base not in found:
                found[base] = NextRest(base, "pending")
        return [None if base is None else found[base] for base in bases]

    def of(self, near: Iterable[Tensor]) -> list[Twin]:
        """The twins of these; those that are not trained have none."""
        return [self.twins[id(one)] for one in near if id(one) in self.twins]

    def look(self) -> None:
        """Follow what was written to parameters, or moved, since host and device last agreed."""
        changed = [twin for twin in self.twins.values() if self._follows(twin) and twin.look()]
        if changed:
            self.follow(changed)

    def _follows(self, twin: Twin) -> bool:
        """Frozen ones too, whose masters follow them, unless they are something else by now."""
        near, values = twin.near, twin.values
        same = twin.rest is None and (near.dtype, near.shape) == (values.dtype, values.shape)
        return near.requires_grad or (same and device.is_apart(near) == (self.driver is not None))

    def follow(self, twins: Sequence[Twin]) -> None:
        """These parameters were written: that counts, and not what an update has made of them meanwhile."""
        lost = sum(twin.pending for twin in twins)
        if lost:
            warnings.warn(_DROPPED % lost, stacklevel=2)
        self.refetch(twins)

    def refetch(self, twins: Sequence[Twin]) -> None:
        """The values of the twins are those of the parameters."""
        if not twins:
            return
        for twin in twins:
            twin.pending = False
        self._forget([twin for twin in twins if twin.rest is not None])
        pairs = [(twin.near.detach(), twin.values.detach()) for twin in twins if twin.rest is None]
        if self.copies is None:
            for near, values in pairs:
                values.copy_(near)
        else:
            self.copies.to_host([near.contiguous() for near, _ in pairs], [values for _, values in pairs]).wait()
            torch.autograd.graph.increment_version([twin.values for twin in twins])
        for twin in twins:
            twin.checked = False
            twin.agree()

    def _forget(self, twins: Sequence[Twin]) -> None:
        """As `refetch`, where both rest: nothing is read unless what lies beside them is pending."""
        needed = {twin.rest for twin in self.pending}
        for twin in twins:
            assert twin.rest is not None
            if twin.rest not in needed:
                twin.rest.forget()
                continue
            with present(twin.near), present(twin.values, written=True), torch.no_grad():
                twin.values.copy_(twin.near)

    def fetch(
        self, pairs: Sequence[tuple[Twin, Tensor]], *, left_as: Sequence[int] = (), ready: Copy | None = None
    ) -> Copy | None:
        """Gradients to where the update reads them, once `ready`; a ticket where they are on their way.

        `left_as`: their versions when `ready` was set; they may yet be edited. What was not is not fetched again.
        """
        if not left_as:
            pairs = [(twin, grad) for twin, grad in pairs if not twin.holds(grad)]
        for place, (twin, grad) in enumerate(pairs):
            if twin.grad.dtype != grad.dtype:
                self._exchange(twin, grad.dtype)
            twin.fetched = (grad, left_as[place]) if left_as else None
        if self.copies is None:
            grads = [grad for _, grad in pairs]
            for places in in_turns([grads]):
                with fetched([grads[place] for place in places], written=()):
                    for place in places:
                        pairs[place][0].grad.copy_(grads[place].detach())
            return None
        if not pairs:
            return None
        sources, targets = [grad.detach() for _, grad in pairs], [twin.grad for twin, _ in pairs]
        # a gradient is checked when it is found; its twin, once
        ticket = self.copies.to_host(sources, targets, ready=ready, checked=all(twin.checked for twin, _ in pairs))
        for twin, _ in pairs:
            twin.checked = True
        return ticket

    def _exchange(self, twin: Twin, dtype: torch.dtype) -> None:
        """Gradients come in another dtype from here on; what the old one took is kept for when it comes back."""
        twin.others[twin.grad.dtype] = twin.grad
        found = twin.others.pop(dtype, None)
        if found is None:
            (found,) = self.room.lay_out([Wanted("gradients", twin.near.shape, dtype)])
        twin.grad, twin.values.grad_dtype, twin.checked = found, dtype, False

    def store(self, twins: Sequence[Twin], ready: Any) -> Copy | None:
        """Updated values to the device, once `ready`; without one, `publish` takes them."""
        if self.copies is None:
            return None
        targets = [twin.near.detach() if twin.shadow is None else twin.shadow for twin in twins]
        sources = [twin.values.detach() for twin in twins]
        return self.copies.to_device(sources, targets, ready=ready, checked=all(twin.checked for twin in twins))

    def reading(self, value: Any) -> Callable[[], Any]:
        """What a number on the device is now, for whoever asks later, on any thread, and waits for nothing else."""
        if not isinstance(value, Tensor):
            return lambda: value
        if self.copies is None or value.is_cpu:
            kept = value.detach().clone()
            return lambda: kept
        wanted = Wanted("scalars", torch.Size([1]), torch.float32)
        cell = self._cells.pop() if self._cells else self.room.lay_out([wanted])[0]
        ticket = self.copies.to_host(value.detach().to(torch.float32).reshape(1), cell)

        def read() -> Any:
            ticket.wait()
            found = cell.clone()
            self._cells.append(cell)
            return found

        return read

    def here(self) -> Copy | None:
        """A ticket for all that the device has been given until now."""
        return None if self.copies is None else self.copies.here()

    def consumed(self, twins: Sequence[Twin], *, updated: bool) -> None:
        """The gradients of these are of no more use; with `updated`, their values are of the step to come."""
        for twin in twins:
            twin.pending, twin.fetched = twin.pending or (updated and self.delays), None
            if self._poisons:
                twin.grad.fill_(torch.nan)
            twin.free = True  # last: from now on the next one may be fetched
        self.freed()

    @property
    def pending(self) -> list[Twin]:
        return [twin for twin in self.twins.values() if twin.pending]

    def publish(self, updated: Sequence[Twin]) -> None:
        """What was `updated`, or is pending where updates are delayed, is what everybody sees: all of it at once."""
        twins = list(updated)
        if self.delays:
            self.put(self.pending)
            twins, self._put = self._put, []
        torch.autograd.graph.increment_version([twin.near for twin in twins])
        for twin in twins:
            twin.pending, twin.loaded = False, None
            twin.agree()

    def put(self, updated: Iterable[Twin]) -> Copy | None:
        """What is pending of these is put where compute reads it, from here on; `publish` accounts for it."""
        twins = [twin for twin in updated if twin.pending]
        if not twins:
            return None
        loose = [twin for twin in twins if twin.rest is None]
        rests = {twin.rest for twin in twins if twin.rest is not None}
        if rests:
            twins = loose + [twin for twin in self.pending if twin.rest in rests]  # and what lies beside them
        for rest in rests:
            self._put_rest(rest, [twin for twin in twins if twin.rest is rest])
        if self.driver is None:
            with torch.no_grad():
                for twin in loose:
                    twin.near.detach().copy_(twin.values.detach())
        else:
            shadowed = [(alias(twin.near, 0, twin.near.shape), twin.shadow) for twin in loose]
            put_in_place(self.driver, [(near, shadow) for near, shadow in shadowed if shadow is not None])
        for twin in twins:
            twin.pending = False
        self._put += twins
        return self.here()

    def _put_rest(self, rest: NextRest, twins: Sequence[Twin]) -> None:
        """What is pending of all that rest together; without a copy, unless others have written beside them."""
        if rest.take_place():
            return
        with rest.base.used(), rest.used(), torch.no_grad():
            rest.base.change()
            for twin in twins:
                twin.near.detach().copy_(twin.values.detach())
        rest.forget()

    def pend(self, near: Tensor, values: Tensor) -> None:
        """Values that were saved with their update yet to be published, if they are others than the twin's."""
        twin = self.twins[id(near)]
        with present(values), present(twin.values):
            if torch.equal(values.to(twin.values.device), twin.values):
                return
        with torch.no_grad(), present(values), present(twin.values, written=True):
            alias(twin.values, 0, twin.values.shape).copy_(values)  # its master comes with it, and is not to begin anew
        self.wait_for([twin])

    def wait_for(self, twins: Sequence[Twin]) -> None:
        """These have been given values that wait to be published, where they are others than the parameters'."""
        ticket = self.store(twins, None) if twins else None
        if ticket is not None:
            ticket.wait()
        for twin in twins:
            with present(twin.values), present(twin.near):
                twin.pending = not torch.equal(twin.values.detach(), twin.near.detach().to(twin.values.device))
            twin.loaded = twin.bits if twin.pending else None


def _resting(near: Tensor, grad: Tensor, rest: NextRest) -> Twin:
    """The twin of a parameter that rests; its values lie as the parameter's do."""
    with rest.adding_views():
        offset = int(near.storage_offset()) - int(rest.base.memory.storage_offset())
        values = nn.Parameter(alias(rest.memory, offset, near.shape))
        shown = values.detach()
    values.zk_rest = shown.zk_rest = rest  # type: ignore[attr-defined]
    rest.is_viewed()  # by nobody else yet
    return Twin(near, values, grad, rest=rest, shown=shown)
