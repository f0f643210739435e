"""What is told where a framework is missing, and where zerokern has nothing to do."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

import zerokern as zk
from zerokern.core.errors import say_once
from zerokern.integrations import without


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_without_the_framework_the_extra_is_named(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"zerokern.integrations.{framework}", raising=False)
    with pytest.raises(ImportError, match=rf"{framework} is not installed; pip install 'zerokern\[integrations\]'"):
        importlib.import_module(f"zerokern.integrations.{framework}")
    other = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    assert without("lightning", other) is other


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).sum()}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_trainer_for_which_nothing_is_done_says_so(
    sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer as PlainTrainer
    from transformers import TrainingArguments

    from zerokern.integrations.transformers import Trainer

    say_once.cache_clear()
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
    model = zk.shard(Net()) if sharded else Net()
    with caplog.at_level(logging.WARNING, "zerokern.integrations.transformers"):
        Trainer(model=model, args=args).create_optimizer()
    told = [record.getMessage() for record in caplog.records if "does nothing here" in record.getMessage()]
    assert len(told) == (0 if sharded else 1)
    assert sharded or "zk.shard(model)" in told[0]
    assert issubclass(Trainer, PlainTrainer)


def plain(framework: str, model: torch.nn.Module, folder: Path) -> None:
    """Trains a model of zk.shard inside a framework, as if that knew of none."""
    if framework == "transformers":
        from transformers import Trainer, TrainingArguments

        args = TrainingArguments(str(folder), use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
        Trainer(model, args, train_dataset=[{"x": torch.ones(4)}] * 8).train()
    elif framework == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare_model(model)
        accelerator.backward(prepared(torch.ones(2, 4))["loss"])
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
    else:
        import lightning.pytorch as pl

        class Task(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
                return self.net(batch)["loss"]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return zk.AdamW(self.parameters())

        settings = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "gradient_clip_val": 1.0, "logger": False}
        trainer = pl.Trainer(**settings, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(Task(), torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2))


@pytest.mark.parametrize("framework", ["transformers", "accelerate", "lightning"])
def test_a_framework_without_its_adapter_is_told_which_it_is(framework: str, tmp_path: Path) -> None:
    from hf_cases import fresh

    from zerokern.core.errors import adapter_of_caller
    from zerokern.zero.sharded_ops import ShardedUseError

    with fresh(), pytest.raises(ShardedUseError, match=rf"zerokern\.integrations\.{framework}"):
        plain(framework, zk.shard(Net(), stage=2), tmp_path)
    assert adapter_of_caller() == ""


def test_the_adapter_itself_is_told_what_the_op_needs(tmp_path: Path) -> None:
    """A Trainer of ours, in which the user takes the norm of a divided gradient."""
    from transformers import TrainingArguments

    from zerokern.integrations.transformers import Trainer

    class Watched(Trainer):
        def training_step(self, model: torch.nn.Module, *arguments: object) -> torch.Tensor:
            loss = super().training_step(model, *arguments)
            model.linear.weight.grad.norm()
            return loss

    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
    with pytest.raises(TypeError, match=r"zk\.clip_grad_norm_") as raised:
        Watched(zk.shard(Net(), stage=3), args, train_dataset=[{"x": torch.ones(4)}] * 8).train()
    assert "zerokern.integrations" not in str(raised.value)
