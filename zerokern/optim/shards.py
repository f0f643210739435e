"""Lists what an optimizer updates: this rank's piece of each parameter, or a copy of that in host memory
(`HostCopies`), with the gradients that a step reads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, chain, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import Group, during, user_group
from zerokern.core.errors import StateError, got
from zerokern.memory.addresses import TensorBodies
from zerokern.optim import checks, device
from zerokern.optim.accord import PARAMETERS, Accord, norm_of_all
from zerokern.optim.hosted import HostCopies, HostCopy, LocationsOf
from zerokern.optim.matrices import exchange_groups, group_of
from zerokern.optim.outside import WatchedState
from zerokern.optim.parts import Part, needed_first
from zerokern.optim.shown import ShownState
from zerokern.optim.survey import Groups, names_of, params_of, same_objects
from zerokern.zero.changed_spans import Take
from zerokern.zero.kinds import is_divided, is_placed, shardings_of, without_waiting
from zerokern.zero.reducing import Sumsq
from zerokern.zero.shard import Shard, shard_changes, shard_of, shards_of
from zerokern.zero.watch import Watch

__all__ = ["Shards", "sharded", "with_gradients"]

_EXPOSED = (
    "{name}: its gradient is with the parameter that zk.shards(model) returned for it; since that call, optimizers are "
    "built over zk.shards(model), this one too"
)

_seen_version_of = attrgetter("seen_version")


def sharded(groups: Groups) -> bool:
    """Whether any parameter is divided or replicated by zk.shard, or is a DTensor."""
    return any(is_divided(param) or shard_of(param) is not None for param in params_of(groups))


class Shards:
    """The shards of an optimizer's parameters (`params`), in their order.

    `local`: this rank's piece of each, beside the compute. `updated`: what an update changes, these or their copies in
    host memory (`is_hosted`). `shown`: their state, and what the user sees of it. `shares`: for each the number of the
    sum that its gradient goes into; 0 is what counts here alone.
    """

    def __init__(
        self,
        groups: Groups,
        host: tuple[HostCopies, LocationsOf] | None = None,
        last: Shards | None = None,
        group: Any = None,
    ) -> None:
        self.params = params_of(groups)
        self.shards: list[Shard] = shards_of(self.params, names_of(groups), () if last is None else last.shards)
        self.local: list[Tensor] = [shard.piece for shard in self.shards]
        self.host = HostCopies(None, delays=False) if host is None else host[0]  # else of nothing
        self.updated = self.local
        if host is not None:
            self.updated = self.host.take_in(self.local, self._grad_dtypes(), host[1], self.needed_first())
        self.shardings = shardings_of(self.shards)
        self.publishers = [one.publisher for one in self.shardings if one.publisher is not None]
        party = user_group(group, self.local[0].device if self.local else "cpu")
        self.accord: Accord = Accord(self.shardings, party, self._aside(), None if last is None else last.accord)
        self._buckets = [bucket for one in self.shardings for bucket in one.gradient_buckets]
        self.shares = self.accord.share_out(self.shards)
        self._trained = [one.requires_grad for one in self.local]
        self._copies = [shard.copies for shard in self.shards]
        pairs = list(zip(self.params, self.shards, strict=True))
        by_hand = [shard.sharding for param, shard in pairs if param is shard.piece and shard.sharding is not None]
        reached = [shard.gradients.memory for shard in self.shards if shard.gradients is not None]
        # beside optimizers over pieces programs write pieces themselves, and leave those out that have no elements here
        reached += [memory for one in by_hand for memory in one.memories]
        self._reached = set(map(id, reached))
        followed, self._seen = _followed(pairs, self.shardings)
        # where zk.shard made all of them, nothing but that changes them; others are asked one by one
        self._changes = shard_changes() if all(shard_of(param) is shard for param, shard in pairs) else None
        self._followed_bodies = TensorBodies([param for param, _ in followed])
        self._followed_shards = [shard for _, shard in followed]
        if not all(p is not shard.piece and not is_placed(p) for p, shard in followed):
            self._seen = array("q")  # a DTensor has two versions, its own and that of the tensor within: all are asked
        self._spans = _places_of_spans(self.shards)
        self.shown = ShownState(self.params, self.updated, self.local, self.shards, self.host)
        self.grads: list[Tensor | None] = []  # by parameter, what the step that is under way reads
        self.sums: list[Sumsq] = []  # of their squares, where a device has measured those that were copied
        self._fetched: list[int] = []  # places of parameters whose host copies were given gradients
        self._listed: tuple[list[int], dict[str, list[str]]] = ([], {})
        self._folds: list[tuple[Any, float | Tensor]] = []  # what clipping has left pending, by sharding

    @property
    def is_hosted(self) -> bool:
        """Whether updates change copies in host memory."""
        return self.host.room is not None

    @property
    def stand_alone(self) -> bool:
        """Whether a step is about the parameters themselves, and nobody else's."""
        return not self.is_hosted and not self.shardings and self.accord.party is None

    @property
    def exchanges(self) -> list[Group]:
        """The groups of ranks that bring matrices together, where whole matrices are updated."""
        return exchange_groups(self.shards)

    def needed_first(self) -> list[int]:
        """Returns the places of the parameters in the order in which forwards need them."""
        return needed_first(self.local, self.shards)

    def _aside(self) -> Callable[[], AbstractContextManager[Any]]:
        """Returns what makes a stream beside the program's current, where an update in host memory serves a device."""
        memories = [memory for one in self.shardings for memory in one.memories]
        links = [memory.host.copies for memory in memories if memory.host is not None]
        drivers = [self.host.driver, *(link.driver for link in links if link is not None)]
        return next((partial(driver.aside, "reduce") for driver in drivers if driver is not None), nullcontext)

    def knows(self, groups: Groups) -> bool:
        """Whether these are the parameters, sharded and placed as they were."""
        if not same_objects(params_of(groups), self.params) or self.changes_over:
            return False
        if self._changes is not None and self._changes == shard_changes():
            return True
        pairs = zip(self.params, self.shards, strict=True)
        fits = self._copies == [shard.copies for shard in self.shards] and all(shard.fits(p) for p, shard in pairs)
        if fits and self._changes is not None:
            self._changes = shard_changes()  # those were of other models
        return fits

    @property
    def changes_over(self) -> bool:
        """Whether parameters were frozen or thawed: those that are trained have a host copy, others none."""
        return self.is_hosted and self._trained != [one.requires_grad for one in self.local]

    @property
    def sends_changes(self) -> bool:
        """Whether a device is sent what updates in host memory change of some of these."""
        asked = any(one.publishes_changes for one in self.shardings)
        return asked and self.host.link is not None and any(one.stays is None for one in self.host.copies.values())

    def _grad_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of gradients, as far as they are known before there are any."""
        made = []
        for param, shard, near in zip(self.params, self.shards, self.local, strict=True):
            found = shard.local_gradient(param, landed=False)
            made.append(found.dtype if found is not None else getattr(near, "grad_dtype", None) or near.dtype)
        return made

    def groups(self, groups: Groups) -> list[dict[str, Any]]:
        """Returns these groups with the tensors that are updated as parameters, under the parameters' names."""
        made, start = [], 0
        for group in groups:
            some = slice(start, start := start + len(group["params"]))
            if group.get("state_format") == "int8":
                _refuse_int8(self.shards[some])
            names = [shard.name for shard in self.shards[some]]
            made.append({"param_names": names, **group, "params": self.updated[some]})
        return made

    def look(self) -> None:
        """Counts writes to whole parameters as writes to their pieces; `publish` has accounted for our own."""
        seen = array("q", map(_seen_version_of, self._followed_shards)) if self._seen is None else self._seen
        if self._followed_bodies.versions() != seen:
            for param, shard in zip(self._followed_bodies.tensors, self._followed_shards, strict=True):
                shard.count_writes(param)
        self.host.look()

    def gradients(self) -> dict[int, Tensor]:
        """Returns this rank's gradients by the parameter's place, after checking them."""
        found: dict[int, Tensor] = {}
        # over a link they are copied: what has left already need not come back for that
        found_here = self._local_gradients(landed=self.host.link is None)
        for place, (grad, local) in enumerate(zip(found_here, self.local, strict=True)):
            if grad is None:
                continue
            plain = grad.dtype == local.dtype and grad.shape == local.shape and grad.is_contiguous()
            if not plain or grad.device != local.device or grad.layout is not torch.strided:
                bucket = self.shards[place].gradients
                away = bucket is not None and bucket.shown.released.is_released
                checks.gradient(self.shards[place].name, local, grad, away=away)
            found[place] = grad
        self._take_folds(found)  # before they are fetched: what is applied here is applied beside them
        return found

    def land(self) -> None:
        """Waits until gradients that a device sends to host memory are there; whoever reads them there calls it."""
        for bucket in self._buckets:
            if bucket.memory.host is not None:
                bucket.shown.land()

    def _local_gradients(self, *, landed: bool = True) -> list[Tensor | None]:
        """Returns this rank's gradients, in the memory that they lie in."""
        found: list[Tensor | None] = []
        for param, shard in zip(self.params, self.shards, strict=True):
            grad = shard.local_gradient(param, landed=landed)
            if grad is None and shard.piece.grad is not None:
                raise StateError(_EXPOSED.format(name=shard.name))
            found.append(grad.resolve_neg() if grad is not None and grad.is_neg() else grad)
        return found

    def take_copies(self, places: Iterable[int]) -> None:
        """Sets `grads` to the host copies of these gradients, which may still be on their way."""
        self._fetched = list(places)
        self.grads, self.sums = [None] * len(self.updated), [None] * len(self.updated)
        for place in self._fetched:
            copy = self.copy(place)
            self.grads[place], self.sums[place] = copy.grad, copy.sumsq

    @property
    def has_squares(self) -> bool:
        """Whether the device has measured all gradients of this step that have copies."""
        return all(self.sums[place] is not None for place in self._fetched)

    def copy(self, place: int) -> HostCopy:
        """Returns the host copy of a parameter; raises if it is frozen."""
        found = self.host.copies.get(id(self.local[place]))
        if found is None:
            raise StateError(f"parameter {place} has a gradient, and does not require one; allowed: requires_grad=True")
        return found

    def pieces_of(self, part: Part) -> list[list[tuple[HostCopy, slice]]]:
        """Returns the pieces of a part as elements of host copies; of what is frozen there is none."""
        return [
            [(copy, one.elements) for one in piece for copy in self.host.of([self.local[one.param]])]
            for piece in part.pieces
        ]

    def readings(self, places: Iterable[int]) -> Watch:
        """Returns a watch of the gradients that an update of these parameters reads."""
        grads = [self.grads[place] for place in places]
        return Watch((grad for grad in grads if grad is not None), memory=False)

    def take_gradients(self) -> None:
        """Sets `grads` to this rank's gradients, in the memory that they lie in."""
        for bucket in self._buckets:
            if bucket.shown.released.is_released:  # another optimizer has fetched them
                bucket.shown.land()
        with without_waiting():
            self.look()
            reductions, places = self._spans
            spans = [one.shown_spans() for one in reductions]
            if places and None not in spans:
                found = list(chain(*spans))
                self.grads = list(map(found.__getitem__, places))
            else:
                self.grads = self._local_gradients(landed=False)
        self._take_folds(place for place, grad in enumerate(self.grads) if grad is not None)

    @property
    def are_decided_there(self) -> bool:
        """Whether steps are decided on the device that the parameters lie on, and no rank's host adds up."""
        return not self.is_hosted and bool(self.updated) and device.serves(self.updated[0].device)

    def listed(self, groups: Groups) -> dict[str, list[str]]:
        """Returns the names of the parameters that ranks share, by group. Of pieces each rank leaves out its own."""
        sizes = [len(group["params"]) for group in groups]
        if self._listed[0] != sizes:
            each = zip(self.params, self.shards, strict=True)
            found = {}
            for number, size in enumerate(sizes):
                shared = [one for param, one in islice(each, size) if not hasattr(param, "zk_name")]
                names = sorted(one.name for one in shared if one.sharding is not None)
                found[f"{PARAMETERS} param_groups[{number}]"] = names
            self._listed = sizes, found
        return self._listed[1]

    def without_gradients(self, groups: Groups) -> list[list[str]]:
        """Returns for each group the parameters whose matrices ranks bring together, and that have no gradients in this
        step.

        Others may have some on one rank and none on another.
        """
        pairs = zip(self.shards, self.grads, strict=True)
        lacks = iter([shard.name if grad is None and group_of(shard) is not None else None for shard, grad in pairs])
        return [sorted(name for name in islice(lacks, len(one["params"])) if name is not None) for one in groups]

    def end_step(self, *, undone: bool) -> None:
        """Forgets the gradients. `undone`: nothing has changed, so that the next step needs the clip factor again."""
        self.grads, self.sums = [], []
        for sharding, factor in self._folds:
            sharding.fold(factor) if undone else sharding.folded(factor)
        self._folds.clear()

    def refetch(self) -> None:
        """Copies all parameters to their host copies again, because writes may not have been counted."""
        self.host.follow(list(self.host.copies.values()))

    def take_loaded(self, state: Mapping[Any, Any], pending: Mapping[int, Tensor]) -> WatchedState:
        """Takes over loaded state of pieces; returns it as users see it."""
        pieces, outer = self.shown.replace(state)
        # replaced, not lost: nobody need be warned of it
        self.host.refetch([one for one in self.host.copies.values() if one.pending])
        self.look()
        for place, values in pending.items():
            self.host.load_pending(self.local[place], values)
        self.shown.bound(pieces, outer)
        return outer

    def mark_pending(self, places: Iterable[int], outer: WatchedState) -> None:
        """Marks the values that were loaded into these host copies as pending."""
        copies = self.host.of(self.local[place] for place in places)
        self.host.mark_pending(copies)
        if copies:
            self.shown.bound([copy.values for copy in copies], outer)

    @property
    def fold(self) -> float | Tensor:
        """The factor that clipping has left pending for all gradients of the step."""
        return self._folds[0][1] if self._folds else 1.0

    def _take_folds(self, places: Iterable[int]) -> None:
        """Keeps the factor that clipping has left pending; if it is not that of all gradients, it is applied now."""
        folds = [(sharding, factor) for sharding in self.shardings for factor in (sharding.take_fold(),)]
        folds = [(sharding, factor) for sharding, factor in folds if isinstance(factor, Tensor) or factor != 1.0]
        if not folds:
            return
        mine = {id(self.shards[place]) for place in places}
        first = self.shardings[0]
        if len(self.shardings) == 1 and mine == with_gradients(first) and first.has_own_gradients:
            self._folds = folds
            return
        for sharding, factor in folds:  # what was set by hand since is no part of it
            sharding.fold(factor)
            sharding.settle()

    def total_there(self, sums: Sequence[Tensor], out: Tensor, found_inf: Tensor | None) -> None:
        """Does what `accord.total` does with 0-dim tensors on a device, into `out`, without waiting for it."""
        sums = self.accord.by_team(sums)
        out[0].copy_(sums[0])
        broken = torch.isfinite(sums[0]).logical_not()
        if found_inf is not None:
            broken = broken | (found_inf.reshape(()) != 0)
        for number, (own, team) in enumerate(zip(sums[1:], self.accord.teams, strict=True), 1):
            term = out[number : number + 1]
            term.copy_(torch.where(broken, torch.inf, own))
            norm_of_all(team, term, "sum", "opt.step")
        if self.accord.party is not None:
            terms = out[: 1 + len(self.accord.teams)]
            total = torch.where(broken, torch.inf, terms.sum()).reshape(1)
            norm_of_all(self.accord.party, total, "sum", "opt.step")
            terms.zero_()[:1].copy_(total)

    def announce(self) -> None:
        """Counts what the host has updated as written to parameters; with a delay, what it had updated before."""
        self.host.publish(self.host.of([self.local[place] for place in self._fetched]))

    def publish(self, gather: Callable[[], object] | None = None, take: Take | None = None) -> None:
        """Publishes what was updated to all ranks. `gather`: sends the buckets, in their order, if not one by one.

        `take`: gives up the bits of what has changed of a piece; None: nobody knows.
        """
        self.announce()
        with during("opt.flush"):  # unless it is part of a step
            for sharding in self.shardings:
                if gather is None:
                    sharding.publish(self.reaches, take)
                else:
                    sharding.begin_publishing()
            if gather is not None:
                gather()

    def reaches(self, memory: Any) -> bool:
        """Whether any of these parameters is in a bucket; others are published by the optimizer that has them.

        Of a model whose pieces these are, all buckets.
        """
        return id(memory) in self._reached


def _refuse_int8(shards: Iterable[Shard]) -> None:
    """Raises if a block of int8 codes, counted from a parameter's element 0, would be on two ranks."""
    for shard in shards:
        if shard.here.misaligned:
            do = f"{shard.here.misaligned}, so {shard.name} goes into a param_group with state_format='fp32'"
            raise ValueError(got("state_format", "int8", "'fp32' or 'bf16'", do))


def with_gradients(sharding: Any) -> set[int]:
    """Returns the ids of the shards of all parameters of a model that have gradients."""
    pairs = zip(sharding.zero_order, sharding.shards, strict=True)
    return {id(shard) for param, shard in pairs if param.grad is not None or shard.piece.grad is not None}


def _followed(
    pairs: Sequence[tuple[Tensor, Shard]], shardings: Sequence[Any]
) -> tuple[Sequence[tuple[Tensor, Shard]], array[int] | None]:
    """Returns the parameters whose writes count for their pieces, with their shards, and the versions that all these
    have seen, where one model's are all of them: in its order then."""
    followed = [(param, shard) for param, shard in pairs if shard.sharding is not None]
    if len(shardings) != 1 or shardings[0].seen_versions is None:
        return followed, None
    all_params = shardings[0].zero_order
    if {id(param) for param, _ in followed} != set(map(id, all_params)):
        return followed, None
    return list(zip(all_params, shardings[0].shards, strict=True)), shardings[0].seen_versions


def _places_of_spans(shards: Sequence[Shard]) -> tuple[list[Any], list[int]]:
    """Returns the reductions of these shards, and the place of each among all spans that they reduce.

    Returns no places if a shard has no gradient bucket.
    """
    if not all(shard.gradients is not None for shard in shards):
        return [], []
    reductions = list({id(one): one for one in (shard.sharding.reduction for shard in shards)}.values())
    buckets = [bucket for one in reductions for bucket in one.buckets]
    ends = accumulate((len(bucket.entries) for bucket in buckets), initial=0)
    first = {id(bucket): end for bucket, end in zip(buckets, ends, strict=False)}
    return reductions, [first[id(shard.gradients)] + shard.place for shard in shards]
