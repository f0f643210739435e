"""The torch.optim.Optimizer face: groups, step, hooks, clipping, loss scaling, checkpoints."""

from __future__ import annotations

import sys
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.comm import during
from zerokern.core.errors import StateError
from zerokern.memory.interrupts import is_running, whole
from zerokern.optim import checks, device
from zerokern.optim.accord import TORN, Accord
from zerokern.optim.decide import Decision, of_scaler
from zerokern.optim.disk import refuse_copy
from zerokern.optim.exchange import take_over
from zerokern.optim.formats import Algorithm, as_saved
from zerokern.optim.holdings import Holdings, chosen
from zerokern.optim.matrices import Matrix
from zerokern.optim.outside import WatchedState, warn_of_second_update
from zerokern.optim.shards import sharded
from zerokern.optim.shown import LATE
from zerokern.optim.state import plain
from zerokern.optim.step import StepRunner
from zerokern.optim.survey import Groups, Survey, held_gradients, params_of
from zerokern.zero import checks as zero_checks
from zerokern.zero.hooks import import_compiler, weakly
from zerokern.zero.kinds import shardings_of, without_waiting
from zerokern.zero.partition import shards_parameters
from zerokern.zero.shard import Shard, shard_of
from zerokern.zero.sharded import Sharded
from zerokern.zero.sharded_ops import refuse

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Self

_TWICE = (
    "step() was called while another step() of this optimizer runs, in another thread or in a signal handler: the two "
    "would write the same state; call it from one thread, or build an optimizer for each"
)
_CLOSED = "this optimizer is closed: close() was called. Build another one"
_REPLACED = (
    "this optimizer is closed: another one, which was built later in this process, has taken over its folder {path!r}, "
    "and the state that it had there is gone{pending}. Use that one. To train with both give each a folder of its own, "
    "tier=zk.Nvme(another path), and load a checkpoint"
)
_PENDING = ", with an update that zk.Delayed had yet to publish"
_CLOSED_WITHIN = "close() was called while step() runs, in another thread or in a hook; call it afterwards"
_LANES = {"update": ("cpu",), "ranks": ("net",), "link": ("down", "up"), "disk": ("read", "write", "ring")}
_OF_THE_OPTIMIZER = ("tier", "schedule", "update", "max_grad_norm", "group")  # and of no group
_NOT_OF_GROUPS = ("self", "__class__", "params", *_OF_THE_OPTIMIZER)


def algorithm_of(kind: type[FusedOptimizer]) -> Algorithm:
    """Returns the update rule of a class of optimizers.

    >>> from zerokern.optim import Muon
    >>> algorithm_of(Muon).whole
    True
    """
    return kind._algorithm


class FusedOptimizer(torch.optim.Optimizer):
    """What all optimizers here share; the subclasses say which update rule and which hyperparameters.

    Nothing is kept about a parameter before the first `step()` that finds a gradient on it, so parameters may be
    exchanged until then; where gradients of zk.shard leave a device during backward, before the first such pass. A step
    is one native call for all parameters.

    `holdings`: its state, and where that lies. `decision`: whether a step is carried out. `runner`: when, and
    what becomes of it.
    """

    _algorithm: ClassVar[Algorithm]
    _step_supports_amp_scaling = True
    _zk_shards = True  # steps parameters that zk.shard shards
    tier, schedule, update = map(chosen, ("tier", "schedule", "update"))
    _waited_ns: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})  # until the step before, and until the last one
    _steps = 0
    _step_s = 0.0

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        checks.spelling(cls, named)
        return super().__new__(cls)

    def __init__(self, params: ParamsT, given: dict[str, Any]) -> None:
        """`given`: all that the subclass was called with, by name."""
        import_compiler()  # which torch's class asks for, below frames that know this optimizer
        self._furnish(given["tier"], given["schedule"], Decision(), given["group"], given["update"])
        self.max_grad_norm = given["max_grad_norm"]
        super().__init__(params, {name: value for name, value in given.items() if name not in _NOT_OF_GROUPS})
        self.state = WatchedState()
        if self.tier != "device" and self.schedule != "sync" and given["group"] is None:
            for sharding in shardings_of(map(shard_of, params_of(self.param_groups))):
                sharding.reduction.expecting.append(weakly(self._expect))

    def _expect(self) -> None:
        self.runner.expect(self.param_groups)

    def _furnish(self, tier: Any, schedule: Any, decision: Decision, group: Any, update: str) -> None:
        self.decision = decision
        self.holdings = Holdings(self._algorithm, tier, schedule, type(self).__name__, group, update)
        self.runner = StepRunner(self.holdings, decision)
        self._stepping: dict[object, FrameType] = {}  # who steps or closes, the first one; others are refused
        if self.holdings.disk is not None:
            self.holdings.disk.tier.gives_way = partial(_give_way, weakref.ref(self))

    @property  # type: ignore[override]
    def state(self) -> WatchedState:
        """As torch's. Whoever asks for it while an update is under way waits: it is about to write there."""
        if self.runner.pending is not None and not any(map(is_running, list(self._stepping.values()))):
            self.runner.pending.run.finish()
        return self.holdings.state

    @state.setter
    def state(self, state: Any) -> None:
        self.holdings.state = state

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients are scaled within the update so that their global norm is at most this; None leaves them alone.

        math.inf measures the norm, for `grad_norm`, and clips nothing. With any number, a step whose norm is not finite
        is skipped: no parameter and no state changes. For parameters on a GPU both are decided there.
        """
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = checks.norm_limit(value)

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's gradients, before clipping. Without `zk.shard` it takes `max_grad_norm`.

        For parameters on a GPU, reading it waits for the step.
        """
        self.runner.wait_for_decision()
        return self.decision.grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing: the norm was not finite, or GradScaler had found an infinity. Waits too."""
        self.runner.wait_for_decision()
        return self.decision.skipped_steps

    def __repr__(self) -> str:
        closed = "closed, " if self.holdings.closed else ""
        said = f"{closed}tier={self.tier!r}, schedule={self.schedule!r}, max_grad_norm={self.max_grad_norm}"
        told = self.update != ("device" if self._algorithm.whole else "host")  # what it is where nobody says it
        said += "" if not told else f", update={self.update!r}"
        return super().__repr__().replace(" (\n", f" ({said}\n", 1)

    def statistics(self) -> dict[str, float]:
        """Returns numbers about the last `step()`, under names that suit a logger.

        `steps` and `skipped_steps`: how many there were, how many of them changed nothing. `grad_norm`, where it is
        known. `step_s`: seconds that `step()` took. `waited_s/update`: seconds between the two last calls of `step()`
        in which a forward, a backward or `step()` itself waited for the update; `waited_s/link`, `/disk` and `/ranks`:
        in which somebody, the update's own thread mostly, waited for a copy between host and device, for the disk of
        `tier=zk.Nvme(path)`, for other ranks' parts of parameters. `state_bytes/device`, `/cpu` and `/disk`: what
        state this rank has, and where; with `zk.Delayed` also the parameters that wait to be published.
        `state_budget_bytes/device`: what "device:auto" has become. `change_bytes`: what `zk.deltas` and
        `publish="delta"` take to know what updates change.

        Asking waits for the decision to step, and on a GPU for the step.

        >>> import torch, zerokern as zk
        >>> weight = torch.nn.Parameter(torch.ones(1024))
        >>> opt = zk.AdamW([weight], max_grad_norm=1.0)
        >>> weight.grad = torch.ones(1024); opt.step()
        >>> found = opt.statistics()
        >>> found["steps"], found["grad_norm"], found["state_bytes/cpu"], found["waited_s/update"]
        (1, 32.0, 8196, 0.0)
        """
        norm = self.grad_norm
        before, now = self._waited_ns
        waited = {
            f"waited_s/{what}": sum(now.get(lane, 0) - before.get(lane, 0) for lane in lanes) / 1e9
            for what, lanes in _LANES.items()
        }
        return {
            "steps": self._steps,
            "skipped_steps": self.skipped_steps,
            **({} if norm is None else {"grad_norm": norm}),
            "step_s": self._step_s,
            **waited,
            **self.holdings.state_nbytes(),
        }

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; where an update that is under way still reads gradients, zeroing them in place waits for it."""
        if not set_to_none:
            self.runner.release_gradients(self.param_groups)
        with without_waiting():  # gradients are not what parameters are awaited for
            super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own hyperparameters; everything is checked before the group is added."""
        if isinstance(param_group, dict) and "params" in param_group:
            if not isinstance(param_group["params"], set):  # which torch refuses
                if not isinstance(param_group["params"], Tensor):
                    param_group["params"] = list(param_group["params"])
                checks.group(param_group, _NOT_OF_GROUPS, self.defaults)
            checks.real(param_group["params"], len(getattr(self, "param_groups", ())))
            named, options = checks.listed(param_group["params"]), {**self.defaults, **param_group}
            self.holdings.refuse_at_rest([{"params": [one for _, one in named]}])
            self._check_params(named, options)
            self._algorithm.checked(options)
        super().add_param_group(param_group)

    def _check_params(self, named: Sequence[tuple[str, Any]], group: Mapping[str, Any]) -> None:
        """Raises for parameters that the update rule is not for, each with the name that it was given. `group`: all of
        their options."""

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returns.

        >>> from zerokern.optim import SGD
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> opt = SGD([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -2.0]); opt.step(); weight.data
        tensor([0.5000, 3.0000])
        """
        self.holdings.refuse_if_closed()
        loss = None if closure is None else torch.enable_grad()(closure)()
        mine = object()
        try:
            self._enter(mine, sys._getframe(), _TWICE)
            here, known = self.holdings, self.holdings.outcome is TORN
            try:
                here.shards.accord.begin()
                began = time.perf_counter()
                try:
                    with during("opt.step"):
                        self._step()
                finally:
                    self._step_s = time.perf_counter() - began
                    self._steps += 1
                    ring_ns = here.disk.ring.waited_ns if here.disk is not None and here.disk.is_open else 0
                    self._waited_ns = self._waited_ns[1], {**self.runner.waited_ns, "ring": ring_ns}
            except BaseException as error:
                if not known:
                    self.runner.tell(error)  # and thereby the other ranks
                raise
        finally:
            self._stepping.pop(mine, None)
        return loss

    def _enter(self, mine: object, frame: FrameType, message: str) -> None:
        """Refuses all but the first who is in; called within the `try` that takes `mine` out."""
        self._stepping[mine] = frame
        for other, of_other in self._stepping.copy().items():
            if other is mine:
                return
            if is_running(of_other):
                raise StateError(message)
            self._stepping.pop(other, None)  # Ctrl-C came before the line that does so

    def _step(self) -> None:
        """Updates the parameters themselves, or what stands for them: this rank's pieces, copies on the host. All ranks
        that share some take part."""
        here, groups = self.holdings, self.param_groups
        here.refuse_elsewhere()
        if self.tier != "device" or here.shards.is_hosted:
            device.refuse_update_in_graph()
        self.runner.finish(groups)
        for publisher in here.shards.publishers:
            publisher.finish()
        here.refuse_if_torn()
        settings = [self._algorithm.checked(group) for group in groups]
        if here.shards.stand_alone and self._update(groups, settings):
            return
        shards = self.runner.find_shards(groups)
        accord = shards.accord
        if accord.in_company:
            accord.names = shards.listed(groups)
            accord.settings = self._settings(settings, accord)
        if any(shards_parameters(one.stage) for one in shards.shardings):
            zero_checks.refuse_materialized(shards.shards)
        shards.host.measures = self._max_grad_norm is not None or bool(shards.shardings or accord.party)
        done = False
        found_inf, grad_scale = of_scaler(self)
        unscaled = found_inf is not None and grad_scale is None
        with whole("the step") if accord.in_company else nullcontext():  # which other ranks are in
            try:
                self.runner.read_gradients(shards, unscaled=unscaled)
                if self._algorithm.whole:  # ranks bring matrices together, and would wait for each other
                    for number, names in enumerate(shards.without_gradients(groups)):
                        accord.settings[f"parameters without a gradient of param_groups[{number}]"] = (
                            ", ".join(names) or "none"
                        )
                if accord.in_company:
                    accord.compare(there=shards.are_decided_there)
                done = self._update(shards.groups(groups), settings)
                accord.begin()  # what is raised from here on is no failure of the step
            finally:
                shards.end_step(undone=not done and not here.torn)

    def _settings(self, checked: list[dict[str, Any]], accord: Accord) -> dict[str, Any]:
        """All settings by name, as ranks compare them: which parameters there are, then what was said of them."""
        # what else there is of tiers may differ, as budgets do; ranks meet at other moments by these alone
        where = "on the device" if self.holdings.shards.are_decided_there else "in host memory"
        known = {
            "tier": "one with a disk" if self.holdings.disk is not None else f"one that is updated {where}",
            "max_grad_norm": getattr(self, "limit_of_chain", self._max_grad_norm),
            "group": None if accord.party is None else accord.party.size,
        }
        named: dict[str, Any] = {"optimizer": type(self).__name__}
        for name, names in accord.names.items():
            named[name] = f"{len(names)}, crc {zlib.crc32(repr(names).encode()):08x}"
        named |= {name: known[name] if name in known else getattr(self, name) for name in _OF_THE_OPTIMIZER}
        for number, (group, one) in enumerate(zip(self.param_groups, checked, strict=True)):
            options = self._algorithm.options(group, one, self.defaults)
            named |= {f"{name} of param_groups[{number}]": value for name, value in options.items()}
        return named

    def _update(self, groups: Groups, settings: list[dict[str, Any]]) -> bool:
        """The update; False: nothing was done, because the parameters need stand-ins that they have not."""
        here, shards = self.holdings, self.holdings.shards
        formats = [self._algorithm.key(group) for group in groups]
        binding = here.binding if here.binding is not None and formats == here.binding.formats else None
        alone = shards.stand_alone
        grads, sums = (None, []) if alone else (shards.grads, shards.sums)
        if alone and binding is not None:  # until the end no other thread can free them under native calls
            grads = held_gradients(groups, resolved=False)
        pointers = binding.survey.pointers(groups, grads, sums) if binding is not None else None
        if binding is None or pointers is None:
            if alone and (sharded(groups) or here.is_apart(groups) or here.group is not None):
                return False
            if alone:
                grads = held_gradients(groups, resolved=True)
            of_shards = (grads,) if alone else (grads, shards.shares, [one.start for one in shards.shards], sums)
            matrices = self._matrices(groups, () if alone else shards.shards)
            layouts, hosted = self._algorithm.layout, shards.is_hosted
            survey, binding = Survey(groups, layouts, *of_shards, hosted=hosted, matrices=matrices), None
            checks.remainders(self.param_groups)
            warn_of_second_update(self, self.param_groups, grads if alone else None)
            if survey.device is not None:
                device.require(survey.device, self.tier)
            pointers = survey.pointers(groups, grads, sums) or survey.gradient_pointers
        else:
            survey = binding.survey
        intact = binding is not None and binding.intact(here.held)
        shards.accord.makes_state = not intact
        self._ask(survey, pointers)
        bind = partial(here.bind, binding, survey, groups, formats, self.decision, intact=intact)
        prepare = methodcaller("prepare", settings, pointers)
        self.runner.submit(survey, bind, prepare, first=binding is None)
        return True

    def _matrices(self, groups: Groups, shards: Sequence[Shard]) -> Sequence[Sequence[Matrix]]:
        """Returns which matrices each parameter is made of, where the algorithm updates whole ones."""
        return []

    def _ask(self, survey: Survey, pointers: array[int]) -> None:
        """Whether, and how, gradients are applied. Divided ones are always looked at: all ranks skip, or none."""
        shards, decision = self.holdings.shards, self.decision

        def sums() -> list[float]:
            shards.land()  # the step's first read of them, in whatever thread: an update comes after its norm
            return survey.sumsq(pointers)

        if survey.params:
            decision.move(survey.device)  # parameters may be moved
        found_inf, grad_scale = of_scaler(self)
        decision.ask(
            sums=sums,
            max_norm=self._max_grad_norm,
            found_inf=found_inf,
            grad_scale=grad_scale,
            fold=shards.fold,
            total=shards.accord.total if shards.shardings or shards.accord.party else None,
            add_up=None if shards.stand_alone else shards.total_there,
            reading=shards.host.reading,
        )

    @torch._disable_dynamo
    def flush(self) -> None:
        """Finishes the update that is in flight, and publishes one that was kept back (`schedule=zk.Delayed(...)`).

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
        self.runner.flush(self.param_groups)

    @torch._disable_dynamo
    def close(self) -> None:
        """Ends the optimizer: an update in flight is finished and published, then disk and host memory are given back.

        Parameters stay as they are; state is gone, so save it before. `with zk.AdamW(...) as opt:` closes at the end of
        the block. Under `zk.shard` every rank calls it. A second call does nothing.

        An optimizer that nobody refers to any more needs no `close()`. In a notebook `_` and `Out` refer to what a cell
        showed: there an optimizer that is built later on the same folder closes the earlier one, with a warning, in the
        first step that needs the folder. Until then the earlier one works, and its `state_dict()` can be loaded.

        >>> import tempfile, zerokern as zk
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder, zk.SGD([weight], lr=0.5, tier=zk.Nvme(folder)) as opt:
        ...     weight.grad = torch.ones(2); opt.step()
        >>> opt.step()
        Traceback (most recent call last):
        ...
        zerokern.core.errors.StateError: this optimizer is closed: close() was called. Build another one
        """
        self._end(publish=True)

    def _end(self, *, publish: bool) -> None:
        here = self.holdings
        if here.closed:
            return
        known, mine = here.outcome is TORN, object()
        try:
            self._enter(mine, sys._getframe(), _CLOSED_WITHIN)
            try:
                if publish:
                    self.runner.flush(self.param_groups)
            except StateError:
                if not known:  # else the step that failed has said so
                    raise
            finally:
                self.runner.close(self.param_groups)
                here.close(_CLOSED)
        finally:
            self._stepping.pop(mine, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an exception nothing is published: the other ranks may be anywhere."""
        self._end(publish=kind is None)

    @torch._disable_dynamo
    def refresh_masters(self) -> None:
        """Rebuilds masters and remainders from the parameters, after a write that torch does not count.

        Such are writes by way of `p.data`, torch.distributed's (`broadcast(p, 0)`), and those through numpy or a
        pointer. Others (`load_state_dict`, `copy_` within `torch.no_grad()`) are followed without this call.

        >>> from zerokern.optim import AdamW
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> opt = AdamW([weight]); weight.grad = torch.ones_like(weight); opt.step()
        >>> weight.data.fill_(2.0); opt.refresh_masters(); opt.state[weight]["remainder"]
        tensor([2., 2., 2.], dtype=torch.bfloat16)
        tensor([0, 0, 0], dtype=torch.int16)
        """
        self.holdings.refuse_if_closed()
        self.runner.finish(self.param_groups)
        self.holdings.refresh()

    def state_dict(self) -> dict[str, Any]:
        """As torch's: the same keys, so that fp32 state goes into torch.optim's optimizers and back.

        State on disk is read into memory, all of it. With `zk.Delayed`, state is that after the last update, published
        or not, and "pending" beside it are the parameter's values then: whoever loads both goes on as if nothing was.
        """
        self.runner.wait_until_whole(self.param_groups)
        held = self.holdings.state
        try:
            self.state = WatchedState({key: as_saved(entry) for key, entry in self.holdings.shown().items()})
            state_dict = super().state_dict()
        finally:
            self.state = held
        return {**state_dict, "state": plain(state_dict["state"])}

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but nothing is cast: state of another format or shape is refused, and nothing is changed then.

        Load the model before its optimizer: a parameter written later drops its remainder.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        take_over(self.holdings, self.runner, self.param_groups, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        here = self.holdings
        here.refuse_elsewhere()
        self.runner.finish(self.param_groups)
        refuse_copy(here.state)
        here.catch_up()
        shown = plain(here.shown())
        for part in (value for entry in shown.values() for value in entry.values() if isinstance(value, Sharded)):
            refuse("a copy of an optimizer, or a pickle", part, "owner")
        return {**super().__getstate__(), "state": shown, **self._own()}

    def _own(self) -> dict[str, Any]:
        own = {"tier": self.tier, "schedule": self.schedule, "update": self.update}
        own["_max_grad_norm"] = self._max_grad_norm
        own["group"] = self.holdings.group
        return {**own, "_grad_norm": self.grad_norm, "_skipped_steps": self.skipped_steps, "_torn": self.holdings.torn}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a live optimizer may be given its state and groups alone, as torch does it: all else stays
        if live := "holdings" in self.__dict__:
            self.flush()
        mine = {**(self._own() if live else {}), **state}
        held, torn = mine.pop("state"), mine.pop("_torn")
        decision = Decision(mine.pop("_grad_norm"), mine.pop("_skipped_steps"))
        update = mine.pop("update", "host")  # which pickles of earlier versions do not have
        self._furnish(mine.pop("tier"), mine.pop("schedule"), decision, mine.pop("group"), update)
        super().__setstate__(mine)
        self.state = WatchedState(held)
        self.holdings.renew(loaded=False)
        if torn:
            self.holdings.tear()


def _give_way(there: weakref.ref[FusedOptimizer]) -> str:
    """For another optimizer on its folder: what who uses this one is told from then on; nothing if it is in a step."""
    opt, mine = there(), object()
    if opt is None:
        return ""
    try:
        opt._stepping[mine] = sys._getframe()
        if any(is_running(frame) for other, frame in opt._stepping.copy().items() if other is not mine):
            return ""
        path = getattr(opt.holdings.order.config, "path", opt.tier)
        opt.runner.close(opt.param_groups)
        late = any(group.get(LATE, False) for group in opt.param_groups)
        opt.holdings.close(because := _REPLACED.format(path=path, pending=_PENDING if late else ""))
        return because
    finally:
        opt._stepping.pop(mine, None)
