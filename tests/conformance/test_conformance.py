"""Small programs, as people write them, give under zk.shard what they give in plain torch, in every mode."""

from __future__ import annotations

import functools
import traceback
import zlib

import of_blocks  # noqa: F401
import of_cases  # noqa: F401
import of_evaluation  # noqa: F401
import of_hooks  # noqa: F401
import of_layers  # noqa: F401
import of_loops  # noqa: F401
import of_losses  # noqa: F401
import of_modules  # noqa: F401
import of_optimizers  # noqa: F401
import pytest
import torch
from small_programs import MODES, PROGRAMS, Plain, Trace, Zero, compare
from worlds import World, on_threads, says

PLACES = [(stage, mode) for stage in (0, 1, 2, 3) for mode in MODES]
TIMEOUT_S = 120.0


def places_of(name: str) -> set[tuple[int, str]]:
    """Where a program is run by `make test`: once at stage 3, once below, in two modes. Its name alone decides."""
    number = zlib.crc32(name.encode())
    modes = list(MODES)
    first = number % 4
    return {(3, modes[first]), (number // 4 % 3, modes[(first + 1 + number // 12 % 3) % 4])}


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


def follow(name: str, stage: int, mode: str) -> None:
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


def at_places(name: str, quick: bool) -> None:
    """At the places of `make test`, or at all others; the first that differs is named in the error."""
    for stage, mode in PLACES:
        if ((stage, mode) in places_of(name)) is quick and (mode != "delayed" or PROGRAMS[name].late):
            torch.manual_seed(zlib.crc32(name.encode()))
            try:
                follow(name, stage, mode)
            except BaseException as error:
                error.add_note(f"{name} at stage {stage}, {mode}")
                raise


@pytest.mark.filterwarnings("ignore:.*written while an update")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_as_in_plain_torch(name: str) -> None:
    at_places(name, quick=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*written while an update")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_at_every_other_place(name: str) -> None:
    at_places(name, quick=False)


def test_every_program_and_every_place_has_its_turn() -> None:
    assert len(PROGRAMS) >= 120
    turns = [place for name in PROGRAMS for place in places_of(name)]
    assert all(turns.count(place) >= 5 for place in PLACES), {place: turns.count(place) for place in PLACES}
