"""torchtitan's own Trainer with zerokern: a plain loop's bits, FSDP2's losses on layouts of ranks, and resumed."""

from __future__ import annotations

from typing import Any

import light_titan_ranks as ranks
import pytest
import torch
from hf_cases import on_ranks
from light_titan import STEPS
from torch import Tensor

slow = pytest.mark.slow


@pytest.fixture(scope="module", params=[pytest.param((1, False), id="1"), pytest.param((2, True), id="2", marks=slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks of a world found; each starts once, for torchtitan takes seconds to import."""
    world, full = request.param
    return on_ranks(world, ranks.everything, str(tmp_path_factory.mktemp("titan")), full)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def goes_on(whole: Any, rest: Any) -> None:
    """The last two of four steps, once more, and all that there is at their end."""
    ((losses, norms), spans), ((later, later_norms), again) = whole, rest
    assert (losses[2:], norms[2:]) == (later, later_norms) and len(later) == 2
    same(spans, again)


def test_a_plain_loop_and_resumed_as_if_never_stopped(found: list[dict[str, Any]]) -> None:
    """What a builder has put on its container runs; what has no meaning here is refused, and says what to do."""
    for rank in found:
        for name, ((losses, params), (others, expected), norms) in rank["fits"].items():
            assert len(losses) == STEPS and min(norms) > 0.5, name  # all of them were clipped
            assert losses == others, name
            same(params, expected)
        for whole, rest in rank["resumed"].values():
            goes_on(whole, rest)
        assert rank["hooks"] == ["before", "after"]
        for words, said in rank["refusals"]:
            assert words in said


@slow
def test_its_checkpoint_on_another_number_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("titan"))
    same(on_ranks(2, ranks.saved, folder)[0], on_ranks(1, ranks.loaded, folder)[0])


FULL = "--activation_checkpoint.mode=full"
MIXED = ["--training.mixed_precision_param=bfloat16", "--compile.enable", "--compile.backend=aot_eager"]
# the degrees, stages, torchtitan's own options, batches that are accumulated
LAYOUTS: dict[int, dict[str, tuple[ranks.Layout, list[int], list[str], int]]] = {
    2: {
        "dp 2": ({"shard": 2}, [3, 0], [FULL], 2),
        "mixed precision and compiled blocks": ({"shard": 2}, [3], MIXED, 1),
        "pp 2 interleaved": ({"pp": 2}, [3], ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"], 1),
        "copies alone": ({"replicate": 2}, [3], [], 1),
    },
    4: {
        "tp 2 x dp 2": ({"shard": 2, "tp": 2}, [3], [], 1),
        "pp 2 x dp 2": ({"pp": 2, "shard": 2}, [1], [], 2),
        "cp 2 x dp 2": ({"cp": 2, "shard": 2}, [2], [], 4),
        "hsdp 2 x 2": ({"replicate": 2, "shard": 2}, [3], [], 1),
    },
}


@slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_as_fsdp2_and_resumed(world: int, tmp_path: Any) -> None:
    """Losses and norms of each step differ by the order of sums; what a checkpoint holds is all that there is.

    Copies alone are stage 0, which is said; torchtitan's DDP takes the mean of what is divided already.
    """
    for rank in on_ranks(world, ranks.laid, str(tmp_path), LAYOUTS[world]):
        for name, ((theirs, ours), again, told) in rank.items():
            copies = name == "copies alone"
            expected = torch.tensor(theirs) * torch.tensor([[1.0], [2.0 if copies else 1.0]])
            for one in ours:
                rtol = 1e-3 if "mixed" in name else 5e-6
                torch.testing.assert_close(torch.tensor(one), expected, rtol=rtol, atol=0.0, msg=name)
            if again is not None:
                goes_on(*again)
            assert not copies or (len(told) == 1 and "stage=3 was asked for" in told[0])
