"""Optimizers with the face of torch.optim and one native call per step."""

from zerokern.optim.clip import clip_grad_norm_
from zerokern.optim.formats import convert_state
from zerokern.optim.optimizers import SGD, Adagrad, Adam, AdamW, Lion

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "clip_grad_norm_", "convert_state"]
