"""300 uneven tensors into one bucket and back, the sum of squares and the check for non-finite values included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...run import Outcome
from ...shapes import Shape
from ..lists import Lists, Making, Way, making
from ..peers import lists as torch_lists
from ..report import Desk
from ..roof import roofs
from ..settings import Settings, uneven
from ..turns import Contest

F32, BF16 = torch.float32, torch.bfloat16
OURS, BACK = "zk flatten with norm", "zk unflatten with norm"
SMALL_SHARE = 16  # a bucket as small as those that overlap with a backward pass


DTYPES = ((BF16, BF16), (F32, BF16), (BF16, F32))


def warmers(settings: Settings) -> list[Callable[[], object]]:
    """Both ways for each pair of dtypes, on a little data."""

    def launch(source: torch.dtype, target: torch.dtype) -> None:
        one = Lists(uneven(20, 1 << 20), source, target, settings.device)
        _flatten(settings)(one)()
        _unflatten(settings)(one)()

    return [] if settings.rehearse else [lambda pair=pair: launch(*pair) for pair in DTYPES]


def run(desk: Desk) -> None:
    sizes = desk.settings.sizes
    large = uneven(sizes.flatten_tensors, sizes.flatten_numel)
    small = uneven(sizes.flatten_tensors, max(sizes.flatten_tensors, sizes.flatten_numel // SMALL_SHARE))
    # (shape, dtype of the tensors, dtype of the bucket); the first is what is asked for
    cases = [(large, BF16, BF16), (small, BF16, BF16), *((large, *pair) for pair in DTYPES[1:])]
    left = 2 * len(cases)
    for i, (shape, source, target) in enumerate(cases):
        lists = sets(shape, source, target, desk.settings)
        outcome = desk.contest(_contest(lists, desk.settings, OURS), left)
        if i == 0:
            _figures(desk, outcome)
        desk.contest(_contest(lists, desk.settings, BACK), left - 1)
        left -= 2
        del lists


def sets(shape: Shape, source: torch.dtype, target: torch.dtype, settings: Settings) -> list[Lists]:
    count = settings.rotation(shape.numel * (source.itemsize + target.itemsize))
    return [Lists(shape, source, target, settings.device) for _ in range(count)]


def _figures(desk: Desk, outcome: Outcome) -> None:
    for peer in ("cat", "foreach_copy", "chunk_cat"):
        desk.ratio_to_fastest(f"flatten.{peer}", outcome, OURS, [f"{peer} + norm"])
    row = next((row for row in outcome.rows if row.name == OURS), None)
    if row is None:
        desk.could_not("flatten.copy_share", outcome.missing.get(OURS, "it did not take part"))
    else:
        desk.figure("flatten.copy_share", row.roof_share)


def _contest(lists: Sequence[Lists], settings: Settings, name: str) -> Contest:
    one, back = lists[0], name == BACK
    way = _unflatten if back else _flatten
    check = Lists.check_tensors if back else Lists.check_bucket
    before = Lists.before_unflatten if back else Lists.before_flatten
    theirs = torch_lists.unflatten if back else torch_lists.flatten
    peers: dict[str, Making] = {f"{peer} + norm": make for peer, make in theirs(lists, norm=True).items()}
    peers.update({f"{peer} alone": make for peer, make in theirs(lists, norm=False).items()})
    ours: Mapping[str, Making] = {name: making(lists, name, way(settings), check, before)}
    dtypes = f"{_short(one.tensors[0])} {'<-' if back else '->'} {_short(one.bucket)}"
    title = f"{name}, {one.shape.name} tensors, {one.shape.numel:,} elements, {dtypes}, {len(lists)} sets"
    return Contest(title, one.shape.numel, ours, peers, roofs=lambda: roofs(settings, one.nbytes))


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _flatten(settings: Settings) -> Way:
    def way(one: Lists) -> Callable[[], object]:
        flattener = _flattener(one, settings)
        return _with_stats(one, lambda: flattener.flatten(one.tensors, one.bucket, stats=one.stats))

    return way


def _unflatten(settings: Settings) -> Way:
    def way(one: Lists) -> Callable[[], object]:
        flattener = _flattener(one, settings)
        return _with_stats(one, lambda: flattener.unflatten(one.bucket, one.tensors, stats=one.stats))

    return way


def _flattener(one: Lists, settings: Settings) -> Any:
    """Made once for a list, as for the gradients of a model."""
    from zerokern.kernels.flat import Flattener

    return Flattener(one.tensors, one.bucket.dtype, impl=settings.impl)


def _with_stats(one: Lists, move: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        move()
        one.norm = one.root_of_stats

    return run
