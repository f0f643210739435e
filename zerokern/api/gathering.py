"""zk.gathered: full parameters for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from zerokern.core.errors import got
from zerokern.zero.whole import whole

__all__ = ["gathered"]


@contextmanager
def gathered(module_or_params: nn.Module | Tensor | Iterable[Tensor], write: bool = False) -> Iterator[None]:
    """Within, the parameters are ordinary full tensors, on every rank; all ranks enter and leave together.

    What is taken from them (`state_dict()`, copies) stays valid afterwards. With `write=True` what was written into
    them is kept: each rank keeps its own span of what it wrote, so write the same on all of them. Without, it is
    dropped at stage 3, where they are copies.

    Gradients of what is computed with them are reduced, then or later. A model that is gathered whole computes without
    the other ranks, so one of them may evaluate or generate alone, and `copy.deepcopy` makes a plain model of it.

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(2, 1, bias=False), stage=3)
    >>> with zk.gathered(model, write=True):
    ...     _ = torch.nn.init.ones_(model.weight)
    >>> model.weight.local
    tensor([1., 1.])
    """
    if isinstance(module_or_params, nn.Module):
        params = list(module_or_params.parameters())
    else:
        listed = [module_or_params] if isinstance(module_or_params, Tensor) else list(module_or_params)
        strangers = [one for one in listed if not isinstance(one, nn.Parameter)]
        if strangers:
            raise TypeError(got("module_or_params", type(strangers[0]).__name__, "a module, or parameters of one"))
        params = [one for one in listed if isinstance(one, nn.Parameter)]
    with whole(params, write):
        yield
