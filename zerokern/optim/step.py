"""Runs each update as a step program: gives its ops their actions, and accounts for what became of it.

Under "sync" the program runs inline, in the thread that calls `step()`. Under "overlap" and `Delayed` a worker runs it
beside what the program does next; at most one update is pending then. What has become of it is the `Outcome` of the
optimizer's holdings.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import CommError
from zerokern.memory.interrupts import whole
from zerokern.optim import device
from zerokern.optim.accord import OWED, TORN, UNTOLD, Phase, say_outcome
from zerokern.optim.leaving import LeavingGradients
from zerokern.optim.outside import watched
from zerokern.optim.parts import Part, in_pieces, part_of, parts_of
from zerokern.optim.rounds import together
from zerokern.optim.shards import Shards
from zerokern.optim.shown import LATE, PENDING
from zerokern.optim.survey import Groups, Survey, params_of
from zerokern.optim.update import ALL, Update, buckets_of, gathers
from zerokern.schedule import Delayed, StepProgram
from zerokern.schedule.executor import Executor
from zerokern.schedule.recorder import SpanRecorder
from zerokern.zero.hooks import weakly
from zerokern.zero.shard import shard_of

if TYPE_CHECKING:
    from zerokern.optim.binding import Binding
    from zerokern.optim.decide import Decision
    from zerokern.optim.holdings import Holdings

__all__ = ["StepRunner"]

CALLS = "delayed_calls"  # in param_groups: how often `step()` was called, which says when the delay begins


class StepRunner:
    """The updates of one optimizer, of which one may be pending.

    Whatever uses the optimizer calls `finish` first, with the groups as they are then.
    """

    def __init__(self, holdings: Holdings, decision: Decision) -> None:
        self._holdings, self._decision = holdings, decision
        self.pending: Update | None = None
        self.leaving = LeavingGradients(holdings.shards)
        self._groups: Groups = ()
        self._executors: dict[bool, Executor] = {}  # by whether they run inline
        self._parts: tuple[Shards | None, list[Part]] = (None, [])
        self._program: tuple[tuple[Any, ...], StepProgram] | None = None
        self._unpublished: Update | None = None  # a delayed update that was made

    @property
    def waited_ns(self) -> Mapping[str, int]:
        """For how long threads have waited for ops of updates, by lane."""
        waited = [one.waited_ns for one in self._executors.values()]
        return waited[0] if len(waited) == 1 else sum(map(Counter, waited), Counter())

    @property
    def _runs_inline(self) -> bool:
        return self._holdings.schedule == "sync" or not self._holdings.is_scheduled

    @property
    def agrees(self) -> bool:
        """Whether ranks tell each other how the update went before `step()` returns."""
        return self._holdings.moves_on_disk and self._runs_inline

    def _executor(self, inline: bool) -> Executor:
        found = self._executors.get(inline)
        if found is None:
            found = self._executors[inline] = Executor(self._holdings.recorder, inline=inline)
        return found

    # Before the update: parameters and gradients.

    def find_shards(self, groups: Groups) -> Shards:
        """What stands for the parameters; where they are others than before, what was pending is published first."""
        here = self._holdings
        last, stepped = here.shards, here.binding is not None
        here.state = watched(here.state)
        if last.changes_over:
            here.catch_up()  # who follows what was written knows it by what it was
        if last.host.late and not last.knows(groups):
            last.look()
            self._publish(last)
        shards = here.shards = here.shards_of(groups)
        here.changes.replace(last, shards)  # other ones than it knows, also where state was loaded since
        shards.shown.adopt(here.state, refuse_plain=stepped and last.stand_alone)
        if here.recorder is not None and shards is not last:
            for _, memory, name in buckets_of(shards, self._parts_of(shards)):
                memory.recorder = SpanRecorder(here.recorder, name)
        return shards

    def read_gradients(self, shards: Shards, *, unscaled: bool) -> None:
        """Fetches gradients to where the update reads them; what an earlier step made and kept back is published.

        `unscaled`: GradScaler has written into gradients, which it does not count as writing.
        """
        if not shards.is_hosted:
            shards.take_gradients()
            return
        shards.look()
        if shards.host.late:
            self._publish(shards)
        if self.leaving.shards is not shards:
            self.leaving.end()
            self.leaving = LeavingGradients(shards, self._parts_of(shards), self._holdings.schedule != "sync")
        shards.take_copies(self.leaving.read(unscaled=unscaled))

    def expect(self, groups: Groups) -> None:
        """As the first backward pass begins: gradients of the first step leave as they come, too.

        Else all of them would lie on the device then, which is never so again. What is wrong, `step()` says.
        """
        here = self._holdings
        if self.leaving.shards.params or here.closed or here.torn or here.placing.waits:
            return
        with contextlib.suppress(Exception):
            if here.is_apart(groups) and any(map(device.is_apart, groups[0]["params"][:1])):
                shards = self.find_shards(groups)
                shards.host.measures = True
                self.leaving = LeavingGradients(shards, self._parts_of(shards), shards.is_hosted, passes=1)

    def release_gradients(self, groups: Groups) -> None:
        """Returns once gradients may be written: they have memory here, and what reads them has done so, or the current
        stream waits for it."""
        update = self.pending
        if update is not None and update.reads_in_place:
            update.run.finish()
        elif update is not None:
            for part in update.streamed(update.parts):
                update.gate_reads(part.name)
        self.leaving.gate()
        shards = [shard for param in params_of(groups) if (shard := shard_of(param)) is not None]
        for bucket in dict.fromkeys(shard.gradients for shard in shards if shard.gradients is not None):
            bucket.shown.land()
            bucket.shown.guard()

    def _parts_of(self, shards: Shards) -> list[Part]:
        if self._parts[0] is not shards:
            parts = parts_of(shards.updated, shards.shards)
            if shards.host.link is not None and self._holdings.schedule != "sync" and self._holdings.disk is None:
                parts = [in_pieces(part, shards.updated, _moved(shards, part)) for part in parts]
            self._parts = (shards, parts)
        return self._parts[1]

    # The update itself.

    def submit(
        self, survey: Survey, bind: Callable[[], Binding], prepare: Callable[[Binding], None], *, first: bool
    ) -> None:
        """Makes the update, or begins it: returns when as much of it is done as the schedule promises.

        `first`: of its kind, so that state may have to be made, which no step that is skipped makes.
        """
        here, shards = self._holdings, self._holdings.shards
        inline = self._runs_inline
        lazily = not inline and here.schedule == "overlap"
        launches = lazily or (not inline and here.has_both)  # on the device, what stays there: once it is decided
        if inline or launches or first or not survey.params or shards.accord.meets:
            # the last ends last: others are not waited for any more. Squares alone decide what the device does beside
            alone = launches and here.has_both and not first and shards.has_squares
            for tickets in reversed(self.leaving.tickets.values()) if not alone else ():
                tickets[0].wait()
            self.leaving.sweep()
            self._decision.take()
            if self._decision.scale is None:
                shards.host.consumed(list(shards.host.copies.values()), updated=False)
                self._count_call()
                return
        # where a device decides, nobody asks others before they wait for this rank's matrices
        untold = shards.exchanges if survey.matrices and shards.are_decided_there else ()
        with together(untold), shards.accord.prepared():
            binding = bind() if survey.params else None
        if binding is None:
            with self._reported(lambda: False):
                pass
            shards.accord.phase = Phase.PUBLISHES
            self._publish(shards)
            self._count_call()
            return
        binding.recorder = here.recorder
        taken = self._taken(shards, binding)
        if here.is_scheduled or (taken and binding.moves):
            parts = taken[::-1] if here.delays else taken
        else:
            parts = [part_of(ALL, survey.numbers)]
        update = Update(binding, self._decision, shards, parts, here.changes)
        for group in update.exchanges:
            group.begin_exchanging(None if inline else update)
        prepare = together(update.exchanges)(prepare)
        if inline:
            self._run_inline(shards, update, taken, prepare)
            return
        prepare(binding)
        for publisher in shards.publishers if lazily else ():
            publisher.prepare()
        if launches:
            self._launch_beside(shards, update)
        with whole("the step"):  # a Ctrl-C now would leave a run that nobody knows of; what is waited for comes later
            self._begin(shards, update, taken, lazily=lazily, inline=False)
            if lazily:
                self._publish_later(shards, update, taken)
        if lazily:
            self._wait_for_first(shards, update)
        elif update.publish_when_done:
            self.finish(self._groups)

    def _taken(self, shards: Shards, binding: Binding) -> list[Part]:
        """The parts that the update is about, in the order in which forwards need them."""
        if shards.stand_alone:
            return []  # they are one part
        there = set(binding.survey.numbers)
        return [part for part in self._parts_of(shards) if not there.isdisjoint(part.members)]

    def _run_inline(
        self, shards: Shards, update: Update, taken: Sequence[Part], prepare: Callable[[Binding], None]
    ) -> None:
        here, binding = self._holdings, update.binding
        ran: list[Update] = []
        with whole("the step"):
            try:
                with self._reported(lambda: any(one.changed for one in ran)):
                    prepare(binding)
                    ran.append(update)
                    update.launch(shards.host)
                    self._begin(shards, update, taken, lazily=False, inline=True)
                    with here.writing():
                        made = (key for key in reversed(update.run.keys) if key[0] in ("Step", "Store"))
                        update.run.wait(*next(made))  # all but gathers, and what follows them
                        update.count()
            except BaseException as error:  # refused, here or on another rank, or the second Ctrl-C
                if ran and update.made and update.counted is False:
                    update.count()
                if ran:
                    here.settle(update.outcome)
                self._give_up(update, error)
                raise
            self.pending = None
            shards.accord.phase = Phase.PUBLISHES
            self._publish(shards, update)

    def _launch_beside(self, shards: Shards, update: Update) -> None:
        """Launches what stays on the device; where that fails, all is over."""
        try:
            update.launch(shards.host)
        except BaseException as error:
            self.pending = update
            self._give_up(update, error)
            if not shards.accord.in_company:
                say_outcome(error, self._holdings.outcome)
            raise

    def _begin(self, shards: Shards, update: Update, taken: Sequence[Part], *, lazily: bool, inline: bool) -> None:
        """Hands the program to its executor, with an action for each op that is the optimizer's."""
        here, tickets = self._holdings, self.leaving.tickets
        key = (update.binding, here.schedule, lazily, update.copies_back, frozenset(tickets))
        if self._program is None or self._program[0] != key:
            self._program = (key, update.program(here.schedule, shards, taken, tickets, lazily=lazily))
        program = self._program[1]
        actions = dict(update.actions(program, shards, taken, tickets, lazily=lazily, inline=inline))
        ahead = ("Publish",) if here.delays and not inline else ()
        update.run = self._executor(inline).submit(program, actions, ahead=ahead)
        self.pending = update
        is_late = isinstance(schedule := here.schedule, Delayed) and self._calls() >= schedule.after
        update.publish_when_done = not lazily and not is_late  # what is late, the next call publishes
        self._count_call()
        self.leaving.begun()

    def _calls(self) -> int:
        return max((group.get(CALLS, 0) for group in self._groups), default=0)

    def _count_call(self) -> None:
        if self._holdings.delays:
            calls = self._calls() + 1
            for group in self._groups:
                group[CALLS] = calls

    # How parameters become those of the step.

    def _publish(self, shards: Shards, made: Update | None = None) -> None:
        """Shows what was updated to all who read parameters: until then these are of different steps.

        `made`: an update whose program gathers it; without one, a delayed update that waits for this.
        """
        changes = self._holdings.changes
        with self._holdings.writing(), changes.told():
            late, self._unpublished = self._unpublished, None
            if self._holdings.delays:
                changes.wrote((copy.values for copy in shards.host.pending), told=True)
            if late is not None:
                for op in late.run.program.ops:
                    if op.verb == "Publish":
                        late.run.perform(op.verb, op.what)
            shards.publish(None if made is None else made.run.finish, changes.take)
            if made is not None and not shards.stand_alone:
                made.binding.followed.accept_writes()
        if self._holdings.delays:  # what was computed is seen now
            changes.tell(shards)
        self.set_late(False)

    def set_late(self, late: bool) -> None:
        """Says, to all ranks and checkpoints, whether an update waits for the next `step()`."""
        if self._holdings.host.room is not None and self._holdings.delays:
            self._holdings.host.late = late
            for group in self._groups:
                group[LATE] = late

    def _publish_later(self, shards: Shards, update: Update, taken: Sequence[Part]) -> None:
        """Counts parameters as those of this step from here on; forwards wait until they are."""
        if not shards.accord.in_company:  # others go on, whatever fails here
            self._take_first(update, taken)
        update.count()
        self._keep_gradients(update, taken)
        with self._holdings.changes.told():
            shards.announce()
        for sharding in [one for one in shards.shardings if one.publisher is not None]:
            names = {part.bucket.number: part.name for part in self._parts_of(shards) if part.sharding is sharding}
            sharding.publish_later(partial(self._perform_bucket, update, names), self._holdings.tear)
        update.binding.followed.accept_writes()

    def _take_first(self, update: Update, taken: Sequence[Part]) -> None:
        """Waits for the first part. A disk that cannot be read, or a launch that is refused, shows before the step
        counts: then all is as it was."""
        streamed = update.streamed(taken)[:1]
        try:
            if update.binding.moves and not streamed:
                update.run.wait("Step", taken[0].names[0])
            for part in streamed:  # the host waits for the launch alone
                update.run.gate("Step", part.name)
        except Exception as error:
            self._give_up(update, error)
            say_outcome(error, self._holdings.outcome)
            raise

    def _keep_gradients(self, update: Update, taken: Sequence[Part]) -> None:
        """Makes whoever writes gradients next wait for the update, if that reads them beside the program's stream."""
        for part in update.streamed(taken):
            if part.bucket is None:
                continue  # `step()` waits for those
            if part.bucket.shown.handed_out():  # nobody could wait for who writes there
                update.gate_reads(part.name)
            else:
                part.bucket.shown.reads_until(partial(weakly(update.gate_reads), part.name))

    def _wait_for_first(self, shards: Shards, update: Update) -> None:
        """Waits for what is complete when `step()` returns: all that no forward of a unit waits for."""
        for part in self._parts_of(shards):
            if part.sharding is None:
                self._perform(update, part.name)
        for sharding in shards.shardings:
            if sharding.publisher is not None:
                sharding.publisher.upto(0)
            else:
                sharding.publish()

    def _perform_bucket(self, update: Update, names: dict[int, str], bucket: int) -> None:
        if bucket in names:
            self._perform(update, names[bucket])

    def _perform(self, update: Update, name: str) -> None:
        if not update.run.program.has("Publish", name):
            return
        try:
            update.run.perform("Publish", name)
        except Exception as error:
            told = self.pending is not update
            if not self._give_up(update, error):
                say_outcome(error, self._holdings.outcome)
                raise
            for publisher in self._holdings.shards.publishers if not told else ():
                publisher.failure = error  # the forward ends: other ranks wait in it

    # What became of it.

    def finish(self, groups: Groups) -> None:
        """Returns once what an earlier call left pending is done and accounted for; raises what went wrong with it."""
        here = self._holdings
        self._groups = groups
        update = self.pending
        if update is None:
            return
        try:
            update.run.finish()
        except Exception as error:
            self._give_up(update, error)
            say_outcome(error, here.outcome)
            raise
        self.pending = None
        if self._decision.scale is None:
            return
        update.count()
        self._unpublished = update if here.delays else None
        if update.publish_when_done:
            self._publish(here.shards)
        else:
            self.set_late(True)

    def _reported(self, changed: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around an update that ends with its step: where it fails on one rank, it fails on all of them."""
        return self._holdings.shards.accord.reported(changed) if self.agrees else nullcontext()

    def _give_up(self, update: Update, error: BaseException) -> bool:
        """Ends an update that failed, once. Returns whether other ranks wait here, and have yet to hear of it."""
        here, shards, accord = self._holdings, self._holdings.shards, self._holdings.shards.accord
        spreads = not isinstance(error, CommError)
        if self.pending is update:
            self.pending = None
            update.break_off()
            known = not accord.in_company or (self.agrees and accord.agreed)
            if known or not here.is_scheduled or not isinstance(error, Exception):
                if update.outcome is TORN:
                    here.tear()
            else:
                here.fail_alone(error, owes=not update.counted)
                if update.counted and spreads:  # others publish it part by part, and their forwards wait for it
                    with contextlib.suppress(CommError):
                        for part in self._parts_of(shards):
                            if part.name not in update.gathered and gathers(part):
                                part.sharding.publisher.gather(part.bucket.number).wait()
        return spreads and here.outcome.is_here_alone

    def tell(self, error: BaseException) -> None:
        """A step has failed here: the other ranks hear of it where they wait for this one, or in their next step."""
        here, shards = self._holdings, self._holdings.shards
        accord = shards.accord
        if not accord.in_company:
            if self.agrees or (here.moves_on_disk and here.torn):
                say_outcome(error, here.outcome)
            return
        if isinstance(error, Exception) and not isinstance(error, CommError):
            there = shards.are_decided_there
            with contextlib.suppress(CommError):
                if not there:
                    self._publish_with_others(shards)
                accord.refuse(here.reason or str(error), torn=here.torn, reports=self.agrees, there=there)
        if accord.agreed:
            here.settle(accord.agreed)
            say_outcome(error, here.outcome)
        elif accord.phase >= Phase.MET:
            here.fail_alone(error)
            if isinstance(error, Exception) and accord.phase < Phase.PUBLISHES and not here.is_scheduled:
                with contextlib.suppress(CommError):
                    shards.publish()  # the others do, and wait for this rank's part

    def _publish_with_others(self, shards: Shards) -> None:
        """Publishes what other ranks publish before they meet this one, also of an update that has failed here."""
        here = self._holdings
        if here.outcome is OWED:
            here.outcome = UNTOLD
            shards.publish()
        elif shards.host.late and shards.accord.phase < Phase.MET:
            self._publish(shards)

    # For the rest of the optimizer.

    def wait_for_decision(self) -> None:
        """Returns once the last step's norm, and whether it was skipped, are known."""
        if self.pending is not None and not self._decision.known:
            self.pending.run.wait("Norm", "all")

    def wait_until_whole(self, groups: Groups) -> None:
        """Returns once the state is that of the last step, and consistent; refuses where it cannot be."""
        self._holdings.refuse_elsewhere()
        self.finish(groups)
        self._holdings.refuse_if_torn()
        self._holdings.catch_up()

    def flush(self, groups: Groups) -> None:
        """Returns once nothing is pending, and nothing waits to be published."""
        here = self._holdings
        here.refuse_elsewhere()
        try:
            self.finish(groups)
            here.refuse_if_torn()
        finally:
            if here.outcome is OWED:
                self._publish_with_others(here.shards)
        entries = here.state.values() if here.shards.stand_alone else ()
        if any(PENDING in entry for entry in entries if isinstance(entry, dict)):
            self.find_shards(groups)
        shards = here.shards
        for publisher in shards.publishers:
            publisher.finish()
        if shards.is_hosted:
            shards.look()
            if shards.host.late:
                self._publish(shards)

    def drop(self, groups: Groups) -> None:
        """Ends what is pending, whatever becomes of it: state is about to be replaced, and nothing may keep it."""
        self._groups, self._program = groups, None
        if self.pending is not None:
            with contextlib.suppress(Exception):  # where it failed, the optimizer is torn now
                self.finish(groups)
        self._unpublished = None
        for publisher in self._holdings.shards.publishers:
            with contextlib.suppress(Exception):
                publisher.finish()

    def close(self, groups: Groups) -> None:
        """Ends the worker's part of what is pending. Nothing is published, so that no other rank is waited for."""
        with contextlib.suppress(Exception):  # nobody asks any more what became of it
            self.finish(groups)
        self.leaving.end()
        self.leaving = LeavingGradients(Shards(()))
        self.pending = self._unpublished = self._program = None
        self._parts, self._executors = (None, []), {}


def _moved(shards: Shards, part: Part) -> list[int]:
    """Returns the members of a part that cross the link both ways."""
    trained = [member for member in part.members if shards.local[member].requires_grad]
    return [member for member in trained if shards.copy(member).stays is None]
