"""Calls on tensors whose elements rest elsewhere: what a call is about is fetched, and no more of it at a time than
rests together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zerokern.memory.rest import Rest

__all__ = ["by_rests", "fetched", "goes_by_rests", "in_turns", "rests_of"]


def rests_of(tensors: Iterable[Any]) -> list[Rest]:
    """Where these are while nobody uses them, each once."""
    found = (getattr(one, "zk_rest", None) for one in tensors)
    return list({id(rest): rest for rest in found if rest is not None}.values())


@contextmanager
def fetched(tensors: Iterable[Any], written: Iterable[Any]) -> Iterator[None]:
    """Within, those that rest elsewhere are here; what is written to them lasts."""
    resting = [one for one in tensors if getattr(one, "zk_rest", None) is not None]
    begun: list[Rest] = []
    try:
        for rest in rests_of(resting):
            rest.fetch()
            begun.append(rest)
        for rest in begun:
            rest.wait()
        for rest in rests_of(written):
            rest.change()
        spans = [getattr(one, "span", one) for one in resting]
        versions = [span._version for span in spans]
        yield
        for span, version in zip(spans, versions, strict=True):
            if span._version != version:
                span.zk_rest.change()
    finally:
        for rest in begun:
            rest.leave()


def in_turns(lists: Sequence[Sequence[Any]]) -> Iterator[list[int]]:
    """The positions of these lists, those together that rest together; what comes next is on its way meanwhile."""
    found: dict[tuple[int, ...], tuple[list[Rest], list[int]]] = {}
    for place, column in enumerate(zip(*lists, strict=True)):
        rests = rests_of(column)
        found.setdefault(tuple(map(id, rests)), (rests, []))[1].append(place)
    turns = list(found.values())
    begun: list[Rest] = []
    try:
        for turn, (rests, places) in enumerate(turns):
            for ahead, _ in turns[turn + (turn > 0) : turn + 2]:
                for rest in ahead:
                    rest.fetch()
                    begun.append(rest)
            yield places
            for rest in rests:
                begun.remove(rest)
                rest.leave()
    finally:
        for rest in begun:
            rest.leave()


def goes_by_rests(func: Callable) -> bool:
    """Whether a call takes lists of tensors, position by position."""
    return getattr(func, "__name__", "").startswith("_foreach_")


def by_rests(perform: Callable[[tuple, dict], Any], args: tuple, given: dict) -> Any:
    """Such a call, part by part."""
    first = args[0] if args else next(iter(given.values()))
    lists = [one for one in (*args, *given.values()) if _is_parallel(one, len(first))]
    results: dict[int, Any] = {}
    for places in in_turns(lists):

        def some(value: Any, places: list[int] = places) -> Any:
            return [value[place] for place in places] if _is_parallel(value, len(first)) else value

        result = perform(tuple(map(some, args)), {name: some(value) for name, value in given.items()})
        if result is not None:
            results.update(zip(places, result, strict=True))
    return [results[place] for place in sorted(results)] if results else None


def _is_parallel(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length and not isinstance(value, torch.Size)
