"""Checkpoints as others write them: a small model with AdamW that has stepped, in each of their forms."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from raw_cases import same
from torch import Tensor, nn

__all__ = ["same"]


class Small(nn.Module):
    """Two matrices of uneven sizes, a vector, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.register_buffer("mean", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.mean.sum()


def trained(seed: int = 0) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Small()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    step(model, opt)
    return model, opt


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        opt.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        opt.step()


def expected(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By our keys."""
    found = {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in opt.state[param].items():
            found[f"optim.state.{name}.{key}"] = value.clone()
    return found


def everything(source: Any, keys: Any = None) -> dict[str, Tensor]:
    """All tensors of a source."""
    rows = {key: source.tensors[key] for key in (source.tensors if keys is None else keys)}
    room = {key: torch.empty(row.shape, dtype=getattr(torch, row.dtype)) for key, row in rows.items()}
    source.read(room)
    return room


def fsdp_saves(rank: int, folder: str) -> dict[str, Tensor]:
    """FSDP2 on two ranks, saved by torch; what it holds, whole."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = Small()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    step(model, opt)
    models, optims = get_state_dict(model, opt)
    state = {"model": models, "optim": optims, "epoch": 3, "note": {"seen": [1, 2]}}
    dcp.save(state, checkpoint_id=f"{folder}/plain")
    dcp.save({"app": state}, checkpoint_id=f"{folder}/app")
    whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in expected(model, opt).items()}
    return {key: tensor.clone() for key, tensor in whole.items()}


def fsdp_loads(rank: int, folder: str) -> dict[str, Tensor]:
    """What every rank of three reads into uneven rows of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from zerokern.checkpoint.source import open_checkpoint

    source = open_checkpoint(folder)
    source.verify(rank, 3)
    mesh = init_device_mesh("cpu", (3,))
    room: dict[str, Any] = {}
    for key, row in source.tensors.items():
        whole = torch.zeros(row.shape, dtype=getattr(torch, row.dtype))
        room[key] = distribute_tensor(whole, mesh, [Shard(0)]) if row.shape else whole
    source.read(room)
    return {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in room.items()}


class Scaler:
    """An object of a class that only DeepSpeed has, as far as a reader is concerned."""

    def __init__(self) -> None:
        self.cur_scale = 2.0


def universal(folder: Path, model: nn.Module, opt: torch.optim.Optimizer, *, flat: bool = False, step: Any = 2) -> None:
    """The folder that ds_to_universal makes: of stages 1 and 2, or of stage 3, which keeps parameters flat.

    `step`: as the optimizer of stage 3 counts, DeepSpeed's in a number, torch's in a tensor."""
    names = dict(model.named_parameters())
    for name, param in names.items():
        at = folder / "zero" / name
        at.mkdir(parents=True)
        state = opt.state[param]
        for key, tensor in {"fp32": param.detach(), **state}.items():
            if key != "step":
                kept = tensor.reshape(-1).clone() if flat else {"cat_dim": 0, "param": tensor.clone()}
                torch.save(kept, at / f"{key}.pt")
        if not flat:
            torch.save(int(state["step"]), at / "step.pt")
    group = {**{key: one for key, one in opt.param_groups[0].items() if key != "params"}, "params": []}
    common: dict[str, Any] = {"loss_scaler": Scaler(), "param_groups": [group], "zero_stage": 3 if flat else 2}
    if flat:
        state = {0: {"step": step, "exp_avg": torch.zeros(2)}}
        common["optimizer_state_dict"] = {"state": state, "param_groups": [group]}
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    shapes = [{name: param.shape for name, param in names.items()}]
    # stage 3 leaves parameters empty here; the others write them in the dtype of the model
    module = dict(model.state_dict())
    for name in names:
        module[name] = module[name][:0] if flat else module[name].bfloat16()
    states = {"module": module, "buffer_names": ["mean"], "param_shapes": shapes, "args": Scaler()}
    torch.save(states, folder / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if flat else "mp_rank_00_model_states.pt"))
    (folder.parent / "latest_universal").write_text(folder.name)


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple:
        import os

        return os.system, (f"touch '{self.proof}'",)


def poisoned(folder: Path, proof: Path) -> None:
    """A checkpoint of torch whose index runs a command."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    found.planner_data["evil"] = Evil(proof)
    path.write_bytes(pickle.dumps(found))
