"""The ranks that save or load one checkpoint together. An error on one of them is raised on all."""

from __future__ import annotations

import hashlib
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from zerokern.comm import Group, during, group_of
from zerokern.core.errors import StateError, ZerokernError, got

__all__ = ["Ranks", "absolute_path", "digests", "open_same", "refuse_differences", "refuse_unusable"]

T = TypeVar("T")

LISTED = 3

_TEACH = (ZerokernError, ValueError, TypeError, OSError, KeyboardInterrupt)  # errors whose message needs no traceback


class Ranks:
    """A process group as torch.distributed.checkpoint sees it; a process without one is a group of one rank.

    >>> alone = Ranks.of(None)
    >>> alone.rank, alone.size, alone.all_gather("example", lambda: "done")
    (0, 1, ['done'])
    """

    def __init__(self, pg: Any, call: str = "") -> None:
        self.pg = pg
        self.call = call  # the public call, for messages
        self._group: Group | None = None
        self._wrapper = _DistWrapper(pg, pg is not None, 0)
        self.rank, self.size = self._wrapper.get_rank(), self._wrapper.get_world_size()

    @classmethod
    def of(cls, group: Any, call: str = "") -> Ranks:
        """Returns the ranks of a ProcessGroup, or of a DeviceMesh of one dimension or of all ranks; None is the
        world."""
        there = dist.is_available() and dist.is_initialized()
        if group is None:
            return cls(dist.group.WORLD if there else None, call)
        if not there:
            advice = "Call torch.distributed.init_process_group first"
            raise ValueError(got("group", group, "None while torch.distributed is not initialised", advice))
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, DeviceMesh):
            everyone = sorted(group.mesh.flatten().tolist()) == list(range(dist.get_world_size()))
            if group.ndim != 1 and not everyone:
                advice = "Choose one dimension, or flatten the mesh: its ranks together hold what is saved"
                raise ValueError(got("group", group, "a mesh of one dimension, or of all ranks", advice))
            group = dist.group.WORLD if group.ndim != 1 else group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(got("group", group, "a ProcessGroup, a DeviceMesh or None for the world"))
        if dist.get_rank(group) < 0:
            raise ValueError(got("group", group, f"a group that this rank, {dist.get_rank()}, is part of"))
        return cls(group, call)

    def all_gather(self, what: str, work: Callable[[], T]) -> list[T]:
        """Returns the results of `work` on all ranks, to all of them; raises on all if it raises on one."""
        return self._run(what, self._wrapper.all_gather, work)

    def check_same(self, given: Callable[[], dict[str, Any]]) -> None:
        """Raises on all ranks if the arguments of one are invalid or differ from those of the first."""
        each = self.all_gather("arguments", lambda: {"call": self.call, **given()})
        for rank, mine in enumerate(each):
            for name in each[0]:
                if name not in mine or mine[name] != each[0][name]:
                    difference = f"{name}={each[0][name]!r} on rank 0 and {mine.get(name)!r} on rank {rank}"
                    raise ValueError(
                        f"{each[0]['call']} was given {difference}; allowed: the same on all ranks, which call it "
                        "together. Decide on one rank and tell the others, or leave the argument out"
                    )

    def broadcast(self, what: str, work: Callable[[], T]) -> T:
        """Returns on all ranks the result of `work`, which only the first rank calls."""
        return self._run(what, self._wrapper.broadcast, work)

    def scatter(self, what: str, mine: Callable[[], T], divided: Callable[[list[T]], list[T]]) -> T:
        """Gathers the results of `mine` to the first rank and returns to each rank its element of
        `divided(results)`."""
        return self._run(what, self._wrapper.reduce_scatter, mine, divided)

    def gather_to_first(self, what: str, mine: Callable[[], T], ended: Callable[[list[T]], None]) -> None:
        """Passes the results of `mine` on all ranks to `ended` on the first rank; returns when that has returned."""
        self._run(what, self._wrapper.all_reduce, mine, ended)

    def _run(self, what: str, exchange: Callable[..., Any], mine: Callable[[], Any], *more: Any) -> Any:
        """Runs one of torch's exchanges, which calls `mine`, and raises the original error instead of torch's wrapper.

        All ranks meet here first: torch's collectives do not say which rank is missing, and crash if ranks move
        different things.
        """
        if self.size > 1:
            with during(self.call):
                self._group = self._group or group_of(self.pg)
                self._group.agree(what)
        kept: list[BaseException] = []

        def picklable() -> Any:
            try:
                return mine()
            except BaseException as error:
                kept.append(error)
                raise _make_picklable(error) from None

        try:
            return exchange(what, picklable, *more)
        except CheckpointException as wrapped:
            error = kept[0] if kept else _unwrap(wrapped, self.rank, self.size)
        raise error from None


def refuse_unusable(model: Any, **switches: Any) -> None:
    """Raises TypeError unless `model` is a module and the switches are booleans."""
    if not isinstance(model, torch.nn.Module):
        do = "It comes behind the path and before its optimizers, as in zk.save(path, model, opt)"
        raise TypeError(got("model", model, "a torch.nn.Module", do))
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(got(name, value, "True or False"))


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path, which a later os.chdir does not change.

    >>> absolute_path("step3") == Path.cwd() / "step3"
    True
    """
    if not os.fspath(path):
        raise ValueError(got("path", path, "the name of a folder", "'.' is the one that the program is in"))
    return Path(path).absolute()


def _unwrap(wrapped: CheckpointException, rank: int, size: int) -> BaseException:
    """Returns the error that torch.distributed.checkpoint wrapped: of this rank, or else of the first rank that failed.

    >>> _unwrap(CheckpointException("read", {1: (ValueError("shape"), None)}), rank=0, size=2)
    ValueError('shape')
    """
    failures = wrapped.failures
    failed = rank if rank in failures else min(failures)
    error, frames = failures[failed]
    notes = [f"raised on rank {failed} of {size}"] if size > 1 else []
    others = sorted({str(failures[other][0]) for other in failures if other != failed} - {str(error)})
    notes += [f"other ranks failed too: {'; '.join(others)}"] if others else []
    if frames is not None and not isinstance(error, _TEACH):
        notes.append("".join(traceback.format_list(frames)))
    for note in notes if hasattr(error, "add_note") else ():  # from Python 3.11 on
        error.add_note(note)
    return error


def _make_picklable(error: BaseException) -> BaseException:
    """Returns the error, or one with the same message that can be sent to another process.

    >>> class Local(Exception): ...
    >>> _make_picklable(Local("three")), _make_picklable(ValueError("four"))
    (RuntimeError('Local: three'), ValueError('four'))
    """
    if isinstance(error, _TEACH) and type(error).__module__.partition(".")[0] in ("builtins", "zerokern"):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _rows_to_compare(items: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns what is compared between ranks, as text; parts of a tensor count as the whole tensor.

    >>> import torch
    >>> _rows_to_compare({"model.w": torch.ones(2, 3)}, {"groups": [], "aliases": {"v": "w"}})
    {'model': ['w torch.float32 (2, 3)'], 'opt': [], 'tied weights': ['v is w']}
    """
    names = {key.removeprefix("model."): item for key, item in items.items() if key.startswith("model.")}
    return {
        "model": [f"{name} {item.dtype} {tuple(item.shape)}" for name, item in names.items()],
        "opt": [
            f"{number} of optimizer {which}: {json.dumps(group, sort_keys=True)}"
            for which, groups in enumerate(values["groups"])
            for number, group in enumerate(groups)
        ],
        "tied weights": [f"{other} is {first}" for other, first in sorted(values["aliases"].items())],
    }


def digests(items: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Returns digests that are the same on ranks with the same model and optimizers; these are sent instead of the
    rows."""
    made = _rows_to_compare(items, values)
    return {name: hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest() for name, rows in made.items()}


def refuse_differences(
    ranks: Ranks, each: Sequence[Mapping[str, str]], items: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Raises StateError on all ranks that shows the first difference. `each`: the `digests` of all ranks."""
    difference = next(
        ((rank, name) for rank, mine in enumerate(each) for name in mine if mine[name] != each[0][name]), None
    )
    if difference is None:
        return
    rank, name = difference
    rows = ranks.all_gather("what differs", lambda: _rows_to_compare(items, values)[name])
    only = []
    for this, other in ((0, rank), (rank, 0)):
        mine = [row for row in rows[this] if row not in rows[other]]
        more = f" and {len(mine) - LISTED} more" if len(mine) > LISTED else ""
        only.append(f"rank {this} alone has {', '.join(mine[:LISTED]) or 'nothing'}{more}")
    raise StateError(
        f"{name} differs between ranks 0 and {rank}: {'; '.join(only)}. All ranks save one model and its optimizers "
        "together, as one checkpoint; allowed: the same on all of them (group=... names the ranks of one model)"
    )


def open_same(ranks: Ranks, path: Path, opening: Callable[[], str]) -> None:
    """Opens what lies at `path` on every rank until all ranks see the same; `opening` opens it and returns a
    fingerprint.

    Raises StateError on all ranks if they never do: a folder of the same name may be another one on another host.
    """
    before: list[str] = []
    while len(set(each := ranks.all_gather("open", opening))) > 1:
        if each == before:  # else something was saved between two ranks' looks
            rank = next(rank for rank, seen in enumerate(each) if seen != each[0])
            raise StateError(
                f"{path} is not the same on all ranks: rank 0 sees {each[0]}, rank {rank} sees {each[rank]}; nothing "
                "was changed. All ranks load one checkpoint: choose a folder that every host mounts, or copy the same "
                "one to each of them"
            )
        before = each
