"""Computes the tensors and activations of transformers from a few sizes, a preset's name or a Hugging Face config."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokern.core.errors import did_you_mean, got, whole_number

__all__ = ["ATTENTIONS", "PRESETS", "Transformer", "Widths", "from_config", "named", "preset"]

ATTENTIONS = ("sdpa", "eager")
Shape = tuple[int, ...]
_FROM_1 = "a whole number from 1 on"
_FP32 = 4
_GELU_STEPS = {"gelu_new": 4}  # tensors kept of an activation that is written in Python; a kernel keeps one
_STATE_NBYTES = 20  # per parameter: fp16 parameter, fp32 gradient and its fp16 source, fp32 master and two averages


@dataclass(frozen=True)
class Widths:
    """Sizes of a decoder that its activations depend on. All methods return bytes per token.

    The formulas count the tensors that the modules of transformers save for backward, each storage once, without
    parameters. tests/planner/test_activations.py compares them with what real models allocate.

    `family`: "llama" (also Mistral and Qwen2), "mixtral", "gpt2" or "gpt_neox". `queries`, `keys`: heads x head size.
    `chosen`: experts per token. `parallel`: attention and MLP read the same input (GPT-NeoX). `dropout`: whether
    residuals are dropped in training.

    >>> llama = Widths("llama", hidden=4096, heads=32, queries=4096, keys=1024, wide=14336, vocabulary=128256)
    >>> llama.layer(itemsize=2, seq=4096), llama.loss(itemsize=2)
    (200840, 1795584)
    """

    family: str
    hidden: int
    heads: int
    queries: int
    keys: int
    wide: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    act: str = "silu"
    parallel: bool = False
    dropout: bool = False
    attention_dropout: bool = False

    def layer(self, itemsize: int, seq: int, attention: str = "sdpa") -> int:
        """Returns what one layer saves for its backward."""
        norms = 2 * self._norm(itemsize) - self.parallel * itemsize * self.hidden
        masks = 2 * self.dropout * self.hidden  # a byte for each element
        return norms + masks + self._attention(itemsize, seq, attention) + self._mlp(itemsize)

    def outside(self, itemsize: int) -> int:
        """Returns what the last norm saves, with token ids and labels."""
        return self._norm(itemsize) + self.dropout * self.hidden + 3 * 8

    def logits(self, itemsize: int) -> int:
        """Returns the logits, which a training loop that has a name for them keeps while backward runs."""
        return itemsize * self.vocabulary

    def loss(self, itemsize: int) -> int:
        """Returns the peak of the loss: logits, their log-softmax in fp32, and two gradients of that size."""
        return self.logits(itemsize) + 3 * _FP32 * self.vocabulary

    def backward(self, itemsize: int, seq: int, attention: str = "sdpa") -> int:
        """Returns what backward of one layer allocates at its peak, beyond what was saved."""
        hidden, scores = itemsize * self.hidden, self.heads * seq
        wide = itemsize * self.wide
        if self.family == "mixtral":  # gradients of the weighted sum are fp32
            chosen = self.chosen * self.hidden
            summed = _FP32 * self.hidden + (2 * _FP32 + itemsize) * chosen
            of_mlp = max(2 * self.chosen * wide - itemsize * chosen, summed) + hidden
        else:  # of the product's two factors, or of what a kernel has activated; and of the residual
            of_mlp = (2 if self.family == "llama" or self.act in _GELU_STEPS else 1) * wide + hidden
        if attention == "sdpa":
            return of_mlp
        freed = self._mlp(itemsize) + self._norm(itemsize)  # of this layer: their backward is over
        softmax = 2 * _FP32 - itemsize * (itemsize != _FP32)  # two in fp32, in place of those that were multiplied
        softmax = 2 * itemsize if self.family == "gpt2" else softmax  # its softmax has the dtype of the scores
        return max(of_mlp, softmax * scores - freed + hidden)

    def last_norm(self, itemsize: int) -> int:
        """Returns what backward of the last norm allocates; for RMSNorm that is four tensors in fp32."""
        return (4 * _FP32 if self._is_rms else 2 * itemsize) * self.hidden

    def shared(self, itemsize: int) -> int:
        """Returns what a layer saves of its own input, which a checkpoint holds as well."""
        return 0 if self._is_rms and itemsize != _FP32 else itemsize * self.hidden

    @staticmethod
    def mask(itemsize: int, seq: int, attention: str = "sdpa") -> int:
        """Returns the causal mask, which checkpoints hold as an argument of every layer; SDPA has none."""
        return itemsize * seq if attention == "eager" else 0

    @property
    def _is_rms(self) -> bool:
        return self.family in ("llama", "mixtral")

    def _norm(self, itemsize: int) -> int:
        """Returns what a norm keeps: RMSNorm its input in fp32, the normalized input and its output; LayerNorm input
        and output."""
        if self._is_rms:
            return (_FP32 + 2 * itemsize) * self.hidden + _FP32
        return 2 * itemsize * self.hidden + 2 * itemsize

    def _attention(self, itemsize: int, seq: int, attention: str) -> int:
        if attention == "sdpa":
            kept = 2 * self.queries + 2 * self.keys
            if self.family == "gpt_neox":
                kept += 3 * self.queries  # values are a view of the projection, and the output is copied
            return itemsize * kept + _FP32 * self.heads
        kept = itemsize * 4 * self.queries  # keys and values are repeated for all heads
        scores = itemsize if self.family == "gpt2" else _FP32 + (itemsize if itemsize != _FP32 else 0)
        dropped = self.attention_dropout * (1 + itemsize)
        return kept + (scores + dropped) * self.heads * seq

    def _mlp(self, itemsize: int) -> int:
        of_act = _GELU_STEPS.get(self.act, 1)
        if self.family == "mixtral":
            routed = _FP32 * self.experts + 40 * self.chosen + _FP32
            return self.chosen * itemsize * (2 * self.hidden + (3 + of_act) * self.wide) + routed
        gated = 3 if self.family == "llama" else 1  # what the activation returns, what it multiplies, their product
        return itemsize * (gated + of_act) * self.wide


@dataclass(frozen=True)
class Transformer:
    """Describes `layers` blocks of 12 hidden² parameters; with `heads`, `batch` (per rank) and `seq` also activations.

    `preset` and `from_config` also know every tensor: `layer_shapes` are those of one layer, `outer_shapes`
    those of what is in no layer, and `widths` counts activations and logits tensor by tensor.
    `ci` is how many blocks lie between two activation checkpoints, `itemsize` the bytes of one of their elements.
    attention: "sdpa", which stores no scores, as flash attention does not; or "eager", which stores all of them.

    >>> gpt = Transformer(128, 25 * 1024, heads=256, batch=32, seq=1024)
    >>> f"{gpt.numel / 1e12:.2f} T, states {gpt.states / 2**40:.2f} TiB, checkpoints {gpt.checkpoints / 2**40:.2f} TiB"
    '1.01 T, states 18.31 TiB, checkpoints 0.20 TiB'
    >>> preset("llama-3-8b").numel
    8030261248
    """

    layers: int
    hidden: int
    heads: int | None = None
    batch: int | None = None
    seq: int | None = None
    ci: int = 1
    attention: str = "sdpa"
    itemsize: int = 2
    name: str = ""
    layer_shapes: tuple[Shape, ...] = ()
    outer_shapes: tuple[Shape, ...] = ()
    widths: Widths | None = None

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            allowed = (
                "'sdpa', which stores no scores (flash attention has the same), or 'eager', which stores all of them"
            )
            raise ValueError(got("attention", self.attention, allowed))
        optional = ("heads", "batch", "seq")
        for name in ("layers", "hidden", *optional, "ci", "itemsize"):
            value = getattr(self, name)
            if value is not None or name not in optional:
                whole_number(name, value, _FROM_1)
        missing = [name for name in optional if getattr(self, name) is None]
        if 0 < len(missing) < len(optional):
            names = ", ".join(missing)
            raise ValueError(f"activations follow from heads, batch and seq together; {names} is missing: give it too")
        if self.ci > self.layers:
            allowed = f"a number of layers between checkpoints, at most layers={self.layers}"
            raise ValueError(got("ci", self.ci, allowed))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the parameters of one layer, as torch.nn.Linear has them; by default query, key and value as one;
        output; up; down.

        >>> Transformer(1, 8).shapes
        ((24, 8), (8, 8), (32, 8), (8, 32))
        """
        size = self.hidden
        return self.layer_shapes or ((3 * size, size), (size, size), (4 * size, size), (size, 4 * size))

    @property
    def title(self) -> str:
        if self.name:
            return f"{self.name}, {self.layers} layers, hidden {self.hidden:,}"
        return f"Transformer of {self.layers} layers, hidden {self.hidden:,}, without embeddings"

    @property
    def numel(self) -> int:
        return self.layers * sum(map(math.prod, self.shapes)) + sum(map(math.prod, self.outer_shapes))

    @property
    def states(self) -> int:
        """Bytes of model states as the paper counts them, of all ranks together."""
        return _STATE_NBYTES * self.numel

    @property
    def has_activations(self) -> bool:
        return self.batch is not None

    @property
    def activations(self) -> int:
        """Bytes of all activations, if none is recomputed."""
        return sum(self.peak())

    @property
    def checkpoints(self) -> int:
        """Bytes of activation checkpoints; where `ci` does not divide the layers, as the paper has it, a fraction."""
        return self.checkpoint * self.layers // self.ci

    @property
    def checkpoint(self) -> int:
        """Bytes of one of them."""
        return self.itemsize * self.tokens * self.hidden

    def checkpoints_in(self, tiers: Sequence[tuple[str, int | None]], micro: int) -> dict[str, int]:
        """Returns the bytes of all checkpoints but the last that rest in each of these tiers, which have budgets, where
        a batch is computed in `micro` slices.

        >>> shape = preset("llama-3-8b", batch=1, seq=4096)  # 32 layers of 32 MiB
        >>> shape.checkpoints_in([("device", 100 << 20), ("cpu", None)], 1)
        {'device': 100663296, 'cpu': 939524096}
        """
        if len(tiers) < 2:
            return {name: self.checkpoints - self.checkpoint for name, _ in tiers}
        names, budgets = zip(*tiers, strict=True)
        found = dict.fromkeys(names, 0)
        from zerokern.memory.order import place_latest  # its package needs torch, other plans do not

        batch = self.batch or 1
        rows = -(-batch // micro)
        slices = [min(rows, batch - begin) * self.checkpoint // batch for begin in range(0, batch, rows)]
        count, rest = divmod(self.checkpoints - self.checkpoint, self.checkpoint)
        sizes = [rest] * bool(rest) + slices * count
        for number, size in zip(place_latest(sizes, budgets), sizes, strict=True):
            found[names[number]] += size
        return found

    @property
    def working_activations(self) -> int:
        """Bytes of the activations between two checkpoints, while they are recomputed."""
        return sum(self.peak(self.batch or 0))

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return (self.batch or 0) * (self.seq or 0)

    @property
    def counts_logits(self) -> bool:
        """Whether the size of the vocabulary is known."""
        return self.widths is not None

    def peak(self, rows: int | None = None) -> tuple[int, int]:
        """Returns bytes of activations, and of logits and loss, at the moment when their sum is largest.

        rows: sequences that recomputed units take at a time, whose `checkpoints` are counted apart. None: no unit is
        recomputed.
        """
        if self.widths is None:  # as the ZeRO-Infinity paper counts them
            scores = 2 * self.itemsize * (self.seq or 0) if self.attention == "eager" else 4
            layer = self.tokens * (16 * self.itemsize * self.hidden + scores * (self.heads or 0))
            return (layer * self.layers if rows is None else layer * self.ci // 2 * rows // (self.batch or 1)), 0
        widths, size, seq = self.widths, self.itemsize, self.seq or 0
        layer = widths.layer(size, seq, self.attention)
        outside, logits = widths.outside(size), widths.logits(size)
        mask = widths.mask(size, seq, self.attention) * self.tokens
        kept = mask if rows is not None else self.layers * layer * self.tokens
        again = 0 if rows is None else self.ci * layer - widths.shared(size)
        computing = (again + widths.backward(size, seq, self.attention)) * seq * (rows or self.batch or 0)
        moments = [  # the loss begins its backward, or the norm behind all layers, or a layer
            (kept + outside * self.tokens, widths.loss(size) * self.tokens),
            (kept + (outside + widths.last_norm(size)) * self.tokens, logits * self.tokens),
            (kept + computing, logits * self.tokens),
        ]
        return max(moments, key=sum)


class _Config:
    """Reads numbers, flags and texts of a config, and refuses missing or wrong ones by name."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source, self._values = source, values

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return whole_number(f"{self.source}: {name}", value, _FROM_1)
        if default is None:
            raise ValueError(f"{self.source} has no {names[0]!r}, which the number of parameters depends on")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        return default if value is None else bool(value)

    def text(self, name: str, default: str) -> str:
        return str(self._values.get(name) or default)


_Tensors = tuple[list[Shape], list[Shape], Widths]  # shapes of one layer's and of the outer tensors


def _llama(config: _Config, *, bias: bool = False) -> _Tensors:
    """Returns shapes of a model with gated MLP, grouped queries and norms without bias; a mixture of experts if it has
    any."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    pairs, wide = config.number("num_key_value_heads", default=heads), config.number("intermediate_size")
    size = config.number("head_dim", default=hidden // heads)
    experts, vocabulary = config.number("num_local_experts", default=1), config.number("vocab_size")
    queries, keys = heads * size, pairs * size
    layer: list[Shape] = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries), (hidden,), (hidden,)]
    if config.flag("attention_bias", bias):
        layer += [(queries,), (keys,), (keys,), *([] if bias else [(hidden,)])]
    if experts > 1:
        layer.append((experts, hidden))
    layer += [(wide, hidden), (wide, hidden), (hidden, wide)] * experts
    outer: list[Shape] = [(vocabulary, hidden), (hidden,)]
    if not config.flag("tie_word_embeddings", False):
        outer.append((vocabulary, hidden))
    return layer, outer, Widths(
        "mixtral" if experts > 1 else "llama", hidden, heads, queries, keys, wide, vocabulary,
        experts=experts, chosen=min(experts, config.number("num_experts_per_tok", default=2)) if experts > 1 else 0,
        act=config.text("hidden_act", "silu"), attention_dropout=config.flag("attention_dropout", False),
    )  # fmt: skip


def _qwen2(config: _Config) -> _Tensors:
    return _llama(config, bias=True)


def _with_biases(hidden: int, wide: int) -> list[Shape]:
    """Returns shapes of a layer with two LayerNorms, fused query, key and value, and a plain MLP, all with biases."""
    attention: list[Shape] = [(3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    return [*[(hidden,)] * 4, *attention, (wide, hidden), (wide,), (hidden, wide), (hidden,)]


def _gpt2(config: _Config) -> _Tensors:
    hidden = config.number("n_embd", "hidden_size")
    wide = config.number("n_inner", default=4 * hidden)
    words, heads = config.number("vocab_size"), config.number("n_head", "num_attention_heads")
    outer: list[Shape] = [(words, hidden), (config.number("n_positions"), hidden), (hidden,), (hidden,)]
    return _with_biases(hidden, wide), outer, Widths(
        "gpt2", hidden, heads, hidden, hidden, wide, words, act=config.text("activation_function", "gelu_new"),
        dropout=config.flag("resid_pdrop", True), attention_dropout=config.flag("attn_pdrop", True),
    )  # fmt: skip


def _gpt_neox(config: _Config) -> _Tensors:
    hidden, wide = config.number("hidden_size"), config.number("intermediate_size")
    words, heads = config.number("vocab_size"), config.number("num_attention_heads")
    outer: list[Shape] = [(words, hidden), (hidden,), (hidden,)]
    outer += [] if config.flag("tie_word_embeddings", False) else [(words, hidden)]
    return _with_biases(hidden, wide), outer, Widths(
        "gpt_neox", hidden, heads, hidden, hidden, wide, words, act=config.text("hidden_act", "gelu"),
        parallel=config.flag("use_parallel_residual", True), dropout=config.flag("hidden_dropout", False),
        attention_dropout=config.flag("attention_dropout", False),
    )  # fmt: skip


_READERS: dict[str, Callable[[_Config], _Tensors]] = {
    "llama": _llama, "mistral": _llama, "mixtral": _llama, "qwen2": _qwen2, "gpt2": _gpt2, "gpt_neox": _gpt_neox,
}  # fmt: skip


def _llama_config(layers: int, hidden: int, wide: int, heads: int, pairs: int, words: int, **more: Any) -> dict:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": wide,
        "num_attention_heads": heads, "num_key_value_heads": pairs, "vocab_size": words, **more,
    }  # fmt: skip


def _gpt2_config(layers: int, hidden: int, heads: int) -> dict:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "vocab_size": 50257, "n_positions": 1024}


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2_config(12, 768, 12),
    "gpt2-xl": _gpt2_config(48, 1600, 25),
    "llama-2-7b": _llama_config(32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _llama_config(40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _llama_config(80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": _llama_config(32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": _llama_config(80, 8192, 28672, 64, 8, 128256),
    "mistral-7b": _llama_config(32, 4096, 14336, 32, 8, 32000, model_type="mistral"),
    "mixtral-8x7b": _llama_config(32, 4096, 14336, 32, 8, 32000, model_type="mixtral", num_local_experts=8),
    "qwen2.5-7b": _llama_config(28, 3584, 18944, 28, 4, 152064, model_type="qwen2"),
}


def preset(
    name: str, *, batch: int | None = None, seq: int | None = None, ci: int = 1, attention: str = "sdpa"
) -> Transformer:
    """Returns a published model by name; with `batch` and `seq` it has activations, by `attention` with their scores.

    >>> both = [preset("llama-3-8b", batch=1, seq=4096, attention=attention) for attention in ("sdpa", "eager")]
    >>> [f"{shape.activations / 1e9:.1f} GB" for shape in both]
    ['33.8 GB', '138.5 GB']
    >>> preset("gpt2").numel
    124439808
    """
    if name not in PRESETS:
        other = "Any other is planned as a module, or by its config.json: --config, zerokern.planner.from_config"
        do = f"{did_you_mean(name, PRESETS)} {other}".lstrip()
        raise ValueError(got("model", name, f"{', '.join(PRESETS)}, or MODULE:FUNCTION on the command line", do))
    return _transformer(name, name, PRESETS[name], batch=batch, seq=seq, ci=ci, attention=attention)


def named(model: Any) -> Any:
    """Returns the published model that a name stands for, and anything else, also a number as text, as it is.

    >>> named("gpt2").layers, named("7.5B")
    (12, '7.5B')
    """
    return preset(model.strip()) if isinstance(model, str) and model.strip()[:1].isalpha() else model


def from_config(
    path: str | Path, *, batch: int | None = None, seq: int | None = None, ci: int = 1, attention: str = "sdpa"
) -> Transformer:
    """Returns the model that a Hugging Face `config.json` describes, without importing transformers."""
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(got("config", str(path), "a config.json that can be read", str(error))) from error
    except ValueError as error:
        raise ValueError(got("config", str(path), "JSON", str(error))) from error
    if not isinstance(values, dict):
        raise ValueError(got("config", str(path), "a JSON object"))
    name = str(values.get("_name_or_path") or path.name)
    return _transformer(name, path.name, values, batch=batch, seq=seq, ci=ci, attention=attention)


def _transformer(
    name: str, source: str, values: Mapping[str, Any], *, batch: int | None, seq: int | None, ci: int, attention: str
) -> Transformer:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        do = "Another architecture is planned by --model MODULE:FUNCTION, which counts the tensors of the module itself"
        raise ValueError(got(f"{source}: model_type", kind, ", ".join(_READERS), do))
    config = _Config(source, values)
    layer, outer, widths = _READERS[kind](config)
    layers = config.number("num_hidden_layers", "n_layer")
    heads = None if batch is None and seq is None else widths.heads
    return Transformer(
        layers, widths.hidden, heads, batch, seq, ci, attention,
        name=name, layer_shapes=tuple(layer), outer_shapes=tuple(outer), widths=widths,
    )  # fmt: skip
