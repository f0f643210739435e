"""A Llama of Hugging Face, made from a configuration, at stage 3; and saved so that `from_pretrained` reads it.

    python examples/llama.py FOLDER
    torchrun --standalone --nproc-per-node=2 examples/llama.py FOLDER

`zk.build` constructs it unit by unit, so that no rank has all of it. Weights of a real model come by
`zk.load_pretrained(model, folder)`, after `huggingface_hub.snapshot_download(name)`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import zerokern as zk

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def main(folder: str, steps: int = 3) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = zk.build(lambda: LlamaForCausalLM(CONFIG).bfloat16(), stage=3)
    opt = zk.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    torch.manual_seed(rank)  # each rank has tokens of its own
    tokens = torch.randint(0, 512, (4, 32))
    for step in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(f"rank {rank}, step {step}: loss {loss.item():.4f}")
    zk.export(folder, model)  # safetensors, each rank its own bytes
    if rank == 0:
        CONFIG.save_pretrained(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER\n\n{__doc__}")
    main(sys.argv[1])
