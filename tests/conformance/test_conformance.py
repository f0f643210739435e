"""Small programs, as people write them, give under zk.shard what they give in plain torch, in every mode."""

from __future__ import annotations

import functools
import traceback
import zlib
from typing import Any

import of_blocks  # noqa: F401
import of_evaluation  # noqa: F401
import of_hooks  # noqa: F401
import of_layers  # noqa: F401
import of_loops  # noqa: F401
import of_losses  # noqa: F401
import of_modules  # noqa: F401
import of_optimizers  # noqa: F401
import pytest
from programs import MODES, PROGRAMS, Plain, Trace, Zero, compare
from worlds import World, on_threads, says

PLACES = [(stage, mode) for stage in (0, 1, 2, 3) for mode in MODES]
TIMEOUT_S = 120.0


def places_of(name: str) -> set[tuple[int, str]]:
    """Where a program is run by `make test`: once at stage 3, once below, in two modes. Its name alone decides."""
    number = zlib.crc32(name.encode())
    modes = list(MODES)
    first = number % 4
    return {(3, modes[first]), (number // 4 % 3, modes[(first + 1 + number // 12 % 3) % 4])}


def rows() -> list[Any]:
    table = []
    for name in PROGRAMS:
        for stage, mode in PLACES:
            if mode == "delayed" and not PROGRAMS[name].late:
                continue
            marks = [] if (stage, mode) in places_of(name) else [pytest.mark.slow]
            table.append(pytest.param(name, stage, mode, marks=marks, id=f"{name}-{stage}-{mode}"))
    return table


def in_plain_torch(world: World, name: str, exact_calls: int | None) -> Trace:
    run = Plain(world, exact_calls)
    PROGRAMS[name].run(run)
    return run.finish()


@functools.cache
def expected(name: str, exact_calls: int | None) -> list[Trace]:
    return on_threads(2, in_plain_torch, name, exact_calls, timeout=TIMEOUT_S)


def played(name: str, stage: int, mode: str) -> list[Trace]:
    """An error comes without its frames, which are printed: tensors there may have no memory, and pytest shows them."""
    try:
        return on_threads(2, sharded, name, stage, mode, timeout=TIMEOUT_S)
    except BaseException as error:
        traceback.print_exc()
        one: BaseException | None = error
        while one is not None:
            one.__traceback__ = None
            one = one.__cause__ or one.__context__
        failed = error
    raise failed


def sharded(world: World, name: str, stage: int, mode: str) -> Trace:
    run = Zero(world, stage, MODES[mode])
    PROGRAMS[name].run(run)
    return run.finish()


@pytest.mark.filterwarnings("ignore:.*written while an update")
@pytest.mark.parametrize("name, stage, mode", rows())
def test_the_same_as_in_plain_torch(name: str, stage: int, mode: str) -> None:
    one = PROGRAMS[name]
    refused = one.refusal(stage, mode)
    if refused is not None:
        with pytest.raises(refused.kinds) as error:
            played(name, stage, mode)
        says(str(error.value), refused.words)
        return
    reference = expected(name, MODES[mode].exact_calls)
    for mine, theirs in zip(played(name, stage, mode), reference, strict=True):
        compare(mine, theirs, one.exact)


def test_every_program_and_every_place_has_its_turn() -> None:
    assert len(PROGRAMS) >= 120
    turns = [place for name in PROGRAMS for place in places_of(name)]
    assert all(turns.count(place) >= 5 for place in PLACES), {place: turns.count(place) for place in PLACES}
