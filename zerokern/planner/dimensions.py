"""Ranks in several dimensions, as a plan knows them: what a mesh says, and what a step sends along each of them.

Along `dp` a part of the model is divided by `zk.shard`, along `replicate` it is there again, along `tp` and `pp` each
rank has another part. What has the same parameters for other tokens (`cp`) divides them as `dp` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerokern.core.errors import got
from zerokern.planner.outline import Outline
from zerokern.planner.recipe import Arrangement, Recipe, itemsize
from zerokern.zero.partition import shards_parameters, shards_state

__all__ = ["sent_along", "sizes_of", "told", "uncounted"]

_MEANS = {
    "pp": "pp",
    **dict.fromkeys(("replicate", "dp_replicate"), "replicate"),
    **dict.fromkeys(("dp", "shard", "dp_shard", "fsdp", "cp", "dp_cp", "dp_shard_cp"), "world"),
    "tp": "tp",
}
_OF_EXPERTS = ("ep", "efsdp", "edp", "dp_shard_mod_ep", "dp_shard_in_ep")
_EACH = 2  # all-reduces of a layer in each: behind its attention, and behind its MLP


def sizes_of(mesh: Any) -> dict[str, int]:
    """Ranks by what they are to a plan; a mesh without names is one that `zk.shard` takes.

    >>> sizes_of({"pp": 2, "dp_replicate": 3, "dp_shard": 4, "cp": 2, "tp": 8})
    {'pp': 2, 'replicate': 3, 'world': 8, 'tp': 8}
    """
    found: dict[str, int] = {}
    for name, size in _named(mesh).items():
        if name not in _MEANS:
            apart = name in _OF_EXPERTS or not isinstance(name, str)
            do = "Experts that have a mesh of their own are not planned" if apart else "Give it as a dict"
            found_there = name if isinstance(name, str) else f"one for a {type(name).__name__}"
            raise ValueError(got("mesh", found_there, f"dimensions named {', '.join(_MEANS)}", do))
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(got(f"mesh[{name!r}]", size, "a whole number of ranks, from 1 on"))
        found[_MEANS[name]] = found.get(_MEANS[name], 1) * size
    return found


def _named(mesh: Any) -> dict[str, Any]:
    if isinstance(mesh, Mapping):
        return dict(mesh)
    if not hasattr(mesh, "mesh_dim_names"):
        allowed = 'a DeviceMesh, or sizes by name such as {"pp": 2, "dp": 8, "tp": 4}'
        raise TypeError(got("mesh", mesh, allowed))
    sizes, names = tuple(mesh.shape), mesh.mesh_dim_names
    if names is None and len(sizes) <= 2:
        names = ("replicate", "dp")[-len(sizes) :]
    if names is None:
        raise ValueError(got("mesh", mesh, "a DeviceMesh whose dimensions have names", "Pass mesh_dim_names"))
    return dict(zip(names, sizes, strict=True))


def sent_along(
    subject: Outline, recipe: Recipe, stage: int, settings: Arrangement, along_dp: int
) -> dict[str, int | None]:
    """Bytes that a rank sends in a step along each dimension that has several ranks; None: the model does not say."""
    shape = subject.transformer
    found: dict[str, int | None] = {}
    passed = None  # bytes between two layers, of one micro-batch
    if shape is not None and shape.has_activations:
        passed = shape.checkpoint
    if settings.pp > 1:  # activations to the next stage, their gradients to the one before
        neighbours = min(2, settings.pp - 1)
        found["pp"] = None if passed is None else neighbours * passed * settings.accumulate
    if settings.replicate > 1:
        found["replicate"] = _among_copies(subject, recipe, stage, settings)
    if settings.world > 1:
        found["dp"] = along_dp
    if settings.tp > 1:
        passes = 2 if recipe.keep is None else 3  # forward, again where it is recomputed, backward
        count = passes * _EACH * (0 if shape is None else shape.layers) * settings.accumulate
        found["tp"] = None if passed is None else count * _all_reduced(passed, settings.tp)
    return found


def _among_copies(subject: Outline, recipe: Recipe, stage: int, settings: Arrangement) -> int:
    """Of each bucket what is left of it after the reduction along `dp` becomes the mean of all that have it."""
    times = 1 if settings.no_sync else settings.accumulate
    total = 0
    for load in subject.buckets(stage, settings.world, settings.bucket_bytes).loads:
        if load.trainable:
            numel = load.shard_numel if shards_state(stage) else load.padded_numel
            total += times * _all_reduced(numel, settings.replicate) * itemsize(recipe.wire_dtype(load.dtype))
    return total


def _all_reduced(amount: int, size: int) -> int:
    """What each of `size` ranks sends: a reduce-scatter and an all-gather.

    >>> _all_reduced(128, 2), _all_reduced(128, 4)
    (128, 192)
    """
    return 2 * (size - 1) * -(-amount // size)


def uncounted(subject: Outline, recipe: Recipe, stage: int, settings: Arrangement) -> list[str]:
    """What the text says of dimensions that `zk.shard` does not divide along."""
    said: list[str] = []
    known = subject.transformer is not None and subject.transformer.has_activations
    if not subject.members or subject.transformer is not None:
        if settings.tp * settings.pp > 1:
            said.append(
                "Assumed: tp divides every parameter evenly, and each stage of pp has as many layers as another."
            )
    elif settings.pp > 1:
        said.append("The module is what one stage of pp has; plan the largest of them.")
    if settings.tp > 1 and known:
        said.append(
            "Along tp: two all-reduces of a layer's output in forward, in backward, and where it is computed again, as "
            "Megatron-LM divides it. Activations are counted whole; tp divides some of them."
        )
    if settings.pp > 1 and known:
        said.append("Activations are those of one micro-batch; a schedule of pp holds several of them at a time.")
    missing = [name for name in ("tp", "pp") if getattr(settings, name) > 1 and not known]
    if missing:
        said.append(
            f"Not counted: what is sent along {' and '.join(missing)}, activations, by torch's own parallelism; "
            "parameters do not say how large they are."
        )
    if settings.pp > 1 and shards_parameters(stage) and not recipe.rests and settings.world > 1:
        said.append("At stage 3 all that a stage of pp has stays gathered for a step, as zk.PipelineStage(whole=True).")
    return said


def told(settings: Arrangement) -> str:
    """The dimensions that have several ranks, in the order of a mesh.

    >>> told(Arrangement(4, "cuda", 1, 1, False, tp=2))
    'dp 4 x tp 2'
    """
    sizes = {"pp": settings.pp, "replicate": settings.replicate, "dp": settings.world, "tp": settings.tp}
    return " x ".join(f"{name} {size:,}" for name, size in sizes.items() if size > 1)
