"""`Watch`: what was written or was given other memory is found, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tables import each

from zerokern.memory import addresses
from zerokern.zero.watch import Watch, WriteLog, counting


def without_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(addresses, "torch_calls", lambda: None)


def weights_of(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2,), float(number))) for number in range(count)]


@each("lacks", [lambda patch: None, without_calls])
@each("count", [4, 100])
def test_each_change_is_found_once(count: int, lacks: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Of 100 natively, where torch offers that."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        lacks(patch)
        weights = weights_of(count)
        watch = Watch(weights)
        assert watch.unchanged() and watch.in_place() and watch.changed() == []
        weights[1].add_(1)
        weights[2].data = torch.zeros(2)
        torch.utils.swap_tensors(weights[3], torch.nn.Parameter(torch.zeros(2).add_(1)))
        assert not watch.unchanged() and not watch.in_place()
        assert watch.changed() == [1, 2, 3] and watch.written() == [1, 3]
        watch.accept([1, 2])
        assert watch.changed() == [3]
        watch.accept()
        assert watch.unchanged() and watch.changed() == []


@each("count", [4, 100])
def test_our_own_writes_are_accounted_for_and_hide_no_memory(count: int) -> None:
    weights = weights_of(count)
    watch = Watch(weights)
    with torch.no_grad():
        weights[0].add_(1)
        weights[1].add_(1)
    weights[2].data = torch.zeros(2)
    assert watch.written() == [0, 1] and watch.changed() == [0, 1, 2]
    assert watch.written(accept=True) == [0, 1] and watch.written() == [] and watch.changed() == [2]
    with torch.no_grad():
        weights[0].add_(1)
    watch.accept_writes()
    assert watch.written() == [] and watch.changed() == [2]


def test_memory_is_exchanged_where_its_storage_was_freed_or_it_lies_elsewhere() -> None:
    """Another view of a storage, or another storage over memory whose first one lives, is the same memory."""
    memory = bytearray(8)
    first = torch.frombuffer(memory, dtype=torch.float32)
    weights = [torch.nn.Parameter(first), torch.nn.Parameter(torch.ones(2))]
    watch = Watch(weights)
    weights[0].data = torch.frombuffer(memory, dtype=torch.float32)
    weights[1].data = weights[1].data.view(2)
    assert watch.changed() == [] and watch.unchanged()
    watch.accept()
    del first
    assert watch.changed() == [] and watch.unchanged()
    weights[0].data = torch.zeros(2)
    weights[0].data = torch.frombuffer(memory, dtype=torch.float32)
    assert watch.changed() == [0] and watch.in_place() and not watch.unchanged()
    weights[1].data = torch.frombuffer(memory, dtype=torch.float32)
    watch.accept()
    assert watch.changed() == []


def test_where_bits_decide_a_write_of_the_same_values_is_none() -> None:
    weights = weights_of(3)
    watch = Watch(weights)
    watch.compare_bits([0, 1])
    with torch.no_grad():
        for weight in weights[:2]:
            weight.copy_(weight.clone())
        weights[0].data = weights[0].data.clone()
        assert watch.changed() == [] and watch.unchanged() and watch.prints
        weights[1].add_(1)
        weights[2].copy_(weights[2].clone())
        assert watch.changed() == [1, 2]
        watch.accept([1, 2])
        weights[1].sub_(1)  # back to what it was: not what was accepted
        assert watch.changed() == [1] and watch.prints
    watch.accept_writes()
    assert not watch.prints


def test_another_watch_goes_on_where_the_last_one_was() -> None:
    weights = weights_of(4)
    last = Watch(weights[:3])
    last.compare_bits([0])
    with torch.no_grad():
        weights[1].add_(1)
        weights[0].copy_(weights[0].clone())
    weights[2].data = torch.zeros(2)
    made = Watch([weights[3], *weights[:3]])
    made.carry_over(last)
    assert made.changed() == [2, 3] and made.prints


def test_tensors_of_inference_mode_raise_as_torch_does() -> None:
    with torch.inference_mode():
        tensors = [torch.ones(2) for _ in range(100)]
    with pytest.raises(RuntimeError, match="Inference tensors"):
        Watch(tensors)
    assert Watch(tensors, versions=False).in_place()


def test_a_log_whose_neighbour_was_interrupted_hears_of_later_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (WriteLog([weight]) for weight in weights_of(2))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(second, "note", interrupted)
    with pytest.raises(KeyboardInterrupt), counting([first, second]):
        pass
    with torch.no_grad():
        first.tensors[0].add_(1)
    first.note()
    assert first.places == {0}
