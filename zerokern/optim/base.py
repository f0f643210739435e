"""The torch.optim.Optimizer face: groups, step, hooks, clipping, loss scaling, checkpoints."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.comm import during
from zerokern.core.errors import CommError, StateError, got
from zerokern.io import Nvme
from zerokern.optim import checks, device
from zerokern.optim.accord import say_outcome
from zerokern.optim.binding import Binding
from zerokern.optim.bound import Bound, FormatKey, bind
from zerokern.optim.checkpointed import Checkpointed, Inheritance
from zerokern.optim.decide import Decision
from zerokern.optim.disk import Disk
from zerokern.optim.formats import Layout, check_formats, layout_of
from zerokern.optim.interrupts import whole
from zerokern.optim.local import Local, sharded
from zerokern.optim.survey import Groups, Survey
from zerokern.optim.watched import WatchedState, watched
from zerokern.schedule import Delayed
from zerokern.zero import guards
from zerokern.zero.awaited import without_waiting
from zerokern.zero.data_writes import DataWrites

_TWICE = (
    "step() was called while another step() of this optimizer runs, in another thread or in a signal handler: the two "
    "would write the same state; call it from one thread, or build an optimizer for each"
)


class FusedOptimizer(Checkpointed):
    """What all optimizers here share; the subclasses say which update rule and which hyperparameters.

    Nothing is kept about a parameter before the first `step()` that finds a gradient on it, so parameters may be
    exchanged until then. A step is one native call for all parameters.
    """

    _step_supports_amp_scaling = True
    _zk_shards = True  # steps parameters that zk.shard divides

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        tier: str | Nvme,
        schedule: str | Delayed,
        state_format: str,
        master_format: str | None,
        stochastic_seed: int | None,
        max_grad_norm: float | None,
    ) -> None:
        checks.tier(tier)
        self.tier = tier
        self._choose(tier, schedule)
        self._disk = Disk(tier) if isinstance(tier, Nvme) else None
        self.max_grad_norm = max_grad_norm
        self._decision = Decision()
        self._torn = False
        self._local = None  # what is known of parameters that have stand-ins, once there are some
        self._bound = Bound()
        self._data_writes = DataWrites()
        formats = {"state_format": state_format, "master_format": master_format, "stochastic_seed": stochastic_seed}
        super().__init__(params, {**defaults, **formats})
        self.state = WatchedState()
        self._inheritance = Inheritance(self)

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
        self._look_at_decision()
        return self._decision.grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, because the norm was not finite or GradScaler had found an infinity.

        For parameters on a GPU, reading it waits for the step.
        """
        self._look_at_decision()
        return self._decision.skipped_steps

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; where an update that is under way still reads gradients, zeroing them in place waits for it."""
        if not set_to_none:
            self._release_gradients()
        with without_waiting():  # gradients are not what parameters are awaited for
            super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own hyperparameters; everything is checked before the group is added."""
        if isinstance(param_group, dict) and "params" in param_group:
            if not isinstance(param_group["params"], (Tensor, set)):
                param_group["params"] = list(param_group["params"])
                checks.distinct(param_group["params"])
            self._checked({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._watch_data(self.param_groups[-1:])

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
        if not self._stepping.acquire(blocking=False):
            raise StateError(_TWICE)
        known = self._torn and not self._untold
        try:
            if self._local is not None:
                self._local.accord.begin()
            with during("opt.step"):
                self._step()
        except BaseException as error:
            if not known:
                self._tell(error)
            raise
        finally:
            self._stepping.release()
        return loss

    def _step(self) -> None:
        self._refuse_in_child()
        self._finish()
        for publisher in () if self._local is None else self._local.publishers:
            publisher.finish()
        self._refuse_if_torn()
        settings = [self._checked(group) for group in self.param_groups]
        if self._local is not None or not self._update(self.param_groups, settings):
            self._update_pieces(settings)

    def _update_pieces(self, settings: list[dict[str, Any]]) -> None:
        """The update of what stands for parameters: this rank's pieces, twins on the host. Every rank takes part."""
        local = self._localise()
        guards.refuse_lent(local.homes)
        done = False
        with whole("the step") if local.accord.in_company else nullcontext():  # which other ranks are in
            try:
                self._enter(local)
                done = self._update(local.groups(self.param_groups), settings)
                local.accord.begin()  # what is raised from here on is no failure of the step
            finally:
                local.leave(undone=not done and not self._torn)

    def _update(self, groups: Groups, settings: list[dict[str, Any]]) -> bool:
        """The update; False: nothing was done, because the parameters need stand-ins that they have not."""
        formats = [self._format_key(group) for group in groups]
        binding = self._bound.binding if formats == self._bound.formats else None
        held = binding.survey.hold() if binding is not None else []
        pointers = binding.survey.pointers(groups) if binding is not None else None
        if binding is None or pointers is None:
            if self._local is None and (sharded(groups) or self._is_apart(groups)):
                return False
            cuts = () if self._local is None else (self._local.shares, self._local.starts)
            survey, binding = Survey(groups, self._layout, *cuts), None
            if survey.device is not None:
                device.require(survey.device, self.tier)
            held = survey.hold()
            pointers = survey.pointers(groups) or survey.gradient_pointers
        else:
            survey = binding.survey
        intact = binding is not None and binding.intact(self._held)
        if self._local is not None:
            self._local.accord.makes_state = not intact
        prepare = partial(_prepare, settings, pointers)
        where = partial(self._rebound, survey, groups, formats, intact=intact)
        self._ask(survey, pointers)
        if self._is_scheduled():
            self._submit(survey, binding, where, prepare)
        elif (scale := self._decision.take()) is not None:
            binding = self._carry_out(survey, binding, where, prepare, scale)
            if self._local is not None:
                self._publish(self._local, binding)
        del held  # until here no other thread could free a gradient under the native calls
        return True

    def _rebound(
        self, survey: Survey, groups: Groups, formats: list[FormatKey], binding: Binding | None, *, intact: bool
    ) -> Binding:
        """The binding, or a new one where there is none that fits."""
        state = self._held
        if binding is None:
            last = self._bound.binding
            return self._bind(survey, groups, formats, last if last and last.intact(state) else None)
        if not intact:
            return self._bind(survey, groups, formats, None)
        binding.witness.catch_up(state, in_place=True)
        return binding

    def _ask(self, survey: Survey, pointers: array[int]) -> None:
        """Whether, and how, gradients are applied. Divided ones are always looked at: all ranks skip, or none."""
        local, decision = self._local, self._decision
        if survey.params:
            decision.move(survey.device)  # parameters may be moved
        decision.ask(
            sums=lambda: survey.sumsq(pointers),
            max_norm=self._max_grad_norm,
            found_inf=getattr(self, "found_inf", None),
            grad_scale=getattr(self, "grad_scale", None),
            fold=1.0 if local is None else local.take_fold(),
            total=None if local is None or not local.shardings else local.accord.total,
            add_up=None if local is None else local.total_there,
            reading=None if local is None or local.host is None else local.host.reading,
        )

    def _bind(self, survey: Survey, groups: Groups, formats: list[FormatKey], previous: Binding | None) -> Binding:
        self.state = watched(self.state)
        local, last, witness = self._local, self._bound.binding, self._bound.witness
        self._bound.binding = None
        self._watch_data(self.param_groups)
        subject = self._algorithm, survey, groups, self._held
        room = self._room if survey.device is None else None
        initial = [self._initial_moment(group) for group in groups]
        exact = None if local is None else local.exact
        binding = bind(
            subject, self._disk, self._decision, last, previous, room, initial=initial, witness=witness, exact=exact
        )
        if local is not None:
            local.bound(survey.params, self.state)
        self._bound = Bound(binding, binding.witness, formats)
        return binding

    def _carry_out(
        self,
        survey: Survey,
        binding: Binding | None,
        bind: Callable[[Binding | None], Binding],
        prepare: Callable[[Binding], None],
        scale: float,
    ) -> Binding | None:
        """The update, as one of all ranks where it may fail on some; returns what it was made with."""
        accord = None if self._local is None else self._local.accord
        if accord is None:  # nobody to agree with
            if survey.params:
                binding = bind(binding)
                prepare(binding)
                self._run(binding, scale)
            return binding
        with accord.prepared():
            binding = bind(binding) if survey.params else None
        ran: list[Binding] = []
        with (
            nullcontext()
            if accord is None or self._disk is None
            else accord.reported(lambda: any(one.carried_out or one.torn for one in ran))
        ):
            if binding is not None:
                prepare(binding)
                ran.append(binding)
                self._run(binding, scale)
        return binding

    def _run(self, binding: Binding, scale: float) -> None:
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

    def _tell(self, error: BaseException) -> None:
        """A step has failed here: the other ranks hear of it where they wait for this one, or in their next step."""
        accord = None if self._local is None else self._local.accord
        if self._local is None or accord is None or not accord.in_company:
            if self._disk is not None:
                say_outcome(error, torn=self._torn)
            return
        decided_there = self._local.host is None and device.holds(self._local.pieces)  # nobody here has added up
        if isinstance(error, Exception) and not isinstance(error, CommError) and not decided_there:
            with suppress(CommError):
                self._keep_up(self._local)
                accord.refuse(self._untold or str(error), torn=self._torn, reports=self._disk is not None)
        if accord.agreed:
            self._torn, self._untold = accord.torn, ""
            say_outcome(error, torn=accord.torn)
        elif accord.met:
            self._torn, self._untold = True, str(error)
            if isinstance(error, Exception) and not accord.publishes and not self._is_scheduled():
                with suppress(CommError):
                    self._local.publish()  # the others do, and wait for this rank's part

    def _refuse_if_torn(self) -> None:
        if self._torn:
            raise StateError(
                "a step or a load was broken off while parameters and state were being written, so that they may be of "
                "different steps; load a checkpoint of the model, then of the optimizer (load_state_dict), to go on"
            )

    def _publish(self, local: Local, binding: Binding | None) -> None:
        """Every rank's parameters to all: until then they are of different steps."""
        self._torn = local.accord.publishes = True
        local.publish()
        if binding is not None:
            binding.witness.stepped()
        self._torn = False

    def _layout(self, group: dict[str, Any], dtype: torch.dtype, holds_moments: bool = False) -> Layout:
        needs_moments, state_format, master_format, seed = self._format_key(group)
        has_moments = needs_moments or holds_moments
        return layout_of(self._algorithm, dtype, has_moments, state_format, master_format, seed is not None)

    def _format_key(self, group: dict[str, Any]) -> FormatKey:
        return self._has_moments(group), group["state_format"], group["master_format"], group["stochastic_seed"]


def _prepare(settings: list[dict[str, Any]], pointers: array[int], binding: Binding) -> None:
    binding.prepare(settings, pointers)
