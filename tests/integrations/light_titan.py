"""torchtitan's own Trainer on a CPU, on each of some ranks: a tiny Llama, data by number, losses that are kept.

What is replaced, because it asks for a GPU: which device there is, the metrics (memory, FLOPS: a hook of TrainSpec),
attention in context parallelism, and the shorter timeout after the first step (gloo takes no device_ids). Model, FSDP2,
loop, clipping, the container of optimizers, schedulers and CheckpointManager are torchtitan's.
"""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd as gathered

STEPS, ROWS, LENGTH, WORDS = 4, 2, 8, 32


def titan() -> Any:
    """torchtitan.train, imported where it finds a CPU: it looks for its device once."""
    import torch._utils as found

    before, found._get_available_device_type = found._get_available_device_type, lambda: "cpu"
    try:
        import torchtitan.train as imported
    finally:
        found._get_available_device_type = before
    imported.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    imported.dist_utils.set_pg_timeouts = lambda **_: None
    from torchtitan.models.llama3.infra import parallelize

    parallelize.apply_cp_to_attention_module = gathers_keys
    return imported


def gathers_keys(modules: Iterable[Any], mesh: Any, _: str) -> None:
    """Attention in context parallelism: torch's own (ring attention) has no kernel for a CPU.

    Keys and values of all ranks are gathered. Rank r of n has the chunks r and 2n - 1 - r of a sequence of 2n.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        size, half = mesh.size(), q.shape[2] // 2
        firsts = [(rank * half, (2 * size - 1 - rank) * half) for rank in range(size)]
        places = [torch.cat([torch.arange(one, one + half) for one in both]) for both in firsts]
        k, v = (gathered(one.contiguous(), 2, mesh.get_group()) for one in (k, v))
        mask = places[mesh.get_local_rank()][:, None] >= torch.cat(places)[None, :]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for module in modules:
        module.forward = attention


class Data:
    """Rows by number, which a checkpoint remembers."""

    def __init__(self, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.world, self.rank, self.number = dp_world_size, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            rng = torch.Generator().manual_seed(self.number * self.world + self.rank)
            self.number += 1
            rows = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=rng)
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {f"number_{self.rank}": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state[f"number_{self.rank}"]


class Metrics:
    """Keeps what torchtitan logs."""

    def __init__(self, *_: Any) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.color = types.SimpleNamespace(blue="", red="", yellow="", reset="")
        stats = types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = types.SimpleNamespace(device_name="CPU", get_peak_stats=lambda: stats)
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, mean: float, most: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        self.losses.append(mean)
        self.norms.append(norm)
        self.rates.append(extra_metrics["lr"])

    def close(self) -> None:
        pass


def parallelized(model: Any, *arguments: Any, **settings: Any) -> Any:
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3 import parallelize_llama

    model = parallelize_llama(model, *arguments, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model


def options(name: str, param: Tensor) -> dict[str, Any]:
    """A vector of 16 elements over two ranks has no block of int8 of its own on the second."""
    return {} if param.ndim > 1 else {"state_format": "fp32", "weight_decay": 0.0}


def with_muon(name: str, param: Tensor) -> dict[str, Any]:
    """Matrices of the blocks for Muon, with AdamW's rates."""
    is_matrix = name.startswith("layers.") and param.ndim == 2
    return {"rule": "muon", "adjust_lr_fn": "match_rms_adamw"} if is_matrix else {}


def tiny(options: Any = options, **settings: Any) -> Any:
    """A TrainSpec: torchtitan's Llama 3, of a size for tests; with `settings`, trained by zerokern."""
    titan()
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols.train_spec import get_train_spec

    from zerokern.integrations.torchtitan import train_spec

    spec = dataclasses.replace(
        get_train_spec("llama3"),
        model_args={"tiny": TransformerModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=WORDS, multiple_of=16)},
        parallelize_fn=parallelized,
        build_dataloader_fn=Data,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Metrics,
        state_dict_adapter=None,
    )
    return train_spec(spec, options, **settings) if settings else spec


def started(
    spec: Any, folder: Path | str, *more: str, steps: int = STEPS, accumulated: int = 1, batches: int = 0
) -> Any:
    """torchtitan's Trainer, of its own command line. `batches`: the ranks that have data of their own; 0: all."""
    trainer = titan().Trainer
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec as specs

    specs._extra_train_specs.pop("tiny", None)
    specs.register_train_spec("tiny", spec)
    world = batches or torch.distributed.get_world_size()
    config = ConfigManager().parse_args(
        [
            "--model.name=tiny",
            "--model.flavor=tiny",
            f"--job.dump_folder={folder}",
            f"--training.steps={steps}",
            f"--training.local_batch_size={ROWS}",
            f"--training.global_batch_size={ROWS * world * accumulated}",
            f"--training.seq_len={LENGTH}",
            "--training.max_norm=0.5",
            "--training.mixed_precision_param=float32",
            "--optimizer.lr=0.03",
            "--lr_scheduler.warmup_steps=2",
            "--activation_checkpoint.mode=none",
            "--debug.seed=5",
            *more,
        ]
    )
    return trainer(config)
