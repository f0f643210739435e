"""torch's own stages of a pipeline, whose backward in halves, of zero-bubble schedules, goes past zk.shard."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from zerokern.core.errors import StateError
from zerokern.zero import hooks

__all__ = ["refuse_half_backwards"]

DEEP = 64  # frames between a stage and the forward of its module, at most
STAGES = "torch.distributed.pipelining.stage"


def refuse_half_backwards(sharding: Any) -> None:
    """Makes a model refuse to run its backward in halves, where a forward of its was called by such a stage.

    >>> import torch
    >>> from zerokern.comm import group_on
    >>> from zerokern.zero.sharding import Sharding
    >>> sharding = Sharding(torch.nn.Linear(2, 2), stage=2, group=group_on())
    >>> refuse_half_backwards(sharding); len(sharding.guard.before_forward)
    1
    """
    sharding.guard.before_forward.append(_HalfBackwards(sharding).begin_forward)


class _HalfBackwards:
    """Whether a model's backward is run for its inputs alone, by a stage that knows nothing of zk.shard.

    That stage would then ask autograd for gradients of weights, and put them into `.grad` by hand, where they count as
    reduced. Whole backwards, of other schedules, are right: each micro-batch reduces.
    """

    def __init__(self, sharding: Any) -> None:
        self._sharding = weakref.ref(sharding)
        self._here = False  # whether the forward that runs is such a stage's
        self._hears = False

    def begin_forward(self) -> None:
        """A forward with gradients begins."""
        self._here = STAGES in sys.modules and _in_torchs_stage()
        sharding = self._sharding()
        if self._here and not self._hears and sharding is not None:
            self._hears = True
            hooks.wrap_forward(sharding.module, after=self._after)

    def _after(self, result: Any) -> None:
        if self._here and not hooks.in_backward():
            self._here = False
            hooks.when_backward_begins(result, self._refuse_half)

    def _refuse_half(self) -> None:
        sharding = self._sharding()
        if sharding is None or not any(param.requires_grad for param in sharding.zero_order):
            return
        if not sharding.in_pass():
            raise StateError(
                "a zero-bubble schedule runs backward in halves, and torch.distributed.pipelining.PipelineStage would "
                "then set gradients of weights by hand, which zk.shard could not reduce; allowed: zk.PipelineStage, "
                "which takes the same arguments, or a schedule with whole backwards (GPipe, 1F1B, interleaved 1F1B)"
            )


def _in_torchs_stage() -> bool:
    stage = getattr(sys.modules[STAGES], "_PipelineStageBase", None)
    code = getattr(getattr(stage, "forward_maybe_with_nosync", None), "__code__", None)
    frame = sys._getframe(1)
    for _ in range(DEEP):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
