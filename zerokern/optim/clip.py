"""Clipping apart from the update: torch's function, for parameters at any stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as clip_plain
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerokern.comm import Group, MeshGroups, user_group
from zerokern.core.errors import got
from zerokern.kernels import sumsq
from zerokern.kernels.ops import sumsq_there
from zerokern.optim.accord import norm_of_all
from zerokern.optim.shards import gradient_of, scale_gradients, with_gradients
from zerokern.optim.survey import added
from zerokern.zero.kinds import is_divided
from zerokern.zero.reducing import KnownSquares, Seen, sumsq_of_each
from zerokern.zero.shard import Shard, gradients_of_dtensors, shard_of
from zerokern.zero.tiers import fetched, in_turns

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | torch.nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: Any = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`, also for gradients that are divided among ranks: the norm is that of all ranks.

    Every rank must call it. Gradients under `zk.shard` are not touched: the next update multiplies them by the factor,
    and is skipped if the norm is not finite. Gradients of DTensors are scaled here, as torch does. The norm is returned
    as a plain tensor. `max_grad_norm` of an optimizer does all this without the call.

    `group`: ranks that hold other parameters, such as the stages of a pipeline (`mesh["pp"]` or a ProcessGroup). Their
    gradients count too. Each rank calls this once with all it holds of the model; if the norm is not finite, all skip.

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], max_norm=1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    params = [_gradient_holder(param) for param in _listed(parameters)]
    homes = [(param, home) for param in params if (home := shard_of(param)) is not None]
    divided = [(param, home) for param, home in homes if home.team is not None]
    tensors = [param for param in params if shard_of(param) is None and is_divided(param)]
    place = next((home.sharding.group.device for _, home in homes), params[0].device if params else "cpu")
    party = user_group(group, place)
    if not divided and not tensors and party is None:
        return clip_plain(params, max_norm, norm_type, error_if_nonfinite, foreach)
    kind = float(norm_type)
    if kind not in (2.0, math.inf):
        raise ValueError(got("norm_type", norm_type, "2.0 or inf for parameters that are divided"))
    known = {id(param) for param in (*tensors, *(param for param, _ in divided))}
    spans: list[Any] = gradients_of_dtensors(tensors)
    plain = [param for param in params if id(param) not in known and param.grad is not None]
    total = _total(divided, spans, plain, kind, foreach, party)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {kind} of the gradients is {float(total)}, so they cannot be clipped; with "
            "error_if_nonfinite=False the next update is skipped instead"
        )
    shown = total.to(torch.float32)
    if plain and party is None:
        clip_grads_with_norm_(plain, max_norm, shown, foreach)
    elif plain:
        spans = [*spans, (party, [param.grad for param in plain if param.grad is not None])]
    for _, grads in spans:
        scale = torch.clamp(float(max_norm) / (shown + 1e-6), max=1.0)
        if party is not None:  # or gradients of other ranks would count as those of a step that is good
            scale = torch.where(torch.isfinite(shown), scale, torch.nan)
        torch._foreach_mul_(grads, scale.to(grads[0].device))
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    # the update is skipped, where gradients show it, or else by this; a batch after it is not
    factor = torch.where(torch.isfinite(total), factor, 1.0 if party is None else torch.nan)
    for sharding, mine in _by_sharding(divided).items():
        if with_gradients(sharding) <= {id(home) for _, home in mine} and sharding.has_own_gradients:
            sharding.fold(factor.item() if factor.is_cpu or mine[0][1].piece.is_cpu else factor)
        else:
            if sharding.publisher is not None:
                sharding.publisher.finish()  # an update may be reading them
            scale_gradients([param for param, _ in mine], factor)
    return shown


def _listed(parameters: Tensor | torch.nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _gradient_holder(param: Tensor) -> Tensor:
    """Returns the tensor whose `.grad` it is: at stage 0, the span if `zk.shards` has returned that."""
    home = shard_of(param)
    exposed = home is not None and home.team is None and param.grad is None and home.piece.grad is not None
    return home.piece if exposed else param  # type: ignore[union-attr]


def _by_sharding(divided: Iterable[tuple[Tensor, Shard]]) -> dict[Any, list[tuple[Tensor, Shard]]]:
    """The parameters of each model."""
    made: dict[Any, list[tuple[Tensor, Shard]]] = {}
    for param, home in divided:
        made.setdefault(home.sharding, []).append((param, home))
    return made


def _total(
    divided: list[tuple[Tensor, Shard]],
    spans: list[tuple[Any, list[Tensor]]],
    plain: list[Tensor],
    kind: float,
    foreach: bool | None,
    party: Group | MeshGroups | None,
) -> Tensor:
    """The norm over all ranks as a 0-dim float64 tensor: one collective for each group of ranks."""
    sums: dict[Any, list[Tensor]] = {}
    for sharding, homes in _by_sharding(divided).items():
        factor = sharding.take_fold()
        sharding.fold(factor)
        for team in dict.fromkeys(home.team for _, home in homes):
            mine = [pair for pair in homes if pair[1].team is team]
            for copies in sorted({home.copies for _, home in mine}):
                pairs = [(gradient_of(param, home), home) for param, home in mine if home.copies == copies]
                there = [(grad, home) for grad, home in pairs if grad is not None and grad.numel()]
                own = _measure([grad for grad, _ in there], kind, sharding.group.device, [home for _, home in there])
                sums.setdefault(team, []).append(own * factor**2 / copies if kind == 2.0 else own * factor)
    for team, spread in spans:
        place = team.device
        sums.setdefault(team, []).append(_measure([g for g in spread if g.numel()], kind, place).to(place))
    totals = []
    for group, terms in sums.items():
        own = torch.stack(terms).sum() if kind == 2.0 else torch.stack(terms).amax()
        totals.append(own.reshape(1))
        norm_of_all(group, totals[-1], "sum" if kind == 2.0 else "max", "zk.clip_grad_norm_")
    copied = [1 if (home := shard_of(param)) is None else home.copies for param in plain]
    for copies in sorted(set(copied)):
        whole = [p.grad for p, its in zip(plain, copied, strict=True) if its == copies and p.grad is not None]
        alone = get_total_norm(whole, kind, foreach=foreach)
        totals.append((alone.double() ** 2 / copies if kind == 2.0 else alone.double()).reshape(1))
    place = totals[0].device if totals else "cpu"
    found = torch.cat([one.to(place) for one in totals]) if totals else torch.zeros(1, dtype=torch.float64)
    found = (found.sum() if kind == 2.0 else found.amax()).reshape(1)
    if party is not None:
        found = found.to(party.device)
        norm_of_all(party, found, "sum" if kind == 2.0 else "max", "zk.clip_grad_norm_")
    return found[0].sqrt() if kind == 2.0 else found[0]


def _measure(grads: list[Tensor], kind: float, place: torch.device, homes: Sequence[Shard] = ()) -> Tensor:
    """The sum of squares, or the largest magnitude, NaN if there is any; `homes`: of these gradients' parameters."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=place)
    if grads[0].is_cuda and kind == 2.0:
        return sumsq_there(grads).to(place)
    if kind == 2.0:
        known = KnownSquares(homes).of(grads)
        seen = [Seen(getattr(grad, "zk_rest", None), one) for grad, one in zip(grads, known, strict=True)]
        sums = sumsq_of_each(seen, lambda places: [sumsq(grads[place]) for place in places])
        return torch.tensor(added(sums), dtype=torch.float64).to(place)
    largest = []
    for places in in_turns([grads]):
        with fetched([grads[place] for place in places], written=()):
            # detached: a part of a gradient refuses to tell its norm for that of the whole
            largest += [torch.linalg.vector_norm(grads[place].detach(), math.inf) for place in places]
    return torch.stack(largest).amax().double().to(place)
