"""DDP: the second backward of one graph is not averaged, and the ranks' weights part ways."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks


def act(rank: int) -> None:
    model = nn.Linear(1, 1, bias=False)
    loss = DistributedDataParallel(model)(torch.full((1, 1), 1.0 + rank)).sum()  # slopes 1 and 2, 1.5 on average
    loss.backward(retain_graph=True)
    loss.backward()
    print(f"rank {rank}: {model.weight.grad.item()}, must be 3 on both ranks")


if __name__ == "__main__":
    on_two_ranks(act)
