"""After `del` everything is gone by reference counts alone: training loops switch the garbage collector off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked
from tables import each

ROUNDS = 4
PROGRAM = """
import gc, json, os, sys, threading, time, warnings, weakref
from pathlib import Path
import torch
from torch import nn
import zerokern as zk
from zerokern.memory import heap
warnings.simplefilter("ignore")
gc.collect(); gc.disable()
folder, rounds, stage, rest, tier, schedule, keep = json.loads(sys.argv[1])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Linear(256, 256), nn.ModuleList([Block() for _ in range(3)])
    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x

def place(name, number, what):
    return name if name in ("device", "cpu", None) else zk.Nvme(f"{folder}/{what}-{number}", ring_nbytes="2M")

played = None
if rest is not None and rest.startswith("played "):
    from zerokern.examples.played_device import PlayedDevice
    class Waiting(PlayedDevice):  # torch computes at once, and frees at once, where a device would follow its stream
        def follow(self, stream, mark):
            super().follow(stream, mark)
            if stream is None:
                mark.wait()
    played, rest = Waiting(), rest.removeprefix("played ")

def train(number):
    model = Net()
    for param in model.parameters() if played is not None else ():
        played.own(param)
    if stage is not None:
        kept = place(keep, number, "kept")
        zk.shard(model, stage=stage, tier=place(rest, number, "parameters"), **({} if kept is None else {"keep": kept}))
    how = zk.Delayed(after=1) if schedule == "delayed" else schedule
    opt = zk.AdamW(model.parameters(), lr=1e-3, tier=place(tier, number, "state"), schedule=how, max_grad_norm=1.0)
    batch = 1024 if keep == "nvme" else 64  # inputs are kept on a disk from 1 MiB on
    for _ in range(3):
        model(torch.randn(batch, 256)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if played is not None:
            played.synchronize()
    return [weakref.ref(one) for one in (model, opt, model.blocks[0].up.weight)]

def counts():  # the played device keeps the threads of its streams
    streams = sum(one.name.startswith("played") for one in threading.enumerate())
    return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")) - streams

seen, before = [], None
for number in range(rounds):
    there = train(number)
    until = time.monotonic() + 10
    while True:  # a worker that nobody needs any more ends by itself, and has what it did last until then
        now = counts()
        alive = [type(one()).__name__ for one in there if one() is not None]
        if (not alive and (before is None or now <= before)) or time.monotonic() > until:
            break
        time.sleep(0.01)
    assert not alive, f"round {number}: {alive} outlived the last reference"
    if before is None:  # torch and the native library start threads with the first
        while (now := counts()) != before:
            before = now
            time.sleep(0.1)
    assert now <= before, f"round {number}: file descriptors and threads are {now}, were {before}"
    heap.trim_heap()
    pages = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    seen.append([int(pages["VmRSS"].split()[0]) >> 10, int(pages.get("VmLck", "0 kB").split()[0]) >> 10])
print(json.dumps(seen))
"""
QUICK = [
    (None, None, "device", "delayed", None),
    (None, None, "cpu", "overlap", None),
    (None, None, "nvme", "sync", None),
    (2, "device", "nvme", "delayed", None),
    (3, "device", "cpu", "overlap", None),
    (3, "nvme", "nvme", "sync", "nvme"),
    (3, "nvme", "nvme", "overlap", None),
    (3, "device", "nvme", "delayed", None),
    (3, "played cpu", "cpu", "overlap", None),
]
PLAIN = [(None, None, tier, how, None) for tier in ("device", "cpu", "nvme") for how in ("sync", "overlap", "delayed")]
OTHERS = [
    *(row for row in PLAIN if row not in QUICK),
    (2, "device", "device", "overlap", None),
    (3, "device", "device", "sync", "device"),
    (3, "played nvme", "nvme", "overlap", None),
    (2, "played device", "cpu", "delayed", None),
    (3, "nvme", "device", "overlap", "nvme"),
]


@each("stage, rest, tier, schedule, keep", QUICK)
def test_memory_files_and_threads_return(
    stage: int | None, rest: str | None, tier: str, schedule: str, keep: str | None, tmp_path: Path
) -> None:
    returns(stage, rest, tier, schedule, keep, tmp_path)


def returns(stage: int | None, rest: str | None, tier: str, schedule: str, keep: str | None, tmp_path: Path) -> None:
    ran = run_forked(PROGRAM, json.dumps([str(tmp_path), ROUNDS, stage, rest, tier, schedule, keep]))
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    # a model has 7 MiB of parameters and 14 of state
    (_, locked), *_, (resident, at_last) = seen
    assert resident - seen[1][0] < 7, f"MiB resident, and locked: {seen}"
    assert at_last == locked, f"MiB resident, and locked: {seen}"


@pytest.mark.slow
@each("stage, rest, tier, schedule, keep", OTHERS)
def test_they_return_elsewhere_too(
    stage: int | None, rest: str | None, tier: str, schedule: str, keep: str | None, tmp_path: Path
) -> None:
    returns(stage, rest, tier, schedule, keep, tmp_path)


def test_the_first_of_a_process_ends_too() -> None:
    """torch's compiler is imported with it, and torch.fx keeps the frames that it was imported from."""
    program = """
import gc, os, sys, weakref
import torch
import zerokern as zk
assert "torch._dynamo" not in sys.modules
gc.collect(); gc.disable()
def train(stage):
    model = torch.nn.Linear(8, 8)
    if stage:
        zk.shard(model, stage=stage)
    opt = zk.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    return [weakref.ref(model), weakref.ref(opt)]
for stage in (0, 2, 3):  # 0: as it is
    child = os.fork()
    if not child:
        left = [one() for one in train(stage)]
        print(left, flush=True)
        os._exit(left != [None, None])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, stage
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_whichever_goes_first(first: str, tmp_path: Path) -> None:
    ran = run_forked(
        """
import gc, sys, weakref
import torch
from torch import nn
import zerokern as zk
gc.collect(); gc.disable()
first, folder = sys.argv[1:]
model = zk.shard(nn.Linear(64, 64), stage=3, tier=zk.Nvme(folder + "/p"))
opt = zk.AdamW(model.parameters(), lr=1e-3, tier=zk.Nvme(folder + "/s"), schedule="overlap")
for _ in range(3):
    model(torch.randn(4, 64)).sum().backward(); opt.step(); opt.zero_grad()
there = [weakref.ref(model), weakref.ref(opt)]
if first == "model":
    del model
    assert there[0]() is None
    opt.flush()
    del opt
else:
    del opt
    model(torch.randn(4, 64)).sum().backward()
    del model
assert there[0]() is None and there[1]() is None
""",
        first,
        tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
