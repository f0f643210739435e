"""Muon: an optimizer for whole matrices, and which of a model's parameters it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.errors import got
from zerokern.core.units import MasterFormat, NsForm, Schedule, StateFormat, Tier, Update
from zerokern.memory import TierConfig
from zerokern.optim import checks
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.device import is_apart
from zerokern.optim.formats import Algorithm, Group
from zerokern.optim.matrices import Matrix, check_matrix, check_shard, group_of, matrices_of, parts_of_matrices
from zerokern.optim.survey import Groups, names_of
from zerokern.schedule import Delayed
from zerokern.zero.kinds import is_placed
from zerokern.zero.shard import Shard, shard_of
from zerokern.zero.units import check_split

__all__ = ["Muon"]


def _refuse(group: Group) -> None:
    """Raises what settings are refused that do not go together, or not with the device of the parameters."""
    checks.steps_of_coefficients(group)
    if group["ns_form"] != "gram":
        return
    for _, param in checks.listed(group["params"]):
        checks.gram_form(group["ns_dtype"], on_cpu=param.device.type == "cpu" and not is_apart(param))


def _some(params: ParamsT) -> ParamsT:
    """Returns what was given, if there is anything in it."""
    if isinstance(params, Tensor):
        return params
    given: Any = list(params)
    if not given:
        do = (
            "zk.muon_groups(model) proposes them within the blocks of an nn.ModuleList; of another model "
            "muon_groups(model, matrices=[...]) takes their names. Print what it returns"
        )
        raise ValueError(got("params", given, "at least one matrix", do))
    return given


class Muon(FusedOptimizer):
    """Muon as torch.optim.Muon defines it: momentum whose singular values are made nearly 1, matrix by matrix.

    It is for matrices that multiply activations. Embeddings, heads, biases and norms need another optimizer;
    `zk.muon_groups(model)` proposes which parameters go where. lr, weight_decay, momentum, nesterov, ns_coefficients,
    eps, ns_steps and adjust_lr_fn are torch's. ns_coefficients may also be a sequence of `ns_steps` triples, one for
    each iteration.

    A matrix is updated as a whole. The exact state of a bf16 parameter is 6 bytes, an fp32 average and a 16-bit
    remainder; AdamW's is 10. Under `zk.shard` at stages 1 and 2 each matrix must lie whole on one rank (`whole=`). At
    stage 3 each step assembles it on one rank.

    ns_dtype: the dtype in which matrices are orthogonalized, "bf16" or "fp32". By default bf16 on a GPU, and fp32 on
        every CPU; "bf16" is faster on CPUs with tiles for it (AMX). Also per param_group.
    ns_form: "gram" iterates on the small Gram matrix of fp32 matrices of at least 128 x 1024 and 2^18 elements whose
        longer side is at least twice the shorter one; its results differ from those of "standard" by rounding. On CPUs
        alone. Also per param_group.
    split: how many matrices a parameter consists of, as equal slices of its first dimension: 3 for a fused query, key
        and value, the number of experts for a stack of them. Each is orthogonalized by itself, which changes the
        update; 1 is torch's. Also per param_group.
    maximize: as in torch's other optimizers.
    tier: "device", "cpu", `zk.Nvme(path)`, or a list of these. Records on a disk end where matrices do, or this rank's
        parts of them; a matrix whose state is larger than a slot of the ring has several, and still one at a time, or
        a round of them, is gathered in memory.
    update: where the update of state that rests off the device runs, for parameters on a GPU. The iteration is never
        made on the host then, so "host" is refused for these.

    state_format ("fp32", "bf16" or "int8", of momentum_buffer), master_format, max_grad_norm, group, stochastic_seed
    and schedule: as `zk.Adam` says.

    >>> import torch, zerokern as zk
    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> newton_schulz = {"ns_steps": 10, "ns_coefficients": (1.5, -0.5, 0.0), "ns_dtype": "fp32"}
    >>> opt = zk.Muon([weight], lr=0.5, weight_decay=0.0, **newton_schulz)
    >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, -2.0]]); opt.step(); weight.data.round(decimals=3) + 0.0
    tensor([[-0.5000,  0.0000],
            [ 0.0000,  0.5000]])
    """

    _algorithm = Algorithm(
        "muon",
        counts_steps=False,
        others=("lr", "weight_decay", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "ns_dtype", "ns_form"),
        refuse=_refuse,
        whole=True,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | Sequence[tuple[float, float, float]] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        ns_dtype: Literal["bf16", "fp32"] | None = None,
        ns_form: NsForm = "standard",
        split: int = 1,
        maximize: bool = False,
        tier: Tier | Sequence[str | TierConfig] = "device",
        schedule: Schedule | Delayed = "sync",
        update: Update = "device",
        state_format: StateFormat = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(_some(params), locals())

    def _check_params(self, named: Sequence[tuple[str, Any]], group: Mapping[str, Any]) -> None:
        split = check_split(group["split"])
        for place, (name, param) in enumerate(named):
            if not isinstance(param, Tensor):
                continue  # torch refuses it
            if (shard := shard_of(param)) is not None:
                self._check_shard(shard, split)
            else:
                check_matrix(name or f"params[{place}]", param.shape, split, placed=is_placed(param))

    def _check_shard(self, shard: Shard, split: int) -> None:
        check_shard(shard, split)
        if (group := group_of(shard)) is None:
            return
        do = "stages 1 and 2 with whole= leave matrices whole"
        if group.device.type != shard.piece.device.type or shard.sharding.splits:
            what = f"parameters off {group.device}, of which stage 3 cuts {shard.name}"
            raise ValueError(got("tier of zk.shard", what, "'device' for matrices on GPUs, which exchange them", do))

    def _matrices(self, groups: Groups, shards: Sequence[Shard]) -> Sequence[Sequence[Matrix]]:
        found: list[list[Matrix]] = []
        names = names_of(groups)
        for group in groups:
            split, in_blocks = check_split(group["split"]), group["state_format"] == "int8"
            for param in group["params"]:
                name, shape, numel, is_cut = names[len(found)], param.shape, param.numel(), False
                if shards:
                    shard = shards[len(found)]
                    self._check_shard(shard, split)
                    name, shape, is_cut = shard.name, shard.shape, group_of(shard) is not None
                else:
                    check_matrix(name, shape, split)
                matrices = matrices_of(name, shape, shape.numel() if is_cut else numel, split, in_blocks=in_blocks)
                found.append(parts_of_matrices(shard, matrices) if is_cut else matrices)
        return found
