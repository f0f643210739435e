"""The state of an optimizer, to others and back: masters that follow their parameters, state_dict, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.io import Nvme
from zerokern.optim import disk_state, loading
from zerokern.optim.bound import Bound
from zerokern.optim.device_binding import DeviceBinding
from zerokern.optim.disk import Disk
from zerokern.optim.formats import Algorithm
from zerokern.optim.host_room import HostRoom
from zerokern.optim.judge import Judge
from zerokern.optim.local import NOT_DELAYED, PENDING, Local, localised, sharded
from zerokern.optim.masters import Witness, follow, tracked
from zerokern.optim.scheduled import LATE, Scheduled
from zerokern.optim.state import copied
from zerokern.optim.watched import WatchedState, plain

__all__ = ["Checkpointed"]

_OWN_ATTRIBUTES = ("tier", "schedule", "_max_grad_norm", "_grad_norm", "_skipped_steps", "_torn")


class Checkpointed(Scheduled, torch.optim.Optimizer):
    """What `FusedOptimizer` is made of besides stepping, which knows its algorithm and its groups."""

    _algorithm: ClassVar[Algorithm]
    state: WatchedState
    param_groups: list[dict[str, Any]]
    _disk: Disk | None
    _bound: Bound
    _judge: Judge | None
    _checked: Callable[[dict[str, Any]], dict[str, Any]]
    grad_norm: Any
    skipped_steps: Any

    @property
    def _held(self) -> WatchedState:
        """The state by what is updated here: parameters, or this rank's pieces of them."""
        return self.state if self._local is None else self._local.state

    @torch._disable_dynamo
    def refresh_masters(self) -> None:
        """Begin masters and remainders anew from the parameters, after a write that torch does not count (`.data`).

        Writes that it counts (`load_state_dict`, `copy_` and the like) are followed without this call.

        >>> from zerokern.optim import AdamW
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> opt = AdamW([weight]); weight.grad = torch.ones_like(weight); opt.step()
        >>> weight.data.fill_(2.0); opt.refresh_masters(); opt.state[weight]["remainder"]
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
        if self._room is not None:
            self._room.check()
        self._finish()
        self._refuse_if_torn()
        self._catch_up()
        held = self.state
        try:
            self.state = self._shown()
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
        self._abandon()
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
        self._torn = False
        said = [saved[LATE] for saved in state_dict["param_groups"] if LATE in saved]
        self._keep_back(any(said) if said else bool(pending))

    def _kept(self, entries: Sequence[loading.Checked]) -> list[dict[str, Any]]:
        """Loaded entries as this optimizer holds them."""
        if self._disk is None:
            return copied(entries, self._room_for(entries))
        owners = disk_state.housed(self._disk, entries, self._held)
        self._torn = True  # from here on a failure leaves neither the old state nor the new one
        return disk_state.put_down(self._disk, owners, entries, self._algorithm)

    def _room_for(self, entries: Sequence[loading.Checked]) -> HostRoom | None:
        """Where state lies on the host, for entries that may lie there: it is about to be written."""
        room = self._room if all(param.is_cpu for param, _, _ in entries) else None
        self._torn = self._torn or room is not None  # until the load has ended
        return room

    def _adopt_group(self, group: dict[str, Any]) -> None:
        """What a subclass decides about a loaded group."""

    def __getstate__(self) -> dict[str, Any]:
        self._finish()
        disk_state.refuse_copy(self.state)
        self._catch_up()
        own = {name: getattr(self, name) for name in _OWN_ATTRIBUTES}
        own.update(_grad_norm=self.grad_norm, _skipped_steps=self.skipped_steps)
        return {**super().__getstate__(), "state": plain(self._shown()), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = WatchedState(self.state)
        self._disk = Disk(self.tier) if isinstance(self.tier, Nvme) else None
        self._judge = self._local = None
        self._choose(self.tier, self.schedule)
        self._bound = Bound(witness=Witness(tracked(self.state)))


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
