"""The stages of a pipeline in a checkpoint: saved, loaded and exported as the one model that they are stages of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zerokern.checkpoint.partial import PartialModel, SharedWeights
from zerokern.checkpoint.ranks import Ranks
from zerokern.core.errors import StateError, got

__all__ = ["Stages", "parts_of_one_model", "stages_of"]


def stages_of(given: Any) -> Stages | None:
    """The model that pipeline stages, one or several, are stages of; None of anything else."""
    found = list(given) if isinstance(given, Sequence) else [given]
    if not found or not all(_is_stage(one) for one in found):
        return None
    stages = sorted(found, key=lambda one: one.stage_index)
    tied = {one.stage_index: getattr(one, "tied", {}) for one in stages}
    return Stages({one.stage_index: one.submod for one in stages}, stages[0].num_stages, tied)


def _is_stage(one: Any) -> bool:
    return isinstance(getattr(one, "submod", None), nn.Module) and hasattr(one, "stage_index")


class Stages(PartialModel):
    """The modules of the stages that are here, by the number of their stage.

    >>> Stages({0: nn.Linear(2, 2)}, count=2).numbers
    (0,)
    """

    def __init__(
        self, modules: dict[int, nn.Module], count: int, tied: Mapping[int, Mapping[str, Tensor]] | None = None
    ) -> None:
        """`count`: of the stages of the model; `tied`: by stage, the weights that others have copies of."""
        super().__init__()
        self.numbers, self.count = tuple(modules), count
        self._tied = {id(one): (key, at) for at, some in (tied or {}).items() for key, one in some.items()}
        for number, module in modules.items():
            self.add_module(str(number), module)

    def check(self) -> None:
        names: set[str] = set()
        for module in self.children():
            mine = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
            for name in sorted(mine & names):
                _refuse_twice(name)
            names |= mine

    def shared_weights(self, ranks: Ranks, tensors: Callable[[], Mapping[str, Tensor]]) -> SharedWeights:
        """What `tied=` of the stages says: the copy of the first stage is saved."""

        def mine() -> tuple[list[tuple[str, int, str]], list[str]]:
            found = tensors()
            return [(*self._tied[id(one)], name) for name, one in found.items() if id(one) in self._tied], list(found)

        each = ranks.all_gather("weights that stages share", mine)
        told: dict[str, dict[int, str]] = {}
        rows: set[tuple[str, int, str]] = {(key, stage, name) for some, _ in each for key, stage, name in some}
        for key, stage, name in sorted(rows):
            told.setdefault(key, {})[stage] = name
        firsts = {(some[min(some)], min(some)) for some in told.values()}
        copies = {(name, stage) for some in told.values() for stage, name in some.items()} - firsts
        saved = Counter(name for names in {tuple(names) for _, names in each} for name in names)
        saved.subtract(name for name, _ in copies)
        for key, some in told.items():
            for stage, name in some.items():
                if (name, stage) in copies and name != some[min(some)] and saved[name]:
                    raise StateError(
                        f"{name!r} is stage {stage}'s copy of {key!r}, and another weight has that name at another "
                        "stage; keep in each stage the names that the whole model has"
                    )
        mine_only = each[ranks.rank][0]
        names = {name: list(dict.fromkeys(told[key].values())) for key, _, name in mine_only}
        return SharedWeights(names, frozenset(name for key, stage, name in mine_only if stage != min(told[key])))

    def names_elsewhere(self, ranks: Ranks, names: Callable[[], Iterable[str]]) -> frozenset[str]:
        each = ranks.all_gather("stages", lambda: list(names()))
        return frozenset(name for some in each for name in some).difference(each[ranks.rank])

    def merge_saved(self, ranks: Ranks, digest: Mapping[str, str], found: Mapping[str, Any], nbytes: int) -> Any:
        def mine() -> dict[str, Any]:
            names = [key for key in found["items"] if key.startswith("model.")]
            return self._part(digest, names, values=found["values"], places=found["places"], nbytes=nbytes)

        told = ranks.all_gather("stages", mine)
        return ranks.all_gather("one model", lambda: _merged(told))[0]

    def merge_rows(self, ranks: Ranks, digest: str, rows: Sequence[tuple[str, Any, Any]]) -> list[Any]:
        def mine() -> dict[str, Any]:
            return self._part(digest, [name for name, *_ in rows], rows=rows)

        return [row for part in parts_of_one_model(ranks.all_gather("stages", mine)) for row in part["rows"]]

    def _part(self, digest: Any, names: Sequence[str], **more: Any) -> dict[str, Any]:
        """What this rank says of its stages, for `parts_of_one_model`."""
        return {"numbers": self.numbers, "count": self.count, "digest": digest, "names": names, **more}


def parts_of_one_model(each: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks have said, of those with the same stages once, in the order of stages; by `numbers`, `count`,
    `digest` and `names`. StateError where these are not the stages of one model.

    >>> one = {"numbers": (0,), "count": 1, "digest": "", "names": ["weight"]}
    >>> len(parts_of_one_model([one, one]))
    1
    """
    first: dict[tuple[int, ...], tuple[int, dict[str, Any]]] = {}
    for rank, one in enumerate(each):
        before = first.setdefault(tuple(one["numbers"]), (rank, one))
        if before[1]["digest"] != one["digest"]:
            raise StateError(
                f"ranks {before[0]} and {rank} both have pipeline stages {one['numbers']}, and not the same model or "
                "optimizer; allowed: the same on all ranks that have the same stages"
            )
    parts = [one for _, (_, one) in sorted(first.items())]
    there = sorted(number for one in parts for number in one["numbers"])
    if there != list(range(parts[0]["count"])):
        raise StateError(
            got("the pipeline stages of all ranks", there, f"0 to {parts[0]['count'] - 1}, each of one kind of ranks")
        )
    names: set[str] = set()
    for one in parts:
        for name in one["names"]:
            if name in names:
                _refuse_twice(name)
        names.update(one["names"])
    return parts


def _merged(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts = parts_of_one_model(each)
    values = [one["values"] for one in parts]
    merged_values = {
        "groups": [_groups(some) for some in _together([one["groups"] for one in values], "optimizers")],
        "optimizers": [_optimizers(some) for some in _together([one["optimizers"] for one in values], "optimizers")],
        "aliases": {name: first for one in values for name, first in one["aliases"].items()},
        "extra_state": {name: kept for one in values for name, kept in one["extra_state"].items()},
    }
    places = {name: place for one in parts for name, place in one["places"].items()}
    return {"values": merged_values, "places": places, "nbytes": sum(one["nbytes"] for one in parts)}


def _together(each: Sequence[Sequence[Any]], what: str) -> list[tuple[Any, ...]]:
    counts = sorted({len(one) for one in each})
    if len(counts) > 1:
        raise StateError(got(f"the number of {what} of pipeline stages", counts, "the same on all of them"))
    return list(zip(*each, strict=True))


def _groups(each: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of one optimizer; the first of one stage is the first of another."""
    made = []
    for number, some in enumerate(_together(each, "param_groups")):
        options = [{key: value for key, value in one.items() if key != "params"} for one in some]
        other = next((one for one in options if one != options[0]), None)
        if other is not None:
            key = next(key for key in {**options[0], **other} if options[0].get(key) != other.get(key))
            raise StateError(
                f"param_groups[{number}] has {key}={options[0].get(key)!r} at one pipeline stage and "
                f"{other.get(key)!r} at another; allowed: the same groups at all of them, in one order"
            )
        made.append({**options[0], "params": [name for one in some for name in one["params"]]})
    return made


def _optimizers(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    beside = {name: kept for one in each for name, kept in one["beside"].items()}
    return {**each[0], "beside": beside}


def _refuse_twice(name: str) -> None:
    raise StateError(
        f"two pipeline stages have a parameter or buffer called {name!r}, and are saved as one model; keep in each "
        "stage the names that the whole model has: delete the layers that it has not, or use a ModuleDict"
    )
