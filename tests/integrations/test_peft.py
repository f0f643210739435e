"""PEFT's LoRA on a frozen base that zk.shard has sharded: the losses, and the adapter on disk, of a plain loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerokern as zk

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))

from ranks import run_ranks

STAGES = (2, 3)
ERROR = 2e-6  # torch's AdamW and ours round differently; over five steps of a loss near 3


SFT: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "max_steps": cases.STEPS, "per_device_train_batch_size": cases.ROWS,
    "learning_rate": cases.LR, "lr_scheduler_type": "constant", "max_grad_norm": cases.CLIP,
    "weight_decay": 0.01,  # torch's default, which the plain loop has
    "max_length": None, "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "logging_steps": 1,
    "save_strategy": "no", "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip


def here(function: Any, *arguments: Any) -> list:
    return [function(0, *arguments)]


def on_two_ranks(function: Any, *arguments: Any) -> list:
    return run_ranks(2, function, *arguments, timeout=240.0, patience=120.0)


WORLDS = pytest.mark.parametrize(
    "worlds", [here, pytest.param(on_two_ranks, marks=pytest.mark.slow)], ids=["1 rank", "2 ranks"]
)


def main_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def losses_and_adapters(rank: int, folder: str) -> dict[Any, tuple[list[float], dict[str, Tensor]]]:
    """By torch's own loop, and by zk.shard at each stage; there saved by PEFT's own button too."""
    torch.set_num_threads(1)
    model, losses = cases.by_torch()
    seen: dict[Any, Any] = {"torch": (losses, cases.adapter_of(model))}
    for stage in STAGES:
        model, losses = cases.sharded(stage)
        assert [name for name, p in model.named_parameters() if p.grad is not None and not p.requires_grad] == []
        with zk.gathered(model):  # every rank takes part; one writes
            model.save_pretrained(f"{folder}/{stage}", is_main_process=main_process())
        seen[stage] = (losses, cases.adapter(model))
    seen["held"] = held(model)
    return seen


def held(model: torch.nn.Module) -> tuple[int, int, int]:
    """Elements of the frozen base on this rank and in all; and those of a state of the adapters on this rank."""
    frozen = [param for param in model.parameters() if not param.requires_grad]
    opt = zk.AdamW(cases.trainable(model), lr=cases.LR)
    cases.trained(model, opt)
    states = sum(value["exp_avg"].local.numel() for value in opt.state.values())
    return sum(param.local.numel() for param in frozen), sum(param.numel() for param in frozen), states


@WORLDS
def test_losses_and_adapters_are_those_of_a_plain_loop(worlds: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    results = worlds(losses_and_adapters, str(tmp_path))
    plain, theirs = results[0]["torch"]
    assert max(plain) - min(plain) > 0.02
    for stage in STAGES:
        losses, ours = results[0][stage]
        assert losses == pytest.approx(plain, abs=ERROR)
        assert losses == results[0][STAGES[0]][0] == results[-1][stage][0]
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=2e-5)
        on_disk = load_file(tmp_path / str(stage) / "adapter_model.safetensors")
        assert on_disk.keys() == ours.keys() and all(torch.equal(on_disk[name], ours[name]) for name in ours)
    of_base, base, states = zip(*(result["held"] for result in results), strict=True)
    assert sum(of_base) == base[0] and max(of_base) < 1.2 * base[0] / len(results)
    assert sum(states) == sum(value.numel() for value in ours.values())
    loaded = PeftModel.from_pretrained(cases.llama(), tmp_path / "3")
    assert all(torch.equal(value, ours[name]) for name, value in cases.adapter_of(loaded).items())


def test_a_bf16_base_and_fp32_adapters() -> None:
    base = {name: value.clone() for name, value in cases.llama(torch.bfloat16).state_dict().items()}
    _, plain = cases.by_torch(torch.bfloat16)
    model, losses = cases.sharded(3, torch.bfloat16)
    assert {param.dtype for param in cases.trainable(model)} == {torch.float32}
    assert losses == pytest.approx(plain, abs=0.01)  # a bf16 step of the loss
    with zk.gathered(model):
        kept = {name.replace(".base_layer", ""): value for name, value in model.get_base_model().state_dict().items()}
    assert all(torch.equal(kept[name], value) for name, value in base.items())


def test_offloaded_compressed_and_checkpointed() -> None:
    _, plain = cases.sharded(3)
    assert cases.sharded(3, tier="cpu", schedule="overlap")[1] == plain
    assert cases.sharded(3, state_format="int8")[1] == pytest.approx(plain, abs=0.02)
    model = cases.adapted()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    zk.shard(model, stage=3)
    opt = zk.AdamW(cases.trainable(model), lr=cases.LR, max_grad_norm=cases.CLIP)
    assert cases.trained(model, opt) == plain


def test_an_adapter_is_switched_off_and_merged(tmp_path: Path) -> None:
    """And saving what is divided says what to do."""
    rows = next(cases.batches())
    model, _ = cases.sharded(3)
    with pytest.raises(TypeError, match=r"with zk.gathered\(model\)"):
        model.save_pretrained(tmp_path)
    with torch.no_grad(), model.disable_adapter():
        bare = model(input_ids=rows).logits
    with torch.no_grad():
        assert torch.equal(bare, cases.llama()(input_ids=rows).logits)
        apart = model(input_ids=rows).logits
        with zk.gathered(model, write=True):
            model.merge_adapter()
        merged = model(input_ids=rows).logits
    assert not torch.equal(apart, bare)
    torch.testing.assert_close(merged, apart, rtol=1e-4, atol=1e-4)


def tuned(rank: int, folder: str, stages: tuple[int | None, ...]) -> dict[Any, Any]:
    """TRL's SFTTrainer: as it is, with the optimizer alone; and on sharded models."""
    import logging

    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    from zerokern.integrations.transformers import TrainerMixin, optimizer_cls_and_kwargs

    class Tuner(TrainerMixin, SFTTrainer):
        pass

    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable(logging.WARNING)
    model, losses = cases.by_torch()
    seen: dict[Any, Any] = {"torch": (losses, cases.adapter_of(model))}
    for stage in stages:
        args = SFTConfig(output_dir=f"{folder}/{stage}", **SFT)
        common = {
            "args": args,
            "train_dataset": Dataset.from_dict({"input_ids": cases.tokens().tolist()}),
            "processing_class": cases.tokenizer(),
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args),
        }
        if stage is None:
            trainer = SFTTrainer(model=cases.adapted(), **common)
        else:
            trainer = Tuner(model=zk.shard(cases.adapted(), stage=stage), **common)
        trainer.train()
        trainer.save_model(f"{folder}/{stage}/adapter")
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        seen[stage] = (losses, cases.adapter_of(trainer.model) if stage is None else cases.adapter(trainer.model))
    return seen


@WORLDS
def test_sft_trainer_reaches_the_losses_of_a_plain_loop(worlds: Any, tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("needs TRL, which needs Python 3.11")
    from peft import PeftModel

    results = worlds(tuned, str(tmp_path), (None, 3))
    plain, adapter = results[0].pop("torch")
    for stage, (losses, ours) in results[0].items():
        assert losses == pytest.approx(plain, abs=ERROR), stage
        for name, value in adapter.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-5)
        loaded = PeftModel.from_pretrained(cases.llama(), tmp_path / str(stage) / "adapter")
        assert all(torch.equal(value, ours[name]) for name, value in cases.adapter_of(loaded).items())
