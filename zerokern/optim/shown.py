"""Translates between the state that users see, of parameters in their logical shapes, and that of what is updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.optim.hosted import HostCopies
from zerokern.optim.outside import WatchedState
from zerokern.zero.kinds import present
from zerokern.zero.shard import Shard, plain_shard
from zerokern.zero.watch import Watch

__all__ = ["LATE", "NOT_DELAYED", "PENDING", "ShownState"]

LATE = "delayed_pending"  # in param_groups: whether an update waits to be published
PENDING = "pending"  # in a state_dict: values of a parameter that an update has made and no step has published
NOT_DELAYED = (
    "this state was saved while a delayed update was pending, which this optimizer would lose; load it into one with "
    "schedule=zk.Delayed(...), and flush() that, or call opt.flush() before saving"
)

_FROZEN = (
    "{name} is frozen, and this state has an update of it that was pending when it was saved, which would be lost; "
    "load it with requires_grad=True, and freeze the parameter after opt.flush()"
)
_TOO_LATE = (
    "{name}: its optimizer has stepped before zk.shard sharded it, so its state is of another shape. Build the "
    "optimizer after zk.shard (or fully_shard); to keep the state, take state_dict() and load it into that one"
)


class ShownState:
    """The state of what an optimizer updates (`state`), and the views of it that stand in the optimizer's own.

    `in_place`: they are the same, tensor by tensor.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        updated: Sequence[Tensor],
        local: Sequence[Tensor],
        shards: Sequence[Shard],
        host: HostCopies,
    ) -> None:
        """As `Shards` has them, in the order of the parameters."""
        self._params, self._updated, self._local, self._host = params, updated, local, host
        pairs = list(zip(params, shards, strict=True))
        # what a program steps itself, a plain parameter or a piece, is shown as it is
        self._shown = [plain_shard(shard.name, param) if param is shard.piece else shard for param, shard in pairs]
        self._shard_of = dict(zip(map(id, updated), shards, strict=True))
        self.in_place = host.room is None and all(param is shard.piece for param, shard in pairs)
        self.state = WatchedState()
        self._outer: Mapping[Any, Any] | None = None  # the optimizer's own state, as of the last look
        self._exported: dict[int, dict[str, Any]] = {}  # what was shown there, by the piece's id
        self._views = Watch((), versions=False)

    def adopt(self, outer: WatchedState, *, refuse_plain: bool = False) -> None:
        """Reads what was assigned to the optimizer's state since it was last shown.

        `refuse_plain`: raises if there is state that was made before its parameter was sharded.
        """
        if self.in_place:
            self.state = outer
            return
        if outer is self._outer and not outer.mark.changed and self._views.in_place():
            return
        made: dict[Any, Any] = {}
        for param, piece, shard in zip(self._params, self._updated, self._shown, strict=True):
            entry = outer.get(param)
            if entry is None:
                continue
            if entry and refuse_plain and shard.sharding is not None:
                raise StateError(_TOO_LATE.format(name=shard.name))
            mine, shown = self.state.get(piece) or {}, self._exported.get(id(piece), {})
            made[piece] = {
                key: mine[key]
                if key in mine and value is shown.get(key) and in_place(value, mine[key])
                else shard.take(key, value, own=True)
                for key, value in entry.items()
            }
        made.update(self.others(outer))
        for place, piece in enumerate(self._updated):
            entry = made.get(piece)
            if entry and PENDING in entry and entry[PENDING].data_ptr() != piece.data_ptr():
                values = entry.pop(PENDING)
                if self.check_pending(place, values):
                    self._host.load_pending(self._local[place], values)
                    self._show_pending(entry, place)
        self.state = WatchedState(made)
        outer.watch_all()
        self._outer = outer

    def check_pending(self, place: int, values: Tensor) -> bool:
        """Whether loaded values that an update left pending can wait here; raises if they would be lost."""
        near = self._local[place]
        waits = self._host.delays and bool(self._host.of([near]))  # one that was trained may have a copy
        if not waits:
            with present(near):
                if not torch.equal(values.to(near.device), near):
                    frozen = _FROZEN.format(name=self._shown[place].name)
                    raise StateError(frozen if self._host.delays else NOT_DELAYED)
        return waits

    def others(self, outer: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns state under keys that are no parameters."""
        known = set(map(id, self._params))
        return {key: entry for key, entry in outer.items() if id(key) not in known}

    def views(self, state: Mapping[Any, Any], outer: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns state as users see it; what `outer` shows already stays the same object."""
        if self.in_place:
            return state
        made = self.others(outer)
        for param, piece, shard in zip(self._params, self._updated, self._shown, strict=True):
            entry = state.get(piece)
            if entry is not None:
                before = outer.get(param) or {}
                made[param] = {key: shard.show(key, value, before.get(key)) for key, value in entry.items()}
        return made

    def show(self, outer: WatchedState) -> None:
        """Shows in the optimizer's state what has been made here."""
        if self.in_place:
            return
        for param, entry in self.views(self.state, outer).items():
            if outer.get(param) is not entry:
                outer[param] = entry
        outer.watch_all()
        pairs = list(zip(self._params, self._updated, strict=True))
        self._exported = {id(piece): dict(outer[param]) for param, piece in pairs if param in outer}
        wholes = [piece for piece, shard in zip(self._updated, self._shown, strict=True) if shard.sharding is not None]
        shown = [one for piece in wholes for one in self._exported.get(id(piece), {}).values()]
        self._views = Watch((one for one in shown if type(one) is Tensor), versions=False)
        self._outer = outer

    def bound(self, pieces: Iterable[Tensor], outer: WatchedState) -> None:
        """Notes that state has been made for these, and drops what it did not use of their first values.

        With a delay each has an entry, even if the update rule keeps no state: an update of it may be pending.
        """
        mine = {id(piece): piece for piece in pieces}
        for piece in mine.values():
            self.exact(piece, kept=True)
        if self._host.delays:
            for place, piece in enumerate(self._updated):
                if id(piece) in mine or self.state.get(piece):
                    self._show_pending(self.state[piece], place)
            self.state.watch_all()  # that was us: what is bound stays bound
        self.show(outer)

    def _show_pending(self, entry: dict[str, Any], place: int) -> None:
        """Adds the host copy's values to the entry, pending or not: flattening a state_dict of a fresh optimizer needs
        all keys."""
        piece = self._updated[place]
        for copy in self._host.of([self._local[place]]):
            if copy.values is piece:  # what is frozen has nothing pending, and may be exchanged
                entry.setdefault(PENDING, piece.detach())

    def localize(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state_dict with the state of pieces in the place of that of parameters."""
        ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        state = dict(state_dict["state"])
        for key, shard in zip(ids, self._shown, strict=True):
            if key in state:
                state[key] = {name: shard.take(name, value) for name, value in state[key].items()}
        return {**state_dict, "state": state}

    def saved(self, state: Mapping[Any, Any], outer: Mapping[Any, Any]) -> WatchedState:
        """Returns state as users see it, with copies of pending values: loading in place writes into a state_dict."""
        waiting = {key: entry for key, entry in state.items() if isinstance(entry, dict) and PENDING in entry}
        copies = {key: {**entry, PENDING: entry[PENDING].clone()} for key, entry in waiting.items()}
        return WatchedState(self.views({**state, **copies}, outer))

    def replace(self, state: Mapping[Any, Any]) -> tuple[list[Tensor], WatchedState]:
        """Takes over other state; returns the pieces that have some, and all as the optimizer's own."""
        mine = set(map(id, self._updated))
        self.state = WatchedState({key: entry for key, entry in state.items() if id(key) in mine or self.in_place})
        outer = self.state if self.in_place else WatchedState({k: v for k, v in state.items() if id(k) not in mine})
        return [piece for piece in self.state if id(piece) in mine], outer

    def exact(self, piece: Tensor, *, kept: bool = False) -> Tensor | None:
        """Returns the fp32 values that a piece was rounded from, if known; or what is `kept` of them, once."""
        shard = self._shard_of.get(id(piece))
        initial = None if shard is None else shard.take_initial(kept=kept)
        return None if initial is None else initial.to(piece.device)


def in_place(shown: Any, value: Any) -> bool:
    """Whether a shown tensor still lies in the memory of its value; only plain views can be given other memory."""
    return shown is value or type(shown) is not Tensor or shown.data_ptr() == value.data_ptr()
