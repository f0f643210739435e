"""A small language model, its data, and Hugging Face's loops written out by hand."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerokern as zk

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))

from ranks import run_ranks

STEPS, ROWS, LENGTH, ACCUMULATED, CLIP = 6, 2, 8, 2, 0.3
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALE = 2.0**10
HOST, SMALL = {"tier": "cpu"}, {"tier": "cpu", "state_format": "int8", "master_format": "split8"}
PLAIN = (  # autocast, dtype, settings: what frameworks are tried with on one rank
    (None, FP32, HOST), (None, BF16, SMALL), (BF16, FP32, {**HOST, "schedule": "overlap"}),
    (None, BF16, {**HOST, "schedule": zk.Delayed(after=2)}), (FP16, FP32, HOST),
)  # fmt: skip


def on_ranks(size: int, function: Callable, *arguments: Any) -> list:
    """On real ranks, each of which imports the frameworks anew."""
    return run_ranks(size, function, *arguments, timeout=480.0, patience=240.0)


def language_model(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": 32}
    config = GPT2Config(**shape, **drop, bos_token_id=0, eos_token_id=0, initializer_range=0.3)
    model = GPT2LMHeadModel(config).to(dtype)
    model.loss_type = "ForCausalLM"
    return model


def rows(count: int = 96) -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 32, (count, LENGTH), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in tokens]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def arguments(folder: Path | str, **settings: Any) -> Any:
    """What all runs have in common: accumulation, clipping, weight decay, a rate that changes."""
    from transformers import TrainingArguments

    common = {
        "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS,
        "gradient_accumulation_steps": ACCUMULATED, "learning_rate": SETTINGS["lr"], "max_grad_norm": CLIP,
        "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "linear", "logging_steps": 1,
        "save_strategy": "no", "train_sampling_strategy": "sequential", "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**common, **settings})


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Trainer's two groups: weight decay for neither biases nor norms."""
    names = dict(model.named_parameters())
    spared = {name for name in names if "bias" in name or ".ln_" in name}
    groups = [(decay, [names[name] for name in names if (name in spared) == (not decay)]) for decay in (0.1, 0.0)]
    return [{"params": params, "weight_decay": decay} for decay, params in groups]


FUSED = ["*.c_attn.weight"]  # query, key and value lie beside each other in GPT-2's, transposed: one matrix


def sharded(model: nn.Module, stage: Any, muon: bool = False) -> nn.Module:
    """With whole matrices, where stages divide them."""
    whole = zk.muon_groups(model, matrices=FUSED)[0] if muon and stage in (1, 2) else []
    return zk.shard(model, stage=stage, whole=whole) if isinstance(stage, int) else model


def chained(model: nn.Module, **settings: Any) -> zk.ChainedOptimizer:
    """Muon for the matrices of blocks, AdamW for the rest."""
    matrices, rest = zk.muon_groups(model, matrices=FUSED)
    muon = zk.Muon(matrices, lr=2e-2, weight_decay=0.1, **settings)
    return zk.ChainedOptimizer([muon, zk.AdamW(rest, **SETTINGS, **settings)])


def optimizer_of(model: nn.Module, muon: bool = False, **settings: Any) -> Any:
    return chained(model, **settings) if muon else zk.AdamW(decayed(model), **SETTINGS, **settings)


@dataclass
class Run:
    """What was seen of a run: by step the loss, the norm before clipping and the rate; the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    skipped: int = 0

    def same(self, other: Run, first: int = 0) -> None:
        """Bit for bit; of `other` from its step `first` on."""
        assert self.losses and self.losses == other.losses[first:], (self.losses, other.losses[first:])
        assert repr(self.norms) == repr(other.norms[first:]), (self.norms, other.norms[first:])  # nan too
        assert self.rates == other.rates[first:], (self.rates, other.rates[first:])
        assert self.params.keys() == other.params.keys()
        wrong = [name for name, value in self.params.items() if not torch.equal(value, other.params[name])]
        assert not wrong, wrong


def values(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters, copied."""
    from zerokern.integrations.sharded_model import is_sharded

    model = getattr(model, "module", model)
    with zk.gathered(model) if is_sharded(model) else contextlib.nullcontext():
        named = model.named_parameters()
        return {name: getattr(param, "full_tensor", param.detach)().detach().clone() for name, param in named}


def seen_by(trainer: Any) -> Run:
    """Of a Trainer that logged each step."""
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    of = {key: [entry[key] for entry in logs] for key in ("loss", "grad_norm", "learning_rate")}
    return Run(of["loss"], of["grad_norm"], of["learning_rate"], values(trainer.model))


def batches(rank: int, size: int) -> Iterator[dict[str, Tensor]]:
    """As Accelerate deals them out: batch by batch, to the ranks in turn."""
    data = rows()
    for number in range(STEPS * ACCUMULATED):
        begin = (number * size + rank) * ROWS
        chosen = data[begin : begin + ROWS]
        yield {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}


def total(loss: Tensor) -> float:
    """The mean over ranks, as Trainer gathers it."""
    parts = [torch.zeros_like(loss) for _ in range(world_size())]
    if world_size() == 1:
        return loss.item()
    dist.all_gather(parts, loss)
    return torch.stack(parts).mean().item()


def scheduled(optimizer: Any, strides: int = 1) -> Any:
    """The rate of all runs; Accelerate steps it once for each rank."""
    from transformers import get_scheduler

    return get_scheduler("linear", optimizer, num_warmup_steps=2 * strides, num_training_steps=STEPS * strides)


def number_of(norm: Any) -> float:
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def scaler_of(amp: Any, scale: float) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3) if amp is FP16 else None


def by_hand(
    model: nn.Module,
    optimizer: Any,
    *,
    clip: Callable[[], Tensor],
    waits: Callable[[], Any] = contextlib.nullcontext,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    means: bool = False,
    flush: bool = True,
) -> Run:
    """Trainer's loop, or with `means` that of Accelerate's manual; it knows neither of them."""
    size, run = world_size(), Run()
    scheduler, strides = scheduled(optimizer, size if means else 1), size if means else 1
    items = ROWS * (LENGTH - 1) * ACCUMULATED * size
    dealt = batches(dist.get_rank() if size > 1 else 0, size)
    model.train()
    for _ in range(STEPS):
        logged = torch.tensor(0.0)
        for number in range(ACCUMULATED):
            with waits() if number < ACCUMULATED - 1 else contextlib.nullcontext():
                with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
                    loss = model(**next(dealt), **({} if means else {"num_items_in_batch": torch.tensor(items)})).loss
                loss = loss / ACCUMULATED if means else loss * size
                (scaler.scale(loss) if scaler else loss).backward()
                logged += loss.detach()
        if scaler:
            scaler.unscale_(optimizer)
        run.norms.append(number_of(clip()))
        if scaler:
            skipped = optimizer.skipped_steps
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        run.rates.append(scheduler.get_last_lr()[0])
        if not scaler or optimizer.skipped_steps == skipped:
            for _ in range(strides):
                scheduler.step()
        model.zero_grad()
        run.losses.append(total(logged))
    if flush and hasattr(optimizer, "flush"):
        optimizer.flush()
    run.params = values(model)
    return run


def torchs_clip(model: nn.Module) -> Callable[[], Tensor]:
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def expected(
    kind: Any,
    amp: Any = None,
    dtype: torch.dtype = torch.float32,
    scale: float = SCALE,
    *,
    means: bool,
    **settings: Any,
) -> Run:
    """The loop by hand: of one process or DDP (None), of FSDP2, or of a stage of zk.shard."""
    model, muon = language_model(dtype=dtype), settings.get("muon", False)
    wrapped, clip, waits = model, torchs_clip(model), contextlib.nullcontext
    if isinstance(kind, int):
        sharded(model, kind, muon)
        clip, waits = lambda: zk.clip_grad_norm_(model, CLIP), lambda: zk.no_sync(model)
    elif kind == "fsdp2":
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)

        @contextlib.contextmanager
        def waits() -> Iterator[None]:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

    elif dist.is_initialized():
        wrapped = DistributedDataParallel(model)
        waits = wrapped.no_sync
    optimizer = optimizer_of(model, **settings)
    scaler = scaler_of(amp, scale)
    return by_hand(wrapped, optimizer, clip=clip, waits=waits, autocast=amp, scaler=scaler, means=means)


@contextlib.contextmanager
def fp16_on_a_cpu(scale: float) -> Iterator[None]:
    """Accelerate makes no GradScaler for a CPU; here it does."""
    import accelerate

    made = accelerate.Accelerator.__init__

    def scaling(self: Any, *arguments: Any, **settings: Any) -> None:
        made(self, *arguments, **settings)
        if self.mixed_precision == "fp16":
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)

    accelerate.Accelerator.__init__ = scaling
    try:
        yield
    finally:
        accelerate.Accelerator.__init__ = made


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Accelerate keeps its state for the process, and in the environment."""
    from accelerate.state import AcceleratorState, GradientState

    kept = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(kept)


def fsdp2_on_a_cpu() -> None:
    """Accelerate offers FSDP to devices only; from here on, until `fresh` ends, it takes this CPU for one."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["GPT2Block"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrapped)
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
