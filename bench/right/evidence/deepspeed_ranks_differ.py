"""DeepSpeed, stages 1 and 2: each rank uses an expert of its own, and one is given both gradients."""

import torch
from torch import nn
from two_ranks import deepspeed_engine, on_two_ranks, show


def act(rank: int, stage: int) -> None:
    experts = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    for expert in experts:
        nn.init.zeros_(expert.weight)
    engine = deepspeed_engine(experts, torch.optim.SGD(experts.parameters(), lr=1.0), stage)
    engine.backward(experts[rank](torch.tensor([[2.0, 20.0][rank : rank + 1]])).sum())
    engine.step()
    show(rank, stage, "averaged over the ranks they must be [-1, -10]", experts)


if __name__ == "__main__":
    for stage in (1, 2):
        on_two_ranks(act, stage)
