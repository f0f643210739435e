"""What an optimizer has: its state and where that lies, what stands for its parameters, and whether it is whole."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from zerokern.core.errors import StateError, got
from zerokern.io.lock import let_go_in_child
from zerokern.memory import HostTier
from zerokern.memory.tier import AnyTier, config_of
from zerokern.optim.accord import TORN
from zerokern.optim.binding import Binding
from zerokern.optim.decide import Decision
from zerokern.optim.device import is_apart
from zerokern.optim.device_binding import DeviceBinding
from zerokern.optim.disk import Disk, in_memory
from zerokern.optim.disk_binding import DiskBinding
from zerokern.optim.formats import TAKES_LESS, Algorithm, FormatKey
from zerokern.optim.hosted import ColumnsOf, HostCopies
from zerokern.optim.outside import Elsewhere, WatchedState, Witness, follow, tracked, watched
from zerokern.optim.resting_binding import RestingBinding
from zerokern.optim.shards import LATE, Shards
from zerokern.optim.survey import Groups, Survey
from zerokern.schedule import Delayed, check_schedule
from zerokern.schedule.recorder import Recorder
from zerokern.zero.kinds import rest_of
from zerokern.zero.tiers import own_name

__all__ = ["Bound", "Chosen", "Holdings"]

_TORN = (
    "a step or a load was broken off while parameters and state were being written, so that they may be of "
    "different steps; load a checkpoint of the model, then of the optimizer (load_state_dict), to go on"
)
_NOTHING_TO_OVERLAP = (
    'schedule="overlap" hides nothing here, and the update runs as with "sync": these parameters are complete when '
    "step() returns. zk.shard(model), on one rank too, makes each forward wait for its own parameters alone; for a "
    'model on a GPU, tier="cpu" or zk.Nvme(path) does it'
)


class Chosen:
    """An attribute of an optimizer that was chosen when it was built, and that its holdings follow: tier, schedule."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, opt: Any, owner: type | None = None) -> Any:
        return self if opt is None else getattr(opt.holdings, self.name)

    def __set__(self, opt: Any, value: Any) -> None:
        opt.holdings.change(self.name, value)


def _has_company() -> bool:
    """Whether other ranks may have been given the same folder."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass
class Bound:
    """What was learned in earlier steps: all of it can be learned anew from parameters, groups and state."""

    binding: Binding | None = None
    witness: Witness | None = None
    formats: list[FormatKey] = field(default_factory=list)


class Holdings:
    """Of one optimizer, called `name` where it asks for host memory.

    `state` is by parameter, as its users see it; `held` by what is updated here.
    """

    def __init__(
        self, algorithm: Algorithm, tier: AnyTier, schedule: str | Delayed, name: str, group: Any = None
    ) -> None:
        self.algorithm, self.tier, self.schedule = algorithm, tier, check_schedule(schedule)
        self.group = group  # of ranks that decide with this one on each step, as the user named it
        self.room = HostTier(name, TAKES_LESS) if tier != "device" or self.delays else None
        config = config_of(tier)
        self.disk = None if config is None else Disk(config, own_name("state") if _has_company() else "")
        self.state: WatchedState = WatchedState()
        self.shards = Shards(())  # of the parameters, once they have been looked at
        self.host: HostCopies | None = None
        self.recorder: Recorder | None = None  # notes what runs; set before the first step
        self.bound = Bound()
        self.closed = ""  # why nothing can be done with it any more
        self.torn = False
        self.untold = ""  # why this is torn here, where other ranks have yet to hear of it
        self._left_behind: Any = None
        let_go_in_child(self)

    def change(self, name: str, value: Any) -> None:
        """Of what was chosen, the step from which updates are delayed alone may change."""
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
    def is_scheduled(self) -> bool:
        """Whether the update goes through the schedule's worker."""
        return self.shards.is_hosted or (self.schedule == "overlap" and self.shards.defers)

    @property
    def moves_on_disk(self) -> bool:
        """Whether an update reads and writes what rests on a disk, and so may fail on one rank alone."""
        return self.disk is not None or any(getattr(one, "rests", None) is not None for one in self.shards.shardings)

    @property
    def held(self) -> WatchedState:
        """The state by what is updated here: parameters, or this rank's pieces of them."""
        if self.closed:
            return WatchedState()
        return self.state if self.shards.in_place else self.shards.state

    def let_go(self) -> None:
        """In a forked child, where memory of the room is not, whoever reads the state is told so by name."""
        if self.room is not None and self.room.nbytes:
            self._left_behind, self.state = self.state, Elsewhere.of_the_parent()

    def close(self, because: str) -> None:
        """Lets go of the state, of host memory and of the folder; whoever uses the optimizer is told why."""
        if self.closed:
            return
        self.closed, self.state = because, Elsewhere(because)
        self.bound, self.shards, self.host = Bound(), Shards(()), None
        if self.disk is not None:
            self.disk.close(because)

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise StateError(self.closed)

    def refuse_elsewhere(self) -> None:
        """The state must be here: not closed, and not in the memory of the process that this one was forked from."""
        self.refuse_if_closed()
        if self.room is not None:
            self.room.check()

    def refuse_if_torn(self) -> None:
        if self.torn:
            raise StateError(f"{self.untold}. {TORN}" if self.untold else _TORN)

    def is_apart(self, groups: Groups) -> bool:
        """Whether what is updated are copies in host memory."""
        if self.schedule == "sync" and self.tier == "device":
            return False
        everyone = [param for group in groups for param in group["params"] if param.requires_grad]
        if not everyone:
            return False
        there = is_apart(everyone[0])
        if there and self.tier == "device" and self.schedule != "sync":
            do = 'the update of tier="device" runs on the device, and there is nothing to hide it behind'
            allowed = "'sync' for parameters on a device, or tier='cpu' or zk.Nvme(path)"
            raise ValueError(got("schedule", self.schedule, allowed, do))
        return self.delays or (there and self.tier != "device")

    def hosting(self, groups: Groups) -> tuple[HostCopies, ColumnsOf] | None:
        """What makes copies of these parameters, if they are to have some."""
        if not self.is_apart(groups):
            return None
        if self.host is None:
            assert self.room is not None
            self.host = HostCopies(self.room, self.delays, late=any(group.get(LATE, False) for group in groups))
        trained = next(param for group in groups for param in group["params"] if param.requires_grad)
        self.host.reach(trained, measured=self.recorder is not None)
        owners = [group for group in groups for _ in group["params"]]
        if self.disk is not None:
            return self.host, lambda place, dtype: ()
        return self.host, lambda place, dtype: self.algorithm.layout(owners[place], dtype).columns

    def shards_of(self, groups: Groups, *, hosted: bool = True) -> Shards:
        """The shards of these parameters: those of before, or others where the parameters are, or are elsewhere.

        `hosted`: with copies in host memory, if the tier asks for such.
        """
        last, host = self.shards, self.hosting(groups) if hosted else None
        known = last.knows(groups) and (host is not None) == last.is_hosted
        return last if known else Shards(groups, host, last, self.group)

    def catch_up(self) -> None:
        """Follow writes that no step has seen yet, so that what is saved is consistent."""
        self.shards.adopt(self.state)
        self.shards.look()
        if self.bound.witness is not None:
            self.bound.witness.catch_up(self.held)

    def refresh(self) -> None:
        """Masters and remainders begin anew from the parameters, however these were written."""
        self.shards.adopt(self.state)
        self.shards.refetch()
        follow(tracked(self.held), self.held)
        if self.bound.witness is not None:
            self.bound.witness.look()

    def shown(self) -> WatchedState:
        """The state as it is saved."""
        binding, made = self.bound.binding, self.held
        if self.disk is not None:
            made = WatchedState(in_memory(self.disk, made))
        elif isinstance(binding, DeviceBinding):
            made = WatchedState(binding.shown(made))
        return self.shards.saved(made, self.state)

    def renew(self, *, loaded: bool = True) -> None:
        """The state is another one: what points at it is made anew."""
        self.bound = Bound(witness=Witness(tracked(self.held), loaded=loaded))
        self.torn, self.untold = False, ""

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
        """The binding, or a new one where there is none that fits."""
        last, witness = self.bound.binding, self.bound.witness
        if last is None and self.schedule == "overlap" and not self.is_scheduled:
            warnings.warn(_NOTHING_TO_OVERLAP, stacklevel=2)
        if binding is not None and intact:
            binding.witness.catch_up(self.held, in_place=True)
            return binding
        previous = last if binding is None and last and last.intact(self.held) else None
        self.state = watched(self.state)
        self.bound.binding = None
        subject = self.algorithm, survey, groups, self.held
        begins: dict[str, Any] = {  # what new state and its witness begin with
            "initial": [self.algorithm.first_moment(group) for group in groups],
            "witness": witness,
            "exact": partial(self.shards.exact, kept=self.disk is not None),
        }
        if self.disk is not None:
            made: Binding = DiskBinding(*subject, self.disk, **begins)
        elif decision.device is not None:
            before = last if isinstance(last, DeviceBinding) and last.place == survey.device else None
            made = DeviceBinding(
                *subject, decision, previous=before if before is previous else None, last=before, **begins
            )
        else:
            room = self.room if survey.device is None else None
            kind = Binding if all(rest_of(one) is None for one in survey.params) else RestingBinding
            made = kind(*subject, previous=previous if type(previous) is kind else None, room=room, **begins)
        self.shards.bound(survey.params, self.state)
        self.bound = Bound(made, made.witness, formats)
        return made
