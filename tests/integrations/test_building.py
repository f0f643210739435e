"""Models of transformers, constructed in parts: the bits of zk.shard(model), and of what is drawn next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hf_cases import language_model
from torch import nn

import zerokern as zk
from zerokern.building import construction

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
WORDS = {**SMALL, "vocab_size": 40}
PICTURE = {**SMALL, "image_size": 16, "patch_size": 4}
PAIR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
PAIR |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 60}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**WORDS, "num_key_value_heads": 1}),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**WORDS, "tie_word_embeddings": True}),
    "BERT": ("BertForMaskedLM", "BertConfig", WORDS),
    "T5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}),
    "ViT": ("ViTForImageClassification", "ViTConfig", PICTURE),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**WORDS, "num_key_value_heads": 1, "num_local_experts": 3}),
    "Whisper": ("WhisperModel", "WhisperConfig", {**PAIR, "num_mel_bins": 8, "pad_token_id": 1}),
    "CLIP": ("CLIPModel", "CLIPConfig", {"text_config": WORDS, "vision_config": PICTURE, "projection_dim": 16}),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {**WORDS, "state_size": 4}),
    "DeBERTa": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**WORDS, "relative_attention": True}),
}


def made(name: str) -> nn.Module:
    import transformers

    model, config, settings = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def narrow() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(**WORDS, num_key_value_heads=1)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def same(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "LIVE_NBYTES", 0)
    monkeypatch.setattr(construction, "SMALL_NBYTES", 0)
    models, numbers = [], []
    for construct in (lambda: zk.shard(make(), stage=3), lambda: zk.build(make, stage=3)):
        torch.manual_seed(11)
        models.append(construct())
        numbers.append(torch.rand(3))
    with zk.gathered(models[0]), zk.gathered(models[1]):
        whole, built = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in models)
        assert list(whole) == list(built)
        differ = [name for name, value in whole.items() if not torch.equal(value, built[name])]
    assert not differ and torch.equal(*numbers), make


def test_models_of_transformers_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are seeded within, and with another default dtype."""
    for make in (*(partial(made, name) for name in MODELS), language_model, narrow):
        same(make, monkeypatch)
