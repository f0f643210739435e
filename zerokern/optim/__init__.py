"""Optimizers with the face of torch.optim and one native call per step."""

from zerokern.optim.adagrad import Adagrad
from zerokern.optim.adam import Adam, AdamW
from zerokern.optim.clip import clip_grad_norm_
from zerokern.optim.formats import convert_state
from zerokern.optim.lion import Lion
from zerokern.optim.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "clip_grad_norm_", "convert_state"]
