"""State on disk: however the disk is driven, what moves there and what does not, and whose the folder is."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optim_cases import (
    BF16,
    SPREAD,
    Twins,
    make_params,
    python_calls,
    same_bits,
    set_grads,
    train,
)
from tables import each
from tries import best

import zerokern as zk
from zerokern.io import Faults, Nvme
from zerokern.memory.order import TierOrder
from zerokern.optim import SGD, AdamW
from zerokern.optim.binding import Binding

Tier = Callable[..., Nvme]


@each("how", [{"engine": "threads"}, {"checksum": True}, {"budget": "8M"}])
@each("dtype, state_format", [(BF16, "int8")])
def test_same_bits_however_the_disk_is_driven(tier: Tier, how: dict, dtype: torch.dtype, state_format: str) -> None:
    twins = Twins("adamw", tier(**how), dtype=dtype, state_format=state_format, max_grad_norm=1.0)
    twins.train(4)
    assert twins.agree()
    assert twins.ours.grad_norm == twins.reference.grad_norm


@each("seed", range(2))
def test_same_bits_from_a_device_that_delays_shortens_and_interrupts(tier: Tier, seed: int) -> None:
    chance = 65536 // 4
    bad_day = Faults(seed=seed, delay=chance, delay_us=500, shorten=chance, interrupt=chance, again=chance, full=chance)
    twins = Twins("adamw", tier(faults=bad_day), dtype=BF16)
    twins.train(4)
    assert twins.agree()


def test_thousands_of_small_parameters_share_records(tier: Tier) -> None:
    twins = Twins("adamw", tier(), sizes=(10,) * 1_500)
    twins.train(2)
    assert twins.agree()
    assert len(twins.ours.holdings.disk.records) == 2  # 1,500 x 2 x 64 bytes in slots of 128 KiB


def test_records_of_idle_parameters_do_not_move(tier: Tier) -> None:
    twins = Twins("adamw", tier(), sizes=(100_000, 100_000))
    twins.train(1)
    before = twins.ours.holdings.disk.tier.swap.stats()
    twins.train(1, 1, idle=(1,))
    after = twins.ours.holdings.disk.tier.swap.stats()
    touched = {place.record for place in twins.ours.state[twins.params[0]]["on_disk"].places}
    assert len(touched) < len(twins.ours.holdings.disk.records)
    for direction in ("read_nbytes", "written_nbytes"):
        assert after[direction] - before[direction] == sum(record.nbytes for record in touched)
    assert twins.agree()


@each("state_format, per_parameter", [("fp32", 10), ("int8", 4 + 1 / 16)])
def test_a_step_reads_and_writes_each_byte_of_state_once_and_no_gradient(
    tier: Tier, state_format: str, per_parameter: float
) -> None:
    params = make_params((1 << 20,), BF16)
    optimizer = AdamW(params, tier=tier(), state_format=state_format)
    train(optimizer, params, 1)
    set_grads(params)
    store, per_step = optimizer.holdings.disk.tier.swap, per_parameter * (1 << 20)

    def too_much() -> float:
        """What the system has seen besides: pages of code that it had taken away are read again, and count."""
        before, seen_before = store.stats(), seen_by_the_system()
        optimizer.step()
        after, seen_after = store.stats(), seen_by_the_system()
        for direction in ("read_nbytes", "written_nbytes"):
            assert after[direction] - before[direction] == pytest.approx(per_step, rel=0.02)
        assert after["bounced_nbytes"] == 0
        moved = [seen_after[name] - seen_before[name] for name in ("read_bytes", "write_bytes")]
        assert not store.direct or min(moved) >= 0.98 * per_step
        return max(moved) - per_step if store.direct else 0.0

    assert best(too_much, 0.02 * per_step) < 0.02 * per_step


def seen_by_the_system() -> dict[str, int]:
    """Bytes that this process has had moved by disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


def test_bookkeeping_is_for_records_and_not_for_parameters(tier: Tier, native_calls: list[int]) -> None:
    calls = {}
    for count in (300, 3_000):
        params = make_params((10,) * count)
        optimizer = AdamW(params, tier=tier())
        train(optimizer, params, 2)
        set_grads(params)
        native_calls.clear()
        calls[count] = python_calls(optimizer.step)
        assert len(native_calls) == len(optimizer.holdings.disk.records)
        assert sum(native_calls) == count
    assert (calls[3_000] - calls[300]) / 2_700 < 0.1


def test_the_binding_is_made_once(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = Binding.__init__
    monkeypatch.setattr(Binding, "__init__", lambda self, *a, **k: made.append(1) or original(self, *a, **k))
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, lr=0.1, tier=tier())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)
    for step in range(5):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        train(optimizer, params, 1, start=step)
        schedule.step()
        optimizer.state_dict()
        with torch.no_grad():
            params[0].add_(1.0)
    assert len(made) == 1


def test_sgd_without_momentum_leaves_the_disk_alone(tier: Tier) -> None:
    twins = Twins("sgd", where := tier(), momentum=0.0)
    twins.train(2)
    assert twins.agree()
    assert not os.path.exists(where.path)


def test_two_optimizers_of_one_folder_are_refused_and_two_folders_are_not(tier: Tier) -> None:
    where, other = tier(), tier()
    first, second = make_params(), make_params()
    owner, intruder = AdamW(first, tier=where), AdamW(second, tier=where)
    train(owner, first, 1)
    set_grads(second)
    kept = [param.detach().clone() for param in second]
    with pytest.raises(zk.ZerokernError, match=str(os.getpid())):
        intruder.step()
    assert same_bits(second, kept)
    train(AdamW(second, tier=other), second, 1)
    train(owner, first, 1)


def test_files_are_private_nameless_and_gone_with_the_optimizer(tier: Tier) -> None:
    """A crash leaves none: the only name in the folder is the lock's."""
    where = tier()

    def swap() -> list[os.stat_result]:
        links = [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
        files = [link for link in links if os.readlink(link).startswith(os.path.realpath(where.path) + os.sep)]
        return [found for found in map(os.stat, files) if found.st_size > 4096]

    params = make_params(SPREAD)
    optimizer = AdamW(params, tier=where)
    train(optimizer, params, 1)
    assert swap() and all(file.st_mode & 0o777 == 0o600 and file.st_nlink == 0 for file in swap())
    assert [path.name for path in Path(where.path).iterdir()] == ["zerokern.lock"]
    del optimizer
    gc.collect()
    assert swap() == []
    train(AdamW(params, tier=where), params, 1)


@each("listed", [False, True])
def test_a_disk_may_be_text_as_configuration_files_have_it(listed: bool, tmp_path: Path) -> None:
    """Alone and behind budgets, in every option that takes tiers; copies of the optimizer's settings are made of it."""
    text = f"nvme:{tmp_path / 'swap: 1'}"
    ours, twins = make_params(SPREAD), make_params(SPREAD)
    optimizer, reference = AdamW(ours, tier=["cpu:1KiB", text] if listed else text), AdamW(twins)
    assert optimizer.holdings.order.config == zk.Nvme(tmp_path / "swap: 1")
    train(optimizer, ours, 2)
    train(reference, twins, 2)
    assert same_bits(ours, twins) and (tmp_path / "swap: 1").is_dir()
    assert TierOrder.of("keep", text).config == zk.Nvme(tmp_path / "swap: 1")
    plans = [
        zk.plan(torch.nn.Linear(64, 64), tier=[*before, one]) for one in ("nvme", text) for before in ([], ["cpu:1MiB"])
    ]
    assert str(plans[0]) == str(plans[2]) and str(plans[1]) == str(plans[3])


@each("value", ["nvme:100GiB", "nvme:auto", "nvme:swap:8G", ["cpu:1KiB", "nvme: 8 GiB"]])
def test_text_of_a_disk_has_no_budget(value: object) -> None:
    """It would be the name of a folder here, without a budget."""
    with pytest.raises(ValueError, match=r"tier=.*zk\.Nvme\(path, budget=\.\.\.\)"):
        SGD(make_params(), tier=value)
    assert TierOrder.of("tier", "nvme: swap").config == zk.Nvme("swap")
    with pytest.raises(ValueError, match="budget="):
        zk.plan("gpt2", tier=value)


@each("value", ["nvme", "nvme:", "nvme: ", ["cpu:1KiB", "nvme:"], "disk:swap", "swap", Path("swap"), None, 3])
def test_other_tiers_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"tier=.*'device', 'cpu' or zk\.Nvme\(path\)"):
        SGD(make_params(), tier=value)
