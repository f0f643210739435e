"""What models are made of: containers, sharing, layers of torch.nn, blocks that are left out or run twice."""

from __future__ import annotations

import torch
from module_cases import layers
from small_programs import Run, model_program, program, trained
from torch import Tensor, nn
from torch.nn.utils import prune, weight_norm
from zero_cases import IN, OUT, WIDTH, Net


@model_program()
def units_whose_weights_hooks_make_anew() -> nn.Module:
    net = Net()
    net.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    weight_norm(net.blocks[0])
    prune.l1_unstructured(net.blocks[1], "weight", amount=0.3)
    return net


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, WIDTH)
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), nn.RMSNorm(WIDTH)])
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for norm in self.norms:
            x = norm(x)
        return self.leave(x)


@program()
def norms_with_running_buffers(run: Run) -> None:
    model = run.shard(Normed)
    run.train(model)
    run.see(*model.buffers())
    model.eval()
    with torch.no_grad():
        run.see(model(run.data(9)[0]))


def bags(**settings: object) -> nn.Module:
    model = layers.Bags()
    vars(model.words).update(settings)
    return model


trained("embedding_with_gradients_scaled_by_frequency", lambda: bags(scale_grad_by_freq=True))
