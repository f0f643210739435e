"""DeepSpeed, stage 3: a layer that a step's first pass leaves out keeps the gradient that it had in the step before."""

import torch
from torch import nn
from two_ranks import deepspeed_engine, on_two_ranks, show


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, names: str) -> torch.Tensor:
        return sum(getattr(self, name)(torch.ones(1, 4)).sum() for name in names)


def act(rank: int, stage: int, steps: list[list[str]]) -> None:
    model = Both()
    for layer in (model.a, model.b):
        nn.init.ones_(layer.weight)
    accumulate = len(steps[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed_engine(model, optimizer, stage, gradient_accumulation_steps=accumulate)
    for passes in steps:  # a layer has a slope of 1 in a step that it takes part in
        for names in passes:
            engine.backward(accumulate * engine(names))
            engine.step()
        show(rank, stage, f"a step of {' and '.join(passes)}: each layer in it must be less by 1", model)


if __name__ == "__main__":
    for stage in (2, 3):
        on_two_ranks(act, stage, [["ab"], ["a"], ["b"]])
        on_two_ranks(act, stage, [["a", "b"], ["a", "b"]])
