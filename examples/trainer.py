"""Hugging Face's own Trainer with `zk.AdamW`: state in 8 bits, or exact; no adapter is needed for that.

    python examples/trainer.py FOLDER

For a model that `zk.shard` shards, take `Trainer` from `zerokern.integrations.transformers` instead.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import zerokern as zk


class Tokens(Dataset):
    """A few sequences that can be learned by heart."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) * (place + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main(folder: str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32))
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=1, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no",
    )  # fmt: skip
    settings = {"lr": 1e-2, "state_format": "int8"}
    trainer = Trainer(model, arguments, train_dataset=Tokens(), optimizer_cls_and_kwargs=(zk.AdamW, settings))
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER\n\n{__doc__}")
    print("losses", *main(sys.argv[1]))
