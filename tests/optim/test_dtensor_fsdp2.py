"""Models under FSDP2: training as torch's own AdamW does it, and checkpoints through torch's own functions."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensor_cases import built, cut, local, mesh_of, on_ranks, one_by_one
from optim_cases import same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm

from zerokern.core.errors import StateError
from zerokern.optim import AdamW
from zerokern.zero.kinds import over

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
FULL = StateDictOptions(full_state_dict=True)


def backward(rank: int, seed: int, *models: nn.Module, scale: float = 1.0) -> None:
    torch.manual_seed(100 * seed + rank)
    batch = torch.randn(4, 7).to(next(models[0].parameters()).dtype)
    for model in models:
        (scale * model(batch).pow(2).sum()).backward()


def trained(rank: int, model: nn.Module, optimizer: Any, seeds: Any) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(rank, seed, model)
        optimizer.step()


def close(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(local(mine), local(other), rtol=2e-6, atol=2e-6)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **SETTINGS)


def state_goes_through_torchs_functions_and_training_goes_on_with_the_same_bits(rank: int) -> None:
    mesh = mesh_of(2)
    for options in (StateDictOptions(), FULL, StateDictOptions(flatten_optimizer_state_dict=True)):
        straight = built(mesh)
        first = AdamW(straight.parameters(), max_grad_norm=1.0, **SETTINGS)
        trained(rank, straight, first, range(3))
        saved = get_optimizer_state_dict(straight, first, options=options)
        again = built(mesh)
        again.load_state_dict(straight.state_dict())
        second = AdamW(again.parameters(), max_grad_norm=1.0, **SETTINGS)
        set_optimizer_state_dict(again, second, saved, options=options)
        trained(rank, straight, first, range(3, 5))
        trained(rank, again, second, range(3, 5))
        assert same_bits(everything(again, second), everything(straight, first))


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    params = list(model.parameters())
    return [local(p) for p in params] + [local(v) for p in params for v in optimizer.state[p].values()]


def the_initialising_step_changes_nothing_that_stays(rank: int) -> None:
    model = built(mesh_of(2))
    before = [local(param).clone() for param in model.parameters()]
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0, **SETTINGS)
    saved = get_optimizer_state_dict(model, optimizer)
    assert same_bits([local(param) for param in model.parameters()], before)
    assert optimizer.skipped_steps == 0 and optimizer.param_groups[0]["lr"] == SETTINGS["lr"]
    for name, param in model.named_parameters():
        entry = saved["state"][name]
        assert entry["exp_avg"].placements == param.placements and entry["exp_avg"].shape == param.shape
        assert not local(entry["exp_avg"]).any()


def ours(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), **SETTINGS)


def test_a_checkpoint_of_two_ranks_is_loaded_by_three(tmp_path: Path) -> None:
    (saved, *_) = on_ranks(2, save, str(tmp_path))
    for loaded in on_ranks(3, load, str(tmp_path)):
        assert same_bits(loaded, saved)


def bf16(rank: int) -> tuple[nn.Module, AdamW]:
    model = built(mesh_of(torch.distributed.get_world_size()), dtype=torch.bfloat16)
    return model, AdamW(model.parameters(), **SETTINGS)


def whole(model: nn.Module, optimizer: AdamW) -> list[Tensor]:
    entries = [optimizer.state[param] for param in model.parameters()]
    tensors = [*model.parameters(), *(value for entry in entries for value in entry.values())]
    return [(gathered(one) if isinstance(one, DTensor) else one).detach() for one in tensors]


def gathered(value: DTensor) -> Tensor:
    """torch's transports do not know int16."""
    return value.to(torch.int32).full_tensor() if value.dtype is torch.int16 else value.full_tensor()


def save(rank: int, folder: str) -> list[Tensor]:
    model, optimizer = bf16(rank)
    trained(rank, model, optimizer, range(3))
    dcp.save({"model": model.state_dict(), "opt": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    return whole(model, optimizer)


def load(rank: int, folder: str) -> list[Tensor]:
    model, optimizer = bf16(rank)
    state = {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["opt"])
    assert all(local(optimizer.state[param]["remainder"]).dtype is torch.int16 for param in model.parameters())
    return whole(model, optimizer)


def whole_state_is_cut_and_state_cut_otherwise_is_refused(rank: int) -> None:
    model = built(mesh_of(2))
    optimizer = ours(model)
    trained(rank, model, optimizer, range(2))
    saved = optimizer.state_dict()
    plain = {
        key: {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in entry.items()}
        for key, entry in saved["state"].items()
    }
    other = ours(model)
    other.load_state_dict({**saved, "state": plain})
    before = everything(model, optimizer)
    assert same_bits(everything(model, other), before)
    plain[0]["exp_avg"] = cut(plain[0]["exp_avg"], mesh_of(2), [Replicate()])
    with pytest.raises(StateError, match=r"exp_avg.*divided in another way"):
        other.load_state_dict({**saved, "state": plain})
    plain[0]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(StateError, match=r"exp_avg.*shape \(3, 3\).*another parameter"):
        other.load_state_dict({**saved, "state": plain})
    assert same_bits(everything(model, other), before)


def test_under_tensor_parallelism_too() -> None:
    on_ranks(4, two_ways)


def two_ways(rank: int) -> None:
    """Rows over one dimension of the mesh, each rank's rows over the other: no plain `Shard` says that."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    mine, theirs = build(), build()
    first, other = AdamW(mine.parameters(), max_grad_norm=1e9, **SETTINGS), adamw(theirs)
    for seed in range(3):
        backward(rank // 2, seed, mine, theirs)
        gradients = [param.grad.full_tensor() for param in mine.parameters()]
        for optimizer in (first, other):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(torch.tensor(first.grad_norm), get_total_norm(gradients))
    close(mine, theirs)
    saved = first.state_dict()
    plain = {
        key: {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in entry.items()}
        for key, entry in saved["state"].items()
    }
    before = everything(mine, first)
    first.load_state_dict({**saved, "state": plain})
    assert same_bits(everything(mine, first), before)


def optimizers_and_their_state_are_copied_and_pickled_as_torchs_are(rank: int) -> None:
    model = built(mesh_of(1))
    optimizer = ours(model)
    trained(rank, model, optimizer, range(2))
    optimizer.zero_grad()  # gradients under FSDP2 have no storage that torch could copy
    twin = copy.deepcopy(optimizer)
    assert same_bits([local(v) for entry in twin.state.values() for v in entry.values()], moments(optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same_bits([local(v) for entry in loaded["state"].values() for v in entry.values()], moments(optimizer))


def moments(optimizer: AdamW) -> list[Tensor]:
    return [local(value) for entry in optimizer.state.values() for value in entry.values()]


def state_in_host_memory_under_a_mesh_of_devices(rank: int) -> None:
    mesh = DeviceMesh("cuda", torch.tensor([0]), mesh_dim_names=("dp",), _init_backend=False)
    memory = torch.ones(12)
    shown = over(memory.view(4, 3), mesh, [Shard(0)], torch.Size([4, 3]), (3, 1))
    assert shown.device.type == "cpu" and local(shown).data_ptr() == memory.data_ptr()
    codes = over(torch.ones(2, dtype=torch.int8), shown.device_mesh, [Shard(0)], torch.Size([2]), (1,))
    assert codes.dtype is torch.int8 and codes.device_mesh.device_type == "cuda"


def state_that_is_assigned_or_moved_counts(rank: int) -> None:
    model = built(mesh_of(2))
    optimizer = ours(model)
    trained(rank, model, optimizer, range(2))
    weight = model[0].weight
    replaced = torch.ones_like(weight).detach()
    optimizer.state[weight]["exp_avg"] = replaced
    assert same_bits([local(optimizer.state_dict()["state"][0]["exp_avg"])], [local(replaced)])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(local(optimizer.state[weight]["exp_avg"]), 0.9 * local(torch.ones_like(weight)).detach())
    kept = {key: value for key, value in optimizer.state[weight].items() if key != "step"}
    trained(rank, model, optimizer, [3])
    assert all(optimizer.state[weight][key] is value for key, value in kept.items())


def two_ranks_train_and_are_saved_as_torchs_are(rank: int) -> None:
    works = [
        state_goes_through_torchs_functions_and_training_goes_on_with_the_same_bits,
        the_initialising_step_changes_nothing_that_stays,
        whole_state_is_cut_and_state_cut_otherwise_is_refused,
        state_that_is_assigned_or_moved_counts,
    ]
    one_by_one(rank, works)


def test_two_ranks_train_and_are_saved_as_torchs_are() -> None:
    """As torch's own AdamW trains, and its functions for checkpoints work."""
    on_ranks(2, two_ranks_train_and_are_saved_as_torchs_are)


def alone_they_are_copied_and_may_have_state_elsewhere(rank: int) -> None:
    works = [
        optimizers_and_their_state_are_copied_and_pickled_as_torchs_are,
        state_in_host_memory_under_a_mesh_of_devices,
    ]
    one_by_one(rank, works)


def test_alone_they_are_copied_and_may_have_state_elsewhere() -> None:
    """One rank, under a mesh of one."""
    on_ranks(1, alone_they_are_copied_and_may_have_state_elsewhere)
