"""Accelerate itself, on one rank and on two, with the loop of its manual; compared with the same loop by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    ROWS,
    SETTINGS,
    STEPS,
    Run,
    by_hand,
    decayed,
    fp16_on_a_cpu,
    fresh,
    fsdp2_on_a_cpu,
    language_model,
    number_of,
    on_ranks,
    rows,
    scaler_of,
    scheduled,
    total,
    values,
    world_size,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerokern as zk
from zerokern.core.errors import StateError

FP32 = torch.float32
PRECISION = {None: "no", BF16: "bf16", FP16: "fp16"}


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


def torchs_clip(model: nn.Module) -> Callable[[], Tensor]:
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def same_as_by_hand(amp: Any, dtype: torch.dtype, scale: float = 2.0**10, plain: bool = True, **settings: Any) -> Run:
    """One process, or DDP."""
    with fresh(), fp16_on_a_cpu(scale):
        model = language_model(dtype=dtype)
        session = Session(accelerator_for(amp, plain), model, zk.AdamW(decayed(model), **SETTINGS, **settings))
        session.train()
        found = session.end()
    model = language_model(dtype=dtype)
    reduced = dist.is_initialized()
    wrapped = DistributedDataParallel(model) if reduced else model
    loop = {"means": True, "autocast": amp, "scaler": scaler_of(amp, scale), "clip": torchs_clip(model)}
    waits = {"waits": wrapped.no_sync} if reduced else {}
    found.same(by_hand(wrapped, zk.AdamW(decayed(model), **SETTINGS, **settings), **loop, **waits))
    return found


PLAIN = (
    (None, FP32, {"tier": "cpu"}),
    (None, BF16, {"tier": "cpu", "state_format": "int8", "master_format": "split8"}),
    (BF16, FP32, {"tier": "cpu", "schedule": "overlap"}),
    (None, BF16, {"tier": "cpu", "schedule": zk.Delayed(after=2)}),
    (FP16, FP32, {"tier": "cpu"}),
)


@pytest.mark.parametrize("amp, dtype, settings", PLAIN)
def test_the_losses_of_the_loop_by_hand(amp: Any, dtype: torch.dtype, settings: dict) -> None:
    same_as_by_hand(amp, dtype, **settings)


def test_the_rate_stays_where_a_step_was_skipped() -> None:
    found = same_as_by_hand(FP16, FP32, 2.0**19, plain=False)
    assert found.skipped in range(1, STEPS), found.norms


def sharded_as_by_hand(
    stage: int, amp: Any = None, dtype: torch.dtype = FP32, scale: float = 2.0**10, **settings: Any
) -> Run:
    with fresh(), fp16_on_a_cpu(scale):
        accelerator = accelerator_for(amp)
        model = zk.shard(language_model(dtype=dtype), stage=stage)
        session = Session(accelerator, model, zk.AdamW(decayed(model), **SETTINGS, **settings))
        assert session.model is model
        session.train()
        found = session.end()
    model = zk.shard(language_model(dtype=dtype), stage=stage)
    loop = {"means": True, "autocast": amp, "scaler": scaler_of(amp, scale), "waits": lambda: zk.no_sync(model)}
    clip = {"clip": lambda: zk.clip_grad_norm_(model, CLIP)}
    found.same(by_hand(model, zk.AdamW(decayed(model), **SETTINGS, **settings), **loop, **clip))
    return found


def divided(model: nn.Module) -> nn.Module:
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


def fsdp2_as_by_hand(dtype: torch.dtype, **settings: Any) -> Run:
    with fresh():
        accelerator = accelerator_for(plain=True)
        model = language_model(dtype=dtype)
        optimizer = zk.AdamW(decayed(model), **SETTINGS, **settings)
        fsdp2_on_a_cpu()
        session = Session(accelerator, model, optimizer)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        assert held == {id(param) for param in session.model.parameters()}, "its parameters were exchanged"
        session.train()
        found = session.end()
    model = divided(language_model(dtype=dtype))

    @contextlib.contextmanager
    def waits() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    optimizer = zk.AdamW(decayed(model), **SETTINGS, **settings)
    found.same(by_hand(model, optimizer, means=True, clip=torchs_clip(model), waits=waits))
    return found


def moved_state(settings: dict[str, Any], dtype: torch.dtype = FP32) -> None:
    """An optimizer that has state is prepared: Accelerate moves what it shows to the device, and loads that."""
    runs = []
    for prepared in (False, True):
        model = language_model(dtype=dtype)
        optimizer = zk.AdamW(decayed(model), **SETTINGS, **settings)
        with fresh():
            accelerator = accelerator_for(plain=True)
            wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
            by_hand(wrapped, optimizer, clip=torchs_clip(model), means=True, flush=False)
            if prepared:
                optimizer = accelerator.prepare_optimizer(optimizer).optimizer
            runs.append(by_hand(wrapped, optimizer, clip=torchs_clip(model), means=True))
    runs[1].same(runs[0])


KINDS = (
    ({"tier": "cpu"}, FP32),
    ({"tier": "cpu", "state_format": "int8", "master_format": "split8"}, BF16),
    ({"schedule": zk.Delayed(after=2)}, BF16),
)


@pytest.mark.parametrize("settings, dtype", KINDS)
def test_state_that_was_moved_behind_its_back(settings: dict, dtype: torch.dtype, monkeypatch: Any) -> None:
    """On a CPU nothing moves: here a copy is what comes back, as it would from a device."""
    import accelerate.optimizer

    def copied(value: Any, device: Any) -> Any:
        if isinstance(value, Tensor):
            seen.append(value.dtype)
            return value.clone()
        return (
            accelerate.optimizer.honor_type(value, map(one, value))
            if isinstance(value, list | tuple)
            else ({key: one(item) for key, item in value.items()} if isinstance(value, dict) else value)
        )

    def one(value: Any) -> Any:
        return copied(value, None)

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
    found.same(same_as_by_hand(None, FP32, tier="cpu"))


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
            refuses("which zk.shard has divided", StateError, accelerator, model, kind(model.parameters(), lr=0.1))
        model = divided()
        accelerator.prepare(model, torch.optim.SGD(zk.shards(model), lr=0.1))
    with fresh():
        accelerator = Accelerator(cpu=True)
        fsdp2_on_a_cpu()
        refuses("distributed_type", ValueError, accelerator, divided(3))


def session_of(kind: Any, dtype: torch.dtype, settings: dict[str, Any]) -> Session:
    """Of one process or DDP (None), of FSDP2, or of a stage of zk.shard."""
    accelerator, model = accelerator_for(), language_model(0.2, dtype)
    if isinstance(kind, int):
        zk.shard(model, stage=kind)
    optimizer = zk.AdamW(decayed(model), **SETTINGS, **settings)
    if kind == "fsdp2":
        fsdp2_on_a_cpu()
    return Session(accelerator, model, optimizer)


def saved_and_resumed(folder: str, kinds: tuple[Any, Any], dtype: torch.dtype = FP32, **settings: Any) -> None:
    """By Accelerate's own buttons: three steps, saved, three more; and these three in other objects."""
    runs = []
    for number, kind in enumerate(kinds):
        with fresh():
            session = session_of(kind, dtype, settings)
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


@pytest.mark.parametrize("dtype, settings", [(FP32, {"tier": "cpu"}), (BF16, {"schedule": zk.Delayed(after=1)})])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype, settings: dict) -> None:
    saved_and_resumed(str(tmp_path), (None, None), dtype, **settings)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_of_a_divided_model_goes_on_bit_for_bit(tmp_path: Path, stage: int) -> None:
    saved_and_resumed(str(tmp_path), (stage, stage), BF16, tier="cpu")


def two(rank: int) -> None:
    plain = same_as_by_hand(None, FP32, tier="cpu")
    for found in (sharded_as_by_hand(2), sharded_as_by_hand(3), fsdp2_as_by_hand(FP32, tier="cpu")):
        torch.testing.assert_close(found.losses, plain.losses, rtol=1e-5, atol=0)
    with fresh():
        alone = zk.shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
        accelerator = accelerator_for()
        with pytest.raises(ValueError, match="after the Accelerator"):
            accelerator.prepare(alone)


def test_two_ranks() -> None:
    on_ranks(2, two)


def two_at_length(rank: int, folder: str) -> None:
    same_as_by_hand(None, BF16, plain=False, tier="cpu", schedule=zk.Delayed(after=2))
    moved_state({"tier": "cpu", "state_format": "int8", "master_format": "split8"}, BF16)
    sharded_as_by_hand(2, BF16)
    sharded_as_by_hand(3, None, BF16, tier="cpu", schedule="overlap")
    assert sharded_as_by_hand(3, FP16, scale=2.0**19).skipped > 0
    fsdp2_as_by_hand(BF16, tier="cpu", schedule="overlap")
    saved_and_resumed(f"{folder}/ddp", (None, None), BF16, schedule=zk.Delayed(after=1))
    saved_and_resumed(f"{folder}/3", (3, 3), BF16, tier="cpu", schedule="overlap")
    saved_and_resumed(f"{folder}/2-3", (2, 3))
    saved_and_resumed(f"{folder}/fsdp2", ("fsdp2", "fsdp2"), tier="cpu")
    saved_and_resumed(f"{folder}/late", ("fsdp2", "fsdp2"), BF16, schedule=zk.Delayed(after=1))


@pytest.mark.slow
def test_two_ranks_at_length(tmp_path: Path) -> None:
    on_ranks(2, two_at_length, str(tmp_path))


def saved_by_two(rank: int, folder: str) -> dict[str, Tensor]:
    session = session_of(3, BF16, {"tier": "cpu"})
    session.train(0, 3)
    session.accelerator.save_state(folder)
    return values(session.model)


@pytest.mark.slow
def test_one_rank_goes_on_with_what_two_saved(tmp_path: Path) -> None:
    expected, _ = on_ranks(2, saved_by_two, str(tmp_path))
    with fresh():
        session = session_of(2, BF16, {})
        session.accelerator.load_state(str(tmp_path))
        found = values(session.model)
        session.train(0, 3)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert {float(entry["step"]) for entry in session.optimizer.state.values()} == {6.0}
