"""DeepSpeed, stage 2: ranks run two layers in another order, and gradients of one are averaged with the other's."""

import torch
from torch import nn
from two_ranks import deepspeed_engine, on_two_ranks, show


def act(rank: int, stage: int) -> None:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    for at, layer in enumerate(model):
        nn.init.constant_(layer.weight, 2.0 + at)
    engine = deepspeed_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), stage)
    x = torch.tensor([[10.0 if rank else 1.0]])
    for at in (1, 0) if rank else (0, 1):
        x = model[at](x)
    engine.backward(x.sum())
    engine.step()
    show(rank, stage, "slopes are 3, 2 and 30, 20, so they must be [2 - 16.5, 3 - 11]", model)


if __name__ == "__main__":
    for stage in (1, 2):
        on_two_ranks(act, stage)
