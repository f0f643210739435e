"""Copies, pickles, forks, threads and the environment that torchrun makes."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from optim_cases import BF16, MAKERS, contents, copies, make_params, same_bits, set_grads, train
from tables import each, pairwise
from torch.utils.data import DataLoader, Dataset

import zerokern as zk
from zerokern.core import native
from zerokern.core.env import usable_cpus
from zerokern.optim import AdamW
from zerokern.optim.formats import Algorithm


@pairwise
@each("name", MAKERS)
@each("state_format", ["fp32", "bf16"])
@each("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_its_own_way_with_the_same_bits(how, name: str, state_format: str) -> None:
    params = make_params(dtype=BF16)
    optimizer = MAKERS[name](params, state_format=state_format)
    train(optimizer, params, 2)
    twins, twin = how((params, optimizer))
    kept = contents(optimizer, params)
    train(twin, twins, 2, start=2)
    assert same_bits(contents(optimizer, params), kept)
    train(optimizer, params, 2, start=2)
    assert same_bits(contents(optimizer, params), contents(twin, twins))
    assert type(twin) is type(optimizer)


class Steps(Dataset):
    """Each item steps a copy-on-write copy of the optimizer in a worker process."""

    def __init__(self, optimizer: AdamW, params: list[torch.nn.Parameter]) -> None:
        self.optimizer, self.params = optimizer, params

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        train(self.optimizer, self.params, 1, start=2)
        return torch.cat([param.detach().flatten() for param in self.params])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_19_workers_forked_after_a_step_share_nothing_and_hang_nowhere() -> None:
    params = make_params((100_000, 300), BF16)
    optimizer = AdamW(params)
    before = native.threads()
    native.set_threads(2)
    try:
        train(optimizer, params, 2)
        kept = contents(optimizer, params)
        loader = DataLoader(
            Steps(optimizer, params), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=240
        )
        children = list(loader)
        assert same_bits(contents(optimizer, params), kept)
        train(optimizer, params, 1, start=2)
    finally:
        native.set_threads(before)
    mine = torch.cat([param.detach().flatten() for param in params])
    assert [torch.equal(child, mine) for child in children] == [True, True]


SCRIPT = """
import hashlib, os, sys, torch
sys.path.insert(0, {folder!r})
if sys.argv[1] == "bound":
    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
from forked import run_forked
from optim_cases import BF16, contents, make_params, train
from zerokern.core import native
from zerokern.optim import AdamW
params = make_params((200_000, 300), BF16)
optimizer = AdamW(params, state_format="int8", max_grad_norm=1.0)
train(optimizer, params, 3)
digest = hashlib.sha256()
for value in contents(optimizer, params):
    digest.update(value.view(-1).view(torch.uint8).numpy().tobytes())
print(native.threads(), digest.hexdigest(), optimizer.grad_norm.hex())
"""


def outcome(where: str, **environment: str) -> tuple[int, str]:
    """Threads of the pool, and a digest of everything that the steps made."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_WORLD_SIZE", "ZEROKERN_THREADS")}
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    ran = run_forked(script, where, env={**kept, "OMP_NUM_THREADS": "1", **environment})
    assert ran.returncode == 0, ran.stderr
    threads, result = ran.stdout.split(maxsplit=1)
    return int(threads), result


def test_20_the_environment_changes_threads_and_no_bit() -> None:
    crowded = outcome("anywhere", LOCAL_WORLD_SIZE=str(4 * usable_cpus()))
    told, bound, alone = outcome("anywhere", ZEROKERN_THREADS="3"), outcome("bound"), outcome("anywhere")
    assert [crowded[0], told[0], bound[0], alone[0]] == [1, 3, 1, usable_cpus()]
    assert len({one[1] for one in (crowded, told, bound, alone)}) == 1


def test_optimizers_step_in_threads_at_once() -> None:
    jobs = [(make_params((50_000,), BF16, seed=i), i) for i in range(4)]
    alone = [copies(params) for params, _ in jobs]

    def work(params: list[torch.nn.Parameter], seed: int) -> None:
        optimizer = AdamW(params, lr=0.01)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            params[0].grad = torch.randn(50_000, generator=generator).to(BF16)
            optimizer.step()

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (params, seed), twin in zip(jobs, alone, strict=True):
        work(twin, seed)
        assert same_bits(params, twin)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@each("settings", [{"tier": "cpu"}, {"schedule": zk.Delayed()}])
def test_a_forked_child_is_told_at_once_that_the_state_is_not_there(settings: dict[str, Any]) -> None:
    """Whatever it does; memory that stays behind in the parent would end it by a signal."""
    (weight,) = params = make_params((300,))
    optimizer = AdamW(params, **settings)
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    uses: list[Callable[[], object]] = [
        optimizer.step,
        optimizer.flush,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.state[weight],
        lambda: list(optimizer.state.values()),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
    ]
    child = os.fork()
    if not child:
        answers = []
        for use in uses:
            try:
                answers.append(str(use()))
            except zk.ZerokernError as error:
                answers.append("" if "process" in str(error) else str(error))
        os._exit(sum(bool(answer) for answer in answers))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(optimizer, params, 1, start=2)


def test_a_step_from_a_second_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params((300,))
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    before = contents(optimizer, params)
    inside, go_on = threading.Event(), threading.Event()
    checked = Algorithm.checked

    def slowly(self: Algorithm, group: dict[str, Any]) -> dict[str, Any]:
        inside.set()
        assert go_on.wait(120)
        return checked(self, group)

    monkeypatch.setattr(Algorithm, "checked", slowly)
    set_grads(params, seed=1)
    first = threading.Thread(target=optimizer.step)
    first.start()
    assert inside.wait(120)
    with pytest.raises(zk.StateError, match="another step"):
        optimizer.step()
    assert same_bits(contents(optimizer, params), before)
    go_on.set()
    first.join()
    assert float(optimizer.state[params[0]]["step"]) == 2.0
