"""When an update runs, at once, beside the next forward, or a step late; and what is under way of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from zerokern.core.errors import CommError
from zerokern.optim.accord import say_outcome
from zerokern.optim.binding import Binding
from zerokern.optim.conductor import Conductor, UnderWay
from zerokern.optim.decide import Decision
from zerokern.optim.holdings import Holdings
from zerokern.optim.interrupts import whole
from zerokern.optim.leaving import Departure, Leaving
from zerokern.optim.outside import watched
from zerokern.optim.parts import Part
from zerokern.optim.shards import LATE, PENDING, Shards
from zerokern.optim.survey import Groups, Survey
from zerokern.schedule import Delayed

__all__ = ["Course"]

CALLS = "delayed_calls"  # in param_groups: how often `step()` was called, which says when the delay begins


class Course:
    """The updates of one optimizer, of which one may be under way.

    Whoever enters the optimizer calls `finish` first, with its groups as they are then.
    """

    def __init__(self, holdings: Holdings, decision: Decision) -> None:
        self._holdings, self._decision = holdings, decision
        self.under_way: UnderWay | None = None
        self.leaving: Leaving | None = None
        self._groups: Groups = ()
        self._conductor: Conductor | None = None
        self._unseen: list[UnderWay] = []  # a delayed update that is done, and waits to be put in place
        self._tickets: dict[str, Any] = {}
        self._gates: list[Any] = []
        self._on_their_way: list[Any] = []
        self._behind: UnderWay | None = None  # an update that failed here, and that other ranks publish

    @property
    def waited_ns(self) -> Mapping[str, int]:
        """For how long threads have waited for ops of updates, by lane."""
        return {} if self._conductor is None else self._conductor.waited_ns

    def localise(self, groups: Groups) -> Shards:
        """What stands for the parameters; where they are others than before, what was pending is published first."""
        here = self._holdings
        last, stepped = here.local, here.bound.binding is not None
        here.state = watched(here.state)
        if last is not None and last.changes_over:
            here.catch_up()  # who follows what was written knows it by what it was
        if last is not None and last.host is not None and last.host.late and not last.knows(groups):
            last.look()
            self._put_in_place(last)
        local = here.shards = here.shards_of(groups)
        local.adopt(here.state, refuse_plain=stepped and last is None)
        return local

    @property
    def agrees(self) -> bool:
        """Whether ranks tell each other how the update went before `step()` returns."""
        return self._holdings.moves_on_disk and (self._holdings.schedule == "sync" or not self._holdings.is_scheduled)

    def _conduct(self) -> Conductor:
        if self._conductor is None:
            self._conductor = Conductor(self._holdings.schedule, self._holdings.recorder)
        return self._conductor

    def enter(self, local: Shards, *, unscaled: bool) -> None:
        """Gradients to where the update reads them; what an earlier step made and kept back is published.

        `unscaled`: GradScaler has written into gradients, which it does not count as writing.
        """
        host = local.host
        if host is None:
            local.enter()
            return
        local.look()
        if host.late:
            self._put_in_place(local)
        parts = self._conduct().parts(local)
        if self.leaving is None or self.leaving.local is not local:
            self.leaving = Leaving.of(self.leaving, local, parts, self._holdings.schedule != "sync")
        early = self.leaving.departures()
        try:
            grads = local.gradients()
            local.fold_near(grads)
            self._fetch(local, parts, grads, early, unscaled)
        finally:
            for departure in early.values():
                departure.forget()
        local.lend(grads)

    def _fetch(
        self,
        local: Shards,
        parts: Sequence[Part],
        grads: dict[int, Tensor],
        early: dict[str, Departure],
        unscaled: bool,
    ) -> None:
        host = local.host
        assert host is not None
        self._tickets = {}
        for departure in early.values() if unscaled else ():
            departure.forget()
        for departure in early.values():
            departure.compare()
        self._gates = []
        for part in reversed(parts):  # as the program has it, and as gradients came
            pairs = [(local.twin(place), grads[place]) for place in part.members if place in grads]
            left = early.get(part.name)
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

    def _put_in_place(self, local: Shards) -> None:
        self._holdings.torn = True
        while self._unseen:
            self._unseen.pop().put()
        local.publish()
        self._holdings.torn = False
        self.keep_back(False)

    def keep_back(self, late: bool) -> None:
        """Whether an update waits for the next `step()`, as all ranks and checkpoints know it."""
        if self._holdings.host is not None and self._holdings.delays:
            self._holdings.host.late = late
            for group in self._groups:
                group[LATE] = late

    def submit(
        self,
        survey: Survey,
        bind: Callable[[], Binding],
        prepare: Callable[[Binding], None],
        *,
        first: bool,
    ) -> None:
        """Hand the update over; returns when as much of it is done as the schedule promises. `first`: of its kind."""
        local = self._holdings.local
        assert local is not None
        lazily = self._holdings.schedule == "overlap" and local.defers
        if lazily or first or local.accord.meets or not survey.params:
            for ticket in self._tickets.values():
                ticket.wait()
            if self._decision.take() is None:
                if local.host is not None:
                    local.host.consumed(list(local.host.twins.values()), updated=False)
                self._count_call()
                return
        with local.accord.prepared():
            bound = bind() if survey.params else None
        if bound is None:
            with self._reported(lambda: False):
                pass
            local.publish()
            self._count_call()
            return
        self._conduct().arrange(local, bound)
        prepare(bound)
        for publisher in local.publishers if lazily else ():
            publisher.prepare()
        with whole("the step"):  # a Ctrl-C now would leave a run that nobody knows of; what is waited for comes later
            under_way = self._begin(local, bound, lazily)
        if lazily:
            self._wait_for_first(local, under_way)
        elif under_way.owed:
            self.finish(self._groups)

    def _begin(self, local: Shards, bound: Any, lazily: bool) -> UnderWay:
        conductor = self._conduct()
        under_way = conductor.submit(local, bound, self._decision, self._tickets, publishes=lazily)
        self.under_way = under_way
        under_way.owed = not lazily and not self._late()
        self._count_call()
        for ticket in self._gates:
            ticket.gate()  # what the program does to gradients from here on, it does behind their copies
        self._on_their_way = list(self._tickets.values())
        self._tickets, self._gates = {}, []
        if lazily:
            if bound.rests_on_disk and not local.accord.in_company:  # others go on, whatever fails here
                self._take_first(under_way)
            self._publish_later(local, under_way)
        return under_way

    def _take_first(self, under_way: UnderWay) -> None:
        """A disk that cannot be read shows before the step counts: then all is as it was."""
        try:
            self._conduct().take_first(under_way)
        except Exception as error:
            self._give_up(under_way, error)
            say_outcome(error, torn=self._holdings.torn)
            raise

    def _late(self) -> bool:
        """Whether this call's update is published by the next one."""
        return isinstance(schedule := self._holdings.schedule, Delayed) and self._calls() >= schedule.after

    def _calls(self) -> int:
        return max((group.get(CALLS, 0) for group in self._groups), default=0)

    def _count_call(self) -> None:
        calls = self._calls() + 1
        for group in self._groups if self._holdings.delays else ():
            group[CALLS] = calls

    def _publish_later(self, local: Shards, under_way: UnderWay) -> None:
        """Parameters count as those of this step from here on; forwards wait until they are."""
        under_way.stepped = True
        under_way.binding.stepped()
        local.announce()
        parts = self._conduct().parts(local)
        for sharding in [one for one in local.shardings if one.publisher is not None]:
            names = {part.bucket: part.name for part in parts if part.sharding is sharding}
            sharding.publish_later(partial(self._perform_bucket, under_way, names), self._tear)
        under_way.binding.witness.stepped()

    def _wait_for_first(self, local: Shards, under_way: UnderWay) -> None:
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
        self._holdings.torn = True

    def _perform_bucket(self, under_way: UnderWay, names: dict[int, str], bucket: int) -> None:
        if bucket in names:
            self._perform(under_way, names[bucket])

    def _perform(self, under_way: UnderWay, name: str) -> None:
        if under_way.failed or not under_way.run.program.has("Publish", name):
            return
        try:
            under_way.run.perform("Publish", name)
        except Exception as error:
            if not self._give_up(under_way, error):
                raise
            for publisher in () if self._holdings.local is None else self._holdings.local.publishers:
                publisher.failure = error  # the forward ends: other ranks wait in it

    def finish(self, groups: Groups) -> None:
        """What an earlier call left under way is done and accounted for; raises what went wrong with it."""
        self._groups = groups
        under_way = self.under_way
        if under_way is None:
            return
        try:
            with self._reported(lambda: under_way.begun):
                under_way.finish()
        except Exception as error:
            self._give_up(under_way, error)
            raise
        self.under_way = None
        if self._decision.scale is None:
            return
        if not under_way.stepped:
            under_way.binding.stepped()
        self._unseen = [under_way] * self._holdings.delays
        if under_way.owed and self._holdings.local is not None:
            self._put_in_place(self._holdings.local)
        else:
            self.keep_back(True)

    def abandon(self, groups: Groups) -> None:
        """What is under way ends, and what became of it does not matter: state is about to be replaced."""
        self._groups = groups
        if self.under_way is not None:
            with contextlib.suppress(Exception):  # where it failed, the optimizer is torn now
                self.finish(groups)
        for publisher in () if self._holdings.local is None else self._holdings.local.publishers:
            with contextlib.suppress(Exception):
                publisher.finish()

    def end(self, groups: Groups) -> None:
        """The worker's part of what is under way ends. Nothing is published, so that no other rank is waited for."""
        with contextlib.suppress(Exception):  # nobody asks any more what became of it
            self.finish(groups)
        if self.leaving is not None:
            self.leaving.remove()
        self._unseen, self._tickets, self._gates, self._on_their_way = [], {}, [], []
        self.under_way = self.leaving = self._behind = self._conductor = None

    def _reported(self, changed: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around an update that ends with its step: where it fails on one rank, it fails on all of them."""
        local = self._holdings.local
        return contextlib.nullcontext() if local is None or not self.agrees else local.accord.reported(changed)

    def _give_up(self, under_way: UnderWay, error: Exception) -> bool:
        """An update has failed here. Returns whether other ranks wait for this one, and have yet to hear of it."""
        if self.under_way is under_way:
            here, self.under_way = self._holdings, None
            under_way.binding.break_off()
            accord = None if here.local is None else here.local.accord
            told = accord is not None and self.agrees and accord.agreed
            if here.local is not None and accord is not None and accord.in_company and not told:
                here.untold, under_way.failed = str(error), not isinstance(error, CommError)
                if not under_way.stepped:
                    self._behind = under_way
                elif under_way.failed:  # others publish it part by part, and their forwards wait for it
                    with contextlib.suppress(CommError):
                        self._conduct().gather_rest(here.local, under_way)
            here.torn = here.torn or under_way.begun or bool(here.untold)
        return under_way.failed

    def keep_up(self, local: Shards) -> None:
        """Publish what other ranks publish before they meet this one, also of an update that has failed here."""
        under_way, self._behind = self._behind, None
        if under_way is not None:
            local.publish()
        elif local.host is not None and local.host.late and not local.accord.met:
            self._put_in_place(local)

    def look_at_decision(self) -> None:
        """The last step's norm, and whether it was skipped, are known."""
        if self.under_way is not None and not self._decision.known:
            self.under_way.run.wait("Norm", "all")

    def settle(self, groups: Groups) -> None:
        """Returns once the state is that of the last step, and consistent; refuses where it cannot be."""
        self._holdings.refuse_elsewhere()
        self.finish(groups)
        self._holdings.refuse_if_torn()
        self._holdings.catch_up()

    def flush(self, groups: Groups) -> None:
        """Nothing is under way, and nothing waits to be published."""
        here = self._holdings
        here.refuse_elsewhere()
        try:
            self.finish(groups)
            here.refuse_if_torn()
        finally:
            if self._behind is not None and here.local is not None:
                self.keep_up(here.local)
        if here.local is None and any(PENDING in entry for entry in here.state.values() if isinstance(entry, dict)):
            self.localise(groups)
        local = here.local
        if local is None:
            return
        for publisher in local.publishers:
            publisher.finish()
        if local.host is not None:
            local.look()
            if local.host.late:
                self._put_in_place(local)

    def release_gradients(self) -> None:
        """Returns once gradients may be written: what reads them has done so."""
        under_way = self.under_way
        if under_way is not None and under_way.in_place:
            under_way.finish()
        for ticket in self._on_their_way:
            ticket.gate()
