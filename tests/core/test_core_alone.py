"""The core trains, saves and loads by itself: with nothing plugged in, and nothing importable that stands beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.abc, os, sys
import torch
import torch.distributed as dist

BESIDE = "activations parallel building planner interop integrations debug api".split()

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        assert parts[0] != "zerokern" or len(parts) == 1 or parts[1] not in BESIDE, f"{name} is imported"

sys.meta_path.insert(0, Refuse())
from zerokern.core.ports import PLUGS
PLUGS.clear()
from zerokern.checkpoint.loader import load
from zerokern.checkpoint.saver import save
from zerokern.comm import CommError, group_on
from zerokern.optim import AdamW
from zerokern.zero.sharding import Sharding

def built():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

def trained(model, opt, rank, world):
    for _ in range(3):
        x = torch.arange(32.0).view(4, 8)[rank::world] / 32
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()

def live(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model, other = built(), built()
    for one in (model, other):
        Sharding(one, stage=3, group=group_on(), bucket_bytes=128)
    opt, same = (AdamW(one.parameters(), lr=0.1) for one in (model, other))
    trained(model, opt, rank, 2)
    save(f"{folder}/step3", model, opt)
    load(f"{folder}/step3", other, same)
    assert trained(model, opt, rank, 2) == trained(other, same, rank, 2)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine.local, theirs.local)
    group = group_on()
    group.agree("a step that both want")
    for key in ("what each rank wants alone" + str(rank), "after that"):
        try:
            group.agree(key)
        except CommError:
            continue
        raise AssertionError("ranks that want different steps agreed")

folder = sys.argv[1]
child = os.fork()
if child == 0:
    try:
        live(1, folder)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
live(0, folder)
assert os.waitpid(child, 0)[1] == 0
"""


def test_two_ranks_train_save_load_and_disagree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
