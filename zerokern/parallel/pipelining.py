"""A stage of torch.distributed.pipelining whose module zk.shard shards: one reduction for all micro-batches of a step.

Gradients of micro-batches are added up on this rank, and leave with those of the last one, whichever that is. Where a
schedule computes gradients of inputs first and those of weights later (zero bubble), the latter are one pass too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage

from zerokern.core.errors import StateError, got
from zerokern.parallel.backward_halves import for_inputs, for_weights
from zerokern.parallel.tied_stages import Ties, check_tied, check_tied_still_there
from zerokern.zero import hooks
from zerokern.zero.kinds import shardings_of, without_waiting
from zerokern.zero.shard import shard_of
from zerokern.zero.sharding import Sharding

__all__ = ["PipelineStage"]

# by the group of a pipeline, this rank's stage that a schedule has begun last
_BEGUN: weakref.WeakKeyDictionary[Any, weakref.ref[PipelineStage]] = weakref.WeakKeyDictionary()


class PipelineStage(TorchStage):
    """`torch.distributed.pipelining.PipelineStage` for a module that `zk.shard` has sharded, at any ZeRO stage.

    All of torch's schedules accept it: GPipe, 1F1B, interleaved and zero-bubble. Give `zk.shard` the mesh of the ranks
    that hold the same part of the model (`mesh["dp"]`), and give this class the group of ranks that a batch passes
    through. Each step reduces every bucket once, in the backward pass of the last micro-batch. Gradients are divided by
    the number of micro-batches if the schedule says so (`scale_grads`). Gradients left over from an earlier step are
    added to, not divided again.

    Args:
        submodule: this stage's part of the model.
        stage_index, num_stages, device: as in torch's class, which gets all that is not named here.
        whole: whether stage 3 keeps parameters gathered from a step's first forward to its last backward. By default it
            does, unless they rest in another tier; False gathers them for each micro-batch.
        tied: parameters that other stages hold copies of, such as a word embedding that is also the output head, by
            their name in the whole model: `tied={"words.weight": part.head.weight}`. Every stage with a copy must list
            it and start from the same values. Their gradients are summed once, at the end of a step.

    `zk.clip_grad_norm_(..., group=)` and the optimizers' `group=` make one norm and one decision to step for all
    stages. `zk.save` and `zk.load` store the part of each stage under the names of the whole model.

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
        tied: Mapping[str, nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """As torch's; `whole` and `tied` besides."""
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        if self.dw_builder is not None:
            do = "Gradients that other functions compute would not be reduced; zero-bubble schedules need none of them"
            raise ValueError(got("dw_builder", "a function", "None", do))
        if whole is not None and not isinstance(whole, bool):
            raise TypeError(got("whole", whole, "True, False or None"))
        self._whole, self.tied = whole, check_tied(tied, submodule)
        self._ties: Ties | None = None
        self._together: list[PipelineStage] = []  # this rank's stages that a schedule runs
        self._waits = False  # until its first forward
        self._ended: int | None = None  # its step, whose gradients are to be divided by this
        self._reset()

    def _reset(self) -> None:
        self._shardings: list[Sharding] = []  # within a step
        self._passes: list[int] = []  # how often each had reduced before
        self._forwards = 0
        self._gradients_before: list[tuple[Tensor, Tensor]] | None = None  # the step, and whose they are

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The messages with which torch 2.11 opens connections, before a schedule's first step.

        Where this rank holds both stages, as in V-shaped schedules, torch has one to the rank itself, which gloo has no
        connection to: "Pair is not connected".
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def clear_runtime_states(self) -> None:
        """A schedule begins."""
        super().clear_runtime_states()
        self._reshard()
        self._reset()
        check_tied_still_there(self.tied, self.submod)
        self._join_stages_of_schedule()
        for sharding in self._find_shardings():
            self._check(sharding)

    def _join_stages_of_schedule(self) -> None:
        """A schedule begins all its stages before it runs any."""
        pg = self.group or dist.group.WORLD
        last = _BEGUN[pg]() if pg in _BEGUN else None
        begun = [] if last is None else last._together
        if self in begun or not all(one._waits for one in begun):
            begun = []
        begun.append(self)
        self._together, self._waits, self._ended = begun, True, None
        _BEGUN[pg] = weakref.ref(self)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """A micro-batch's forward."""
        self._waits = False
        if not self._shardings:
            self._begin()
        with self._reshard_on_error():
            result = self.submod(*args, **kwargs)
        self._forwards += 1
        if not self.has_backward and self._forwards == len(self.args_recv_info):
            self._reshard()
            self._reset()
        return result

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """A micro-batch's backward, or its half for inputs or for weights; the last one reduces."""
        with self._reshard_on_error():
            if self._gradients_before is None:
                self._gradients_before = self._set_gradients_aside()
            if backward_type == "input":
                self._refuse_repeated()
                with self._no_sync():
                    return for_inputs(self._leaves(), bwd_kwargs)
            if backward_type == "weight":
                self._keep_unsharded(True)  # its passes follow no order of units
                with ExitStack() if last_backward else self._no_sync():
                    _in_one_backward(self._shardings, self.device, lambda: for_weights(bwd_kwargs["param_groups"]))
                if last_backward or not self._stays_unsharded:
                    self._reshard()
                return (), None
            self._keep_unsharded(not last_backward and self._stays_unsharded)
            with ExitStack() if last_backward else self._no_sync():
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The end of a step; with that of this rank's last stage, what stages share is added up."""
        self._reshard()
        if not self.has_backward:
            return
        self._reduce_rest()
        self._ended = grad_scale_factor
        # all stages of a schedule have computed before one ends; others were begun by one that was refused
        together = [one for one in self._together if not one._waits]
        if all(one._ended is not None for one in together):
            # nothing is left to compute on this rank, and what others wait for is on its way: it can wait for them
            if any(one._ties is None for one in together):
                ties = Ties(together)
                for one in together:
                    one._ties = ties
            assert self._ties is not None
            self._ties.add_up()
            for one in together:
                one._finish(one._ended or 1)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """The end of a step, where a schedule says nothing else."""
        self._reshard()
        if self.tied:
            raise StateError(
                f"pipeline stage {self.stage_index} shares {min(self.tied)!r} with others, and the schedule ended the "
                "step before its gradients were sent to them; allowed: a schedule that calls perform_reduce_grad, as "
                "all of torch's do from 2.10 on"
            )
        self._reduce_rest()
        self._finish(grad_scale_factor)

    def _reduce_rest(self) -> None:
        with self._reshard_on_error():
            for sharding, before in zip(self._shardings, self._passes, strict=True):
                if sharding.reduction.passes == before and sharding.gradient_buckets:  # nothing came last, or nothing
                    _in_one_backward([sharding], self.device, lambda: None)

    def _finish(self, factor: int) -> None:
        for sharding in self._find_shardings() if factor != 1 else ():
            _divide(sharding, factor)
        self._put_back(adds=True)
        self._passes, self._shardings = [], []

    def _put_back(self, *, adds: bool) -> None:
        """Restores gradients from before the step; `adds`: also where there are new ones."""
        before, self._gradients_before = self._gradients_before or [], None
        with torch.no_grad():
            for owner, grad in before:
                if owner.grad is None:
                    owner.grad = grad
                elif adds:
                    owner.grad.add_(grad)

    def _find_shardings(self) -> list[Sharding]:
        """Returns the shardings of this module's parameters."""
        params = list(self.submod.parameters())
        stranger = next((name for name, one in self.submod.named_parameters() if shard_of(one) is None), None)
        if stranger is not None:
            raise StateError(
                f"{stranger!r} of the module of pipeline stage {self.stage_index} is not sharded: call "
                'zk.shard(module, mesh=mesh["dp"]) first, or take torch.distributed.pipelining.PipelineStage'
            )
        return list(shardings_of(map(shard_of, params)))

    def _begin(self) -> None:
        """The first forward of a step."""
        self._shardings = self._find_shardings()
        self._passes = [sharding.reduction.passes for sharding in self._shardings]
        self._keep_unsharded(self._stays_unsharded)

    def _check(self, sharding: Sharding) -> None:
        if not self.has_backward:
            return
        if not sharding.reduction.synchronizes:
            raise StateError(
                f"pipeline stage {self.stage_index} was run within zk.no_sync, and would never reduce its gradients; "
                "call schedule.step() outside: it reduces once, and adds to gradients that are still there"
            )
        for bucket in sharding.gradient_buckets:
            for place in bucket.local if bucket.reducer.needed else ():
                if bucket.owner(place).grad is not None:
                    raise StateError(
                        f"the gradient of {bucket.shards[place].name!r} is that of a step which broke off, or of "
                        "zk.no_sync, and was not reduced; call zero_grad() before the next schedule.step()"
                    )

    def _refuse_repeated(self) -> None:
        """Refuses recomputation, whose result the first half of a backward would use up."""
        for sharding in self._shardings:
            keep, micro = getattr(sharding.wrapper, "keep", None), getattr(sharding.wrapper, "micro", 1)
            if keep is not None and micro == 1:
                raise StateError(
                    f"pipeline stage {self.stage_index} was sharded with keep={keep!r}, and a zero-bubble schedule "
                    "runs its backward in halves, of which each would compute its units again; allowed: keep=None, "
                    "micro=2 or more, or a schedule with whole backwards (GPipe, 1F1B, interleaved 1F1B)"
                )

    @property
    def _stays_unsharded(self) -> bool:
        if self._whole is not None:
            return self._whole
        return all(sharding.rests is None for sharding in self._shardings)

    def _keep_unsharded(self, keeps: bool) -> None:
        """Sets whether units of stage 3 stay unsharded."""
        for sharding in self._shardings:
            if sharding.runner is not None:
                sharding.runner.keep_unsharded(keeps)

    def _reshard(self) -> None:
        """Reshards all units."""
        self._keep_unsharded(False)
        for sharding in self._shardings:
            if sharding.runner is not None:
                sharding.runner.reshard_all()

    @contextmanager
    def _reshard_on_error(self) -> Iterator[None]:
        """Context manager: after an error nothing is kept unsharded, and earlier gradients are back in `.grad`."""
        try:
            yield
        except BaseException:
            self._keep_unsharded(False)
            self._put_back(adds=False)
            raise

    def _no_sync(self) -> ExitStack:
        stack = ExitStack()
        for sharding in self._shardings:
            stack.enter_context(sharding.no_sync())
        return stack

    def _set_gradients_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Takes gradients of earlier steps out of `.grad`: they are not divided by micro-batches again."""
        buckets = [bucket for sharding in self._shardings for bucket in sharding.gradient_buckets]
        with without_waiting():
            owners = [bucket.owner(place) for bucket in buckets for place in range(len(bucket.entries))]
            found = [(owner, owner.grad) for owner in owners if owner.grad is not None]
            for owner, _ in found:
                owner.grad = None
        return found

    def _leaves(self) -> list[Tensor]:
        """Returns the leaves of autograd of trained parameters."""
        buckets = [bucket for sharding in self._shardings for bucket in sharding.gradient_buckets]
        return [leaf for bucket in buckets for leaf in bucket.inbox.leaves if leaf.requires_grad]


def _divide(sharding: Sharding, count: int) -> None:
    """Divides reduced gradients by the number of micro-batches, with the rounding of torch's division."""
    for bucket in sharding.gradient_buckets:
        if count & (count - 1) == 0:
            bucket.scale(1.0 / count)
            continue
        for place in range(len(bucket.entries)):
            grad = bucket.owner(place).grad
            if grad is not None:
                grad.div_(count)


class _RunInBackward(torch.autograd.Function):
    """A pass of autograd that does what it is given."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return trigger.view_as(trigger)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        ctx.work()
        return None, None


def _in_one_backward(shardings: Sequence[Sharding], device: torch.device, work: Callable[[], None]) -> None:
    """Runs `work` within one backward pass; gradients are reduced at its end, if any pass within reduces them."""

    def within() -> None:
        for sharding in shardings:
            if sharding.runner is not None:
                sharding.runner.join_backward()
            if sharding.gradient_buckets:
                sharding.reduction.joins_backward()
        with hooks.within_pass():
            work()

    with torch.enable_grad():
        _RunInBackward.apply(torch.zeros((), device=device, requires_grad=True), within).backward()
