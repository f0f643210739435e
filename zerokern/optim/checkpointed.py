"""The state of an optimizer, to others and back: masters that follow their parameters, state_dict, copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.io import Nvme
from zerokern.io.lock import let_go_in_child
from zerokern.memory import HostPlace
from zerokern.optim import disk_state, loading
from zerokern.optim.bound import Bound
from zerokern.optim.decide import Decision
from zerokern.optim.device_binding import DeviceBinding
from zerokern.optim.disk import Disk
from zerokern.optim.formats import Algorithm, as_kept, as_saved
from zerokern.optim.local import NOT_DELAYED, PENDING, Local, localised, sharded
from zerokern.optim.masters import Witness, follow, tracked
from zerokern.optim.scheduled import LATE, Scheduled
from zerokern.optim.state import copied
from zerokern.optim.watched import Elsewhere, WatchedState, plain
from zerokern.zero.data_writes import DataWrites
from zerokern.zero.sharded import Sharded
from zerokern.zero.sharded_refusals import refuse

__all__ = ["Checkpointed", "Inheritance"]

_OWN_ATTRIBUTES = ("tier", "schedule", "_max_grad_norm", "_torn")


class Checkpointed(Scheduled, torch.optim.Optimizer):
    """What `FusedOptimizer` is made of besides stepping, which knows its algorithm and its groups."""

    _algorithm: ClassVar[Algorithm]
    _state: WatchedState
    param_groups: list[dict[str, Any]]
    _disk: Disk | None
    _bound: Bound
    _data_writes: DataWrites
    _checked: Callable[[dict[str, Any]], dict[str, Any]]
    grad_norm: Any
    skipped_steps: Any

    @property  # type: ignore[override]
    def state(self) -> WatchedState:
        """As torch's. Whoever asks for it while an update is under way waits: it is about to write there."""
        if self._under_way is not None and not self._stepping.locked():
            self._under_way.finish()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    @property
    def _held(self) -> WatchedState:
        """The state by what is updated here: parameters, or this rank's pieces of them."""
        return self.state if self._local is None else self._local.state

    @torch._disable_dynamo
    def refresh_masters(self) -> None:
        """Begin masters and remainders anew from the parameters, after a write that nobody counts.

        Such are torch.distributed's (`broadcast(p, 0)`), those through numpy or a pointer, and those by `.data` of a
        view, or by what `p.data` gave before there was an optimizer. Others (`load_state_dict`, `copy_`,
        `p.data.clamp_`) are followed without this call.

        >>> from zerokern.optim import AdamW
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> opt = AdamW([weight]); weight.grad = torch.ones_like(weight); opt.step()
        >>> weight.detach().data.fill_(2.0); opt.refresh_masters(); opt.state[weight]["remainder"]
        tensor([2., 2., 2.], dtype=torch.bfloat16)
        tensor([0, 0, 0], dtype=torch.int16)
        """
        self._finish()
        if self._local is not None:
            self._local.adopt(self.state)
            self._local.refetch()
        follow(tracked(self._held), self._held)
        if self._bound.witness is not None:
            self._bound.witness.look()

    def _watch_data(self, groups: Sequence[dict[str, Any]]) -> None:
        """Writes by way of `.data` are to be noticed where the state has another value for what is written."""
        for group in groups:
            apart = self._room is not None  # twins, and updates that are pending
            rounded = set() if group["master_format"] == "none" else {torch.bfloat16, torch.float16}
            self._data_writes.watch(param for param in group["params"] if apart or param.dtype in rounded)
        if groups is self.param_groups:
            self._data_writes.keep(param for group in groups for param in group["params"])

    def _finish(self) -> None:
        self._data_writes.count()
        super()._finish()

    def _catch_up(self) -> None:
        """Follow writes that no step has seen yet, so that what is saved is consistent."""
        if self._local is not None:
            self._local.adopt(self.state)
            self._local.look()
        if self._bound.witness is not None:
            self._bound.witness.catch_up(self._held)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: the same keys, so that fp32 state goes into torch.optim's optimizers and back.

        State on disk is read into memory, all of it. With `zk.Delayed`, state is that after the last update, published
        or not, and "pending" beside it are the parameter's values then: whoever loads both goes on as if nothing was.
        """
        self._refuse_in_child()
        self._finish()
        self._refuse_if_torn()
        self._catch_up()
        held = self.state
        try:
            self.state = WatchedState({key: as_saved(entry) for key, entry in self._shown().items()})
            state_dict = super().state_dict()
        finally:
            self.state = held
        return {**state_dict, "state": plain(state_dict["state"])}

    def _shown(self) -> WatchedState:
        """The state as it is saved."""
        binding, made = self._bound.binding, self._held
        if self._disk is not None:
            made = WatchedState(disk_state.in_memory(self._disk, made))
        elif isinstance(binding, DeviceBinding):
            made = WatchedState(binding.shown(made))
        return made if self._local is None else WatchedState(self._local.saved(made, self.state))

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but nothing is cast: state of another format or shape is refused, and nothing is changed then.

        Load the model before its optimizer: a parameter written later drops its remainder.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self._take_over(state_dict, self._kept)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _take_over(
        self, state_dict: dict[str, Any], keep: Callable[[Sequence[loading.Checked]], list[dict[str, Any]]]
    ) -> None:
        """Groups and state are those of the state_dict, whose entries are held as `keep` keeps them."""
        self._refuse_in_child()
        self._abandon()
        state_dict = {**state_dict, "state": {key: as_kept(entry) for key, entry in state_dict["state"].items()}}
        groups = loading.merged_groups(self.param_groups, state_dict["param_groups"])
        for group in groups:
            self._adopt_group(group)
            self._checked(group)
        apart = bool(state_dict["state"]) and self._is_apart(self.param_groups)
        local = None
        if apart or sharded(self.param_groups):
            local = localised(self._local, self.param_groups, host=self._hosting(self.param_groups))
        subject = (
            (self.param_groups, groups, state_dict)
            if local is None
            else local.loading(self.param_groups, groups, state_dict)
        )
        state_dict, pending = _set_apart(subject[2], local, [param for group in groups for param in group["params"]])
        state = loading.loaded_state(self._algorithm, self._layout, *subject[:2], state_dict, keep)
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine.update(group)
        self._local = local
        self.state = WatchedState(state if local is None else local.loaded(state, pending))
        self._bound = Bound(witness=Witness(tracked(self._held), loaded=True))
        self._torn, self._untold = False, ""
        said = [saved[LATE] for saved in state_dict["param_groups"] if LATE in saved]
        self._keep_back(any(said) if said else bool(pending))

    def _kept(self, entries: Sequence[loading.Checked]) -> list[dict[str, Any]]:
        """Loaded entries as this optimizer holds them."""
        if self._disk is None:
            return copied(entries, self._room_for(entries))
        owners = disk_state.housed(self._disk, entries, self._held)
        self._torn = True  # from here on a failure leaves neither the old state nor the new one
        return disk_state.put_down(self._disk, owners, entries, self._algorithm)

    def _room_for(self, entries: Sequence[loading.Checked]) -> HostPlace | None:
        """Where state lies on the host, for entries that may lie there: it is about to be written."""
        room = self._room if all(param.is_cpu for param, _, _ in entries) else None
        self._torn = self._torn or room is not None  # until the load has ended
        return room

    def _adopt_group(self, group: dict[str, Any]) -> None:
        """What a subclass decides about a loaded group."""

    def _refuse_in_child(self) -> None:
        if self._room is not None:
            self._room.check()

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_in_child()
        self._finish()
        disk_state.refuse_copy(self.state)
        self._catch_up()
        own = {name: getattr(self, name) for name in _OWN_ATTRIBUTES}
        own.update(_grad_norm=self.grad_norm, _skipped_steps=self.skipped_steps)
        shown = plain(self._shown())
        for part in (value for entry in shown.values() for value in entry.values() if isinstance(value, Sharded)):
            refuse("a copy of an optimizer, or a pickle", part, "owner")
        return {**super().__getstate__(), "state": shown, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._state = WatchedState(self.__dict__.pop("state"))
        self._disk = Disk(self.tier) if isinstance(self.tier, Nvme) else None
        self._decision = Decision(self.__dict__.pop("_grad_norm"), self.__dict__.pop("_skipped_steps"))
        self._local = None
        self._choose(self.tier, self.schedule)
        self._data_writes = DataWrites()
        self._watch_data(self.param_groups)
        self._bound = Bound(witness=Witness(tracked(self.state)))
        self._inheritance = Inheritance(self)


class Inheritance:
    """In a forked child, where memory of the room is not, whoever reads an optimizer's state is told so by name."""

    def __init__(self, opt: Checkpointed) -> None:
        self._opt = weakref.ref(opt)
        self._left_behind: Any = None
        let_go_in_child(self)

    def let_go(self) -> None:
        opt = self._opt()
        if opt is not None and opt._room is not None and opt._room.nbytes:
            self._left_behind, opt._state = opt._state, Elsewhere()


def _set_apart(
    state_dict: dict[str, Any], local: Local | None, everyone: Sequence[Tensor]
) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """Without the values that a delayed update left pending, and these, by their place among the parameters."""
    order = [key for group in state_dict["param_groups"] for key in group["params"]]
    entries = {key: entry for key, entry in state_dict["state"].items() if isinstance(entry, dict) and PENDING in entry}
    if not entries:
        return state_dict, {}
    places = {place: key for place, key in enumerate(order) if key in entries}
    near = everyone if local is None else local.near
    for place, key in places.items():
        values, mine = entries[key][PENDING], near[place]
        if (values.shape, values.dtype) != (mine.shape, mine.dtype):
            what = f"{PENDING!r} of parameter {place}", f"{tuple(values.shape)} {values.dtype}"
            raise StateError(got(*what, f"{tuple(mine.shape)} {mine.dtype}, as the parameter; nothing is cast"))
    if local is None or local.host is None or not local.host.delays:
        for place, key in places.items():
            if not torch.equal(entries[key][PENDING].to(near[place].device), near[place]):
                raise StateError(NOT_DELAYED)
        places = {}
    rest = {key: {name: one for name, one in entry.items() if name != PENDING} for key, entry in entries.items()}
    # copies: what was loaded in place may be the twins themselves, which follow their parameters first
    pending = {place: entries[key][PENDING].clone() for place, key in places.items()}
    return {**state_dict, "state": {**state_dict["state"], **rest}}, pending
