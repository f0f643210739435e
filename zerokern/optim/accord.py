"""What ranks tell each other of a step, so that it has one outcome: all is from before, all from after, or all torn.

An optimizer's outcome on one rank, and how it changes:

    WHOLE --writing begins--> TORN --writing ends--> WHOLE
    WHOLE --the step fails here, and other ranks do not know--> UNTOLD, or OWED where they also publish the update
    OWED --this rank has published with them--> UNTOLD --all ranks have been told--> WHOLE or TORN, as they agreed
    any --a load--> WHOLE

In the first step ranks compare all settings and parameters of their optimizers (`Accord.compare`), before anything has
changed. Ranks that divide parameters meet in each step anyway, to add up the norm; there each says too whether it
cannot take part, whether it is about to make state, and with which settings. Only where state is made, or read from a
disk, can a rank fail later; there they meet once more.

What is checked when. An update in host memory needs the answer before it begins: the host waits once for each meeting,
however many groups of ranks meet, and for these sums alone, on a stream that the program does not launch on. An update
on a device needs none: norm and skipping are added up and decided there (`Shards.total_there`), and nobody waits; that
a rank cannot take part is found where ranks next compare what they do (`Group.agree`). There, and at stage 0, where a
step has no norm to add up, ranks compare settings again only where these have changed, but for numbers, which schedules
change from step to step.
"""

from __future__ import annotations

import enum
import math
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokern.comm import Group, MeshGroups, during
from zerokern.core.errors import StateError, ZerokernError
from zerokern.kernels.triton.upload import upload
from zerokern.optim.survey import added

__all__ = ["OWED", "TORN", "UNTOLD", "WHOLE", "Accord", "Outcome", "Phase", "norm_of_all", "say_outcome"]


class Outcome(enum.Enum):
    """What steps have left behind on this rank."""

    WHOLE = "Nothing was changed: parameters and state are as they were before the step, which may be tried again"
    TORN = "The step was broken off, so that parameters and state are of different steps: load a checkpoint to go on"
    UNTOLD = "It failed on this rank alone, and the others have yet to hear of it: load a checkpoint to go on"
    OWED = "It failed on this rank alone, and the others publish it, and wait for this rank to do so too"

    @property
    def message(self) -> str:
        """What errors say of it: whoever cannot step again needs a checkpoint, whether other ranks know or not."""
        return (self if self is Outcome.WHOLE else Outcome.TORN).value

    @property
    def is_here_alone(self) -> bool:
        """Whether a step has failed here, and other ranks have yet to hear of it."""
        return self is Outcome.UNTOLD or self is Outcome.OWED


WHOLE, TORN, UNTOLD, OWED = Outcome
_JSON = (str, int, float, list, tuple, type(None))
_AS_BEFORE = "a step with the parameters and settings of the last one"
_OF_THE_NORM = ("max_grad_norm",)  # settings of what is decided with ranks that hold other parameters
_FIRST = "the first step"
_NOT_ALIKE = "and not so on others; ranks that share parameters step them alike"
PARAMETERS = "parameters of"  # a group, as a setting: which there are
_WORDS = 6  # of what a rank says: its sum, whether it failed, is torn, makes state, its settings and their square


class Phase(enum.IntEnum):
    """How far the ranks have come with a step."""

    BEGUN = 0
    COMPARED = 1  # they have compared settings
    MET = 2  # they have added up the norm
    REPORTED = 3  # they have said whether their updates failed
    PUBLISHES = 4


class Accord:
    """One step at a time of the ranks that share parameters.

    >>> accord = Accord([])
    >>> accord.begin(); accord.total([4.0], skip=False), accord.in_company
    (4.0, False)
    """

    def __init__(
        self,
        shardings: Sequence[Any],
        party: Group | MeshGroups | None = None,
        aside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        last: Accord | None = None,
    ) -> None:
        """`party`: ranks with other parameters, which decide as one with these: the stages of a pipeline.

        `aside` makes a stream current that has nothing of the program's, so that waiting for it waits for nothing else.
        `last`: the one of the steps before.
        """
        self._aside = aside
        divided = [team for sharding in shardings for team in sharding.teams]
        self.teams = list({id(team): team for team in divided}.values())
        self.shares: list[tuple[int, int]] = []  # of each sum but the first: the place of its team, and its copies
        self._everyone = [sharding.everyone for sharding in shardings]
        self.party = party
        own = [] if party is None else [party]
        self._deciding = [*self.teams, *own]
        self.in_company = any(team.size > 1 for team in [*self._everyone, *own])
        self.meets = any(getattr(team, "everyone", team).size > 1 for team in self._deciding)
        self.settings: dict[str, Any] = {}  # by name, as this step has them
        self.names: dict[str, list[str]] = {}  # of parameters that ranks share, by the setting that says how many
        self._marked: dict[str, Any] | None = None
        self._marks = [0] * len(self._deciding)
        # what ranks have compared beside a step
        self._compared: dict[str, Any] | None = None if last is None else last._compared
        self.begin()

    def begin(self) -> None:
        """Another step."""
        self.makes_state = False  # on this rank
        self._anyone_makes_state = False
        self.phase = Phase.BEGUN
        self.agreed: Outcome | None = None  # what a step that failed has left behind, once all ranks know

    def total(self, sums: Sequence[float], *, skip: bool) -> float:
        """The sum of squares over all ranks; not finite on any of them if this one is to `skip`.

        Raises where a rank cannot take part in the step: on all of them, before anything has changed.
        """
        own = self.by_team(sums)
        broken = skip or not math.isfinite(own[0])
        if not self.meets:
            self.phase = Phase.MET
            return added([own[0], *(math.inf if broken else term for term in own[1:])])
        known = _on_host(self.settings)
        if known != self._marked:
            self._marks = [zlib.crc32(repr(self._settings_of(team)).encode()) >> 12 for team in self._deciding]
            self._marked = known
        terms, said = self._meet(own, broken, {}, torn=False)
        if self.agreed:
            raise StateError(_told(said, self.agreed))
        return added(terms)

    def compare(self, *, there: bool) -> None:
        """Compares the settings and parameters of all ranks that share some: in the first step, and where they changed.

        `there`: a device decides on steps, and no rank's host adds up. Raises where ranks differ, on all of them:
        StateError where it changed on all, before anything else has, CommError, which ends the groups, where it changed
        on some of them alone. Else hosts do not wait.
        """
        settings = _on_host(self.settings)
        now = {name: "a number" if isinstance(value, float) else value for name, value in settings.items()}
        known = self._compared
        if known is not None and self._meet_in_norms and not there:
            return  # which also says so of each setting in each step
        if now == known:
            for group in self._all_groups:
                group.follow(_AS_BEFORE)
            self.phase = Phase.COMPARED
            return
        others = [name for name in now | (known or {}) if known is not None and now.get(name) != known.get(name)]
        said = self._compare({}, f"a step whose {', '.join(others)} changed since the last one" if others else _FIRST)
        if said:
            raise StateError(_told(said, WHOLE))
        self._compared = now

    def _compare(self, said: dict[str, str], key: str) -> dict[str, str]:
        """Returns why ranks cannot step together: what some cannot do (`said`), or what differs."""
        self.phase = Phase.COMPARED
        with during("opt.step", of="the settings of optimizers"):
            for team in self._circles:
                for group in team.join():
                    group.agree(key)
                me = _own_name(team)
                heard: dict[str, Any] = {name: [reason, {}] for name, reason in said.items()}
                told = _exchanged(_groups_of([team]), {**heard, me: [said.get(me), self._settings_of(team)]})
                said = {name: reason for name, (reason, _) in told.items() if reason}
                settings = {name: one for name, (_, one) in told.items() if one}
                said = said or self._different(team, settings)
                if len({one.get("group") for one in settings.values()}) > 1:
                    break  # they name other ranks to meet
        self._agree(said, torn=False)
        return said

    @cached_property
    def _circles(self) -> list[Any]:
        """Who compares settings: ranks that share parameters, then those of the party."""
        teams = [*self._everyone, *([] if self.party is None else [self.party])]
        return list({tuple(map(id, team.join())): team for team in reversed(teams)}.values())[::-1]

    @cached_property
    def _all_groups(self) -> list[Any]:
        return _groups_of(self._circles)

    @cached_property
    def _meet_in_norms(self) -> bool:
        """Whether all ranks that share parameters meet to add up a norm."""
        return set(map(id, self._all_groups)) <= set(map(id, _groups_of(self._deciding)))

    def share_out(self, homes: Sequence[Any]) -> list[int]:
        """For each parameter the number of its sum: 0 is what counts here alone, others are by team and copies.

        What no team divides may have copies too, in other stages of a pipeline.
        """
        places = {id(None): -1, **{id(team): place for place, team in enumerate(self.teams)}}
        pairs = [(places[id(home.team)], home.copies) for home in homes]
        alone = (-1, 1)
        self.shares = sorted(set(pairs) - {alone})
        return [0 if pair == alone else 1 + self.shares.index(pair) for pair in pairs]

    def by_team(self, sums: Sequence[Any]) -> list[Any]:
        """The sum of what is here alone, and one for each team: in it what several of its ranks have counts once."""
        found = [sums[0], *(0.0 for _ in self.teams)]
        for own, (team, copies) in zip(sums[1:], self.shares, strict=False):
            found[1 + team] = found[1 + team] + (own if copies == 1 else own / copies)
        return found

    def refuse(self, reason: str, *, torn: bool, reports: bool, there: bool) -> None:
        """This rank cannot go on with the step: the others are told so where they next meet.

        `reports`: whether that is, at the latest, in `reported`. `there`: a device decides, and they meet no more.
        """
        said = {_own_name(self._deciding[0] if self._deciding else self._everyone[0]): reason}
        if self._compared is None and self.phase < Phase.COMPARED:  # the others wait there in the first step
            self._compare(said, _FIRST)
        if there or (self.agreed and self.phase is Phase.COMPARED):  # there all have heard of it
            return
        if self.meets and self.phase < Phase.MET:
            self._meet([0.0] * (1 + len(self.teams)), True, said, torn=torn)
        if reports and self.phase < Phase.REPORTED:
            others = not self.agreed or _groups_of(self._everyone) != _groups_of(self.teams)
            if others:  # who have not heard of it, and wait there
                self._ask(self._everyone, said, torn=torn or self.agreed is TORN)

    def _meet(
        self, sums: Sequence[float], broken: bool, said: dict[str, str], *, torn: bool
    ) -> tuple[list[float], dict[str, str]]:
        self.phase = Phase.MET
        with self._aside():
            words = self._add_up(sums, broken, bool(said), torn)
            rows = words[0].tolist() if len(words) == 1 else torch.cat(words).tolist()  # the host waits here, once
        terms = [sums[0]]
        for number, (team, _) in enumerate(zip(self._deciding, words, strict=True)):
            term, failed, torn_ones, makers, marks, squares = rows[number * _WORDS : (number + 1) * _WORDS]
            terms = [term] if team is self.party else [*terms, term]
            torn = torn or torn_ones > 0
            self._anyone_makes_state |= makers > 0
            if failed:
                said = _exchanged(_groups_of([team]), said)
            elif team.size * int(squares) != int(marks) ** 2:  # they are not all the same; marks are whole, and exact
                told = _exchanged(_groups_of([team]), {_own_name(team): self._settings_of(team)})
                said = {**said, **self._different(team, told)}
        self._agree(said, torn)
        return terms, said

    def _add_up(self, sums: Sequence[float], broken: bool, failed: bool, torn: bool) -> list[Tensor]:
        """Adds up a word of each team, and of the party, over its ranks, one after the other.

        A word has what earlier ones have found, so that those who meet here alone hear of it; nothing is read for that.
        """
        words: list[Tensor] = []
        for number, team in enumerate(self._deciding):  # the party last: it adds up what teams have
            last = team is self.party
            own = sums[0] if last else sums[1 + number]
            mark = self._marks[number]
            mine = [math.inf if broken else own, failed, torn, self.makes_state, mark, mark * mark]
            word = upload(array("d", mine), team.device)
            for before, other in zip(words, self._deciding, strict=False):
                word[1:4] += before[1:4]
                word[1] += (other.size * before[5] != before[4] * before[4]).to(word.dtype)
            for before in words if last and not broken else ():
                word[0] += before[0]
            norm_of_all(team, word, "sum", "opt.step")
            words.append(word)
        return words

    def _agree(self, said: dict[str, str], torn: bool) -> None:
        self.agreed = (TORN if torn else WHOLE) if said else None

    def _settings_of(self, team: Any) -> dict[str, Any]:
        """By name. Ranks that hold other parameters have settings of their own, but for what is decided with them."""
        known = _on_host(self.settings)
        alike = team is not self.party or team in self._everyone
        return known if alike else {name: known[name] for name in _OF_THE_NORM if name in known}

    def _different(self, team: Any, told: dict[str, dict[str, Any]]) -> dict[str, str]:
        """What each rank has of the first setting that is not the same on all. All of these ranks ask."""
        for name in dict.fromkeys(name for settings in told.values() for name in settings):
            values = {rank: settings.get(name) for rank, settings in told.items()}
            if len(set(map(repr, values.values()))) > 1:  # some are lists
                if name.startswith(PARAMETERS):
                    return _lacking(name, _exchanged(_groups_of([team]), {_own_name(team): self.names.get(name, [])}))
                return {rank: f"{name} is {value}, {_NOT_ALIKE}" for rank, value in values.items()}
        return {}

    def prepared(self) -> AbstractContextManager[None]:
        """Around what makes state: all ranks leave the block well, or all with an error, and nothing has changed."""
        return self._together(self._deciding, lambda: False) if self._anyone_makes_state else nullcontext()

    def reported(self, changed: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around an update that may fail. `changed`: whether it has written anything here, asked when it is over."""
        meets = self.in_company and self._everyone
        return self._together(self._everyone, changed) if meets else nullcontext()

    @contextmanager
    def _together(self, teams: Sequence[Any], changed: Callable[[], bool]) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = self._ask(teams, {} if failure is None else {_own_name(teams[0]): str(failure)}, torn=changed())
        if failure is not None:
            raise failure
        if self.agreed:
            raise StateError(_told(said, self.agreed))

    def _ask(self, teams: Sequence[Any], said: dict[str, str], *, torn: bool) -> dict[str, str]:
        if teams is self._everyone:
            self.phase = Phase.REPORTED
        for group in _groups_of(teams):
            with self._aside():
                word = upload(array("q", [bool(said), torn]), group.device)
                with during("opt.step", of="the outcome of opt.step"):
                    group.all_reduce(word).wait()
                failed, torn_ones = word.tolist()
            torn = torn_ones > 0
            if failed:
                said = _exchanged([group], said)
        self._agree(said, torn)
        return said


def norm_of_all(team: Group | MeshGroups, own: Tensor, op: str, call: str) -> None:
    """A norm over all ranks in place, for this call of theirs and no other."""
    with during(call, of=f"the norm in {call}"):
        team.follow(call)
        team.all_reduce(own, op).wait()


def say_outcome(error: BaseException, outcome: Outcome) -> None:
    """Add to one of our errors what the step has left behind."""
    if isinstance(error, ZerokernError) and outcome.message not in str(error):
        error.args = (f"{error}. {outcome.message}",)


def _on_host(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON can carry it. What lies on a device is not looked at, which would wait for it."""
    pairs = [(name, value) for name, value in settings.items() if not isinstance(value, Tensor)]
    return {name: value if isinstance(value, _JSON) else str(value) for name, value in pairs}


def _told(said: dict[str, str], outcome: Outcome) -> str:
    reasons = "; ".join(f"on {rank}: {reason}" for rank, reason in sorted(said.items()))
    return f"the step failed {reasons}. {outcome.message}"


def _lacking(name: str, lists: dict[str, list[str]]) -> dict[str, str]:
    """What each rank's list of parameters has not, or has alone."""
    sets = {rank: set(listed) for rank, listed in lists.items()}
    anywhere, everywhere = set().union(*sets.values()), set.intersection(*sets.values())
    said = {}
    for rank, here in sets.items():
        differs, how = (anywhere - here, "lacks") if anywhere - here else (here - everywhere, "has")
        which = ", ".join(sorted(differs)[:3]) + (", ..." if len(differs) > 3 else "")
        said[rank] = f"{name.removeprefix(PARAMETERS)[1:]} {how} {which}, {_NOT_ALIKE}"
    return said


def _own_name(group: Any) -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else group.rank}"


def _groups_of(teams: Sequence[Any]) -> list[Any]:
    groups = [group for team in teams for group in team.join()]
    return list({id(group): group for group in groups}.values())


def _exchanged(groups: Sequence[Any], said: dict[str, Any]) -> dict[str, Any]:
    """What all ranks of these groups have to say, each of which has been told that some of them have."""
    said = dict(said)
    for group in groups:
        for one in group.exchange(said):
            said.update(one)
    return said
