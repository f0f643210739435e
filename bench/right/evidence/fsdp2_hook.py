"""FSDP2: a hook on a parameter is never called, whether it was registered before fully_shard or after it."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import on_two_ranks


def act(rank: int, is_late: bool) -> None:
    model = nn.Linear(1, 2, bias=False)
    if not is_late:
        model.weight.register_hook(lambda grad: grad * 100)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if is_late:
        model.weight.register_hook(lambda grad: grad * 100)
    model(torch.ones(1, 1)).sum().backward()
    if not rank:
        print(f"{'after' if is_late else 'before'} fully_shard: {model.weight.grad.to_local().item()}, must be 100")


if __name__ == "__main__":
    for is_late in (False, True):
        on_two_ranks(act, is_late)
