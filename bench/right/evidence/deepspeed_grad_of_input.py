"""DeepSpeed, stage 3: a gradient of the input, asked for by torch.autograd.grad, and the next steps are wrong."""

import torch
from torch import nn
from two_ranks import deepspeed_engine, on_two_ranks, show


def act(rank: int, stage: int) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    engine = deepspeed_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
    for step in range(1, 4):
        x = torch.ones(1, 1, requires_grad=True)
        torch.autograd.grad(engine(x).sum(), x)
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        show(rank, stage, f"a slope of 1 and a rate of 0.1: it must be {2 - 0.1 * step:.1f}", model)


if __name__ == "__main__":
    on_two_ranks(act, 3)
