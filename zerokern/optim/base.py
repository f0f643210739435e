"""The torch.optim.Optimizer face: groups, step, hooks, clipping, loss scaling, checkpoints."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.errors import StateError, got
from zerokern.io import Nvme
from zerokern.optim import checks, device, disk_state, loading
from zerokern.optim.binding import Binding
from zerokern.optim.device_binding import DeviceBinding
from zerokern.optim.disk import Disk
from zerokern.optim.disk_binding import DiskBinding
from zerokern.optim.formats import Algorithm, Layout, check_formats, layout_of
from zerokern.optim.judge import Judge
from zerokern.optim.masters import Witness, follow, tracked
from zerokern.optim.state import copied
from zerokern.optim.survey import Survey
from zerokern.optim.watched import WatchedState, plain, watched

FormatKey = tuple[bool, str, str | None, int | None]


@dataclass
class _Bound:
    """What earlier steps learned; all of it can be learned anew from parameters, groups and state."""

    binding: Binding | DiskBinding | None = None
    witness: Witness | None = None
    formats: list[FormatKey] = field(default_factory=list)


_OWN_ATTRIBUTES = ("tier", "_max_grad_norm", "_grad_norm", "_skipped_steps", "_torn")


class FusedOptimizer(torch.optim.Optimizer):
    """What all optimizers here share; the subclasses say which update rule and which hyperparameters.

    Nothing is kept about a parameter before the first `step()` that finds a gradient on it, so parameters may be
    exchanged until then. A step is one native call for all parameters.
    """

    _algorithm: ClassVar[Algorithm]
    _step_supports_amp_scaling = True
    state: WatchedState

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        tier: str | Nvme,
        state_format: str,
        master_format: str | None,
        stochastic_seed: int | None,
        max_grad_norm: float | None,
    ) -> None:
        checks.tier(tier)
        self.tier = tier
        self._disk = Disk(tier) if isinstance(tier, Nvme) else None
        self.max_grad_norm = max_grad_norm
        self._grad_norm: float | None = None
        self._skipped_steps = 0
        self._torn = False
        self._judge: Judge | None = None
        self._bound = _Bound()
        formats = {"state_format": state_format, "master_format": master_format, "stochastic_seed": stochastic_seed}
        super().__init__(params, {**defaults, **formats})
        self.state = WatchedState()

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group's values, checked, as `UpdateTable.set_group` spells them."""
        raise NotImplementedError

    def _has_moments(self, group: dict[str, Any]) -> bool:
        return True

    def _initial_moment(self, group: dict[str, Any]) -> float:
        return 0.0

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients are scaled within the update so that their global norm is at most this; None leaves them alone.

        With a number, a step whose norm is not finite is skipped: no parameter and no state changes. For parameters on
        a GPU both are decided there.
        """
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not float(value) > 0.0:
            raise ValueError(got("max_grad_norm", value, "None or a number > 0"))
        self._max_grad_norm = None if value is None else float(value)

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's gradients, before clipping; None until a step with `max_grad_norm`.

        For parameters on a GPU, reading it waits for the step.
        """
        return self._judge.grad_norm if self._judge is not None and self._judge.has_norm else self._grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, because the norm was not finite or GradScaler had found an infinity.

        For parameters on a GPU, reading it waits for the step.
        """
        return self._skipped_steps + (0 if self._judge is None else self._judge.skipped_steps)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own hyperparameters; everything is checked before the group is added."""
        if isinstance(param_group, dict) and "params" in param_group:
            if not isinstance(param_group["params"], (Tensor, set)):
                param_group["params"] = list(param_group["params"])
                checks.distinct(param_group["params"])
            self._checked({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group's hyperparameters, after everything in it has been checked."""
        checks.hints(group)
        check_formats(self._algorithm, group)
        self._initial_moment(group)
        return self._hyperparameters(group)

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returns.

        >>> from zerokern.optim import SGD
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> opt = SGD([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -2.0]); opt.step(); weight.data
        tensor([0.5000, 3.0000])
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_if_torn()
        settings = [self._checked(group) for group in self.param_groups]
        formats = [self._format_key(group) for group in self.param_groups]
        binding = self._bound.binding if formats == self._bound.formats else None
        held = binding.survey.hold() if binding is not None else []
        pointers = binding.survey.pointers(self.param_groups) if binding is not None else None
        if binding is None or pointers is None:
            survey, binding = Survey(self.param_groups, self._layout), None
            if survey.device is not None:
                device.require(survey.device, self.tier)
            held = survey.hold()
            pointers = survey.pointers(self.param_groups) or survey.gradient_pointers
        else:
            survey = binding.survey
        scale = self._scale(survey, pointers)
        if scale is None:
            self._skipped_steps += 1
        elif survey.params:
            if binding is None:
                last = self._bound.binding
                binding = self._bind(survey, formats, last if last is not None and last.intact(self.state) else None)
            elif not binding.intact(self.state):
                binding = self._bind(survey, formats, None)
            else:
                binding.witness.catch_up(self.state, in_place=True)
            self._run(binding, pointers, settings, scale)
        del held  # until here no other thread could free a gradient under the native calls
        return loss

    def _scale(self, survey: Survey, pointers: array[int]) -> float | None:
        """What the gradients are multiplied by: loss scale undone, then clipped. None: this step is to be skipped.

        On a device that is decided there, and 1.0 is what is known of it here.
        """
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        self._change_judge(survey)
        if self._judge is not None:
            self._judge.ask(max_norm=self._max_grad_norm, grad_scale=grad_scale, found_inf=found_inf)
            return 1.0
        if found_inf is not None and float(found_inf):
            return None
        scale = 1.0 if grad_scale is None else 1.0 / checks.number("grad_scale", grad_scale, positive=True)
        if self._max_grad_norm is None:
            return scale
        self._grad_norm = math.sqrt(survey.sumsq(pointers)) * scale
        if not math.isfinite(self._grad_norm):
            return None
        return scale * min(1.0, self._max_grad_norm / (self._grad_norm + 1e-6))

    def _change_judge(self, survey: Survey) -> None:
        """Parameters may be moved: what a device has answered until then is kept."""
        if self._judge is not None and survey.params and self._judge.device != survey.device:
            self._grad_norm, self._skipped_steps, self._judge = self.grad_norm, self.skipped_steps, None
        if self._judge is None and survey.device is not None:
            self._judge = Judge(survey.device)

    def _bind(
        self, survey: Survey, formats: list[FormatKey], previous: Binding | DiskBinding | None
    ) -> Binding | DiskBinding:
        self.state = watched(self.state)
        last, self._bound.binding = self._bound.binding, None
        initial, witness = [self._initial_moment(group) for group in self.param_groups], self._bound.witness
        subject = self._algorithm, survey, self.param_groups, self.state
        binding: Binding | DiskBinding
        if self._disk is not None:
            binding = DiskBinding(*subject, self._disk, initial=initial, witness=witness)
        elif self._judge is not None:
            before = last if isinstance(last, DeviceBinding) and last.place == survey.device else None
            intact = before if before is previous else None
            binding = DeviceBinding(
                *subject, self._judge, initial=initial, previous=intact, last=before, witness=witness
            )
        else:
            known = previous if type(previous) is Binding else None
            binding = Binding(*subject, initial=initial, previous=known, witness=witness)
        self._bound = _Bound(binding, binding.witness, formats)
        return binding

    def _run(
        self, binding: Binding | DiskBinding, pointers: array[int], settings: list[dict[str, Any]], scale: float
    ) -> None:
        binding.prepare(settings, pointers)
        self._torn = True
        try:
            binding.run(scale)
        except BaseException:  # refused, or Ctrl-C, which Python delivers before a native call or after it
            if binding.carried_out:
                binding.stepped()
            self._torn = binding.torn
            raise
        binding.stepped()
        self._torn = False

    def _layout(self, group: dict[str, Any], dtype: torch.dtype, holds_moments: bool = False) -> Layout:
        needs_moments, state_format, master_format, seed = self._format_key(group)
        has_moments = needs_moments or holds_moments
        return layout_of(self._algorithm, dtype, has_moments, state_format, master_format, seed is not None)

    def _format_key(self, group: dict[str, Any]) -> FormatKey:
        return self._has_moments(group), group["state_format"], group["master_format"], group["stochastic_seed"]

    def _refuse_if_torn(self) -> None:
        if self._torn:
            raise StateError(
                "a step or a load was broken off while parameters and state were being written, so that they may be of "
                "different steps; load a checkpoint of the model, then of the optimizer (load_state_dict), to go on"
            )

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
        follow(tracked(self.state), self.state)
        if self._bound.witness is not None:
            self._bound.witness.look()

    def _catch_up(self) -> None:
        """Follow writes that no step has seen yet, so that what is saved is consistent."""
        if self._bound.witness is not None:
            self._bound.witness.catch_up(self.state)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: the same keys, so that fp32 state goes into torch.optim's optimizers and back.

        State on disk is read into memory, all of it.
        """
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
        binding = self._bound.binding
        if self._disk is not None:
            return WatchedState(disk_state.in_memory(self._disk, self.state))
        return WatchedState(binding.shown(self.state)) if isinstance(binding, DeviceBinding) else self.state

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but nothing is cast: state of another format or shape is refused, and nothing is changed then.

        Load the model before its optimizer: a parameter written later drops its remainder.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = loading.merged_groups(self.param_groups, state_dict["param_groups"])
        for group in groups:
            self._adopt_group(group)
            self._checked(group)
        state = loading.loaded_state(self._algorithm, self._layout, self.param_groups, groups, state_dict, self._kept)
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine.update(group)
        self.state = WatchedState(state)
        self._bound = _Bound(witness=Witness(tracked(self.state), loaded=True))
        self._torn = False
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _kept(self, entries: Sequence[loading.Checked]) -> list[dict[str, Any]]:
        """Loaded entries as this optimizer holds them."""
        if self._disk is None:
            return copied(entries)
        owners = disk_state.housed(self._disk, entries, self.state)
        self._torn = True  # from here on a failure leaves neither the old state nor the new one
        return disk_state.put_down(self._disk, owners, entries, self._algorithm)

    def _adopt_group(self, group: dict[str, Any]) -> None:
        """What a subclass decides about a loaded group."""

    def __getstate__(self) -> dict[str, Any]:
        disk_state.refuse_copy(self.state)
        self._catch_up()
        own = {name: getattr(self, name) for name in _OWN_ATTRIBUTES}
        own.update(_grad_norm=self.grad_norm, _skipped_steps=self.skipped_steps)
        return {**super().__getstate__(), "state": plain(self._shown()), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = WatchedState(self.state)
        self._disk = Disk(self.tier) if isinstance(self.tier, Nvme) else None
        self._judge = None
        self._bound = _Bound(witness=Witness(tracked(self.state)))
