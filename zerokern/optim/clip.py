"""Clips gradients apart from the update: torch's function, for parameters at any stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as clip_plain
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerokern.comm import Group, MeshGroups, user_group
from zerokern.core.errors import got
from zerokern.kernels import sumsq
from zerokern.kernels.ops import sumsq_there
from zerokern.optim import checks
from zerokern.optim.accord import norm_of_all
from zerokern.optim.shards import with_gradients
from zerokern.optim.survey import added
from zerokern.zero.kinds import is_divided
from zerokern.zero.reducing import known_squares, measured, rows_by_bucket, sumsq_of_each
from zerokern.zero.shard import Shard, gradients_of_dtensors, shard_of
from zerokern.zero.tiers import fetched, in_turns, rest_of

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
    """`torch.nn.utils.clip_grad_norm_`, also for gradients that are sharded: the norm is that of all ranks.

    Every rank must call it. Gradients under `zk.shard` are not touched: the next update multiplies them by the factor,
    and is skipped if the norm is not finite. Gradients of DTensors are scaled here, as torch does. The norm is returned
    as a plain tensor. `max_grad_norm` of an optimizer does all this without the call.

    `group`: ranks that hold other parameters, such as the stages of a pipeline (`mesh["pp"]` or a ProcessGroup). Their
    gradients count too. Each rank calls this once with all it holds of the model; if the norm is not finite, all skip.

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([3.0, 4.0])
    >>> zk.clip_grad_norm_([weight], max_norm=1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    checks.refuse_other_kinds("max_norm", max_norm)
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    params = [_gradient_holder(one) for one in ([parameters] if isinstance(parameters, Tensor) else parameters)]
    shards = [(param, shard) for param in params if (shard := shard_of(param)) is not None]
    divided = [(param, shard) for param, shard in shards if shard.team is not None]
    tensors = [param for param in params if shard_of(param) is None and is_divided(param)]
    place = next((shard.sharding.group.device for _, shard in shards), params[0].device if params else "cpu")
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
    for sharding, mine in _grouped(divided, attrgetter("sharding")).items():
        if with_gradients(sharding) <= {id(shard) for _, shard in mine} and sharding.has_own_gradients:
            sharding.fold(factor.item() if factor.is_cpu or any(one.piece.is_cpu for _, one in mine) else factor)
        else:
            if sharding.publisher is not None:
                sharding.publisher.finish()  # an update may be reading them
            _scale(mine, factor)
    return shown


def _gradient_holder(param: Tensor) -> Tensor:
    """Returns the tensor whose `.grad` it is: at stage 0, the span if `zk.shards` has returned that."""
    shard = shard_of(param)
    exposed = shard is not None and shard.team is None and param.grad is None and shard.piece.grad is not None
    return shard.piece if exposed else param  # type: ignore[union-attr]


def _gradient_of(param: Tensor, shard: Shard) -> Tensor | None:
    """Returns this rank's span of a gradient; after `zk.shards(model)` the piece has it."""
    found = shard.local_gradient(param)
    return shard.piece.grad if found is None else found


def _scale(pairs: Iterable[tuple[Tensor, Shard]], factor: Tensor) -> None:
    """Multiplies this rank's span of each gradient in place."""
    found = [grad for param, shard in pairs if (grad := _gradient_of(param, shard)) is not None]
    for places in in_turns([found]):
        some = [found[place] for place in places]
        with fetched(some, written=some):
            for grad in some:
                grad.mul_(factor.to(grad.device))


def _grouped(pairs: Iterable[tuple[Tensor, Shard]], key: Callable[[Shard], Any]) -> dict[Any, list[Any]]:
    """Returns these parameters and their shards by what the shards have in common."""
    made: dict[Any, list[Any]] = {}
    for param, shard in pairs:
        made.setdefault(key(shard), []).append((param, shard))
    return made


def _total(
    divided: list[tuple[Tensor, Shard]],
    spans: list[tuple[Any, list[Tensor]]],
    plain: list[Tensor],
    kind: float,
    foreach: bool | None,
    party: Group | MeshGroups | None,
) -> Tensor:
    """Returns the norm over all ranks as a 0-dim float64 tensor: one collective for each group of ranks."""
    add, op = (torch.sum, "sum") if kind == 2.0 else (torch.amax, "max")
    sums: dict[Any, list[Tensor]] = {}
    for (sharding, team, copies), mine in _grouped(divided, attrgetter("sharding", "team", "copies")).items():
        factor = sharding.take_fold()
        sharding.fold(factor)
        pairs = [(grad, shard) for param, shard in mine if (grad := _gradient_of(param, shard)) is not None]
        there = [(grad, shard) for grad, shard in pairs if grad.numel()]
        own = _measure([grad for grad, _ in there], kind, sharding.group.device, [shard for _, shard in there])
        sums.setdefault(team, []).append(own * factor**2 / copies if kind == 2.0 else own * factor)
    for team, spread in spans:
        found = _measure([grad for grad in spread if grad.numel()], kind, team.device)
        sums.setdefault(team, []).append(found.to(team.device))
    totals = []
    for team, terms in sums.items():
        totals.append(add(torch.stack(terms)).reshape(1))
        norm_of_all(team, totals[-1], op, "zk.clip_grad_norm_")
    copied = [1 if (shard := shard_of(param)) is None else shard.copies for param in plain]
    for copies in sorted(set(copied)):
        whole = [p.grad for p, its in zip(plain, copied, strict=True) if its == copies and p.grad is not None]
        alone = get_total_norm(whole, kind, foreach=foreach)
        totals.append((alone.double() ** 2 / copies if kind == 2.0 else alone.double()).reshape(1))
    total = torch.zeros(1, dtype=torch.float64)
    if totals:
        total = add(torch.cat([one.to(totals[0].device) for one in totals])).reshape(1)
    if party is not None:
        total = total.to(party.device)
        norm_of_all(party, total, op, "zk.clip_grad_norm_")
    return total[0].sqrt() if kind == 2.0 else total[0]


def _measure(grads: list[Tensor], kind: float, place: torch.device, shards: Sequence[Shard] = ()) -> Tensor:
    """Returns the sum of squares, or the largest magnitude, NaN if there is any; `shards`: of these gradients."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=place)
    if len({grad.is_cuda for grad in grads}) > 1:  # zk.shard has put some of them off the device
        each = [_measure([grad], kind, place, shards[n : n + 1]) for n, grad in enumerate(grads)]
        return torch.stack(each).amax() if kind == math.inf else reduce(torch.add, each)
    if grads[0].is_cuda and kind == 2.0:
        return sumsq_there(grads).to(place)
    if kind == 2.0:
        known = measured(known_squares(rows_by_bucket(shards), grads))
        rests = list(map(rest_of, grads))
        sums = sumsq_of_each(rests, known, lambda places: [sumsq(grads[place]) for place in places])
        return torch.tensor(added(sums), dtype=torch.float64).to(place)
    largest = []
    for places in in_turns([grads]):
        with fetched([grads[place] for place in places], written=()):
            # detached: a part of a gradient refuses to tell its norm for that of the whole
            largest += [torch.linalg.vector_norm(grads[place].detach(), math.inf) for place in places]
    return torch.stack(largest).amax().double().to(place)
