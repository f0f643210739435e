"""Small programs, as people write them, give under zk.shard what they give in plain torch, in every mode."""

from __future__ import annotations

import functools
import traceback
import zlib
from collections import Counter
from collections.abc import Sequence

import of_bench  # noqa: F401
import of_blocks  # noqa: F401
import of_cases  # noqa: F401
import of_contract  # noqa: F401
import of_evaluation  # noqa: F401
import of_hooks  # noqa: F401
import of_layers  # noqa: F401
import of_loops  # noqa: F401
import of_losses  # noqa: F401
import of_modules  # noqa: F401
import of_optimizers  # noqa: F401
import pytest
import torch
from lane import is_drawn
from small_programs import KEEP, MODES, PROGRAMS, Plain, Trace, Zero, compare
from worlds import World, on_threads, says

TIMEOUT_S = 120.0
EVERY_MODE = {**MODES, KEEP.name: KEEP}
CHANGE_THEIR_MODULES = (
    "old_spectral_norm",
    "first_order_meta_learning",
    "some_values_exchanged_for_one_call",
    "a_jacobian_by_torch_func",
    "a_vectorized_forward",
    "norms_with_running_buffers",
    "frozen_between_forward_and_backward",
)
NOT_RECOMPUTED = {  # models without units
    "stochastic_depth_of_each_rank_within_a_unit",
    "odd_parameters",
    "one_tiny_parameter",
    "convolutions",
    "batch_norm_in_training",
    "bags",
    "a_hypernetwork",
    "states_that_do_not_depend_on_the_split",
    "clipped_where_ranks_hold_unequal_parts",
    "a_state_dict_of_the_whole",
    "layers_in_a_sequential_and_a_dictionary",
    "uncertainty_weights_beside_the_model",
    "embedding_with_gradients_scaled_by_frequency",
}
REFUSED_FIRST = {"an_embedding_with_a_largest_norm"}  # without units, too, and refused for other words


def places_of(name: str) -> list[tuple[int, str]]:
    """Each stage in each mode; first the place of `make test`, which the name alone decides. Most begin at stage 3."""
    number = zlib.crc32(name.encode())
    modes = [mode for mode in MODES if mode != "delayed" or PROGRAMS[name].late]
    stage = 3 if number % 3 else number // 3 % 3
    places = [(stage, mode) for stage in range(4) for mode in modes]
    places.insert(0, places.pop(places.index((stage, modes[number // 9 % len(modes)]))))
    return places


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
    run = Zero(world, stage, EVERY_MODE[mode])
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
    reference = expected(name, EVERY_MODE[mode].exact_calls)
    for mine, theirs in zip(played(name, stage, mode), reference, strict=True):
        compare(mine, theirs, one.exact)


def at(name: str, places: Sequence[tuple[int, str]]) -> None:
    """The first place that differs is named in the error."""
    for stage, mode in places:
        torch.manual_seed(zlib.crc32(name.encode()))
        try:
            follow(name, stage, mode)
        except BaseException as error:
            error.add_note(f"{name} at stage {stage}, {mode}")
            raise


@pytest.mark.filterwarnings("ignore:.*written while an update")
@pytest.mark.parametrize("name", [name for name, one in PROGRAMS.items() if not one.slow])
def test_the_same_as_in_plain_torch(name: str) -> None:
    at(name, places_of(name)[:1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*written while an update")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_at_every_other_place(name: str, pytestconfig: pytest.Config) -> None:
    places = places_of(name)[0 if PROGRAMS[name].slow else 1 :]
    at(name, [place for place in places if is_drawn(f"{name} {place}", pytestconfig, 0.25)])


@pytest.mark.parametrize("name", CHANGE_THEIR_MODULES)
def test_a_module_is_recomputed_as_its_forward_found_it(name: str) -> None:
    """Buffers that a forward writes to, parameters that are exchanged for it, or frozen after it; transforms, which
    take no checkpoint, compute without one."""
    at(name, [(0, KEEP.name), (2, KEEP.name), (3, KEEP.name)])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in REFUSED_FIRST])
def test_the_same_where_units_are_recomputed(name: str) -> None:
    place = [(2 + zlib.crc32(name.encode()) % 2, KEEP.name)]
    if name not in NOT_RECOMPUTED:
        at(name, place)
        return
    with pytest.raises((ValueError, RuntimeError), match="units="):
        at(name, place)


def test_every_program_and_every_place_has_its_turn() -> None:
    assert len(PROGRAMS) >= 120
    first = Counter(places_of(name)[0] for name in PROGRAMS)
    assert all(first[stage, mode] >= 3 for stage in range(4) for mode in MODES), first
