"""Imported by the server that ranks are forked from: the first step loads and fills what each of them would by itself.

It trains on one thread, without a process group, and starts nothing that a fork would miss.
"""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import nn

import zerokern as zk


def one_step(stage: int) -> None:
    model = zk.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=stage)
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=1.0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


torch.set_num_threads(1)
state = torch.get_rng_state()
with contextlib.suppress(Exception):  # a library that cannot train fails in the tests, not in their server
    for number in range(4):
        one_step(number)
torch.set_rng_state(state)
gc.collect()
