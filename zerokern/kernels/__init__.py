"""Arithmetic on flat spans and lists of tensors: the building blocks, usable without the rest of the library.

>>> import torch
>>> from zerokern import kernels
>>> kernels.sumsq([torch.full((4,), 3.0), torch.ones(2)])
38.0
"""

from zerokern.kernels.flat import Flattener, flatten, unflatten
from zerokern.kernels.ops import (
    accumulate,
    adagrad,
    adam,
    cast,
    decode_int8,
    encode_int8,
    join,
    lion,
    muon,
    sgd,
    split,
    stream,
    sumsq,
)

__all__ = [
    "Flattener",
    "accumulate",
    "adagrad",
    "adam",
    "cast",
    "decode_int8",
    "encode_int8",
    "flatten",
    "join",
    "lion",
    "muon",
    "sgd",
    "split",
    "stream",
    "sumsq",
    "unflatten",
]
