"""Muon: an optimizer for whole matrices, and which of a model's parameters it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from zerokern.core.errors import did_you_mean, got, warn
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
from zerokern.zero.units import check_split, owners_of, units_of

__all__ = ["Muon", "MuonGroups", "muon_groups"]

_FUSED = ("qkv", "in_proj", "c_attn", "query_key_value", "kv_proj", "gate_up")
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


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


_Proposal = tuple[str, nn.Parameter, int, str]
"""A name, a parameter, into how many matrices it is split (0: it is for the other optimizer), and why."""


class MuonGroups(tuple[list[dict[str, Any]], list[dict[str, Any]]]):
    """Two lists of param_groups with names, matrices and the rest; printed, it says of each parameter where it goes."""

    _proposals: Sequence[_Proposal]

    def __new__(cls, proposals: Sequence[_Proposal]) -> MuonGroups:
        groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, param, split, _ in proposals:
            groups.setdefault(split, []).append((name, param))
        rest = groups.pop(0, [])
        matrices = [{"params": groups[split], "split": split} for split in sorted(groups)]
        made = super().__new__(cls, (matrices, [{"params": rest}] if rest else []))
        made._proposals = proposals
        return made

    def __repr__(self) -> str:
        longest = max((len(name) for name, *_ in self._proposals), default=0)
        lines = [
            f"{'muon' if split else 'rest'}  {name:{longest}}  {' x '.join(map(str, param.shape))}  {why}"
            for name, param, split, why in self._proposals
        ]
        return "\n".join(map(str.rstrip, lines))


def muon_groups(
    model: nn.Module,
    *,
    matrices: Sequence[str] = (),
    rest: Sequence[str] = (),
    split: Mapping[str, int] | None = None,
) -> MuonGroups:
    """Proposes which parameters `zk.Muon` updates, and which another optimizer does; returns param_groups for both.

    Matrices are parameters with two dimensions in a repeated block (a child of an `nn.ModuleList`), without embeddings
    and what is tied to one. Everything else is the rest, the output head too. Print the result, and correct it:

    matrices, rest: patterns of names ("blocks.*.attn.weight") that go there, whatever is proposed.
    split: a dict from patterns of names to the number of matrices in such a parameter, along its first dimension: 3 for
        a fused query, key and value, the number of experts for a stack with three dimensions. Each is orthogonalized by
        itself. A parameter that is not named here is one matrix; a warning lists names that suggest several.

    >>> import torch, zerokern as zk
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.tokens, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)
    ...         self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    >>> groups = zk.muon_groups(Model())
    >>> print(groups)
    rest  tokens.weight    9 x 4  an embedding
    rest  head.weight      9 x 4  outside of repeated blocks
    muon  blocks.0.weight  4 x 4
    rest  blocks.0.bias    4  no matrix
    >>> matrices, rest = groups
    >>> opts = zk.Muon(matrices, lr=0.02), zk.AdamW(rest, lr=3e-4)
    """
    split = {pattern: check_split(number) for pattern, number in (split or {}).items()}
    matrices, rest = ([one] if isinstance(one, str) else one for one in (matrices, rest))
    owners = owners_of(model)
    inner = {id(param) for unit in units_of(model)[1:] for _, param in unit.params}
    proposals = []
    unused = Counter(dict.fromkeys((*matrices, *rest, *split), 0))
    for name, param in model.named_parameters():
        hits = {pattern for pattern in unused if fnmatchcase(name, pattern)}
        unused.update(dict.fromkeys(hits, 1))
        into = {one: split[one] for one in split if one in hits}
        number = next(iter(into.values()), 1)
        if len(set(into.values())) > 1:
            raise ValueError(got("split", into, f"one number for {name}"))
        if hits.intersection(matrices) and hits.intersection(rest):
            raise ValueError(got("matrices", name, "a name that rest= has not too"))
        why = _no_matrix(param, owners[id(param)], id(param) in inner, bool(into))
        if hits.intersection(rest):
            number, why = 0, "named"
        elif why and not hits.intersection(matrices):
            number = 0
        else:
            check_matrix(name, param.shape, number)
            why = "named" if hits.intersection(matrices) else ""
            why = f"{number} matrices" if number > 1 else why
            fused = not into and not hits and any(part in name.lower() for part in _FUSED)
            why = "as one matrix, by its name several" if fused else why
        proposals.append((name, param, number, why))
    if missed := [pattern for pattern, count in unused.items() if not count]:
        given = {"matrices": matrices, "rest": rest, "split": split}
        argument = next(name for name, patterns in given.items() if missed[0] in patterns)
        near = did_you_mean(missed[0], _patterns(name for name, _ in model.named_parameters()))
        do = f"No parameter has such a name{'. ' if near else ''}{near}"
        raise ValueError(got(argument, missed[0], "a pattern of names of parameters", do))
    _warn_of_fused(proposals)
    return MuonGroups(proposals)


def _patterns(names: Iterable[str]) -> Iterator[str]:
    """Yields what somebody may write for names: themselves, any number in place of theirs, and all below a prefix.

    >>> list(_patterns(["blocks.0.weight"]))
    ['blocks.0.weight', 'blocks.*.weight', 'blocks.*', 'blocks.0.*', 'blocks.*.*']
    """
    for name in names:
        parts = name.split(".")
        general = ["*" if part.isdigit() else part for part in parts]
        yield from dict.fromkeys([name, ".".join(general)])
        ends = range(1, len(parts))
        yield from dict.fromkeys(".".join([*some[:end], "*"]) for end in ends for some in (parts, general))


def _no_matrix(param: Tensor, owners: Sequence[Any], is_inner: bool, is_split: bool) -> str:
    """Returns why a parameter is none for Muon."""
    if param.dim() == 3 and not is_split:
        return "three dimensions: named in split=, each slice is a matrix"
    if param.dim() not in (2, 3):
        return "no matrix"
    if any(isinstance(owner.module, _LOOKUPS) for owner in owners):
        return "an embedding"
    return "" if is_inner else "outside of repeated blocks"


def _warn_of_fused(proposals: Sequence[_Proposal]) -> None:
    fused = [name for name, _, _, why in proposals if "several" in why]
    if fused:
        first = fused[0]
        do = f"split={{{first!r}: 3}} orthogonalizes each by itself, and matrices=[{first!r}] all as one"
        warn(f"{len(fused)} parameters, such as {first}, look fused, and are one matrix; {do}")
