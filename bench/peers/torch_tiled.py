"""torch's fused CPU optimizers cut by hand into tiles, which stay in the cache between the cast, the update and the
cast back. No framework does this; it is the most that torch's own kernels can give."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..contest import Provider
from ..step import PeerStep, StepProblem
from .torch_fused import Lists, fused_update, provider

TILE_NUMELS = (1 << 18, 1 << 19, 1 << 20)


def tiles_of(views: Lists, tile_numel: int) -> list[Lists]:
    """Cut every tensor to at most a tile, then gather pieces up to a tile."""
    pieces = [piece for view in views for piece in view.split(tile_numel)]
    tiles: list[Lists] = [[]]
    room = tile_numel
    for piece in pieces:
        if piece.numel() > room:
            tiles.append([])
            room = tile_numel
        tiles[-1].append(piece)
        room -= piece.numel()
    return tiles


def tiled_step(step: PeerStep, tile_numel: int, update: Callable[..., None]) -> Callable[[], None]:
    grads, params, outs = (tiles_of(views, tile_numel) for views in (step.grads, step.params, step.outs))
    states = [tiles_of(views, tile_numel) for views in step.states]
    flat = step.grads32[0] if len(step.grads32) == 1 else step.problem.buffers.take("grad32", torch.float32)
    scratch = [list(flat[: sum(p.numel() for p in tile)].split([p.numel() for p in tile])) for tile in grads]
    partials = torch.zeros(len(grads))

    def run() -> None:
        for tile, cast, partial in zip(grads, scratch, partials.unbind(), strict=True):
            torch._foreach_copy_(cast, tile)
            whole = flat[: sum(piece.numel() for piece in tile)]
            torch.linalg.vector_norm(whole, out=partial)
        unscale = step.clip_of(torch.linalg.vector_norm(partials)).reciprocal()
        for tile, cast, param, out, *state in zip(grads, scratch, params, outs, *states, strict=True):
            torch._foreach_copy_(cast, tile)
            update(param, cast, *state, grad_scale=unscale)
            torch._foreach_copy_(out, param)

    return run


def full_step(problem: StepProblem) -> list[Provider]:
    step = PeerStep(problem)
    make = functools.partial(tiled_step, step, update=fused_update(step))
    return [provider(step, "torch-tiled", f"fused, tiles of {n}", make(n)) for n in TILE_NUMELS]


CANDIDATES = {"adam": full_step, "adagrad": full_step, "sgd": full_step}
