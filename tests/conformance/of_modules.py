"""What models are made of: containers, sharing, layers of torch.nn, blocks that are left out or run twice."""

from __future__ import annotations

import module_cases as cases
import torch
import torch.nn.functional as F
from small_programs import Run, model_program, program, trained
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from zero_cases import IN, OUT, WIDTH, Net

WORDS = cases.WORDS


@model_program()
def old_weight_norm() -> nn.Module:
    net = Net()
    for block in net.blocks:
        weight_norm(block.up)
    return net


@model_program()
def units_whose_weights_hooks_make_anew() -> nn.Module:
    net = Net()
    net.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    weight_norm(net.blocks[0])
    prune.l1_unstructured(net.blocks[1], "weight", amount=0.3)
    return net


@model_program()
def orthogonal_parametrization() -> nn.Module:
    net = Net()
    parametrizations.orthogonal(net.blocks[0].up)
    return net


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(IN, WIDTH), nn.GRUCell(IN, WIDTH)])
        self.leave = nn.Linear(2 * WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = x.new_zeros(len(x), WIDTH)
        for turn in range(3):
            h, c = self.cells[0](x * turn, (h, c))
            g = self.cells[1](x - turn, g)
        return self.leave(torch.cat([h, g], 1))


trained("recurrent_cells_unrolled", Cells)


class Picture(nn.Module):
    """Convolutions down and up again, with what was skipped added."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(6, 4, 2, stride=2), nn.ConvTranspose2d(8, 1, 2, stride=2)])
        self.norm = nn.GroupNorm(2, 4)
        self.leave = nn.Linear(64, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 58)).view(-1, 1, 8, 8)
        a = F.relu(self.norm(self.down[0](x)))
        b = F.relu(self.down[1](a))
        y = self.up[1](torch.cat([a, self.up[0](b)], 1))
        return self.leave(y.flatten(1))


trained("a_u_net", Picture)


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


class Bags(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.words = nn.ModuleList([nn.Embedding(WORDS, WIDTH, padding_idx=0, **settings), nn.EmbeddingBag(WORDS, 5)])
        self.leave = nn.Linear(WIDTH + 5, OUT)

    def forward(self, x: Tensor) -> Tensor:
        number = (x.abs() * 5).long() % WORDS
        return self.leave(torch.cat([self.words[0](number).sum(1), self.words[1](number)], 1))


trained("embeddings_and_bags", Bags)
trained("embedding_with_gradients_scaled_by_frequency", lambda: Bags(scale_grad_by_freq=True))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 8)
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])
        self.mix, self.leave = nn.Bilinear(8, 8, 5), nn.Linear(5, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x[..., None])
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.leave(self.mix(x.mean(1), x[:, 0]))


trained("multihead_attention_and_bilinear", Attending)
