"""Published models by name, and what a Hugging Face `config.json` says of one: every tensor, so exact counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zerokern.core.errors import got
from zerokern.planner.activations import Widths
from zerokern.planner.outline import Transformer

__all__ = ["PRESETS", "Decoder", "from_config", "named", "preset"]


@dataclass(frozen=True)
class Decoder(Transformer):
    """A transformer whose tensors are known: those of a layer, and those outside of all layers.

    >>> preset("llama-3-8b").numel
    8030261248
    """

    name: str = ""
    layer_tensors: tuple[int, ...] = ()
    outer_tensors: tuple[int, ...] = ()
    widths: Widths | None = None

    @property
    def tensors(self) -> tuple[int, ...]:
        return self.layer_tensors

    @property
    def outside(self) -> tuple[int, ...]:
        return self.outer_tensors

    @property
    def title(self) -> str:
        return f"{self.name}, {self.layers} layers, hidden {self.hidden:,}"

    @property
    def counts_logits(self) -> bool:
        return self.widths is not None

    def peak(self, rows: int | None = None) -> tuple[int, int]:
        """Counted tensor by tensor: when the loss begins its backward, or a layer, or the norm behind all layers."""
        if self.widths is None:
            return super().peak(rows)
        widths, size, seq = self.widths, self.itemsize, self.seq or 0
        layer = widths.layer(size, seq, self.attention)
        outside, logits = widths.outside(size), widths.logits(size)
        mask = widths.mask(size, seq, self.attention) * self.tokens
        kept = mask if rows is not None else self.layers * layer * self.tokens
        again = 0 if rows is None else self.ci * layer - widths.shared(size)
        computing = (again + widths.backward(size, seq, self.attention)) * seq * (rows or self.batch or 0)
        moments = [
            (kept + outside * self.tokens, widths.loss(size) * self.tokens),
            (kept + (outside + widths.last_norm(size)) * self.tokens, logits * self.tokens),
            (kept + computing, logits * self.tokens),
        ]
        return max(moments, key=sum)


class _Config:
    """A mapping whose missing or wrong numbers are refused by name."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source, self._values = source, values

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(got(f"{self.source}: {name}", value, "a whole number from 1 on"))
                return value
        if default is None:
            raise ValueError(f"{self.source} has no {names[0]!r}, which the number of parameters depends on")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        return default if value is None else bool(value)

    def text(self, name: str, default: str) -> str:
        return str(self._values.get(name) or default)


def _llama(config: _Config, *, bias: bool = False, tied: bool = False) -> dict[str, Any]:
    """Gated MLP, grouped queries, norms without bias; a mixture where there are experts."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    pairs, wide = config.number("num_key_value_heads", default=heads), config.number("intermediate_size")
    size = config.number("head_dim", default=hidden // heads)
    experts, vocabulary = config.number("num_local_experts", default=1), config.number("vocab_size")
    queries, keys = heads * size, pairs * size
    layer = [hidden * queries, hidden * keys, hidden * keys, queries * hidden, hidden, hidden]
    if config.flag("attention_bias", bias):
        layer += [queries, keys, keys, *([] if bias else [hidden])]
    if experts > 1:
        layer.append(hidden * experts)
    layer += [hidden * wide] * (3 * experts)
    outer = [vocabulary * hidden, hidden]
    if not config.flag("tie_word_embeddings", tied):
        outer.append(vocabulary * hidden)
    widths = Widths(
        "mixtral" if experts > 1 else "llama", hidden, heads, queries, keys, wide, vocabulary,
        experts=experts, chosen=min(experts, config.number("num_experts_per_tok", default=2)) if experts > 1 else 0,
        act=config.text("hidden_act", "silu"), attention_dropout=config.flag("attention_dropout", False),
    )  # fmt: skip
    return _shape(config, hidden, heads, layer, outer, widths)


def _qwen2(config: _Config) -> dict[str, Any]:
    return _llama(config, bias=True)


def _gpt2(config: _Config) -> dict[str, Any]:
    hidden = config.number("n_embd", "hidden_size")
    wide = config.number("n_inner", default=4 * hidden)
    layer = [hidden] * 4 + [3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden]
    layer += [hidden * wide, wide, wide * hidden, hidden]
    words, heads = config.number("vocab_size"), config.number("n_head", "num_attention_heads")
    outer = [words * hidden, config.number("n_positions") * hidden, hidden, hidden]
    widths = Widths(
        "gpt2", hidden, heads, hidden, hidden, wide, words, act=config.text("activation_function", "gelu_new"),
        dropout=config.flag("resid_pdrop", True), attention_dropout=config.flag("attn_pdrop", True),
    )  # fmt: skip
    return _shape(config, hidden, heads, layer, outer, widths)


def _gpt_neox(config: _Config) -> dict[str, Any]:
    hidden, wide = config.number("hidden_size"), config.number("intermediate_size")
    layer = [hidden] * 4 + [3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden]
    layer += [hidden * wide, wide, wide * hidden, hidden]
    words, heads = config.number("vocab_size"), config.number("num_attention_heads")
    embedding = words * hidden
    outer = [embedding, hidden, hidden, *([] if config.flag("tie_word_embeddings", False) else [embedding])]
    widths = Widths(
        "gpt_neox", hidden, heads, hidden, hidden, wide, words, act=config.text("hidden_act", "gelu"),
        parallel=config.flag("use_parallel_residual", True), dropout=config.flag("hidden_dropout", False),
        attention_dropout=config.flag("attention_dropout", False),
    )  # fmt: skip
    return _shape(config, hidden, heads, layer, outer, widths)


def _shape(
    config: _Config, hidden: int, heads: int, layer: list[int], outer: list[int], widths: Widths
) -> dict[str, Any]:
    layers = config.number("num_hidden_layers", "n_layer")
    found = {"layers": layers, "hidden": hidden, "heads": heads, "widths": widths}
    return {**found, "layer_tensors": tuple(layer), "outer_tensors": tuple(outer)}


KINDS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "llama": _llama, "mistral": _llama, "mixtral": _llama, "qwen2": _qwen2, "gpt2": _gpt2, "gpt_neox": _gpt_neox,
}  # fmt: skip


def _llama_of(layers: int, hidden: int, wide: int, heads: int, pairs: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": wide,
        "num_attention_heads": heads, "num_key_value_heads": pairs, "vocab_size": words, **more,
    }  # fmt: skip


def _gpt2_of(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "vocab_size": 50257, "n_positions": 1024}


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2_of(12, 768, 12),
    "gpt2-xl": _gpt2_of(48, 1600, 25),
    "llama-2-7b": _llama_of(32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _llama_of(40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _llama_of(80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": _llama_of(32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": _llama_of(80, 8192, 28672, 64, 8, 128256),
    "mistral-7b": _llama_of(32, 4096, 14336, 32, 8, 32000, model_type="mistral"),
    "mixtral-8x7b": _llama_of(32, 4096, 14336, 32, 8, 32000, model_type="mixtral", num_local_experts=8),
    "qwen2.5-7b": _llama_of(28, 3584, 18944, 28, 4, 152064, model_type="qwen2"),
}


def preset(
    name: str, *, batch: int | None = None, seq: int | None = None, ci: int = 1, attention: str = "sdpa"
) -> Decoder:
    """A published model by name; with `batch` and `seq` also its activations, by `attention` with scores or without.

    >>> both = [preset("llama-3-8b", batch=1, seq=4096, attention=attention) for attention in ("sdpa", "eager")]
    >>> [f"{shape.activations / 1e9:.1f} GB" for shape in both]
    ['33.8 GB', '138.5 GB']
    >>> preset("gpt2").numel
    124439808
    """
    if name not in PRESETS:
        near = "".join(f"The nearest is {one!r}. " for one in get_close_matches(name.lower(), PRESETS, n=1))
        do = f"{near}Any other is planned as a module, or by its config.json: --config, zerokern.planner.from_config"
        raise ValueError(got("model", name, f"{', '.join(PRESETS)}, or MODULE:FUNCTION on the command line", do))
    return _decoder(name, name, PRESETS[name], batch=batch, seq=seq, ci=ci, attention=attention)


def named(model: Any) -> Any:
    """A published model where a name stands for it; a number of parameters begins with a digit.

    >>> named("gpt2").layers, named("7.5B")
    (12, '7.5B')
    """
    return preset(model.strip()) if isinstance(model, str) and model.strip()[:1].isalpha() else model


def from_config(
    path: str | Path, *, batch: int | None = None, seq: int | None = None, ci: int = 1, attention: str = "sdpa"
) -> Decoder:
    """The model that a Hugging Face `config.json` describes. Nothing of transformers is imported."""
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(got("config", str(path), "a config.json that can be read", str(error))) from error
    except ValueError as error:
        raise ValueError(got("config", str(path), "JSON", str(error))) from error
    if not isinstance(values, dict):
        raise ValueError(got("config", str(path), "a JSON object"))
    seen: dict[str, Any] = {"batch": batch, "seq": seq, "ci": ci, "attention": attention}
    return _decoder(str(values.get("_name_or_path") or path.name), path.name, values, **seen)


def _decoder(name: str, source: str, values: Mapping[str, Any], **seen: Any) -> Decoder:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        do = "Another architecture is planned by --model MODULE:FUNCTION, which counts the tensors of the module itself"
        raise ValueError(got(f"{source}: model_type", kind, ", ".join(KINDS), do))
    found = KINDS[kind](_Config(source, values))
    if seen["batch"] is None and seen["seq"] is None:
        found["heads"] = None
    return Decoder(**found, **seen, name=name)
