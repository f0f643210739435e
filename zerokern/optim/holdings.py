"""Holds what an optimizer has: its state, the tier it is in, the shards of its parameters, and whether it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerokern.core.errors import StateError, got, warn
from zerokern.io.lock import let_go_in_child
from zerokern.kernels.reference_table import host_table
from zerokern.memory import HostTier
from zerokern.memory.order import TierOrder
from zerokern.optim.accord import OWED, TORN, UNTOLD, WHOLE, Outcome
from zerokern.optim.beside import Beside
from zerokern.optim.binding import Binding
from zerokern.optim.changed import Changes
from zerokern.optim.compute import DeviceCompute, RowTable
from zerokern.optim.decide import Decision
from zerokern.optim.device import is_apart
from zerokern.optim.disk import Disk, StateOnDisk, check_slots, in_memory
from zerokern.optim.formats import TAKES_LESS, Algorithm, FormatKey, Layout
from zerokern.optim.hosted import HostCopies, Location, LocationsOf
from zerokern.optim.matrices import group_of
from zerokern.optim.outside import Elsewhere, WatchedState, follow, follow_writes, refuse_other_values, tracked, watched
from zerokern.optim.placing import Placing, check_whole
from zerokern.optim.records import on_disk_of
from zerokern.optim.shards import Shards
from zerokern.optim.shown import LATE, PENDING
from zerokern.optim.state import StateTier
from zerokern.optim.survey import Groups, Survey, names_of, params_of
from zerokern.schedule import Delayed, check_schedule, check_update, refuse_at_rest, refuse_delayed, refuse_on_device
from zerokern.schedule.recorder import Recorder
from zerokern.zero.kinds import local_of, shardings_of
from zerokern.zero.sharded import known_shard
from zerokern.zero.tiers import own_name
from zerokern.zero.watch import Watch

__all__ = ["Holdings", "chosen"]

_TORN = (
    "a step or a load was broken off while parameters and state were being written, so that they may be of "
    "different steps; load a checkpoint of the model, then of the optimizer (load_state_dict), to go on"
)
_TOO_EARLY = (
    "tier={tier!r} takes what a step leaves free on the device, and no backward pass has shown that; load after one "
    "step, which the load overwrites, or say bytes, such as 'device:8GiB' (statistics() of the run that was saved has "
    "them, as state_budget_bytes/device)"
)
_NOTHING_TO_OVERLAP = (
    'schedule="overlap" hides nothing here, and the update runs as with "sync": these parameters are complete when '
    "step() returns. zk.shard(model), on one rank too, makes each forward wait for its own parameters alone; for a "
    'model on a GPU, tier="cpu" or zk.Nvme(path) does it'
)


def chosen(name: str) -> Any:
    """Returns what shows a choice (tier, schedule) as an optimizer's attribute; its holdings have the value."""
    return property(lambda opt: getattr(opt.holdings, name), lambda opt, value: opt.holdings.change(name, value))


def _has_company() -> bool:
    """Whether other ranks may have been given the same folder."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _apart(entry: Any) -> Any:
    """Returns a state entry with copies of its tensors: those read from a disk stay as they are, too.

    `ShownState.saved` copies pending values.
    """
    if not isinstance(entry, dict):
        return entry
    tensors = {key for key, one in entry.items() if isinstance(one, Tensor) and key != PENDING}
    return {key: one.detach().clone() if key in tensors else one for key, one in entry.items()}


class Holdings:
    """Holds the state of one optimizer, which is called `name` where it asks for host memory.

    `state` is by parameter, as its users see it; `held` by what is updated here.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        tier: Any,
        schedule: str | Delayed,
        name: str,
        group: Any = None,
        update: str = "host",
    ) -> None:
        self.algorithm, self.tier, self.schedule = algorithm, tier, check_schedule(schedule)
        self.group = group  # of ranks that decide with this one on each step, as the user named it
        self.order = TierOrder.of("tier", tier, auto=True)
        self.update = check_update(update, on_disk=self.order.config is not None, whole=algorithm.whole)
        self.room = None if self.rests_on_device and not self.delays else HostTier(name, TAKES_LESS)
        config = self.order.config
        self.disk = None if config is None else Disk(config, own_name("state") if _has_company() else "")
        if algorithm.whole and config is not None:
            check_slots(config.ring_nbytes, name)
        self.placing = Placing(self.order, self.room)
        self.state: WatchedState = WatchedState()
        self.shards = Shards(())  # of the parameters, once they have been looked at
        self.host = HostCopies(None, self.delays)  # of nothing, until some are made
        self.recorder: Recorder | None = None  # notes what runs; set before the first step
        self.changes = Changes()  # what updates change, for whoever follows the model
        self.unbind(())
        self.closed = ""  # why nothing can be done with it any more
        self.outcome = WHOLE
        self.reason = ""  # why it is not whole here, where other ranks have yet to hear of it
        self._left_behind: Any = None
        let_go_in_child(self)

    def change(self, name: str, value: Any) -> None:
        """Refuses a change of what was chosen, but for the step from which updates are delayed."""
        if name == "schedule" and self.delays and isinstance(value, Delayed):
            self.schedule = value
        elif value != (now := getattr(self, name)):
            raise AttributeError(
                f"an optimizer keeps the {name} that it was built with, {now!r}; build another one with "
                f"{name}={value!r}, and load this one's state_dict() into it"
            )

    @property
    def delays(self) -> bool:
        return isinstance(self.schedule, Delayed)

    @property
    def rests_on_device(self) -> bool:
        """Whether all state lies beside the parameters."""
        return self.order.tiers == ("device",)

    @property
    def has_both(self) -> bool:
        """Whether parameters and their state may stay on the device, beside copies of others in host memory."""
        return self.placing.there and self.shards.is_hosted and "device" in self.order.tiers

    @property
    def is_scheduled(self) -> bool:
        """Whether the update goes through the schedule's worker."""
        if self.schedule != "overlap" or self.shards.is_hosted:
            return self.shards.is_hosted
        # replicated gradients are plain tensors: nobody could wait for who reads them where they lie
        return any(one.publisher is not None and not one.replicated for one in self.shards.shardings)

    @property
    def moves_on_disk(self) -> bool:
        """Whether an update reads and writes what rests on a disk, and so may fail on one rank alone."""
        return self.disk is not None or any(one.rests is not None for one in self.shards.shardings)

    @property
    def held(self) -> WatchedState:
        """The state by what is updated here: parameters, or this rank's pieces of them."""
        if self.closed:
            return WatchedState()
        shown = self.shards.shown
        return self.state if shown.in_place else shown.state

    def let_go(self) -> None:
        """Makes reading the state raise in a forked child, which has none of the memory of the room."""
        if self.room is not None and self.room.nbytes:
            self._left_behind, self.state = self.state, Elsewhere.of_the_parent()

    def close(self, because: str) -> None:
        """Frees state, host memory and the folder; using the optimizer raises `because` from then on."""
        if self.closed:
            return
        self.closed, self.state = because, Elsewhere(because)
        self.shards, self.host = Shards(()), HostCopies(None, self.delays)
        self.unbind(())
        self.placing.claimed = 0
        if self.room is not None:
            self.room.forget_others(())
        if self.disk is not None:
            self.disk.close(because)

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise StateError(self.closed)

    def refuse_elsewhere(self) -> None:
        """Raises where the optimizer is closed, or its state is in memory of the process that forked this one."""
        self.refuse_if_closed()
        if self.room is not None:
            self.room.check()

    @property
    def torn(self) -> bool:
        """Whether nothing can be done with it but to load a checkpoint."""
        return self.outcome is not WHOLE

    def tear(self) -> None:
        """Says that parameters and state are of different steps; what other ranks have yet to hear stays so."""
        if self.outcome is WHOLE:
            self.outcome = TORN

    def settle(self, outcome: Outcome) -> None:
        """Says what has become of a step, or of a load. Other ranks know it, or need not."""
        self.outcome, self.reason = outcome, ""

    def fail_alone(self, error: BaseException, *, owes: bool = False) -> None:
        """A step has failed here, and other ranks have yet to hear of it. `owes`: they publish it nevertheless."""
        self.outcome, self.reason = OWED if owes or self.outcome is OWED else UNTOLD, str(error) or type(error).__name__

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what leaves parameters and state of different steps until it has ended, well."""
        before, self.outcome = self.outcome, TORN
        yield
        self.outcome = before

    def refuse_if_torn(self) -> None:
        if self.torn:
            raise StateError(f"{self.reason}. {self.outcome.message}" if self.outcome.is_here_alone else _TORN)

    def is_apart(self, groups: Groups) -> bool:
        """Whether what is updated are copies in host memory."""
        first = next((param for param in params_of(groups) if param.requires_grad), None)
        if first is None:
            return False
        self.refuse_at_rest(groups)
        if self._splits(groups):
            if self.delays:
                do = "Some of these parameters are on a device and others are not (zk.shard(tier=[...]))"
                raise ValueError(got("schedule", self.schedule, "'sync' or 'overlap'", do))
            return True
        if self.schedule == "sync" and self.rests_on_device:
            return False
        there = is_apart(first)
        if there and self.rests_on_device:
            refuse_on_device(self.schedule)
        if there and self.update == "device":
            refuse_delayed(self.schedule)
        return self.delays or (there and not self.rests_on_device)

    def refuse_early(self, groups: Groups) -> None:
        """Raises where state is to be placed by what is free on the device, before any gradient has come."""
        waits = self.placing.waits and self.hosting(groups) is not None and self.placing.there
        if waits and all(param.grad is None for param in params_of(groups)):
            raise StateError(_TOO_EARLY.format(tier=self.tier))

    def refuse_at_rest(self, groups: Groups) -> None:
        """Raises where updates are delayed, and parameters of the same models rest on a disk."""
        if self.delays and any(one.at_rest for one in self._shardings(groups)):
            refuse_at_rest(self.schedule)

    def _splits(self, groups: Groups) -> bool:
        """Whether zk.shard may have put some of these parameters on the device, and others off it."""
        return any(one.splits for one in self._shardings(groups))

    def _shardings(self, groups: Groups) -> list[Any]:
        """Returns what has sharded the models of these parameters."""
        last = self.shards
        if last.shards and last.knows(groups):
            return last.shardings
        return shardings_of(map(known_shard, params_of(groups)))

    def hosting(self, groups: Groups) -> tuple[HostCopies, LocationsOf] | None:
        """Returns what makes host copies of these parameters, if they are to have some."""
        if not self.is_apart(groups):
            return None
        if self.host.room is None:
            room = HostTier("norms that a device measures") if self.room is None else self.room
            self.host = HostCopies(room, self.delays, late=any(group.get(LATE, False) for group in groups))
        everyone = [param for param in params_of(groups) if param.requires_grad]
        trained = next(filter(is_apart, everyone), everyone[0])
        there = self.placing.there = is_apart(trained)
        if self.algorithm.whole:
            check_whole(self.tier, self.update, apart=there)
        if self._splits(groups):
            do = "zk.shard has put some of these parameters on the device, and others off it"
            if self.update == "device":
                raise ValueError(got("update", self.update, "'host'", do))
            if self.algorithm.whole and self.disk is not None:
                raise ValueError(got("tier", self.tier, "'device', 'cpu' or both, with budgets", do))
        self.host.reach(trained, measured=self.recorder is not None)

        def locations_of(new: Sequence[tuple[int, Tensor]]) -> list[Location]:
            divided = self._divided(groups, new)
            found: list[Location] = []
            for (_, local), (kind, layout, nbytes) in zip(new, divided, strict=True):
                self.placing.note(local, kind)
                slots = None if kind == "disk" else layout.columns
                if there and kind == "device":
                    found.append((nbytes, None))
                else:
                    found.append((0 if there and self.update == "device" else None, slots))
            return found

        return self.host, locations_of

    def _divided(self, groups: Groups, new: Sequence[tuple[int, Tensor]]) -> list[tuple[str, Layout, int]]:
        """Returns where state of these (place, parameter) goes, its layout and its bytes. They have no copies."""
        if self.placing.there:
            self.refuse_early(groups)
            self.placing.measure(self.host.driver)
        owners = [group for group in groups for _ in group["params"]]
        layouts = [self.algorithm.layout(owners[place], local.dtype) for place, local in new]
        sizes = [layout.nbytes_of(local) for (_, local), layout in zip(new, layouts, strict=True)]
        kinds = self.placing.divide(sizes, sum(copy.stays or 0 for copy in self.host.copies.values()))
        return list(zip(kinds, layouts, sizes, strict=True))

    def kinds_of_copies(self, groups: Groups, wanted: Sequence[tuple[int, Tensor]]) -> dict[int, str]:
        """Returns by place where state will go of those of these (place, parameter) that are yet to have a copy."""
        if self.hosting(groups) is None:
            return {}
        new = [(n, one) for n, one in wanted if one.requires_grad and id(one) not in self.host.copies]
        divided = zip(new, self._divided(groups, new), strict=True)
        return {number: kind for (number, _), (kind, _, nbytes) in divided if nbytes}

    def shards_of(self, groups: Groups, *, hosted: bool = True) -> Shards:
        """Returns the shards of these parameters: the last ones, or others if parameters have changed or moved.

        `hosted`: with copies in host memory, if the tier asks for such.
        """
        last, host = self.shards, self.hosting(groups) if hosted else None
        known = last.knows(groups) and (host is not None) == last.is_hosted
        return last if known else Shards(groups, host, last, self.group)

    def catch_up(self) -> None:
        """Follows writes that no step has seen yet, so that what is saved is consistent."""
        self._await_others()
        self.shards.shown.adopt(self.state)
        self.shards.look()
        follow_writes(self.followed, self.held)

    def _await_others(self) -> None:
        """Returns once parameters are those of the last step, another optimizer's too: it has counted them already."""
        for publisher in self.shards.publishers:
            publisher.complete()

    def refresh(self) -> None:
        """Makes masters and remainders anew from the parameters, however these were written."""
        self._await_others()
        self.shards.shown.adopt(self.state)
        self.shards.refetch()
        for publisher in self.shards.publishers:
            publisher.send_all()
        follow(tracked(self.held), self.held)
        self.followed.accept()

    def shown(self) -> WatchedState:
        """Returns the state as it is saved."""
        binding, made, outer = self.binding, self.held, self.state
        if self.disk is not None:
            made = WatchedState(in_memory(self.disk, {key: _apart(entry) for key, entry in made.items()}))
            views = self.shards.shown
            others = {} if views.in_place else views.others(outer)  # of parameters that no step has met
            outer = WatchedState({**outer, **in_memory(self.disk, {key: _apart(one) for key, one in others.items()})})
        elif binding is not None and (shown := binding.shown(made)) is not made:
            made = WatchedState(shown)
        return self.shards.shown.saved(made, outer)

    def state_nbytes(self) -> dict[str, float]:
        """Returns the bytes of this rank's state by tier, and of its budget; state on disk counts there alone. Those of
        bits of what updates change, and what these go to a device through, if any."""
        found = dict.fromkeys(("device", "cpu", "disk"), 0)
        seen: set[int] = set()
        for entry in self.held.values():
            if not isinstance(entry, dict):
                continue
            for value in entry.values():
                if isinstance(value, Tensor) and (local := local_of(value)).nbytes and local.data_ptr() not in seen:
                    seen.add(local.data_ptr())
                    found["cpu" if local.device.type == "cpu" else "device"] += local.nbytes
            owner = on_disk_of(entry)
            if owner is not None:
                found["disk"] += owner.nbytes
        free = self.placing.free
        others = {} if free is None else {"state_budget_bytes/device": float(free)}
        changes = self.changes.nbytes + (0 if self.host.changed is None else self.host.changed.nbytes)
        others |= {"change_bytes": float(changes)} if changes else {}
        return {**{f"state_bytes/{tier}": nbytes for tier, nbytes in found.items()}, **others}

    def renew(self, *, loaded: bool = True) -> None:
        """Forgets all that points at the state, which is another one now."""
        self.unbind(tracked(self.held))
        self.changes.renew()
        for copy in self.host.copies.values():
            copy.same = False
        if loaded:  # the model may yet be loaded, which has the checkpoint's values already
            self.followed.compare_bits()
        self.settle(WHOLE)

    def unbind(self, followed: Iterable[Tensor]) -> None:
        """Forgets what earlier steps learned. `followed`: parameters with masters, which follow what is written."""
        self.followed = Watch(followed)
        self.binding: Binding | None = None

    def place_by(self, shards: Shards) -> None:
        """Places state from here on by what is known of these shards."""
        self.placing.turns = {id(shards.updated[at]): turn for turn, at in enumerate(shards.needed_first())}
        if self.disk is not None:
            pieces = zip(shards.updated, shards.shards, strict=True)
            self.disk.cut = {id(piece): shard for piece, shard in pieces if group_of(shard) is not None}

    def bind(
        self,
        binding: Binding | None,
        survey: Survey,
        groups: Groups,
        formats: list[FormatKey],
        decision: Decision,
        *,
        intact: bool,
    ) -> Binding:
        """Returns the binding, or a new one where there is none that fits."""
        last = self.binding
        if last is None and self.schedule == "overlap" and not self.is_scheduled:
            warn(_NOTHING_TO_OVERLAP)
        if binding is not None and intact:
            follow_writes(binding.followed, self.held)
            return binding
        previous = last if binding is None and last and last.intact(self.held) else None
        self.place_by(self.shards)
        self.state = watched(self.state)
        self.binding = None
        if self.room is not None and not self.shards.is_hosted:  # copies that are frozen now keep what they have
            self.room.forget_others([*survey.all_params, *self.held])  # others were replaced, or left the groups
        self._check_growth(survey)
        initial = [self.algorithm.first_moment(group) for group in groups]
        of_state = self.algorithm, self.held, initial, self.shards.shown.exact
        if self.disk is not None:
            tier: StateTier = StateOnDisk(*of_state, self.placing, self.disk)
        else:
            tier = StateTier(*of_state, self.placing if survey.device is None else None)
        if decision.device is None:
            compute = RowTable(host_table(self.algorithm.name))
        else:
            compute = DeviceCompute(decision, None if last is None else (last.compute, last.tier))
        streams = self.placing.there and self.shards.is_hosted and self.update == "device"
        beside = None
        if (self.has_both or streams) and self.host.link is not None:
            beside = Beside(self.host, self.room, self.schedule, self.algorithm.name)
            beside.resident.changes = beside.passing.changes = self.changes
        compute.changes = self.changes
        if previous is not None and not previous.is_like(compute, beside):
            previous = None
        last_ones: Any = {"previous": previous, "followed": self.followed}
        made = Binding(survey, groups, tier, compute, beside, formats=formats, **last_ones)
        if self.followed.prints:  # state was loaded, and no step has been made since
            names = dict(zip(map(id, survey.all_params), names_of(groups), strict=True))
            refuse_other_values(self.followed, self.held, names)
        self.placing.forget_moved(self.held)
        self.shards.shown.bound(survey.params, self.state)
        self.followed, self.binding = made.followed, made
        return made

    def _check_growth(self, survey: Survey) -> None:
        """Refuses state that has grown beyond the budget of the device, where it is; counts what it takes there."""
        if not self.has_both or self.update == "device":
            return
        sizes = {id(one): of.nbytes_of(one) for one, of in zip(survey.params, survey.layouts, strict=True)}
        stays = [copy for copy in self.host.copies.values() if copy.stays is not None and not copy.near]
        now = [sizes.get(id(copy.values), copy.stays or 0) for copy in stays]
        self.placing.check_growth([(new, copy.stays or 0) for new, copy in zip(now, stays, strict=True)])
        for copy, nbytes in zip(stays, now, strict=True):
            copy.stays = nbytes
