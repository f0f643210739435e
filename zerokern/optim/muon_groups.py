"""Proposes which of a model's parameters are matrices for Muon, and which are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from zerokern.core.errors import did_you_mean, got, warn
from zerokern.optim.matrices import check_matrix
from zerokern.zero.units import check_split, owners_of, units_of

__all__ = ["MuonGroups", "muon_groups"]

_FUSED = ("qkv", "in_proj", "c_attn", "query_key_value", "kv_proj", "gate_up")
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


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
