"""torchtitan's Llama on layouts of ranks: zk.shard against its own FSDP2, and resumed with the same bits."""

from __future__ import annotations

import math
from typing import Any

import light_titan_layouts as layouts
import pytest
import torch
from light_cases import run_ranks

slow = pytest.mark.slow
FULL = "--activation_checkpoint.mode=full"
# the degrees, stages, torchtitan's own options, batches that are accumulated
ROWS: dict[str, tuple[layouts.Layout, list[int], list[str], int]] = {
    "tp 2 x dp 2": ({"shard": 2, "tp": 2}, [3, 1], [], 1),
    "dp 2": ({"shard": 2}, [3, 2, 1, 0], [FULL], 2),
    "pp 2 x dp 2": ({"pp": 2, "shard": 2}, [3, 2, 1], [], 1),
    "pp 2 interleaved": ({"pp": 2}, [3], ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"], 1),
    "pp 2 always resharded": ({"pp": 2}, [3], ["--parallelism.fsdp_reshard_after_forward=always"], 2),
    "cp 2 x dp 2": ({"cp": 2, "shard": 2}, [3, 2, 1], [], 1),
    "cp 2 x dp 2 accumulated": ({"cp": 2, "shard": 2}, [3], [], 4),
    "hsdp 2 x 2": ({"replicate": 2, "shard": 2}, [3, 2, 1], [], 1),
    "copies x cp 2": ({"replicate": 2, "cp": 2}, [3], [], 1),
    "tp 2": ({"tp": 2}, [3], [], 2),
    "2 x 2 x 2": ({"pp": 2, "shard": 2, "tp": 2}, [3], [], 1),
}


@slow  # test_torchtitan.py has what is quick
@pytest.mark.parametrize("name", ROWS)
def test_as_fsdp2_and_resumed(name: str, tmp_path: Any) -> None:
    """Losses and norms of each step differ by the order of sums; what a checkpoint holds is all that there is."""
    layout, stages, more, accumulated = ROWS[name]
    world = math.prod(layout.values())
    for (theirs, ours), (whole, rest) in run_ranks(
        world, layouts.everything, str(tmp_path), layout, stages, more, accumulated, timeout=230, patience=100
    ):
        for one in ours:
            torch.testing.assert_close(torch.tensor(one), torch.tensor(theirs), rtol=5e-6, atol=0.0)
        (losses, norms), (later, later_norms) = whole[0], rest[0]
        assert (losses[2:], norms[2:]) == (later, later_norms) and len(later) == 2
        assert whole[1].keys() == rest[1].keys()
        for key, value in whole[1].items():
            assert torch.equal(value, rest[1][key]), key


@slow
def test_mixed_precision_and_compiled_blocks(tmp_path: Any) -> None:
    more = ["--training.mixed_precision_param=bfloat16", "--compile.enable", "--compile.backend=aot_eager"]
    for theirs, ours in run_ranks(
        2, layouts.both, str(tmp_path), {"shard": 2}, [3, 2], more, timeout=230, patience=100
    ):
        for one in ours:
            torch.testing.assert_close(torch.tensor(one), torch.tensor(theirs), rtol=1e-3, atol=0.0)


@slow
def test_copies_alone(tmp_path: Any) -> None:
    """data_parallel_replicate_degree alone: stage 0, and it says so. torchtitan's DDP takes the mean of what is
    divided already."""
    found = run_ranks(2, layouts.of_copies, str(tmp_path), timeout=230, patience=100)
    for (losses, norms), [(ours, norms_of_ours)], said in found:
        assert len(said) == 1 and "stage=3 was asked for" in said[0]
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=5e-6, atol=0.0)
        torch.testing.assert_close(torch.tensor(norms_of_ours), 2 * torch.tensor(norms), rtol=5e-6, atol=0.0)
