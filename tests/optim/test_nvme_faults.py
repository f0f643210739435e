"""Steps and loads that fail: afterwards all is as before, or all is done, or the optimizer says that it is torn."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_forked
from nvme_cases import READ, WRITE, assert_torn, file_limit, heal, step_ours, step_reference
from optim_cases import Twins, copies, same_bits, set_grads
from tables import each

import zerokern as zk
from zerokern.io import Faults, Nvme, Store

Tier = Callable[..., Nvme]
SIZES = (300_001,)  # 19 records of 128 KiB, in a ring of 8
RECORD = 128 << 10
ENGINES = each("engine", ["auto", "threads"])


def failing(op: int, number: int) -> Faults:
    """The first transfer of a record fails, once."""
    at = number * RECORD
    return Faults(fail_op=op, fail_begin=at, fail_end=at + 1, fail_count=1, fail_errno=errno.EIO)


@ENGINES
def test_a_failed_read_before_the_first_update_leaves_everything_as_it_was(tier: Tier, engine: str) -> None:
    twins = Twins("adamw", tier(faults=failing(READ, 0), engine=engine), SIZES)
    twins.train(1)
    versions = [param._version for param in twins.params]
    with pytest.raises(zk.IoError, match=r"state/000000.*Nothing was changed") as failed:
        step_ours(twins, 1)
    error = failed.value
    assert (error.key, error.errno, error.offset) == ("state/000000", errno.EIO, 0)
    assert os.path.dirname(error.path) == twins.ours.tier.path
    assert [param._version for param in twins.params] == versions
    assert twins.agree()
    twins.train(2, 1)
    assert twins.agree()


@each(
    "op, number, engine",
    [
        (READ, 1, "auto"),
        (READ, 8, "threads"),
        (READ, 18, "auto"),
        (WRITE, 0, "threads"),
        (WRITE, 8, "auto"),
        (WRITE, 18, "auto"),
    ],
)
def test_a_failed_transfer_in_the_middle_tears_and_a_load_heals(tier: Tier, op: int, number: int, engine: str) -> None:
    """Of the first step, where it is a write."""
    twins = Twins("adamw", tier(faults=failing(op, number), engine=engine), SIZES, max_grad_norm=1.0)
    begin = 0 if op == WRITE else 1
    twins.train(begin)
    versions = [param._version for param in twins.params]
    with pytest.raises(zk.IoError, match=f"state/{number:06}") as failed:
        step_ours(twins, begin)
    assert failed.value.errno == errno.EIO and failed.value.key == f"state/{number:06}"
    assert_torn(twins, failed)
    assert [param._version for param in twins.params] > versions
    step_reference(twins, begin)
    heal(twins)
    twins.train(2, begin + 1)
    assert twins.agree()


def test_a_failed_load_tears_and_another_load_heals(tier: Tier) -> None:
    twins = Twins("adamw", tier(faults=failing(WRITE, 3)), SIZES)
    step_reference(twins, 0)
    with pytest.raises(zk.IoError, match="state/000003"):
        heal(twins)
    with pytest.raises(zk.StateError, match="a load was broken off"):
        twins.ours.step()
    heal(twins)
    twins.train(2, 1)
    assert twins.agree()


def test_a_failed_read_of_state_dict_changes_nothing(tier: Tier) -> None:
    twins = Twins("adamw", tier(faults=failing(READ, 5)), SIZES)
    twins.train(1)
    with pytest.raises(zk.IoError, match="state/000005"):
        twins.ours.state_dict()
    assert twins.agree()
    twins.train(1, 1)
    assert twins.agree()


@each("budget", [None, "2M"])
def test_a_disk_that_is_too_small_shows_before_anything_is_changed(tier: Tier, budget: str | None) -> None:
    twins = Twins("adamw", tier(budget=budget), SIZES)
    kept = copies(twins.params)
    set_grads(twins.params)
    with file_limit(2 << 20), pytest.raises((zk.IoError, zk.BudgetError)):
        twins.ours.step()
    assert same_bits(twins.params, kept)
    assert twins.ours.state_dict()["state"] == {}
    if budget is None:
        twins.train(2)
        assert twins.agree()


@ENGINES
def test_a_file_limit_in_the_middle_of_a_step(tier: Tier, engine: str) -> None:
    twins = Twins("adamw", tier(engine=engine), SIZES)
    twins.train(1)
    with file_limit(10 * RECORD), pytest.raises(zk.IoError) as failed:
        step_ours(twins, 1)
    assert failed.value.errno == errno.EFBIG
    assert failed.value.offset >= 10 * RECORD
    assert_torn(twins, failed)
    heal(twins)
    twins.train(2, 1)
    assert twins.agree()


@each("how", ["overwritten", "truncated"])
def test_a_file_changed_behind_its_back(tier: Tier, how: str) -> None:
    twins = Twins("adamw", tier(checksum=True), SIZES)
    twins.train(1)
    file = f"/proc/self/fd/{twins.ours.holdings.disk.tier.swap._files.all[0].fd}"  # it has no name
    if how == "truncated":
        os.truncate(file, 5 * RECORD)
    else:
        with open(file, "r+b") as handle:
            handle.seek(5 * RECORD + 77)
            handle.write(b"other bytes")
    with pytest.raises(zk.IoError, match="state/000005") as failed:
        step_ours(twins, 1)
    assert failed.value.key == "state/000005"
    assert_torn(twins, failed)
    heal(twins)
    twins.train(1, 1)
    assert twins.agree()


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Ctrl-C while these puts of the process are being asked for."""
    put, count = Store.put, iter(range(1 << 30))

    def interrupted(self: Store, *arguments: object) -> object:
        if next(count) in numbers:
            signal.raise_signal(signal.SIGINT)
        return put(self, *arguments)

    monkeypatch.setattr(Store, "put", interrupted)


@each("number", [0, 9, 18])
def test_ctrl_c_waits_until_the_step_is_whole(tier: Tier, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins("adamw", tier(), SIZES)
    twins.train(1)
    interrupt_at(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        step_ours(twins, 1)
    step_reference(twins, 1)
    assert twins.agree()
    twins.train(1, 2)
    assert twins.agree()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_breaks_the_step_off(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins("adamw", tier(), SIZES)
    twins.train(1)
    interrupt_at(monkeypatch, 3, 5)
    with pytest.raises(KeyboardInterrupt):
        step_ours(twins, 1)
    with pytest.raises(zk.StateError, match="broken off"):
        twins.ours.step()
    heal(twins)
    twins.train(1, 1)
    assert twins.agree()


SCRIPT = """
import os, signal, sys, torch
import zerokern as zk
from zerokern.io import Store
from zerokern.io import tier
tier.Store = lambda *a, **k: Store(*a, depth=8, block=1 << 16, **k)
weight = torch.nn.Parameter(torch.ones(300_001))
optimizer = zk.AdamW([weight], tier=zk.Nvme({folder!r}, ring_nbytes=1 << 20))
put, puts = Store.put, []
def counted(self, *arguments):
    puts.append(1)
    if len(puts) == 28:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, *arguments)
Store.put = counted
for _ in range(2):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
"""


def test_swap_is_gone_with_its_process(tier: Tier) -> None:
    where = tier()
    ran = run_forked(SCRIPT.format(folder=where.path))
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert [path.name for path in Path(where.path).iterdir()] == ["zerokern.lock"]
    twins = Twins("adamw", where, SIZES)
    twins.train(2)
    assert twins.agree()


@each("seed, engine", [(0, "auto"), (1, "threads")])
def test_a_disk_that_fails_at_random_never_lies(tier: Tier, seed: int, engine: str) -> None:
    """Each step is done, or not begun, or torn; what is read back is right. About one block in 60 fails."""
    unlucky = Faults(seed=seed, fail=65536 // 60, shorten=4000, delay=4000, delay_us=200)
    twins = Twins("adamw", tier(faults=unlucky, engine=engine), SIZES)

    def persistently(work: Callable[[], object]) -> object:
        for _ in range(200):
            try:
                return work()
            except zk.IoError:
                continue
        raise AssertionError("200 attempts failed")

    ends = {"whole": 0, "torn": 0, "done": 0}
    for step in range(12):
        before = copies(twins.params)
        try:
            step_ours(twins, step)
        except zk.IoError as error:
            if "Nothing was changed" in str(error):
                ends["whole"] += 1
                assert same_bits(before, twins.params)
                continue
            ends["torn"] += 1
            with pytest.raises(zk.StateError, match="broken off"):
                twins.ours.state_dict()
            step_reference(twins, step)
            persistently(lambda: heal(twins))
        else:
            ends["done"] += 1
            step_reference(twins, step)
        assert persistently(twins.agree)
    assert ends["torn"], ends
