"""Several optimizers of one model behind the face of one, for what takes a single object."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.optim import checks
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.clip import clip_grad_norm_
from zerokern.optim.decide import of_scaler
from zerokern.optim.shards import sharded
from zerokern.optim.survey import names_of, params_of
from zerokern.zero.shard import shard_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ChainedOptimizer", "unchained"]


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, for trainers and schedulers that take a single object: `zk.Muon` beside `zk.AdamW`.

    `param_groups` are the dicts of all of them, so a scheduler changes every learning rate. Either all optimizers step
    or none does: one norm decides, and one factor clips. Under `zk.shard`, and for DTensors, the norm is measured even
    without `max_grad_norm`. A checkpoint of `zk.save` is the same as for a list of the same optimizers.

    optimizers: optimizers of zerokern over different parameters, each without `max_grad_norm`.
    max_grad_norm: `zk.clip_grad_norm_` scales all gradients so that their common norm is at most this. None changes
        nothing; math.inf only measures the norm.

    An error in one of the optimizers leaves those before it in the chain a step ahead: load a checkpoint.

    >>> import torch, zerokern as zk
    >>> weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    >>> opt = zk.ChainedOptimizer([zk.Muon([weight], lr=0.1), zk.SGD([bias], lr=0.5)], max_grad_norm=1.0)
    >>> scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    >>> weight.grad, bias.grad = torch.zeros(2, 2), torch.tensor([3.0, 4.0])
    >>> opt.step(); scheduler.step()
    >>> opt.grad_norm, bias.data, [group["lr"] for group in opt.param_groups]
    (5.0, tensor([0.7000, 0.6000]), [0.05, 0.25])
    """

    _zk_shards = True  # steps parameters that zk.shard shards
    _step_supports_amp_scaling = True

    def __init__(self, optimizers: Iterable[FusedOptimizer], max_grad_norm: float | None = None) -> None:
        self.chained_optimizers = tuple(optimizers)
        for place, opt in enumerate(self.chained_optimizers):
            if not isinstance(opt, FusedOptimizer):
                raise TypeError(got(f"optimizers[{place}]", type(opt).__name__, "an optimizer of zerokern"))
            if opt.max_grad_norm is not None:
                do = "max_grad_norm= of the chain is the norm of all gradients"
                raise ValueError(got(f"max_grad_norm of optimizers[{place}]", opt.max_grad_norm, "None in a chain", do))
        if not self.chained_optimizers:
            raise ValueError(got("optimizers", (), "one optimizer or more"))
        first: dict[int, tuple[int, str]] = {}
        for place, opt in enumerate(self.chained_optimizers):
            for name, param in zip(names_of(opt.param_groups), params_of(opt.param_groups), strict=True):
                other, called = first.setdefault(id(param), (place, name))
                if other != place:
                    shard = shard_of(param)
                    called = shard.name if shard is not None else name if called.startswith("param_groups[") else called
                    what = f"{called} in optimizers[{other}] and optimizers[{place}]"
                    raise ValueError(got("optimizers", what, "optimizers of different parameters"))
        groups = {id(opt.holdings.group): opt.holdings.group for opt in self.chained_optimizers}
        if len(groups) > 1:
            raise ValueError(got("group", "different ones in a chain", "the same group= in all its optimizers"))
        self._group = next(iter(groups.values()))
        self._grad_norm: Tensor | None = None
        self.max_grad_norm = max_grad_norm
        super().__init__(self.param_groups, {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in their order. The list is made anew: to change it is refused."""
        return ChainedGroups(group for opt in self.chained_optimizers for group in opt.param_groups)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._refuse_assigned("param_groups", groups)

    @property  # type: ignore[override]
    def state(self) -> ChainedState:
        """The state of all optimizers, by parameter."""
        return ChainedState(self.chained_optimizers)

    @state.setter
    def state(self, state: Any) -> None:
        self._refuse_assigned("state", state)

    def _refuse_assigned(self, name: str, value: Any) -> None:
        if len(value):  # torch's constructor assigns empty ones
            raise AttributeError(f"{name} of a ChainedOptimizer is that of its chained_optimizers; assign it there")

    @property
    def max_grad_norm(self) -> float | None:
        """As that of one optimizer, for the norm of all gradients together."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = checks.norm_limit(value)

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; None if nothing has asked for it."""
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing."""
        return max(opt.skipped_steps for opt in self.chained_optimizers)

    def __repr__(self) -> str:
        said = [f"{type(self).__name__} (max_grad_norm={self.max_grad_norm}", *map(repr, self.chained_optimizers)]
        return "\n".join(said).replace("\n", "\n    ") + "\n)"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.chained_optimizers, self.max_grad_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: which of the optimizers a new group belongs to is said by adding it there."""
        if all(param_group is not group for group in self.param_groups):  # else it is torch's constructor that calls
            do = "opt.chained_optimizers[0].add_param_group(group) says which rule it is for"
            raise ValueError(got("param_group", "a new group for a chain", "one for one of its optimizers", do))

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        for opt in self.chained_optimizers:
            opt.zero_grad(set_to_none)

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each optimizer, of all or of none; returns what `closure` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        (found_inf, grad_scale), groups = of_scaler(self), self.param_groups
        self._grad_norm = None
        if self.max_grad_norm is not None or self._group is not None or sharded(groups):
            scale = 1.0 if grad_scale is None else float(grad_scale)
            limit = math.inf if self.max_grad_norm is None else self.max_grad_norm * scale
            norm = clip_grad_norm_(params_of(groups), limit, group=self._group)
            broken = torch.isfinite(norm).logical_not().to(torch.float32)
            if found_inf is None and grad_scale is None:
                grad_scale = 1.0  # with None gradients would count as rewritten by GradScaler.unscale_
            found_inf = broken if found_inf is None else torch.as_tensor(found_inf).to(norm.device) + broken
            self._grad_norm = norm / scale
        for opt in self.chained_optimizers:
            _step_as_one(opt, found_inf, grad_scale, self.max_grad_norm)
        return loss

    def flush(self) -> None:
        """`flush()` of each optimizer."""
        for opt in self.chained_optimizers:
            opt.flush()

    def refresh_masters(self) -> None:
        """`refresh_masters()` of each optimizer."""
        for opt in self.chained_optimizers:
            opt.refresh_masters()

    def close(self) -> None:
        """`close()` of each optimizer, also behind one that raises."""
        with ExitStack() as closing:
            for opt in reversed(self.chained_optimizers):
                closing.callback(opt.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        with ExitStack() as closing:
            for opt in reversed(self.chained_optimizers):
                closing.callback(opt.__exit__, *raised)

    def statistics(self) -> dict[str, float]:
        """`statistics()` of each optimizer, added up; steps, those skipped and the norm are of the chain."""
        found: Counter[str] = Counter()
        for opt in self.chained_optimizers:
            found.update(opt.statistics())
        told: dict[str, float] = {name: value for name, value in found.items() if name != "grad_norm"}
        told |= {"steps": told["steps"] // len(self.chained_optimizers), "skipped_steps": self.skipped_steps}
        norm = self.grad_norm
        return told if norm is None else {**told, "grad_norm": norm}

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of all groups: parameters are counted through the chain."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        begin = 0
        for opt in self.chained_optimizers:
            own = opt.state_dict()
            state |= {key + begin if isinstance(key, int) else key: entry for key, entry in own["state"].items()}
            groups += [{**group, "params": [key + begin for key in group["params"]]} for group in own["param_groups"]]
            begin += sum(len(group["params"]) for group in own["param_groups"])
        made = {"state": state, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            made = post_hook(self, made) or made
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; each optimizer takes its groups, and refuses what is not of its rule and formats.

        One that refuses leaves those before it in the chain loaded.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state_dict has {len(groups)} param_groups, the chain has {len(self.param_groups)}; allowed: one "
                "of a chain with the same optimizers"
            )
        ends = accumulate((len(opt.param_groups) for opt in self.chained_optimizers), initial=0)
        for opt, (begin, end) in zip(self.chained_optimizers, pairwise(ends), strict=True):
            own = [dict(group) for group in groups[begin:end]]
            keys = {key for group in own for key in group["params"]}
            state = {key: entry for key, entry in state_dict["state"].items() if key in keys}
            opt.load_state_dict({"state": state, "param_groups": own})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class ChainedGroups(list[dict[str, Any]]):
    """The groups of a chain: dicts that may be changed, in a list that may not."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        do = "opt.chained_optimizers[0].add_param_group(group) says which rule it is for"
        raise TypeError(
            f"param_groups of a ChainedOptimizer are those of its chained_optimizers; change them there: {do}"
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy is anybody's


class ChainedState(MutableMapping[Any, Any]):
    """What the optimizers of a chain have as `state`, by parameter: a view."""

    def __init__(self, optimizers: Sequence[FusedOptimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, param: Any) -> Any:
        for opt in self._optimizers:
            if any(param is one for group in opt.param_groups for one in group["params"]):
                return opt.state
        for opt in self._optimizers:  # pieces of zk.shard that stand for parameters
            if param in opt.state:
                return opt.state
        raise KeyError(param)

    def __getitem__(self, param: Any) -> Any:
        return self._of(param)[param]

    def __setitem__(self, param: Any, entry: Any) -> None:
        self._of(param)[param] = entry

    def __delitem__(self, param: Any) -> None:
        del self._of(param)[param]

    def __iter__(self) -> Iterator[Any]:
        for opt in self._optimizers:
            yield from list(opt.state)

    def __len__(self) -> int:
        return sum(len(opt.state) for opt in self._optimizers)


def unchained(opts: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a chain, of a sequence of optimizers and chains, or the one that it is.

    >>> import zerokern as zk
    >>> one, other = (zk.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2))
    >>> unchained([ChainedOptimizer([one]), other]) == [one, other], unchained(None)
    (True, [])
    """
    while isinstance(getattr(opts, "optimizer", None), torch.optim.Optimizer):  # what a framework has wrapped
        opts = opts.optimizer
    if isinstance(opts, ChainedOptimizer):
        return list(opts.chained_optimizers)
    if isinstance(opts, Sequence):
        return [one for opt in opts for one in unchained(opt)]
    return [] if opts is None else [opts]


def _step_as_one(opt: FusedOptimizer, found_inf: Any, grad_scale: Any, limit: float | None) -> None:
    """A step of one optimizer, told as GradScaler tells it, and to which norm the chain has clipped."""
    told = {"found_inf": found_inf, "grad_scale": grad_scale, "limit_of_chain": limit}
    vars(opt).update(told)
    try:
        opt.step()
    finally:
        for name in told:
            delattr(opt, name)
