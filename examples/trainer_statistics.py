"""What the optimizer measures, in the logs of Hugging Face's Trainer, and so in Weights & Biases or TensorBoard.

    python examples/trainer_statistics.py FOLDER

`report_statistics(trainer)` is the line for a program of your own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import zerokern as zk
from zerokern.examples.trainer import Tokens


class Statistics(TrainerCallback):
    """Adds `opt.statistics()` to what Trainer logs, each name behind "optimizer/"."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        opt = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        if logs is None or "loss" not in logs or not hasattr(opt, "statistics"):
            return  # evaluation, or the summary at the end
        found = {f"optimizer/{name}": value for name, value in opt.statistics().items()}
        logs.update(found)
        state.log_history[-1].update(found)


def report_statistics(trainer: Trainer) -> None:
    """Makes `trainer` log statistics. The callback comes first, so that all reporters see what it adds."""
    trainer.callback_handler.callbacks.insert(0, Statistics())


def main(folder: str, steps: int = 4) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32))
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=1, use_cpu=True, report_to=[],
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=Tokens(), optimizer_cls_and_kwargs=(zk.AdamW, {"lr": 1e-2, "tier": "cpu"})
    )
    report_statistics(trainer)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER\n\n{__doc__}")
    for row in main(sys.argv[1]):
        print(row)
