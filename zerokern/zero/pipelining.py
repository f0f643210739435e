"""A stage of torch.distributed.pipelining whose module zk.shard divides: one reduction for all micro-batches of a step.

Gradients of micro-batches are added up on this rank, and leave with those of the last one, whichever that is. Where a
schedule computes gradients of inputs first and those of weights later (zero bubble), the latter are one pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining.stage import stage_backward_input

from zerokern.core.errors import StateError, got
from zerokern.zero import hooks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.homes import home_of
from zerokern.zero.kinds import shardings_of
from zerokern.zero.sharding import Sharding

__all__ = ["PipelineStage"]


class PipelineStage(TorchStage):
    """`torch.distributed.pipelining.PipelineStage` for a module that `zk.shard` has divided, at any stage of ZeRO.

    All of torch's schedules take it: GPipe, 1F1B, interleaved and zero-bubble ones. `zk.shard` is given the mesh of the
    ranks that have the same part of the model (`mesh["dp"]`), and this the group of those that a batch goes through.
    A step reduces each bucket once, with the last micro-batch's backward. Gradients are divided by the number of
    micro-batches where the schedule says so (`scale_grads`); those of an earlier step that are still there are kept as
    they are, and these added to them.

    `whole`: whether parameters at stage 3 stay gathered from a step's first forward to its last backward, as pipelines
    have it, or are gathered for each micro-batch. None: they do, unless they rest in another tier.

    `zk.clip_grad_norm_(..., group=)` and `group=` of the optimizers make one norm, and one decision to step, of all
    stages. `zk.save` and `zk.load` take a stage's module for its part of the model, by the names that it has there.

    >>> import torch, torch.distributed as dist, zerokern as zk
    >>> from torch.distributed.pipelining import ScheduleGPipe
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = zk.shard(torch.nn.Linear(2, 1, bias=False), stage=3)
    >>> stage = zk.PipelineStage(model, 0, 1, torch.device("cpu"))
    >>> schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: y.sum() - target.sum())
    >>> _ = schedule.step(torch.ones(4, 2), target=torch.ones(4, 1)); model.weight.grad.local
    tensor([2., 2.])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        whole: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """As torch's; `whole` besides."""
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        if self.dw_builder is not None:
            do = "Gradients that other functions compute would not be reduced; zero-bubble schedules need none of them"
            raise ValueError(got("dw_builder", "a function", "None", do))
        if whole is not None and not isinstance(whole, bool):
            raise TypeError(got("whole", whole, "True, False or None"))
        self._whole = whole
        self._reset()

    def _reset(self) -> None:
        self._shardings: list[Sharding] = []
        self._in_step = False
        self._passes: list[int] = []  # how often each had reduced before
        self._forwards = 0
        self._before: list[tuple[Tensor, Tensor]] | None = None  # gradients that were there already, and whose they are

    def clear_runtime_states(self) -> None:
        """A schedule begins."""
        super().clear_runtime_states()
        self._let_go()
        self._reset()
        for sharding in self._found():
            self._check(sharding)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """A micro-batch's forward."""
        if not self._in_step:
            self._begin()
        with self._or_let_go():
            result = self.submod(*args, **kwargs)
        self._forwards += 1
        if not self.has_backward and self._forwards == len(self.args_recv_info):
            self._let_go()
            self._reset()
        return result

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """A micro-batch's backward, or its half for inputs or for weights; the last one reduces."""
        with self._or_let_go():
            if self._before is None:
                self._before = self._put_by()
            if backward_type == "input":
                self._refuse_repeated()
                with self._no_sync():
                    return _for_inputs(self._leaves(), bwd_kwargs)
            if backward_type == "weight":
                self._keep(True)  # its passes follow no order of units
                with ExitStack() if last_backward else self._no_sync():
                    _in_one_pass(self._shardings, self.device, lambda: _for_weights(bwd_kwargs["param_groups"]))
                if last_backward or not self._stays:
                    self._let_go()
                return (), None
            self._keep(not last_backward and self._stays)
            with ExitStack() if last_backward else self._no_sync():
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The end of a step."""
        self._let_go()
        if self.has_backward:
            self._finish(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """The end of a step, where a schedule says nothing else."""
        self._let_go()
        self._finish(grad_scale_factor)

    def _finish(self, factor: int) -> None:
        with self._or_let_go():
            for sharding, before in zip(self._shardings, self._passes, strict=True):
                if sharding.reduction.passes == before and sharding.gradient_buckets:  # nothing came last, or nothing
                    _in_one_pass([sharding], self.device, lambda: None)
        for sharding in self._found() if factor != 1 else ():
            _divide(sharding, factor)
        before_it, self._before = self._before or [], None
        with torch.no_grad():
            for finder, grad in before_it:
                if finder.grad is None:
                    finder.grad = grad
                else:
                    finder.grad.add_(grad)
        self._in_step, self._passes, self._shardings = False, [], []

    def _found(self) -> list[Sharding]:
        """What zk.shard has made of this module."""
        params = list(self.submod.parameters())
        stranger = next((name for name, one in self.submod.named_parameters() if home_of(one) is None), None)
        if stranger is not None:
            raise StateError(
                f"{stranger!r} of the module of pipeline stage {self.stage_index} is not sharded: call "
                'zk.shard(module, mesh=mesh["dp"]) first, or take torch.distributed.pipelining.PipelineStage'
            )
        return list(shardings_of(map(home_of, params)))

    def _begin(self) -> None:
        """The first forward of a step."""
        self._shardings = self._found()
        self._in_step = True
        self._passes = [sharding.reduction.passes for sharding in self._shardings]
        self._keep(self._stays)

    def _check(self, sharding: Sharding) -> None:
        if not self.has_backward:
            return
        if not sharding.reduction.synchronizes:
            raise StateError(
                f"pipeline stage {self.stage_index} was run within zk.no_sync, and would never reduce its gradients; "
                "call schedule.step() outside: it reduces once, and adds to gradients that are still there"
            )
        for bucket in sharding.gradient_buckets:
            for place in bucket.local if bucket.summing.needed else ():
                if _finder(bucket, place).grad is not None:
                    raise StateError(
                        f"the gradient of {bucket.homes[place].name!r} is that of a step which broke off, or of "
                        "zk.no_sync, and was not reduced; call zero_grad() before the next schedule.step()"
                    )

    def _refuse_repeated(self) -> None:
        """A half that computes units again has nothing left of them for the other."""
        for sharding in self._shardings:
            keep, micro = getattr(sharding.repeated, "keep", None), getattr(sharding.repeated, "micro", 1)
            if keep is not None and micro == 1:
                raise StateError(
                    f"pipeline stage {self.stage_index} was sharded with keep={keep!r}, and a zero-bubble schedule "
                    "runs its backward in halves, of which each would compute its units again; allowed: keep=None, "
                    "micro=2 or more, or a schedule with whole backwards (GPipe, 1F1B, interleaved 1F1B)"
                )

    @property
    def _stays(self) -> bool:
        if self._whole is not None:
            return self._whole
        return all(sharding.rests is None for sharding in self._shardings)

    def _keep(self, keeps: bool) -> None:
        """Whether parameters at stage 3 stay whole from here on."""
        for sharding in self._shardings:
            if sharding.gatherer is not None:
                sharding.gatherer.keep(keeps)

    def _let_go(self) -> None:
        """Nothing stays whole."""
        self._keep(False)
        for sharding in self._shardings:
            if sharding.gatherer is not None:
                sharding.gatherer.settle()

    @contextmanager
    def _or_let_go(self) -> Iterator[None]:
        """What breaks off leaves nothing whole, and gradients that were there before where they were."""
        try:
            yield
        except BaseException:
            self._keep(False)
            for finder, grad in self._before or ():
                if finder.grad is None:
                    finder.grad = grad
            self._before = None
            raise

    def _no_sync(self) -> ExitStack:
        stack = ExitStack()
        for sharding in self._shardings:
            stack.enter_context(sharding.no_sync())
        return stack

    def _put_by(self) -> list[tuple[Tensor, Tensor]]:
        """Gradients of an earlier step, which are not this one's to divide."""
        found = []
        with without_waiting():
            for sharding in self._shardings:
                for bucket in sharding.gradient_buckets:
                    for place in range(len(bucket.tenants)):
                        finder = _finder(bucket, place)
                        if finder.grad is not None:
                            found.append((finder, finder.grad))
                            finder.grad = None
        return found

    def _leaves(self) -> list[Tensor]:
        """What autograd meets of the parameters that are trained."""
        tenants = [tenant for one in self._shardings for bucket in one.gradient_buckets for tenant in bucket.tenants]
        leaves = [tenant.param if tenant.full is None else tenant.full for tenant in tenants]
        return [leaf for leaf in leaves if leaf.requires_grad]


def _finder(bucket: Any, place: int) -> Tensor:
    """Where the user looks for a gradient."""
    return bucket.homes[place].piece if bucket.exposed else bucket.tenants[place].param


def _divide(sharding: Sharding, count: int) -> None:
    """What is reduced, by the number of micro-batches: exactly as torch divides each gradient."""
    for bucket in sharding.gradient_buckets:
        if count & (count - 1) == 0:
            bucket.scale(1.0 / count)
            continue
        for place in range(len(bucket.tenants)):
            grad = _finder(bucket, place).grad
            if grad is not None:
                grad.div_(count)


def _for_inputs(leaves: Sequence[Tensor], given: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Gradients of a stage's inputs, and what those of its weights are to be computed from later.

    Weights that no gradient of an input comes past have theirs at once: torch would leave them out.
    """
    nodes = [hooks.accumulator(leaf) for leaf in leaves]
    outputs, inputs, output_grads = given["stage_output"], given["input_values"], given["output_grads"]
    grads = [None] * len(outputs) if output_grads is None else output_grads
    pairs = [(get_gradient_edge(one), grad) for one, grad in zip(outputs, grads, strict=True) if one.requires_grad]
    entered = {hooks.accumulator(one) for one in inputs if isinstance(one, Tensor) and one.requires_grad}
    stand_ins: Any = (SimpleNamespace(requires_grad=False, grad_fn=node) for node in nodes)
    found, groups = stage_backward_input(outputs, output_grads, inputs, stand_ins)
    covered = {node for group in groups for node in group["params"]}
    if not covered.issuperset(nodes):
        accumulators = _accumulators(edge.node for edge, _ in pairs)
        missing = [GradientEdge(one, 0) for one in accumulators if one not in covered and one not in entered]
        if missing:
            _pass_back(pairs, missing, keeps=True)
    return found, groups


def _accumulators(nodes: Iterable[Any]) -> list[Any]:
    """The nodes of all leaves that these come from."""
    stack = list(nodes)
    seen, found = set(stack), []
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def _for_weights(groups: Sequence[dict[str, Any]]) -> None:
    """The half that was left: from the nodes where a weight's gradient leaves the way to the inputs.

    Of a weight that is used several times, what comes to one of its nodes from another is in its gradient already; and
    these go first, as they pass through nodes that others begin with, which would be freed by then.
    """
    found = []
    for group in groups:
        pairs = zip(group.pop("intermediates"), group.pop("grads", ()), strict=False)
        there = [(node, grads) for node, grads in pairs if grads is not None]
        each = ((GradientEdge(node, at), grad) for node, grads in there for at, grad in enumerate(grads))
        edges = [(edge, grad) for edge, grad in each if grad is not None]
        if edges:
            found.append((len(there) > 1, there, edges, [GradientEdge(node, 0) for node in group["params"]]))
    for several, there, edges, targets in sorted(found, key=lambda one: not one[0]):
        handles = [node.register_prehook(_instead(grads)) for node, grads in there] if several else []
        try:
            _pass_back(edges, targets, keeps=several)
        finally:
            for handle in handles:
                handle.remove()


def _pass_back(edges: Sequence[tuple[Any, Any]], targets: list[GradientEdge], *, keeps: bool) -> None:
    begins, grads = [edge for edge, _ in edges], [grad for _, grad in edges]
    torch.autograd.backward(begins, grads, inputs=targets, retain_graph=keeps)


def _instead(grads: Any) -> Callable[[Any], Any]:
    return lambda _: grads


class _Begun(torch.autograd.Function):
    """A pass of autograd that does what it is given."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return trigger.view_as(trigger)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        ctx.work()
        return None, None


def _in_one_pass(shardings: Sequence[Sharding], device: torch.device, work: Callable[[], None]) -> None:
    """Passes that `work` runs are parts of one, at whose end gradients are reduced, if any pass reduces them."""

    def within() -> None:
        for sharding in shardings:
            if sharding.gatherer is not None:
                sharding.gatherer.joins_backward()
            if sharding.gradient_buckets:
                sharding.reduction.joins_backward()
        with hooks.within_pass():
            work()

    with torch.enable_grad():
        _Begun.apply(torch.zeros((), device=device, requires_grad=True), within).backward()
