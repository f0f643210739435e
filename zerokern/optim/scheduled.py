"""The part of an optimizer that knows when its update runs: at once, beside the next forward, or a step late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.io import Nvme
from zerokern.memory import HostPlace
from zerokern.optim.conductor import Conductor, UnderWay
from zerokern.optim.decide import Decision
from zerokern.optim.formats import TAKES_LESS
from zerokern.optim.hosted import Host, LayoutOf
from zerokern.optim.interrupts import whole
from zerokern.optim.leaving import Departure, Leaving
from zerokern.optim.link import is_apart
from zerokern.optim.local import PENDING, Local, localised
from zerokern.optim.parts import Part
from zerokern.optim.survey import Groups, Survey
from zerokern.optim.watched import watched
from zerokern.schedule import Delayed, check_schedule
from zerokern.schedule.recorder import recorder_of

__all__ = ["LATE", "Scheduled"]

CALLS = "delayed_calls"  # in param_groups: how often `step()` was called, which says when the delay begins
LATE = "delayed_pending"  # in param_groups: whether an update waits to be published


class Scheduled:
    """Mixed into `FusedOptimizer`, which surveys, decides and binds."""

    tier: Any
    param_groups: list[dict[str, Any]]
    _bound: Any
    state: Any
    _local: Local | None
    _torn: bool
    _decision: Decision
    _layout: Callable[..., Any]
    _refuse_if_torn: Callable[[], None]
    _refuse_in_child: Callable[[], None]

    def _choose(self, tier: Any, schedule: Any) -> None:
        self.schedule = check_schedule(schedule)
        if isinstance(tier, Nvme) and self.schedule != "sync":
            do = "state on disk is updated as it streams by, before step() returns"
            raise ValueError(got("schedule", schedule, f"'sync' with tier={tier!r}", do))
        self._unschedule()
        self._room = HostPlace(type(self).__name__, TAKES_LESS) if tier == "cpu" or self._delays else None

    def _unschedule(self) -> None:
        """Nothing is under way, and nothing is known."""
        self._host: Host | None = None
        self._conductor: Conductor | None = None
        self._leaving: Leaving | None = None
        self._under_way: UnderWay | None = None
        self._unseen: list[UnderWay] = []  # a delayed update that is done, and waits to be put in place
        self._tickets: dict[str, Any] = {}
        self._departures: list[Departure] = []
        self._gates: list[Any] = []
        self._on_their_way: list[Any] = []
        self._stepping = threading.Lock()
        self._untold = ""  # why this is torn here, where other ranks have yet to hear of it
        self._behind: UnderWay | None = None  # an update that failed here, and that other ranks publish

    @property
    def _delays(self) -> bool:
        return isinstance(self.schedule, Delayed)

    def _is_apart(self, groups: Groups) -> bool:
        """Whether what is updated are twins in host memory."""
        if isinstance(self.tier, Nvme) or (self.tier != "cpu" and self.schedule == "sync"):
            return False
        everyone = [param for group in groups for param in group["params"] if param.requires_grad]
        if not everyone:
            return False
        there = is_apart(everyone[0])
        if there and self.tier != "cpu" and self.schedule != "sync":
            do = 'the update of tier="device" runs on the device, and there is nothing to hide it behind'
            raise ValueError(got("schedule", self.schedule, "'sync' for parameters on a device, or tier='cpu'", do))
        return self._delays or (there and self.tier == "cpu")

    def _hosting(self, groups: Groups) -> tuple[Host, LayoutOf] | None:
        """What makes twins of these parameters, if they are to have some."""
        if not self._is_apart(groups):
            return None
        if self._host is None:
            assert self._room is not None
            self._host = Host(self._room, self._delays, late=any(group.get(LATE, False) for group in groups))
        trained = next(param for group in groups for param in group["params"] if param.requires_grad)
        self._host.reach(trained, measured=recorder_of(self) is not None)
        owners = [group for group in groups for _ in group["params"]]
        return self._host, lambda place, dtype: self._layout(owners[place], dtype)

    def _localise(self) -> Local:
        """What stands for the parameters; where they are others than before, what was pending is published first."""
        last, stepped = self._local, self._bound.binding is not None
        self.state = watched(self.state)
        if last is not None and last.host is not None and last.host.late and not last.knows(self.param_groups):
            last.look()
            self._put_in_place(last)
        self._local = localised(last, self.param_groups, self.state, stepped, self._hosting(self.param_groups))
        return self._local

    def _is_scheduled(self) -> bool:
        """Whether the update goes through the schedule's worker."""
        local = self._local
        return local is not None and (local.host is not None or (self.schedule == "overlap" and local.defers))

    def _conduct(self) -> Conductor:
        if self._conductor is None:
            self._conductor = Conductor(self.schedule, recorder_of(self))
        return self._conductor

    def _enter(self, local: Local) -> None:
        """Gradients to where the update reads them; what an earlier step made and kept back is published."""
        host = local.host
        if host is None:
            local.enter()
            return
        local.look()
        if host.late:
            self._put_in_place(local)
        parts = self._conduct().parts(local)
        if self._leaving is None or self._leaving.local is not local:
            self._leaving = Leaving.of(self._leaving, local, parts, self.schedule != "sync")
        early = self._leaving.departures()
        try:
            grads = local.gradients()
            local.fold_near(grads)
            self._fetch(local, parts, grads, early)
        finally:
            for departure in early.values():
                departure.forget()
        local.lend(grads)

    def _fetch(
        self, local: Local, parts: Sequence[Part], grads: dict[int, Tensor], early: dict[str, Departure]
    ) -> None:
        host = local.host
        assert host is not None
        self._tickets = {}
        if getattr(self, "found_inf", None) is not None and getattr(self, "grad_scale", None) is None:
            for departure in early.values():  # GradScaler has unscaled gradients, which it does not count as writing
                departure.forget()
        by_id = {id(local.near[place]): grad for place, grad in grads.items()}
        for departure in early.values():
            departure.compare(by_id)
        self._gates = []
        for part in reversed(parts):  # as the program has it, and as gradients came
            pairs = [(local.twin(place), grads[place]) for place in part.members if place in grads]
            left = early.get(part.name)
            if left is not None:
                left.look_again()
            again = host.fetch(pairs)
            ticket = again if again is not None or left is None else left.ticket  # of one stream: the last ends last
            if ticket is None:
                continue
            self._tickets[part.name] = ticket
            if part.sharding is not None:
                part.sharding.gradient_buckets[part.bucket].reads_until(ticket.gate)
                continue
            shown = [local.everyone[place].grad for place in part.members if place in grads]
            kept = [twin.keeps(grad) for (twin, _), grad in zip(pairs, shown, strict=True) if grad is not None]
            if any(kept):
                self._gates.append(ticket)
        self._departures = list(early.values())

    def _put_in_place(self, local: Local) -> None:
        self._torn = True
        while self._unseen:
            self._unseen.pop().put()
        local.publish()
        self._torn = False
        self._keep_back(False)

    def _keep_back(self, late: bool) -> None:
        """Whether an update waits for the next `step()`, as all ranks and checkpoints know it."""
        if self._host is not None and self._delays:
            self._host.late = late
            for group in self.param_groups:
                group[LATE] = late

    def _submit(
        self,
        survey: Survey,
        binding: Any,
        bind: Callable[[Any], Any],
        prepare: Callable[[Any], None],
    ) -> None:
        """Hand the update over; returns when as much of it is done as the schedule promises."""
        local = self._local
        assert local is not None
        lazily = self.schedule == "overlap" and local.defers
        if lazily or binding is None or any(team.size > 1 for team in local.teams) or not survey.params:
            for ticket in self._tickets.values():
                ticket.wait()
            for departure in self._departures:
                departure.correct(may_fetch=True)
            self._departures = []
            if self._decision.take() is None:
                if local.host is not None:
                    local.host.consumed(list(local.host.twins.values()), updated=False)
                self._count_call()
                return
        if not survey.params:
            local.publish()
            self._count_call()
            return
        with local.accord.prepared():
            bound = bind(binding)
        prepare(bound)
        for publisher in local.publishers if lazily else ():
            publisher.prepare()
        with whole("the step"):  # a Ctrl-C now would leave a run that nobody knows of; what is waited for comes later
            under_way = self._begin(local, bound, lazily)
        if lazily:
            self._wait_for_first(local, under_way)
        elif under_way.owed:
            self._finish()

    def _begin(self, local: Local, bound: Any, lazily: bool) -> UnderWay:
        conductor = self._conduct()
        under_way = conductor.submit(local, bound, self._decision, self._tickets, self._departures, publishes=lazily)
        self._under_way = under_way
        under_way.owed = not lazily and not self._late()
        self._count_call()
        for ticket in self._gates:
            ticket.gate()  # what the program does to gradients from here on, it does behind their copies
        self._on_their_way = list(self._tickets.values())
        self._tickets, self._departures, self._gates = {}, [], []
        if lazily:
            self._publish_later(local, under_way)
        return under_way

    def _late(self) -> bool:
        """Whether this call's update is published by the next one."""
        return isinstance(self.schedule, Delayed) and self._calls() >= self.schedule.after

    def _calls(self) -> int:
        return max((group.get(CALLS, 0) for group in self.param_groups), default=0)

    def _count_call(self) -> None:
        calls = self._calls() + 1
        for group in self.param_groups if self._delays else ():
            group[CALLS] = calls

    def _publish_later(self, local: Local, under_way: UnderWay) -> None:
        """Parameters count as those of this step from here on; forwards wait until they are."""
        under_way.stepped = True
        under_way.binding.stepped()
        local.announce()
        parts = self._conduct().parts(local)
        for sharding in [one for one in local.shardings if one.publisher is not None]:
            names = {part.bucket: part.name for part in parts if part.sharding is sharding}
            sharding.publish_later(partial(self._perform_bucket, under_way, names), self._tear)
        under_way.binding.witness.stepped()

    def _wait_for_first(self, local: Local, under_way: UnderWay) -> None:
        """What is complete when `step()` returns: all that no forward of a unit waits for."""
        for part in self._conduct().parts(local):
            if part.sharding is None:
                self._perform(under_way, part.name)
        for sharding in local.shardings:
            if sharding.publisher is not None:
                sharding.publisher.upto(0)
            else:
                sharding.publish()

    def _tear(self) -> None:
        self._torn = True

    def _perform_bucket(self, under_way: UnderWay, names: dict[int, str], bucket: int) -> None:
        if bucket in names:
            self._perform(under_way, names[bucket])

    def _perform(self, under_way: UnderWay, name: str) -> None:
        if not under_way.run.program.has("Publish", name):
            return
        try:
            under_way.run.perform("Publish", name)
        except Exception as error:
            self._give_up(under_way, error)
            raise

    def _finish(self) -> None:
        """What an earlier call left under way is done and accounted for; raises what went wrong with it."""
        under_way = self._under_way
        if under_way is None:
            return
        try:
            under_way.finish()
        except Exception as error:
            self._give_up(under_way, error)
            raise
        self._under_way = None
        if self._decision.scale is None:
            return
        if not under_way.stepped:
            under_way.binding.stepped()
        self._unseen = [under_way] * self._delays
        if under_way.owed and self._local is not None:
            self._put_in_place(self._local)
        else:
            self._keep_back(True)

    def _abandon(self) -> None:
        """What is under way ends, and what became of it does not matter: state is about to be replaced."""
        if self._under_way is not None:
            with contextlib.suppress(Exception):  # where it failed, the optimizer is torn now
                self._finish()
            for publisher in () if self._local is None else self._local.publishers:
                with contextlib.suppress(Exception):
                    publisher.finish()

    def _give_up(self, under_way: UnderWay, error: Exception) -> None:
        if self._under_way is under_way:
            self._under_way = None
            if self._local is not None and self._local.accord.in_company:
                self._untold, self._behind = str(error), under_way
            self._torn = self._torn or under_way.begun or bool(self._untold)

    def _keep_up(self, local: Local) -> None:
        """Publish what other ranks publish before they meet this one, also of an update that has failed here."""
        under_way, self._behind = self._behind, None
        if under_way is None:
            if local.host is not None and local.host.late and not local.accord.met:
                self._put_in_place(local)
        elif not under_way.stepped:
            local.publish()
        else:
            self._conduct().gather_rest(local, under_way)

    def _look_at_decision(self) -> None:
        """The last step's norm, and whether it was skipped, are known."""
        if self._under_way is not None and not self._decision.known:
            self._under_way.run.wait("Norm", "all")

    @torch._disable_dynamo
    def flush(self) -> None:
        """Finish what is under way, and publish an update that was kept back (`schedule=zk.Delayed(...)`).

        Nothing else does: saving, evaluating and logging leave a pending update pending. Under `zk.shard` every rank
        calls it.

        >>> import zerokern as zk
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> opt = zk.SGD([weight], lr=0.5, schedule=zk.Delayed(after=0))
        >>> weight.grad = torch.ones(2); opt.step(); weight.data
        tensor([1., 1.])
        >>> opt.flush(); weight.data
        tensor([0.5000, 0.5000])
        """
        self._refuse_in_child()
        try:
            self._finish()
            self._refuse_if_torn()
        finally:
            if self._behind is not None and self._local is not None:
                self._keep_up(self._local)
        if self._local is None and any(PENDING in entry for entry in self.state.values() if isinstance(entry, dict)):
            self._localise()
        local = self._local
        if local is None:
            return
        for publisher in local.publishers:
            publisher.finish()
        if local.host is not None:
            local.look()
            if local.host.late:
                self._put_in_place(local)

    def _release_gradients(self) -> None:
        """Returns once gradients may be written: what reads them has done so."""
        under_way = self._under_way
        if under_way is not None and under_way.in_place:
            under_way.finish()
        for ticket in self._on_their_way:
            ticket.gate()
