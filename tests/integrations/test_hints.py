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
