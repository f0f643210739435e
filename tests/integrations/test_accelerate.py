"""Accelerate itself, on one rank and on two, with the loop of its manual; compared with the same loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_cases import (
    ACCUMULATED,
    BF16,
    CLIP,
    FP16,
    FP32,
    HOST,
    PLAIN,
    ROWS,
    SCALE,
    SETTINGS,
    SMALL,
    STEPS,
    Run,
    by_hand,
    decayed,
    expected,
    fp16_on_a_cpu,
    fresh,
    fsdp2_on_a_cpu,
    language_model,
    number_of,
    on_ranks,
    optimizer_of,
    rows,
    scheduled,
    sharded,
    torchs_clip,
    total,
    values,
    world_size,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zerokern as zk
from zerokern.core.errors import StateError

PRECISION = {None: "no", BF16: "bf16", FP16: "fp16"}
OVERLAP = {**HOST, "schedule": "overlap"}


def accelerator_for(amp: Any = None, plain: bool = False) -> Any:
    import accelerate

    from zerokern.integrations.accelerate import Accelerator

    kind = accelerate.Accelerator if plain else Accelerator
    return kind(cpu=True, mixed_precision=PRECISION[amp], gradient_accumulation_steps=ACCUMULATED)


class Session:
    """A run that can be looked at, saved and gone on with."""

    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        size = world_size()
        data = torch.utils.data.DataLoader(rows()[: STEPS * ACCUMULATED * ROWS * size], batch_size=ROWS)
        self.accelerator = accelerator
        prepared = accelerator.prepare(model, optimizer, data, scheduled(optimizer, size))
        self.model, self.optimizer, self.data, self.scheduler = prepared
        self.run = Run()

    def train(self, first: int = 0, last: int = STEPS) -> Run:
        run, accelerator = self.run, self.accelerator
        self.model.train()
        logged = torch.tensor(0.0)
        data = accelerator.skip_first_batches(self.data, first * ACCUMULATED) if first else self.data
        for number, batch in enumerate(data):
            if number == (last - first) * ACCUMULATED:
                break
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                logged += loss.detach() / ACCUMULATED
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.norms.append(number_of(accelerator.clip_grad_norm_(self.model.parameters(), CLIP)))
                    run.rates.append(self.scheduler.get_last_lr()[0])
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                run.losses.append(total(logged))
                logged = torch.tensor(0.0)
                run.skipped += accelerator.optimizer_step_was_skipped
        return run

    def end(self) -> Run:
        self.optimizer.optimizer.flush()
        self.run.params = values(self.model)
        return self.run


def session_of(
    kind: Any, amp: Any, dtype: torch.dtype, settings: dict[str, Any], plain: bool = False, dropout: float = 0.0
) -> Session:
    """Of one process or DDP (None), of FSDP2, or of a stage of zk.shard."""
    accelerator, model = accelerator_for(amp, plain), language_model(dropout, dtype)
    sharded(model, kind, settings.get("muon", False))
    optimizer = optimizer_of(model, **settings)
    if kind == "fsdp2":
        fsdp2_on_a_cpu()
    session = Session(accelerator, model, optimizer)
    assert session.model is model or not isinstance(kind, int)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in session.model.parameters()}, "its parameters were exchanged"
    return session


def as_by_hand(
    kind: Any = None,
    amp: Any = None,
    dtype: torch.dtype = FP32,
    scale: float = SCALE,
    plain: bool = False,
    **settings: Any,
) -> Run:
    with fresh(), fp16_on_a_cpu(scale):
        session = session_of(kind, amp, dtype, settings, plain)
        session.train()
        found = session.end()
    found.same(expected(kind, amp, dtype, scale, means=True, **settings))
    return found


@pytest.mark.parametrize("amp, dtype, settings", PLAIN)
def test_the_losses_of_the_loop_by_hand(amp: Any, dtype: torch.dtype, settings: dict) -> None:
    as_by_hand(None, amp, dtype, plain=True, **settings)


@pytest.mark.parametrize("kind, amp, settings", [(None, BF16, HOST), (2, FP16, OVERLAP)])
def test_muon_beside_adamw(kind: Any, amp: Any, settings: dict) -> None:
    as_by_hand(kind, amp, FP32, plain=kind is None, muon=True, **settings)


def test_the_rate_stays_where_a_step_was_skipped() -> None:
    found = as_by_hand(None, FP16, FP32, 2.0**19)
    assert found.skipped in range(1, STEPS), found.norms


def moved_state(settings: dict[str, Any], dtype: torch.dtype = FP32) -> None:
    """An optimizer that has state is prepared: Accelerate moves what it shows to the device, and loads that."""
    runs = []
    for prepared in (False, True):
        model = language_model(dtype=dtype)
        optimizer = optimizer_of(model, **settings)
        with fresh():
            accelerator = accelerator_for(plain=True)
            wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
            by_hand(wrapped, optimizer, clip=torchs_clip(model), means=True, flush=False)
            if prepared:
                optimizer = accelerator.prepare_optimizer(optimizer).optimizer
            runs.append(by_hand(wrapped, optimizer, clip=torchs_clip(model), means=True))
    runs[1].same(runs[0])


@pytest.mark.parametrize(
    "settings, dtype", [(HOST, FP32), ({"muon": True}, FP32), (SMALL, BF16), ({"schedule": zk.Delayed(after=2)}, BF16)]
)
def test_state_that_was_moved_behind_its_back(settings: dict, dtype: torch.dtype, monkeypatch: Any) -> None:
    """On a CPU nothing moves: here a copy is what comes back, as it would from a device."""
    import accelerate.optimizer

    def copied(value: Any, device: Any) -> Any:
        if isinstance(value, Tensor):
            seen.append(value.dtype)
            return value.clone()
        if isinstance(value, dict):
            return {key: copied(item, device) for key, item in value.items()}
        return [copied(item, device) for item in value] if isinstance(value, list) else value

    seen: list[torch.dtype] = []
    monkeypatch.setattr(accelerate.optimizer, "move_to_device", copied)
    moved_state(settings, dtype)
    assert len(seen) > 20


def test_parameters_that_were_exchanged_before_the_first_step() -> None:
    with fresh():
        accelerator = accelerator_for(plain=True)
        model, other = language_model(), language_model()
        session = Session(accelerator, model, zk.AdamW(decayed(other), **SETTINGS, tier="cpu"))
        pairs = zip(other.parameters(), model.parameters(), strict=True)
        session.optimizer._switch_parameters(dict(pairs))
        session.train()
        found = session.end()
    found.same(expected(None, means=True, tier="cpu"))


def test_what_cannot_work_is_refused_before_training() -> None:
    from zerokern.integrations.accelerate import Accelerator

    def refuses(words: str, kind: type[Exception], accelerator: Any, model: nn.Module, optimizer: Any = None) -> None:
        with pytest.raises(kind, match=words):
            accelerator.prepare(model, optimizer or zk.AdamW(model.parameters()))

    def divided(stage: int = 2) -> nn.Module:
        return zk.shard(nn.Linear(4, 2), stage=stage)

    with fresh():
        refuses("GradScaler", ValueError, Accelerator(cpu=True, mixed_precision="fp16"), divided())
    with fresh():
        compiled = Accelerator(cpu=True, dynamo_backend="eager")
        refuses("block.compile", ValueError, compiled, divided())
    with fresh():
        accelerator = Accelerator(cpu=True)
        for stage, kind in ((1, torch.optim.AdamW), (3, torch.optim.SGD)):
            model = divided(stage)
            refuses("which zk.shard has sharded", StateError, accelerator, model, kind(model.parameters(), lr=0.1))
        model = divided()
        accelerator.prepare(model, torch.optim.SGD(zk.shards(model), lr=0.1))
    with fresh():
        accelerator = Accelerator(cpu=True)
        fsdp2_on_a_cpu()
        refuses("distributed_type", ValueError, accelerator, divided(3))


def saved_and_resumed(folder: str, kinds: tuple[Any, Any], dtype: torch.dtype = FP32, **settings: Any) -> None:
    """By Accelerate's own buttons: three steps, saved, three more; and these three in other objects."""
    runs = []
    for number, kind in enumerate(kinds):
        with fresh():
            session = session_of(kind, None, dtype, settings, dropout=0.2)
            torch.manual_seed(100 * number + (dist.get_rank() if dist.is_initialized() else 0))
            if number:
                session.accelerator.load_state(folder)
            else:
                session.train(0, 3)
                session.accelerator.save_state(folder)
                session.accelerator.wait_for_everyone()
            session.train(3, STEPS)
            runs.append(session.end())
    if kinds[0] == kinds[1]:
        runs[1].same(runs[0], 3)
    else:
        torch.testing.assert_close(runs[1].losses, runs[0].losses[3:], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "kind, dtype, settings",
    [
        (None, FP32, HOST),
        (None, BF16, {"schedule": zk.Delayed(after=1)}),
        (3, BF16, HOST),
        (2, BF16, {"muon": True, **HOST}),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, kind: Any, dtype: torch.dtype, settings: dict) -> None:
    saved_and_resumed(str(tmp_path), (kind, kind), dtype, **settings)


def two_at_length(rank: int, folder: str) -> dict[str, Tensor]:
    """At its end what two ranks have saved, for one to go on with."""
    plain = as_by_hand(plain=True, **HOST)
    for found in (as_by_hand(2), as_by_hand(3), as_by_hand("fsdp2", plain=True, **HOST)):
        torch.testing.assert_close(found.losses, plain.losses, rtol=1e-5, atol=0)
    with fresh():
        alone = zk.shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
        accelerator = accelerator_for()
        with pytest.raises(ValueError, match="after the Accelerator"):
            accelerator.prepare(alone)
    moved_state(SMALL, BF16)
    as_by_hand(3, None, BF16, **OVERLAP)
    as_by_hand(2, FP16, muon=True, **OVERLAP)
    assert as_by_hand(3, FP16, scale=2.0**19).skipped > 0
    saved_and_resumed(f"{folder}/ddp", (None, None), BF16, schedule=zk.Delayed(after=1))
    saved_and_resumed(f"{folder}/2-3", (2, 3))
    saved_and_resumed(f"{folder}/fsdp2", ("fsdp2", "fsdp2"), BF16, **OVERLAP)
    with fresh():
        session = session_of(3, None, BF16, HOST, dropout=0.2)
        session.train(0, 3)
        session.accelerator.save_state(f"{folder}/two")
        return values(session.model)


@pytest.mark.slow
def test_two_ranks_at_length_and_one_goes_on(tmp_path: Path) -> None:
    of_two, _ = on_ranks(2, two_at_length, str(tmp_path))
    with fresh():
        session = session_of(2, None, BF16, {}, dropout=0.2)
        session.accelerator.load_state(str(tmp_path / "two"))
        found = values(session.model)
        session.train(0, 3)
    assert all(torch.equal(value, of_two[name]) for name, value in found.items())
    assert {float(entry["step"]) for entry in session.optimizer.state.values()} == {6.0}
