"""A Llama of transformers: its own gradient checkpointing is left alone, and zk.shard(keep=, micro=) is another way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerokern as zk

ROWS, LENGTH, WORDS = 4, 6, 32


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=16)
    config.use_cache = False
    return LlamaForCausalLM(config).train()


def batch(step: int) -> dict[str, Tensor]:
    """With padding, so that there is a mask."""
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(words)
    mask[1, 4:] = 0
    return {"input_ids": words, "labels": words.masked_fill(mask == 0, -100), "attention_mask": mask}


def losses(model: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    found = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def ours(checkpoints: bool = False, **settings: Any) -> list[float]:
    model = llama()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    zk.shard(model, **settings)
    return losses(model, zk.AdamW(model.parameters(), lr=1e-2))


@pytest.fixture(scope="module")
def plain() -> list[float]:
    model = llama()
    return losses(model, zk.AdamW(model.parameters(), lr=1e-2))


def test_losses_are_those_of_a_plain_loop(plain: list[float], tmp_path: Path) -> None:
    disk = zk.Nvme(tmp_path, ring_nbytes="1M")
    for keep in ("device", disk):
        assert ours(stage=3, keep=keep) == plain, keep
    assert ours(checkpoints=True, stage=2) == ours(checkpoints=True, stage=3, keep=disk) == plain
    # slices of the batch are sums in another order, and Adam's first steps
    assert ours(stage=3, micro=2) == pytest.approx(plain, abs=2e-5)


def test_a_cache_of_keys_and_values_is_refused() -> None:
    """It would be added to once more in backward, and by each slice."""
    for settings in ({"keep": "device"}, {"micro": 2}):
        model = llama()
        model.config.use_cache = True
        zk.shard(model, **settings)
        with pytest.raises(zk.StateError, match=r"model\.config\.use_cache = False"):
            model(**batch(0))
        with torch.no_grad():
            assert model(**batch(0)).past_key_values is not None


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**shape, num_key_value_heads=2, vocab_size=WORDS, num_local_experts=4)
    config.use_cache = False
    return MixtralForCausalLM(config).train()


def test_what_transformers_collects_of_slices_is_refused_by_name() -> None:
    """Its hooks would collect it slice by slice; what they collect of units themselves is of the whole batch."""
    model = zk.shard(mixtral(), stage=3, micro=2)
    with pytest.raises(zk.StateError, match=r"output_router_logits of transformers.*micro > 1"):
        model(**batch(0), output_router_logits=True)
    del model
    model = zk.shard(llama(), stage=3, micro=2)
    model.set_attn_implementation("eager")
    with pytest.raises(zk.StateError, match=r"output_attentions of transformers.*micro > 1"):
        model(**batch(0), output_attentions=True)
    found = model(**batch(0), output_hidden_states=True)
    found.loss.backward()
    assert [len(one) for one in found.hidden_states] == [ROWS] * 4
    with torch.no_grad():
        assert [len(one) for one in model(**batch(0), output_attentions=True).attentions] == [ROWS] * 3


def test_keywords_in_a_partial_are_named(plain: list[float]) -> None:
    """transformers hands over masks so; with micro=1 they are what they are."""
    model = llama()
    model.gradient_checkpointing_enable()

    def with_micro(micro: int) -> float:
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = partial(zk.recompute, micro=micro)
        return model(**batch(0)).loss.item()

    assert with_micro(1) == plain[0]
    for micro in (2, 4):
        with pytest.raises(zk.StateError, match=r"micro > 1.*attention_mask= of functools.partial, of shape \(4, 1"):
            with_micro(micro)


def test_its_layers_by_hand(plain: list[float]) -> None:
    """zk.recompute is what its layers may be called by."""
    model = llama()
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: zk.recompute(forward, *args, keep="cpu", **kwargs)
    assert losses(model, zk.AdamW(model.parameters(), lr=1e-2)) == plain


def test_the_loss_is_tiled(plain: list[float]) -> None:
    """What its head and loss need of memory divides; a number for each slice, to be weighted as the user means it."""
    model = llama()
    inputs = batch(0)
    hidden = model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state[:, :-1]
    targets = inputs["labels"][:, 1:]

    def summed(hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten(), reduction="sum")

    loss = zk.recompute(summed, hidden, targets, micro=4).sum() / (targets != -100).sum()
    assert loss.item() == pytest.approx(plain[0], abs=1e-6)
    loss.backward()
