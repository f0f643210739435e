"""Gradients multiplied in place, wherever they rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zerokern.zero.shard import Shard, shard_of
from zerokern.zero.tiers import fetched, in_turns

__all__ = ["gradient_of", "scale_gradients"]


def gradient_of(param: Tensor, home: Shard) -> Tensor | None:
    """This rank's span of a gradient, which is with the piece where the piece is what is trained (`zk.shards`)."""
    found = home.local_gradient(param)
    return home.piece.grad if found is None else found


def scale_gradients(params: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply this rank's span of each gradient in place."""
    found = []
    for param in params:
        home = shard_of(param)
        grad = param.grad if home is None else gradient_of(param, home)
        if grad is not None:
            found.append(grad)
    for places in in_turns([found]):
        some = [found[place] for place in places]
        with torch.no_grad(), fetched(some, written=some):
            for grad in some:
                grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
