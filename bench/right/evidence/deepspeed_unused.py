"""DeepSpeed: a layer that no rank uses is decayed. torch.optim leaves a parameter without a gradient as it is."""

import torch
from torch import nn
from two_ranks import deepspeed_engine, on_two_ranks, show


def act(rank: int, stage: int) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 1, bias=False), "unused": nn.Linear(4, 1, bias=False)})
    for layer in model.values():
        nn.init.ones_(layer.weight)
    engine = deepspeed_engine(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), stage)
    engine.backward(model["used"](torch.ones(1, 4)).sum())
    engine.step()
    show(rank, stage, "the second, which nobody used, must be 1", model)


if __name__ == "__main__":
    for stage in (1, 2, 3):
        on_two_ranks(act, stage)
