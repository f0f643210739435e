"""A small Llama with LoRA, its data, and the loop that every framework is to come to the losses of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokern as zk

VOCABULARY, LENGTH, ROWS, STEPS = 32, 8, 2, 5
LR, CLIP = 2e-2, 0.05  # a norm that is always above: clipping acts


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, **special, initializer_range=0.3)).to(dtype)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def adapted(dtype: torch.dtype = torch.float32) -> nn.Module:
    from peft import get_peft_model

    model = llama(dtype)
    torch.manual_seed(1)
    return get_peft_model(model, lora())


def tokens(count: int = STEPS * ROWS * 2) -> Tensor:
    return torch.randint(4, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(7))


def batches() -> Iterator[Tensor]:
    """This rank's part of each step's rows, dealt out as a DataLoader's sampler does: whole batches in turn."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dealt = tokens().split(ROWS)
    for step in range(STEPS):
        yield dealt[step * size + rank]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def averaged(params: list[nn.Parameter]) -> None:
    """Data parallelism in three lines."""
    for param in params if dist.is_initialized() else []:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def trained(model: nn.Module, opt: torch.optim.Optimizer, *, clip: float | None = None) -> list[float]:
    """The losses of a plain loop. `clip`: for an optimizer that does not clip; its gradients are averaged here."""
    losses = []
    for rows in batches():
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        if clip is not None:
            averaged(trainable(model))
            torch.nn.utils.clip_grad_norm_(trainable(model), clip)
        opt.step()
        opt.zero_grad()
        losses.append(mean(loss))
    return losses


def mean(loss: Tensor) -> float:
    """Over the ranks, of what each of them saw."""
    total = loss.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def by_torch(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[float]]:
    """Nothing of zerokern: replicas, averaged gradients, torch's clipping and AdamW."""
    model = adapted(dtype)
    return model, trained(model, torch.optim.AdamW(trainable(model), lr=LR), clip=CLIP)


def sharded(stage: int, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, list[float]]:
    model = zk.shard(adapted(dtype), stage=stage)
    opt = zk.AdamW(trainable(model), lr=LR, max_grad_norm=CLIP, **settings)
    losses = trained(model, opt)
    opt.flush()
    return model, losses


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """What PEFT would save."""
    from peft import get_peft_model_state_dict

    return {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}


def adapter(model: nn.Module) -> dict[str, Tensor]:
    """The same of a sharded model."""
    with zk.gathered(model):
        return adapter_of(model)


def tokenizer() -> Any:
    """Words w4 to w31, without any file."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, VOCABULARY))]
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)
