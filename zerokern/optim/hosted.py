"""Keeps copies in host memory of parameters that lie on a device, or that may not change visibly during an update.

A copy has its parameter's dtype and values, and a gradient of its own. An update fetches gradients, steps the copies,
and stores them: into the parameters, or, with a delay, into shadows on the device that are put in place later.
Gradients of zk.shard are fetched during backward already, bucket by bucket (`leaving.LeavingGradients`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.core import env
from zerokern.core.errors import warn
from zerokern.kernels.squares import ChunkSums, one_by_one
from zerokern.memory import Wanted, placement
from zerokern.memory.changed_copies import Changed, ChangedCopies
from zerokern.memory.copies import Copies, Copy
from zerokern.memory.staging import EMULATED_DRIVERS, driver_of
from zerokern.optim import device
from zerokern.optim.decide import kept
from zerokern.optim.device import put_in_place
from zerokern.optim.formats import Slot
from zerokern.zero.changed_spans import Take
from zerokern.zero.kinds import splits_of
from zerokern.zero.reducing import Sumsq
from zerokern.zero.shard import alias
from zerokern.zero.tiers import fetched, in_turns
from zerokern.zero.watch import Watch

__all__ = ["HostCopies", "HostCopy", "Location", "Piece"]

_checked = attrgetter("checked")
Piece = Sequence[tuple["HostCopy", slice]]
"""Elements of copies that are moved together."""
MeasuredThere = tuple[ChunkSums, tuple[Tensor, Tensor]]
"""What the device measures gradients with, and the copy of the sums that is to be made: to where, from where."""


Location = tuple[int | None, Sequence[Slot] | None]
"""Says of a parameter on a device what `HostCopy.stays` is, and which tensors of its state lie in host memory; None:
its state lies elsewhere, whatever there will be of it."""
LocationsOf = Callable[[Sequence[tuple[int, Tensor]]], Sequence[Location]]
"""Returns, of each of these (place, parameter), where it and its state lie."""
_DROPPED = (
    "%d parameters were written while an update of them was pending; what was written stays, and that update of their "
    "values is dropped. opt.flush() before writing keeps it; a model is loaded before its optimizer"
)


@dataclass(eq=False)
class HostCopy:
    """Holds the host copy of one parameter, of which this rank has `local` beside the compute.

    `stays`: None; or the device updates the parameter: the gradient is the device's own, the values are the parameter
    itself, or, with a delay, its shadow, and so many bytes of its state lie there. `near`: so it is, but in host
    memory, where zk.shard has put what had no room on the device.
    """

    local: Tensor
    values: Tensor
    grad: Tensor
    shadow: Tensor | None = None
    fetched: tuple[Tensor, int] | None = None  # the gradient that left before `step()`, and its version then
    checked: bool = False  # copies to and from it have been checked
    free: bool = True  # no update has yet to read the gradient that is here
    last: weakref.ref[Tensor] | None = None  # the gradient that the last step was made of
    sumsq: Sumsq = None  # of `grad`, where the device has measured it
    pending: bool = False  # the values are those of an update that has yet to be published
    stays: int | None = None
    near: bool = False
    same: bool = False  # the device has these values, but for those that bits of changes tell
    left: weakref.WeakMethod | None = None  # brings the device's gradient back, whose memory there was given up

    @property
    def owns_values(self) -> bool:
        """Whether an update changes values of its own, and not the parameter."""
        return self.values is not self.local

    def bring_back(self) -> None:
        """Brings a gradient back to the device that has its values here alone."""
        if self.left is not None and (land := self.left()) is not None:
            land()

    def keeps(self, grad: Tensor) -> bool:
        """Whether the last step had the same gradient tensor, as far as is known: then the program writes into it."""
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
class HostCopies:
    """Holds the copies of one optimizer. `delays`: parameters change when published, not when copies are stored.

    `measures`: steps ask for the norm of gradients, so the device measures their squares before they leave it.
    `keeps_there`: some parameters are updated on the device. `has_near`: some are in host memory, in place.
    """

    room: Any  # a HostTier; None where there are no copies
    delays: bool
    copies: dict[int, HostCopy] = field(default_factory=dict)
    late: bool = False  # an update waits to be published: on all ranks or none, whatever is pending on this one
    driver: Any = None
    link: Copies | None = None  # to the device that the parameters lie on
    freed: Callable[[], None] = lambda: None  # is called when gradients have been read
    measures: bool = False
    keeps_there: bool = False
    has_near: bool = False
    # by the first of the copies that are fetched together: all of them, and what measures them
    _squares: dict[int, tuple[list[int], ChunkSums]] = field(default_factory=dict)
    _put: list[HostCopy] = field(default_factory=list)  # in place, and not yet accounted for
    _watched: list[HostCopy] = field(default_factory=list)  # those with values of their own
    _watch: Watch = field(default_factory=lambda: Watch(()))  # of their parameters, as of when both last agreed
    changed: ChangedCopies | None = None  # sends what has changed of values, once anybody has asked for that
    _cells: list[Tensor] = field(default_factory=list)
    _poisons: bool = field(default_factory=lambda: env.switched_on("ZEROKERN_POISON"))

    def reach(self, param: Tensor, *, measured: bool) -> None:
        """Opens the link to the device that parameters lie on, if they do. `measured`: copies know when they ran."""
        if self.link is not None:
            return
        if device.serves(param.device):
            placement.reserve_device_cores(param.device)
        self.driver = driver_of(param)
        if self.driver is not None:
            if measured:
                self.driver.measure()
            self.link = Copies(self.driver)

    def take_in(
        self,
        local: Sequence[Tensor],
        grad_dtypes: Sequence[torch.dtype],
        locations_of: LocationsOf,
        needed_first: Sequence[int],
    ) -> list[Tensor]:
        """Makes copies; returns what is updated for each parameter: its copy's values, or itself if it is frozen."""
        trained = [i for i, one in enumerate(local) if one.requires_grad]
        new = [i for i in trained if id(local[i]) not in self.copies]
        near = {i for i in new if _is_near(local[i])}
        places = list(dict.fromkeys(local[i].device for i in trained if not _is_near(local[i]))) if new else []
        if len(places) > 1:
            allowed = "one optimizer for the parameters of each device"
            raise ValueError(f"parameters are on {places[0]} and on {places[1]}; allowed: {allowed}")
        present = set(map(id, local))  # frozen ones keep theirs: they may be trained again
        gone = [copy for key, copy in self.copies.items() if key not in present]
        for copy in gone:
            copy.bring_back()
        self.room.forget([copy.values for copy in gone])  # before others are placed
        if new:
            for i in near:
                self.copies[id(local[i])] = HostCopy(local[i], local[i], local[i], stays=0, near=True)
            new = [i for i in new if i not in near]
            missing = set(new)
            asked = [i for i in needed_first if i in missing]
            locations = dict(zip(asked, locations_of([(i, local[i]) for i in asked]), strict=True))
            made = self._make([(local[i], grad_dtypes[i], locations[i]) for i in new])
            self._read_parameters([copy for copy in made if copy.owns_values])
            self.copies.update((id(copy.local), copy) for copy in made)
        self.copies = {key: copy for key, copy in self.copies.items() if key in present}
        if new or gone:
            last, self._watched = self._watch, [copy for copy in self.copies.values() if copy.owns_values]
            self._watch = Watch(copy.local for copy in self._watched)
            self._watch.carry_over(last)
        self.keeps_there = any(copy.stays is not None for copy in self.copies.values())
        self.has_near = any(copy.near for copy in self.copies.values())
        return [self.copies[id(one)].values if one.requires_grad else one for one in local]

    def _staying(self, local: Tensor, nbytes: int) -> HostCopy:
        """Makes what stands for a parameter that the device updates, with so many bytes of state there."""
        if not self.delays:
            return HostCopy(local, local, local, stays=nbytes)
        shadow = torch.empty_like(local.detach())
        values = nn.Parameter(shadow)
        if local in EMULATED_DRIVERS:
            EMULATED_DRIVERS[values] = self.driver
        return HostCopy(local, values, local, shadow, stays=nbytes)

    def _make(self, new: Sequence[tuple[Tensor, torch.dtype, Location]]) -> list[HostCopy]:
        """Makes copies of these (parameter, dtype of its gradient, where its state lies), all in one arena."""
        copied = [(one, dtype, slots or ()) for one, dtype, (stays, slots) in new if stays is None]
        pairs = ((one, slot) for one, _, (_, some) in new for slot in some or ())
        slots = sorted(pairs, key=lambda pair: pair[1].key)
        wanted = [Wanted("values", one.shape, one.dtype) for one, _, _ in copied]
        wanted += [Wanted("gradients", one.shape, dtype) for one, dtype, _ in copied]
        tensors = iter(self.room.lay_out(wanted + [slot.wanted(one) for one, slot in slots]))
        values = [next(tensors) for _ in copied]
        grads = [next(tensors) for _ in copied]
        state = {(id(one), slot.key): next(tensors) for one, slot in slots}
        made: list[HostCopy] = []
        for one, _, (stays, streams) in new:
            if stays is None:
                continue
            made.append(self._staying(one, stays))
            if streams is not None:
                mine = [state[id(one), slot.key] for slot in streams]
                self.room.keep(one, [slot.wanted(one) for slot in streams], mine)
        for (one, dtype, some), value, grad in zip(copied, values, grads, strict=True):
            copy = HostCopy(one, nn.Parameter(value), grad)
            if dtype != copy.values.dtype:
                copy.values.grad_dtype = dtype
            mine = [state[id(one), slot.key] for slot in some]
            if mine:  # else its state is not in memory
                self.room.keep(copy.values, [slot.wanted(copy.values) for slot in some], mine)
            if self.delays and self.driver is not None:
                copy.shadow = torch.empty_like(one.detach())
            made.append(copy)
        return made

    def of(self, local: Iterable[Tensor]) -> list[HostCopy]:
        """Returns the copies of these; frozen ones have none."""
        return [self.copies[id(one)] for one in local if id(one) in self.copies]

    def are_near(self, local: Iterable[Tensor]) -> bool:
        """Whether all of these parameters are in host memory, where they are updated in place."""
        found = self.of(local)
        return bool(found) and all(copy.near for copy in found)

    def look(self) -> None:
        """Follows parameters that were written or moved since host and device last agreed."""
        if self._watch.unchanged():
            return
        changed = [copy for place in self._watch.changed() if self._follows(copy := self._watched[place])]
        if changed:
            self.follow(changed)

    def _follows(self, copy: HostCopy) -> bool:
        """Whether a copy follows its parameter: frozen ones do too, unless their dtype, shape or device has changed."""
        local, values = copy.local, copy.values
        same = (local.dtype, local.shape) == (values.dtype, values.shape)
        return local.requires_grad or (same and device.is_apart(local) == (self.driver is not None))

    def follow(self, copies: Sequence[HostCopy]) -> None:
        """Copies written parameters to the host, and warns if that drops an update that was pending."""
        lost = sum(copy.pending for copy in copies)
        if lost:
            warn(_DROPPED % lost)
        self.refetch(copies)

    def refetch(self, copies: Sequence[HostCopy]) -> None:
        """Copies parameters to their host copies, and to the shadows of those that stay."""
        copies = [copy for copy in copies if copy.owns_values]
        self._read_parameters(copies)
        self._watch.accept(self._places_of(copies))

    def _places_of(self, copies: Sequence[HostCopy]) -> list[int]:
        """Returns their places among those that are watched."""
        some = set(map(id, copies))
        return [place for place, copy in enumerate(self._watched) if id(copy) in some]

    def _read_parameters(self, copies: Sequence[HostCopy]) -> None:
        """Copies the parameters of these, which own values."""
        if not copies:
            return
        for copy in copies:
            copy.pending = False
        if self.link is None:
            for copy in copies:
                copy.values.detach().copy_(copy.local.detach())
        else:
            leave = [(copy.local.detach().contiguous(), copy.values.detach()) for copy in copies if copy.stays is None]
            ticket = self.link.to_host([local for local, _ in leave], [values for _, values in leave])
            stay = [(copy.values.detach(), copy.local.detach()) for copy in copies if copy.stays is not None]
            if stay:
                put_in_place(self.driver, stay)
                self.link.here().wait()
            ticket.wait()
            torch.autograd.graph.increment_version([copy.values for copy in copies])
        for copy in copies:
            copy.checked, copy.same = False, copy.shadow is None

    def fetch(
        self,
        pairs: Sequence[tuple[HostCopy, Tensor]],
        *,
        left_as: Sequence[int] = (),
        ready: Copy | None = None,
        found: MeasuredThere | None = None,
        pieces: Sequence[Piece] = (),
    ) -> list[Copy | None]:
        """Copies gradients to where the update reads them, once `ready`; returns a ticket where they are on their way.

        `left_as`: their versions when `ready` was set; they may yet be edited. What was not is not fetched again.
        `found`: their squares, measured by then; without `ready` they are measured now. Where parameters stay on the
        device, which wait for them, they do not come behind what else is on its way. `pieces`: of all these copies,
        that come one after the other, each with its own ticket.
        """
        if not left_as:
            pairs = [(copy, grad) for copy, grad in pairs if not copy.holds(grad)]
        for place, (copy, grad) in enumerate(pairs):
            if copy.stays is not None:
                copy.grad = grad.detach()
            elif copy.grad.dtype != grad.dtype:
                self._exchange(copy, grad.dtype)
            copy.fetched = (grad, left_as[place]) if left_as else None
        pairs = [(copy, grad) for copy, grad in pairs if not copy.near]
        if self.link is None:
            grads = [grad for _, grad in pairs]
            for places in in_turns([grads]):
                with fetched([grads[place] for place in places], written=()):
                    for place in places:
                        pairs[place][0].grad.copy_(grads[place].detach())
            return []
        if not pairs:
            return []
        if ready is None:
            found = self.measure(pairs)
        leave = {id(copy): (copy.grad, grad.detach()) for copy, grad in pairs if copy.stays is None}
        batches = [list(leave.values())] if not pieces else [_portions(piece, leave) for piece in pieces]
        # a gradient is checked when it is found; its copy, once
        checked = all(copy.checked for copy, _ in pairs)
        if ready is None and len(batches) > 1:
            ready = self.link.here()
        squares = None
        if found is not None and self.keeps_there:
            here, there = found[1]
            squares = self.link.aside(there, here, ready=ready)
        elif found is not None:
            batches[0].append(found[1])
        tickets: list[Copy | None] = []
        for batch in batches:
            targets, sources = [target for target, _ in batch], [source for _, source in batch]
            tickets.append(self.link.to_host(sources, targets, ready=ready, checked=checked) if batch else None)
        squares = squares or tickets[0]
        tickets[0] = tickets[0] or squares
        sums: Sequence[Sumsq] = [None] * len(pairs)
        if found is not None and squares is not None:
            sums = one_by_one(found[0].later(squares.wait), len(pairs))
        for (copy, _), one in zip(pairs, sums, strict=True):
            copy.checked = True
            copy.sumsq = one
        return tickets

    def measure(self, pairs: Sequence[tuple[HostCopy, Tensor]]) -> MeasuredThere | None:
        """Launches the sums of squares of these gradients, on the device, if steps ask for their norm."""
        if not self.measures or not pairs or self.link is None:
            return None
        grads, key = [grad.detach() for _, grad in pairs], id(pairs[0][0])
        numels, dtypes = [grad.numel() for grad in grads], [grad.dtype for grad in grads]
        of = [id(copy) for copy, _ in pairs]  # of others the sums may not have been read yet
        before, squares = self._squares.get(key, (None, None))
        if squares is None or before != of or squares.key != (tuple(numels), tuple(dtypes)):
            squares = ChunkSums(numels, dtypes)
            self._squares[key] = of, squares
        return squares, squares.launch(self.driver, grads)

    def _exchange(self, copy: HostCopy, dtype: torch.dtype) -> None:
        """Gives gradients of another dtype other memory."""
        (copy.grad,) = self.room.lay_out([Wanted("gradients", copy.local.shape, dtype)])
        copy.values.grad_dtype, copy.checked = dtype, False

    def store(
        self, copies: Sequence[HostCopy], ready: Any, piece: Piece | None = None, take: Take | None = None
    ) -> Copy | None:
        """Copies updated values to the device, once `ready`; without a device, `publish` does. `piece`: not all.

        `take`: gives up the bits of those that have changed, which alone are copied where that is less.
        """
        if self.link is None:
            return None
        wanted = [(copy, slice(0, copy.values.numel())) for copy in copies] if piece is None else piece
        given = set(map(id, copies))  # others of the piece have no gradient in this step
        moved = [(copy, elements) for copy, elements in wanted if copy.stays is None and id(copy) in given]
        if not moved:
            return None
        pairs = {
            id(copy): (copy.local.detach() if copy.shadow is None else copy.shadow, copy.values.detach())
            for copy, _ in moved
        }
        if take is not None and (sent := self._send(moved, pairs, ready, take)) is not None:
            return sent
        batch = list(pairs.values()) if piece is None else _portions(moved, pairs)
        targets, sources = [target for target, _ in batch], [source for _, source in batch]
        ticket = self.link.to_device(sources, targets, ready=ready, checked=all(map(_checked, copies)))
        for copy, elements in moved:
            copy.same = copy.same or elements.stop == copy.values.numel()
        return ticket

    def _send(self, moved: Piece, pairs: Mapping[int, tuple[Tensor, Tensor]], ready: Any, take: Take) -> Copy | None:
        """Copies what has changed of these elements; returns None where all of them are to be copied."""
        assert self.link is not None
        bits = [take(copy.values, elements) for copy, elements in moved]
        changed = [
            Changed(some, values, target)
            for some, (copy, _), (target, values) in zip(bits, moved, _portions(moved, pairs), strict=True)
            if some is not None and copy.same
        ]
        if len(changed) < len(moved):
            return None
        if self.changed is None:
            self.changed = ChangedCopies(self.link, self.room)
        (first, elements), *_ = moved
        return self.changed.send((id(first), elements.start), changed, ready)

    def reading(self, value: Any) -> Callable[[], Any]:
        """Returns a function that returns what a number on the device is now; any thread may call it later."""
        if not isinstance(value, Tensor) or self.link is None or value.is_cpu:
            return kept(value)
        wanted = Wanted("scalars", torch.Size([1]), torch.float32)
        cell = self._cells.pop() if self._cells else self.room.lay_out([wanted])[0]
        ticket = self.link.to_host(value.detach().to(torch.float32).reshape(1), cell)

        def read() -> Any:
            ticket.wait()
            found = cell.clone()
            self._cells.append(cell)
            return found

        return read

    def here(self) -> Copy | None:
        """Returns a ticket for all work that the device has been given until now."""
        return None if self.link is None else self.link.here()

    def consumed(self, copies: Sequence[HostCopy], *, updated: bool) -> None:
        """Lets gradients of these be overwritten. `updated`: their values are pending now, if updates are delayed."""
        for copy in copies:
            copy.pending, copy.fetched = copy.pending or (updated and self.delays), None
            if copy.stays is not None:
                copy.grad = copy.local  # nobody keeps the program's gradient
            elif self._poisons and copy.left is None:
                copy.grad.fill_(torch.nan)
            copy.sumsq = None
            copy.free = True  # last: from now on the next one may be fetched
        self.freed()

    @property
    def pending(self) -> list[HostCopy]:
        return [copy for copy in self.copies.values() if copy.pending]

    def publish(self, updated: Sequence[HostCopy]) -> None:
        """Counts what was `updated` as writes; where updates are delayed, writes all that is pending first."""
        copies = list(updated)
        if self.delays:
            self.put(self.pending)
            copies, self._put = self._put, []
        copies = [copy for copy in copies if copy.values is not copy.local]
        if copies:
            torch.autograd.graph.increment_version([copy.local for copy in copies])
            for copy in copies:
                copy.pending = False
            self._watch.accept(self._places_of(copies))

    def put(self, updated: Iterable[HostCopy]) -> Copy | None:
        """Writes pending values of these to their parameters; `publish` counts it."""
        copies = [copy for copy in updated if copy.pending]
        if not copies:
            return None
        if self.driver is None:
            with torch.no_grad():
                for copy in copies:
                    copy.local.detach().copy_(copy.values.detach())
        else:
            shadowed = [(alias(copy.local, 0, copy.local.shape), copy.shadow) for copy in copies]
            put_in_place(self.driver, [(local, shadow) for local, shadow in shadowed if shadow is not None])
        for copy in copies:
            copy.pending = False
        self._put += copies
        return self.here()

    def load_pending(self, local: Tensor, values: Tensor) -> None:
        """Writes loaded values to a copy, as pending, if they differ from the copy's."""
        copy = self.copies[id(local)]
        if torch.equal(values.to(copy.values.device), copy.values):
            return
        with torch.no_grad():
            copy.same = False
            alias(copy.values, 0, copy.values.shape).copy_(values)  # its master comes with it, and is not to begin anew
        self.mark_pending([copy])

    def mark_pending(self, copies: Sequence[HostCopy]) -> None:
        """Marks copies as pending whose values differ from their parameters."""
        for copy in copies:
            copy.same = False
        ticket = self.store(copies, None) if copies else None
        if ticket is not None:
            ticket.wait()
        for copy in copies:
            copy.pending = not torch.equal(copy.values.detach(), copy.local.detach().to(copy.values.device))
        # a model that is loaded after its optimizer may have the same values already
        self._watch.compare_bits(self._places_of([copy for copy in copies if copy.pending]))


def _portions(piece: Piece, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Returns the elements of a piece in these pairs, each by the id of its copy."""
    whole = [(*pairs[id(copy)], elements) for copy, elements in piece if id(copy) in pairs]
    return [(target.view(-1)[elements], source.view(-1)[elements]) for target, source, elements in whole]


def _is_near(local: Tensor) -> bool:
    """Whether this is in host memory, of a model of which other parameters are on the device."""
    return splits_of(local) and not device.is_apart(local)
