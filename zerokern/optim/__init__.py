"""Optimizers with the face of torch.optim and one native call per step."""

from zerokern.optim.chained import ChainedOptimizer
from zerokern.optim.clip import clip_grad_norm_
from zerokern.optim.formats import convert_state
from zerokern.optim.muon import Muon, muon_groups
from zerokern.optim.optimizers import SGD, Adagrad, Adam, AdamW, Lion

__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "ChainedOptimizer", "Lion", "Muon", "clip_grad_norm_", "convert_state",
    "muon_groups",
]  # fmt: skip
