"""Models whose weights go to safetensors and back, and what reads them independently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from pages import MIB, large_things_apart, peak, restart_peak
from raw_cases import raw
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from worlds import World, built

from zerokern import export, load_pretrained

__all__ = ["MIB", "export", "large_things_apart", "load_pretrained", "peak", "raw", "restart_peak"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BF16 = torch.bfloat16
HALF = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
TOKENS = torch.arange(12).view(2, 6)


class Mixed(nn.Module):
    """Odd sizes, a scalar, buffers of several kinds, a tied weight and a frozen one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.unused = nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList([nn.Linear(7, 42), nn.Linear(42, 7)])
        self.leave = nn.Linear(7, 11, bias=False)
        self.leave.weight = self.enter.weight
        with torch.no_grad():  # halfway between two of bf16
            self.norm.weight[:2] = torch.tensor([1.00390625, 1.01171875])
        self.gain = nn.Parameter(torch.randn(()))
        self.table = nn.Parameter(torch.randint(0, 100, (3, 5)), requires_grad=False)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("scratch", torch.rand(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.enter(tokens).flatten(0, 1))
        x = x + self.blocks[1](F.gelu(self.blocks[0](x)))
        return self.leave(x) * self.gain


def llama(tied: bool) -> Callable[[], nn.Module]:
    """What builds a tiny one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=53, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return lambda: LlamaForCausalLM(config)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def theirs(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as the safetensors package reads them."""
    files = sorted(Path(folder).glob("*.safetensors"))
    found = [load_file(file) for file in files]
    names = [name for one in found for name in one]
    assert len(names) == len(set(names))
    return {name: tensor for one in found for name, tensor in one.items()}


def adamw_steps(model: nn.Module, opt: torch.optim.Optimizer, steps: int, world: World | None = None) -> None:
    """Training on a loss that each rank has a part of."""
    rank = 0 if world is None else world.rank
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        out = model(torch.randint(0, 11, (2, 6), generator=generator))
        out.float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def mixed(seed: int = 0) -> Mixed:
    return built(Mixed, seed)


def kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, without the second names of tied tensors, as transformers and we write them."""
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    return {n: t.detach() for n, t in state.items() if id(t) not in seen and not seen.add(id(t))}


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def filled(value: float) -> nn.Module:
    """A model all of whose values say which export it is."""
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(2)))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


LARGE, SMALL = 1 << 20, 1800


def whole(folder: Path) -> float:
    """The value of the one export that counts for Hugging Face: a single file before an index; all of it is there."""
    if (folder / SINGLE).exists():
        found = load_file(folder / SINGLE)
    else:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        found = {name: load_file(folder / file)[name] for name, file in weight_map.items()}
    assert found.keys() == filled(0).state_dict().keys()
    values = {value for tensor in found.values() for value in tensor.unique().tolist()}
    assert len(values) == 1
    model = filled(-1.0)
    load_pretrained(model, folder)  # and ours reads the same one
    assert {value for p in model.parameters() for value in p.unique().tolist()} == values
    return values.pop()
