"""What autograd keeps of each token in the decoders of transformers, and what their loss takes.

The formulas count the tensors that the modules of transformers save for backward, each storage once and parameters
aside. A test compares them with what real models allocate (tests/planner/test_activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from zerokern.core.errors import got

__all__ = ["ATTENTIONS", "Widths", "check_attention"]

ATTENTIONS = ("sdpa", "eager")
_FP32 = 4
_STEPS_OF_GELU = {"gelu_new": 4}  # tensors that are kept of an activation in Python; of a kernel: one


def check_attention(attention: str) -> str:
    """Refuses what is neither of the two ways to compute attention.

    >>> check_attention("sdpa")
    'sdpa'
    """
    if attention not in ATTENTIONS:
        allowed = "'sdpa', which stores no scores (flash attention has the same), or 'eager', which stores all of them"
        raise ValueError(got("attention", attention, allowed))
    return attention


@dataclass(frozen=True)
class Widths:
    """Sizes of a decoder on which its activations depend. All methods return bytes of one token.

    `family`: "llama" (also Mistral and Qwen2), "mixtral", "gpt2" or "gpt_neox". `queries`, `keys`: heads x head size.
    `chosen`: experts that a token is sent to. `dropout`: whether residuals are dropped in training.

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
    """attention and MLP read the same input (GPT-NeoX)"""
    dropout: bool = False
    attention_dropout: bool = False

    def layer(self, itemsize: int, seq: int, attention: str = "sdpa") -> int:
        """What one layer keeps until its backward."""
        norms = 2 * self._norm(itemsize) - self.parallel * itemsize * self.hidden
        masks = 2 * self.dropout * self.hidden  # a byte for each element
        return norms + masks + self._attention(itemsize, seq, attention) + self._mlp(itemsize)

    def outside(self, itemsize: int) -> int:
        """The last norm's tensors, token ids and labels."""
        return self._norm(itemsize) + self.dropout * self.hidden + 3 * 8

    def logits(self, itemsize: int) -> int:
        """Of the model's output, which a training loop that names it holds while backward runs."""
        return itemsize * self.vocabulary

    def loss(self, itemsize: int) -> int:
        """Of logits, their log-softmax in fp32, and two gradients of that size, the most that are there together."""
        return self.logits(itemsize) + 3 * _FP32 * self.vocabulary

    def backward(self, itemsize: int, seq: int, attention: str = "sdpa") -> int:
        """What backward of one layer allocates, at its most, beyond what is kept."""
        hidden, scores = itemsize * self.hidden, self.heads * seq
        wide = itemsize * self.wide
        if self.family == "mixtral":  # gradients of the weighted sum are fp32
            chosen = self.chosen * self.hidden
            summed = _FP32 * self.hidden + (2 * _FP32 + itemsize) * chosen
            of_mlp = max(2 * self.chosen * wide - itemsize * chosen, summed) + hidden
        else:  # of the product's two factors, or of what a kernel has activated; and of the residual
            of_mlp = (2 if self.family == "llama" or self.act in _STEPS_OF_GELU else 1) * wide + hidden
        if attention == "sdpa":
            return of_mlp
        freed = self._mlp(itemsize) + self._norm(itemsize)  # of this layer: their backward is over
        softmax = 2 * _FP32 - itemsize * (itemsize != _FP32)  # two in fp32, in place of those that were multiplied
        softmax = 2 * itemsize if self.family == "gpt2" else softmax  # its softmax has the dtype of the scores
        return max(of_mlp, softmax * scores - freed + hidden)

    def last_norm(self, itemsize: int) -> int:
        """What backward of the last norm allocates: of RMSNorm four tensors in fp32."""
        return (4 * _FP32 if self._is_rms else 2 * itemsize) * self.hidden

    def shared(self, itemsize: int) -> int:
        """What a layer keeps of its own input, which is there once where checkpoints hold it."""
        return 0 if self._is_rms and itemsize != _FP32 else itemsize * self.hidden

    @staticmethod
    def mask(itemsize: int, seq: int, attention: str = "sdpa") -> int:
        """Of the causal mask, an argument of every layer that checkpoints hold; SDPA has none."""
        return itemsize * seq if attention == "eager" else 0

    @property
    def _is_rms(self) -> bool:
        return self.family in ("llama", "mixtral")

    def _norm(self, itemsize: int) -> int:
        """RMSNorm keeps its input in fp32, the normalized input and its output; LayerNorm its input and output."""
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
        of_act = _STEPS_OF_GELU.get(self.act, 1)
        if self.family == "mixtral":
            routed = _FP32 * self.experts + 40 * self.chosen + _FP32
            return self.chosen * itemsize * (2 * self.hidden + (3 + of_act) * self.wide) + routed
        gated = 3 if self.family == "llama" else 1  # what the activation returns, what it multiplies, their product
        return itemsize * (gated + of_act) * self.wide
