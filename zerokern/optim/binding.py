"""Joins a survey to optimizer state and to the native table of pointers: the one binding of every tier.

Rows of the table lie in batches. A batch is fetched from where its state and parameters rest, updated by a native call,
and stored again, while others are on their way in and out. In memory both are the identity, and all rows are one batch.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Generator, Mapping, Sequence
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import accumulate
from typing import Any

from zerokern.core.units import Piece
from zerokern.memory import Rest, Ring, flowing
from zerokern.memory import Slot as Cell
from zerokern.memory.ring import DeferredSignals
from zerokern.optim.beside import Beside
from zerokern.optim.compute import Member, RowTable
from zerokern.optim.formats import FormatKey
from zerokern.optim.matrices import ns_dtype_of
from zerokern.optim.outside import WatchedState, follow_writes, tracked
from zerokern.optim.records import RecordSpan
from zerokern.optim.rounds import in_rounds
from zerokern.optim.state import Row, StateTier
from zerokern.optim.survey import Groups, Survey, same_objects
from zerokern.optim.transit import RowBatch
from zerokern.schedule.recorder import Recorder, UpdateRecorder
from zerokern.zero.tiers import rest_of
from zerokern.zero.watch import Watch

__all__ = ["Binding"]

Turns = Sequence[Sequence[int | Piece]]
"""Places among an optimizer's parameters that are updated one after the other, or segments of them."""
_AHEAD = 2  # batches of resting parameters in memory at once, where no state passes through a ring: one is on its way


class Binding:
    """Updates a survey's parameters. It is valid as long as the survey is and `intact` says so.

    `tier`: where state rests. `compute`: what runs the table. `beside`: what else a device updates, if anything.
    """

    def __init__(
        self,
        survey: Survey,
        groups: Groups,
        tier: StateTier,
        compute: RowTable,
        beside: Beside | None = None,
        *,
        formats: Sequence[FormatKey] = (),
        previous: Binding | None,
        followed: Watch,
    ) -> None:
        """Checks all state, then makes what is missing and points at it.

        `formats`: by group. `previous`: an intact binding of the same state, whose rows are right. `followed`:
        parameters with masters.
        """
        self.survey, self.tier, self.compute, self.beside, self._groups = survey, tier, compute, beside, groups
        self.formats = formats
        self.begun = False  # whether anything of the last update that was prepared may have been made
        self.turns: Turns = [survey.numbers]
        self.recorder: Recorder | None = None  # notes what is fetched and stored
        self._names: Sequence[str] = ("all",)
        self._updated = self._taken = 0  # batches, in the update at hand: made, and begun
        self._notes: UpdateRecorder | None = None
        self._done = self._is_laid_out = self._launches_records = False
        self._ns_dtypes: list[Any] = []  # by group, where matrices are updated, as of the rows
        self._flow: Generator[int, None, None] | None = None
        self._fetched: list[Rest] = []
        with compute.launching():
            new = tier.find(survey, None if previous is None else previous.tier)
            if new:
                compute.check_new(survey, groups, tier, new)
                versions = [survey.params[i]._version for i in new]
                tier.add(groups, new)
                # masters of 24 bits may round to others than what zk.shard has rounded to
                pairs = zip((survey.params[i] for i in new), versions, strict=True)
                compute.changes.wrote(param for param, version in pairs if param._version != version)
                compute.mark_first(survey, tier, new)
            same = previous is not None and same_objects(survey.all_params, previous.survey.all_params)
            compute.open_book(survey, tier, previous.compute.book if previous and same and not new else None)
            follow_writes(followed, tier.state)
            self.followed = Watch(tracked(tier.state))
            tier.locate()
            if tier.state.mark.changed:
                tier.state.watch_all()
            if not tier.streams:  # else the first update lays out the rows, when its turns are known
                self._lay_out()

    @property
    def moves(self) -> bool:
        """Whether an update fetches and stores state or parameters."""
        return self.tier.streams or self.survey.rests

    @property
    def streams(self) -> bool:
        """Whether state is elsewhere during an update, until `put_away` has returned."""
        return self.tier.streams or self.passes

    @property
    def passes(self) -> bool:
        """Whether state passes to a device and back."""
        return self.beside is not None and self.beside.moves

    def is_like(self, compute: RowTable, beside: Beside | None) -> bool:
        """Whether rows and counters are of use to these."""
        places = [None if one is None else one.place for one in (self.beside, beside)]
        return compute.is_like(self.compute) and places[0] == places[1]

    def stays(self, i: int) -> bool:
        """Whether a parameter of the survey is updated on the device beside which the host decides."""
        return self.beside is not None and self.beside.stays(self.survey.params[i])

    def intact(self, state: WatchedState) -> bool:
        """Whether every state tensor is the one, and lies where, the table points at.

        What was assigned to the state shows by its mark, a tensor whose memory was exchanged (`.data`) by its address.
        """
        known = state is self.tier.state and not state.mark.changed
        return known and self.tier.watch.in_place() and self.compute.book.untouched()

    def arrange(self, turns: Turns, names: Sequence[str]) -> None:
        """Prepares for an update turn by turn: each has the parameters in these places of the optimizer's.

        `names`: of their spans in the step program.
        """
        self._names = names
        if turns != self.turns:
            self.turns, self._is_laid_out = turns, False

    def _lay_out(self) -> None:
        """Puts the rows into batches in the order of the turns, and all of them into tables."""
        survey, tier, compute, beside = self.survey, self.tier, self.compute, self.beside
        self._batches = batches = self._batches_of()
        self._ring = tier.ring or Ring.without_memory(_AHEAD)
        cells = self._ring.slots
        members: list[Member] = []
        rows: list[Row] = []
        bases = [] if beside is None else beside.place_records(survey, batches, cells)
        self._launches_records = bool(bases)
        for number, batch in enumerate(batches):
            lease = cells[number % len(cells)].lease
            base = bases[number] if bases else 0 if lease is None else lease.ptr
            batch.begin = len(rows)
            rows += [tier.row(i, place, base) for i, place in batch.members]
            batch.end = len(rows)
            members += batch.members
        self._firsts = [min(batch.turns) for batch in batches]
        self._ends = list(accumulate(self._firsts.count(turn) for turn in range(len(self.turns))))
        steps = compute.book.choose(survey.numbers)
        if beside is not None:
            staying = [(turn, member, tier.row(*member, 0)) for turn, member in self._staying()]
            passing = batches if bases else []
            beside.lay_out(survey, self._groups, passing, rows, staying, steps)
        if self._launches_records:
            members, rows = [], []
        compute.lay_out(survey, self._groups, members, rows, steps)
        self._is_laid_out = True

    def _staying(self) -> list[tuple[int, Member]]:
        """Returns the rows that the device updates without any record, each with its turn, in that order."""
        survey = self.survey
        turn_of = {number: turn for turn, some in enumerate(self.turns) for number in some}
        stays = [i for i in range(len(survey.params)) if self._has_no_batch(i)]
        found = [(turn_of.get(survey.numbers[i], 0), (i, place)) for i in stays for place in self.tier.places(i)]
        return sorted(found, key=operator.itemgetter(0))

    def _has_no_batch(self, i: int) -> bool:
        """Whether a parameter is updated on the device, and passes nothing that comes from the disk."""
        return self.stays(i) and not self.tier.has_records_of(i)

    def _batches_of(self) -> list[RowBatch]:
        survey = self.survey
        found: dict[Any, RowBatch] = {}
        for i, turn, segment in self._in_turns():
            if self._has_no_batch(i):
                continue
            rest = rest_of(survey.params[i]) if survey.rests else None
            for place in self._places_of(i, segment):
                record = place.record if isinstance(place, RecordSpan) else None
                key = (turn, id(rest)) if record is None else record
                batch = found.get(key)
                if batch is None:
                    batch = found[key] = RowBatch(record)
                batch.turns.append(turn)
                batch.members.append((i, place))
                if rest is not None and rest not in batch.params:
                    batch.params.append(rest)
        batches = sorted(found.values(), key=operator.attrgetter("order"))
        if not self.tier.streams or not survey.matrices:
            return batches
        place = self.compute.place if self.beside is None else self.beside.place
        dtypes = [ns_dtype_of(self._ns_dtypes[owner], place) for owner in survey.owners]
        return in_rounds(batches, survey.matrices, dtypes)

    def _places_of(self, i: int, segment: Piece | None) -> Sequence[Any]:
        """Returns what of a parameter are rows of their own; what updates whole matrices has no segments."""
        return self.tier.places(i) if segment is None else (segment,)

    def _in_turns(self) -> list[tuple[int, int, Piece | None]]:
        """Returns all parameters of the survey, each with its turn, or once for each segment, with that one's."""
        at: dict[int, list[tuple[int, Piece | None]]] = {}
        for turn, members in enumerate(self.turns):
            for one in members:
                number, segment = (one, None) if isinstance(one, int) else (one.param, one)
                at.setdefault(number, []).append((turn, segment))
        numbers = enumerate(self.survey.numbers)
        return [(i, turn, segment) for i, number in numbers for turn, segment in at.get(number, [(0, None)])]

    def on_disk(self, turn: int) -> dict[str, int]:
        """Returns the bytes that a turn fetches and stores, as fields of its span. It is known once prepared.

        What several turns share is that of the first of them.
        """
        if not self.moves:
            return {}
        batches = [batch for batch, first in zip(self._batches, self._firsts, strict=True) if first == turn]
        survey = self.survey
        records = sum(batch.record.nbytes for batch in batches if batch.record is not None)
        rows = {i for batch in batches for i, _ in batch.members}
        params = [i for i in rows if rest_of(survey.params[i]) is not None]
        spilled = [i for i in rows if survey.gradient_rests[i] is not None]
        return {
            "record_nbytes": records + sum(survey.params[i].nbytes for i in params),
            "spill_nbytes": sum(survey.numels[i] * survey.grad_dtypes[i].itemsize for i in spilled),
        }

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Writes all that the native call reads: hyperparameters, step counts, where the gradients are."""
        self.tier.check()
        self.begun, self._done, self._updated, self._taken = False, False, 0, 0
        self.compute.changes.begin(self.survey.params)
        in_rounds = self.tier.streams and bool(self.survey.matrices)
        ns_dtypes = [one["ns_dtype"] for one in settings] if in_rounds else []
        if self.compute.is_outdated() or not self._is_laid_out or ns_dtypes != self._ns_dtypes:
            self._ns_dtypes = ns_dtypes
            with self.compute.launching():
                self._lay_out()
        if self.survey.rests:
            rests = self.survey.gradient_rests
            for batch in self._batches:
                own = (rests[i] for i, _ in batch.members)
                batch.gradients = list({id(rest): rest for rest in own if rest is not None}.values())
        self._notes = None
        if self.moves and self.recorder is not None:
            moved = [tuple(self.on_disk(turn).values()) for turn in range(len(self._names))]
            spans = [(name, read + spilled, read) for name, (read, spilled) in zip(self._names, moved, strict=True)]
            self._notes = UpdateRecorder(self.recorder, spans)
        self.compute.prepare(settings, pointers)
        if self.beside is not None:
            self.beside.prepare(settings, pointers)

    def take_turn(self, turn: int, scale: float) -> Any:
        """Makes one turn of an update that has been arranged and prepared; any thread may, one after the other.

        Batches of the next turns are on their way in meanwhile, those of the last ones on their way out. An error
        before the first batch is updated leaves everything as it was. Returns what `Beside.launch_turn` does.
        """
        begin, end = self._taken, self._ends[turn]  # parts in lanes of their own may come out of turn
        self._scale, self._taken = scale, max(begin, end)
        if not self.moves:
            for i in range(begin, end):
                self._update(i)
        elif begin < end:  # else all of it stays on the device, or was in a record of an earlier turn
            if self._flow is None:
                self._flow = self._flowing()
            with DeferredSignals() as signals:  # between two batches nothing is launched that nobody would wait for
                for _ in range(begin, end):
                    next(self._flow)
                    signals.deliver()
            if not self.tier.streams and end == len(self._batches):
                self.put_away()
        if self.beside is None:
            return None
        try:
            return self.beside.launch_turn(turn, scale)
        finally:
            self.begun = self.begun or self.beside.began

    def _flowing(self, *, waits_first: bool = False) -> Generator[int, None, None]:
        count, acts = len(self._batches), (self._fetch, self._compute, self._store)
        behind = self.beside.behind if self.beside is not None else 0
        return flowing(self._ring, count, *acts, waits_first=waits_first, behind=behind)

    def launch(self, scale: float) -> None:
        """Launches the update of what stays on the device. The update has been prepared, and no turn taken.

        The first batch is waited for: a disk that cannot be read shows before anything has changed.
        """
        if self.beside is None:
            return
        if self.beside.launches and self.moves and self._batches:
            self._flow = self._flowing(waits_first=True)
            with DeferredSignals():
                next(self._flow)
        try:
            self.beside.launch(scale)
        finally:
            self.begun = self.begun or self.beside.began

    def _update(self, i: int) -> None:
        batch, before, self.begun = self._batches[i], self.begun, True
        compute, beside = self.compute, self.beside if self._launches_records else None
        try:
            if beside is None:
                compute.run(self._scale, batch.begin, batch.end)
            else:
                beside.launch_record(i, self._scale)
            self._updated = i + 1
        except BaseException as error:
            if beside is not None:
                self.begun = before or beside.began
            elif compute.carried_out:  # a Ctrl-C hid that it returned
                self._updated = i + 1
            else:
                self.begun = before or compute.may_have_written(error)
            raise

    def _fetch(self, i: int, cell: Cell, after: Any) -> Any:
        batch = self._batches[i]
        if self._notes is not None:
            self._notes.begin("Fetch", self._firsts[i])
        for rest in (*batch.params, *batch.gradients):
            rest.fetch()
            self._fetched.append(rest)
        return self.tier.fetch(batch.record, cell, after)

    def _compute(self, i: int, cell: Cell) -> None:
        batch = self._batches[i]
        if self._notes is not None:
            self._note_ends(i)
        for rest in batch.params:
            rest.wait()
            rest.change()
        for rest in batch.gradients:
            rest.wait()
        if self._launches_records and batch.record is not None and batch.record.unsettled:
            # the host reads parameters: what this update has launched writes others, or other elements
            self.beside.records.started.wait()  # type: ignore[union-attr]
        self.tier.begin(batch.record, cell, batch.members)
        self._update(i)

    def _note_ends(self, i: int) -> None:
        """Notes what has ended before a batch is updated: it was fetched, and what its cell held before was stored."""
        assert self._notes is not None
        if i + 1 == len(self._firsts) or self._firsts[i + 1] != self._firsts[i]:
            self._notes.end("Fetch", self._firsts[i])
        gone = i - len(self._ring.slots)
        if gone >= 0 and self._firsts[gone + 1] != self._firsts[gone]:
            self._notes.end("Store", self._firsts[gone])

    def _store(self, i: int, cell: Cell) -> Any:
        batch = self._batches[i]
        if self._notes is not None:
            self._notes.begin("Store", self._firsts[i])
        if self._launches_records:
            self.beside.records.wait_for(i)  # type: ignore[union-attr]
        ticket = self.tier.store(batch.record, cell, batch.members)
        for rest in batch.params:
            self._leave(rest, awaited=True)  # by its forward
        for rest in batch.gradients:
            self._leave(rest, awaited=False)
        return ticket

    def _leave(self, rest: Rest, *, awaited: bool) -> None:
        self._fetched.remove(rest)
        rest.leave(awaited=awaited)

    def _give_back(self) -> None:
        """Lets go of what was fetched for an update that goes no further."""
        while self._fetched:
            self._fetched.pop().leave()

    def put_away(self) -> None:
        """Returns once what the turns have changed is where it rests."""
        if self._flow is not None:
            next(self._flow, None)
            self._flow = None
        if self.beside is not None:
            self.beside.put_away()
        for turn in set(self._firsts) if self._notes is not None else ():
            self._notes.end("Store", turn)  # type: ignore[union-attr]
        self._done = True

    def break_off(self) -> None:
        """Ends an update of which no further turn will be taken."""
        flow, self._flow = self._flow, None
        if flow is not None and getgeneratorstate(flow) != GEN_RUNNING:  # as it seems to in a forked child
            flow.close()
        self._give_back()
        self.compute.break_off()
        if self.beside is not None:
            self.beside.break_off()

    @property
    def carried_out(self) -> bool:
        """Whether the update was made, even if an interrupt hid that it was."""
        launched = self.beside is None or self.beside.is_launched
        return launched and (self._done if self.moves else self._updated == len(self._batches))

    @property
    def torn(self) -> bool:
        """Whether an update that raised was broken off when some of the parameters had been updated."""
        return self.begun and not self.carried_out

    def stepped(self) -> None:
        """Counts an update that was made."""
        self.compute.stepped(self.tier, started=self.beside is not None and self.beside.count())
        with self.compute.changes.told():
            self.survey.cells.bump_versions()
        self.compute.changes.updated(self.survey.params)
        self.followed.accept_writes()

    def shown(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns the state to save."""
        return self.compute.shown(state, self.tier)
