"""Checks how a model is trained (dtypes, formats, tiers, schedule) and divided (ranks, buckets). No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from zerokern.core.errors import did_you_mean, got, one_of, whole_number
from zerokern.core.units import (
    AUTO,
    MASTER_FORMATS,
    MASTERS,
    NS_FORMS,
    RING_NBYTES,
    STATE_FORMATS,
    StateTensor,
    itemsize,
    master_of,
    meant_tier,
    state_tensors,
)  # fmt: skip
from zerokern.schedule import Delayed, check_schedule, check_update, refuse_delayed, refuse_on_device
from zerokern.zero.partition import shards_parameters

__all__ = ["OPTIMIZERS", "Arrangement", "Recipe", "dtype_of", "mesh_sizes", "short"]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_BY_NAME = {**{name: name for name in _SHORT}, **{short: name for name, short in _SHORT.items()}}


class PlannedOptimizer(NamedTuple):
    """An optimizer: its name in Python, the state keys that grow with the parameters, and the formats they may have."""

    called: str
    moments: tuple[str, ...] = ()
    state_formats: tuple[str, ...] = STATE_FORMATS


_NO_INT8 = tuple(name for name in STATE_FORMATS if name != "int8")
OPTIMIZERS = {
    "adamw": PlannedOptimizer("zk.AdamW", ("exp_avg", "exp_avg_sq")),
    "adam": PlannedOptimizer("zk.Adam", ("exp_avg", "exp_avg_sq")),
    "lion": PlannedOptimizer("zk.Lion", ("exp_avg",)),
    "adagrad": PlannedOptimizer("zk.Adagrad", ("sum",), _NO_INT8),
    "sgd": PlannedOptimizer("zk.SGD", (), _NO_INT8),
    "sgd-momentum": PlannedOptimizer("zk.SGD", ("momentum_buffer",), _NO_INT8),
    # the moments of the matrices; the rest has AdamW's
    "muon": PlannedOptimizer("zk.Muon (matrices) and zk.AdamW (the rest)", ("momentum_buffer",)),
    "none": PlannedOptimizer("no optimizer"),
}
_NS_DTYPES = {None: None, "bf16": "bfloat16", "fp32": "float32"}
_MESH_DIMS = {  # names of mesh dimensions, by what they are to a plan
    "pp": "pp",
    **dict.fromkeys(("replicate", "dp_replicate"), "replicate"),
    **dict.fromkeys(("dp", "shard", "dp_shard", "fsdp", "cp", "dp_cp", "dp_shard_cp"), "world"),
    "tp": "tp",
}
_EXPERT_DIMS = ("ep", "efsdp", "edp", "dp_shard_mod_ep", "dp_shard_in_ep")


@dataclass(frozen=True)
class Recipe:
    """How the parameters are trained. `param_dtype` and `reduce_dtype` None: the parameter's own.

    >>> [(one.role, one.nbytes) for one in Recipe().state_of("bfloat16")]
    [('exp_avg', 4), ('exp_avg_sq', 4), ('remainder', 2)]
    """

    optimizer: str = "adamw"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    state_format: str = "fp32"
    master_format: str | None = None
    tier: str = "device"
    ring_nbytes: int = RING_NBYTES
    """of host memory that a disk is read and written through"""
    budgets: tuple[tuple[str, int | Literal["auto"]], ...] = ()
    """tiers that are filled with state, each up to so many bytes, before `tier` takes what is left; "auto": what a plan
    leaves (`Footprint.budgets`)"""
    param_tier: str = "device"
    param_ring_nbytes: int = RING_NBYTES
    param_budgets: tuple[tuple[str, Any], ...] = ()
    """the same of parameters, before `param_tier`"""
    keep: str | None = None
    keep_ring_nbytes: int = RING_NBYTES
    keep_budgets: tuple[tuple[str, Any], ...] = ()
    """the same of kept inputs, before `keep`"""
    schedule: str | Delayed = "sync"
    update: str = "host"
    """where the update of state in host memory runs"""
    ns_dtype: str | None = None
    """what Muon orthogonalizes matrices in; None: what the device multiplies"""
    ns_steps: int = 5
    """of its iteration"""
    ns_form: str = "standard"
    ns_coefficients: tuple[Any, ...] | None = None
    """three of all iterations, or as many triples; None: Muon's own"""

    @classmethod
    def of(
        cls,
        *,
        optimizer: str | None,
        param_dtype: object,
        reduce_dtype: object,
        mp_policy: object,
        state_format: str,
        master_format: str | None,
        tier: object,
        schedule: object,
        param_tier: object,
        keep: object,
        update: object = None,
        ns_dtype: str | None = None,
        ns_steps: int = 5,
        ns_form: str = "standard",
        ns_coefficients: Any = None,
    ) -> Recipe:
        """Checks the keywords of `zk.shard` and `zk.AdamW`."""
        if mp_policy is not None:
            if param_dtype is not None or reduce_dtype is not None:
                raise ValueError(
                    "mp_policy says both dtypes already; leave out param_dtype and reduce_dtype, or mp_policy"
                )
            param_dtype = getattr(mp_policy, "param_dtype", None)
            reduce_dtype = getattr(mp_policy, "reduce_dtype", None)
        name = "none" if optimizer is None else optimizer
        one_of("optimizer", name, OPTIMIZERS)
        one_of("state_format", state_format, OPTIMIZERS[name].state_formats, where=f" with {name}")
        one_of("master_format", master_format, (None, *MASTER_FORMATS))
        param = None if param_dtype is None else dtype_of("param_dtype", param_dtype)
        reduce = None if reduce_dtype is None else dtype_of("reduce_dtype", reduce_dtype)
        state, state_ring, budgets = _tiers("tier", tier, auto=True)
        params, param_ring, param_budgets = _tiers("param_tier", param_tier)
        kept, keep_ring, keep_budgets = (None, RING_NBYTES, ()) if keep is None else _tiers("keep", keep)
        schedule, is_muon = check_schedule(schedule), name == "muon"
        if update is None:
            update = "device" if is_muon else "host"
        update = check_update(update, on_disk=state == "nvme", whole=is_muon)
        one_of("ns_dtype", ns_dtype, _NS_DTYPES)
        whole_number("ns_steps", ns_steps, "a whole number from 0 to 99", least=0, most=99)
        one_of("ns_form", ns_form, NS_FORMS)
        if not is_muon and (ns_dtype, ns_steps, ns_form, ns_coefficients) != (None, 5, "standard", None):
            asked = "ns_dtype, ns_steps, ns_form or ns_coefficients"
            raise ValueError(got("optimizer", optimizer, f"'muon' where {asked} is given"))
        if ns_coefficients is not None:
            from zerokern.optim import checks  # its package needs torch, other plans do not

            ns_coefficients = checks.coefficients("ns_coefficients", ns_coefficients)
            checks.steps_of_coefficients({"ns_coefficients": ns_coefficients, "ns_steps": ns_steps})
        return cls(
            name, param, reduce, state_format, master_format,
            tier=state, ring_nbytes=state_ring, budgets=budgets,
            param_tier=params, param_ring_nbytes=param_ring, param_budgets=param_budgets,
            keep=kept, keep_ring_nbytes=keep_ring, keep_budgets=keep_budgets,
            schedule=schedule, update=update, ns_dtype=_NS_DTYPES[ns_dtype], ns_steps=ns_steps,
            ns_form=ns_form, ns_coefficients=ns_coefficients,
        )  # fmt: skip

    def check(self, device: str, stage: int, world: int) -> None:
        """Raises what the optimizers raise for these tiers and this schedule, and where no plan counts them."""
        if self.is_muon:
            self._check_matrices(device, stage, world)
        if device != "cpu" and self.tier == "device" and not self.rests:
            refuse_on_device(self.schedule)
        if self.streams(device):
            refuse_delayed(self.schedule)

    def _check_matrices(self, device: str, stage: int, world: int) -> None:
        from zerokern.optim.checks import gram_form  # its package needs torch, other plans do not
        from zerokern.optim.disk import check_slots
        from zerokern.optim.placing import check_whole

        if self.ns_form == "gram":
            gram_form("bf16" if self.ns_dtype == "bfloat16" else None, on_cpu=device == "cpu")

        if self.is_on_both_sides(device):
            do = "zk.shard has put some of these parameters on the device, and others off it"
            tiers = [*self.param_budgets, self.param_tier]
            raise ValueError(got("param_tier", tiers, "one side of the link with optimizer='muon'", do))
        on_disk = self.tier == "nvme"
        if on_disk:
            check_slots(self.ring_nbytes, "Muon")
        said = [*self.budgets, self.tier] if self.budgets else self.tier
        apart = device != "cpu"
        if apart and self.rests and shards_parameters(stage) and world > 1:
            do = "stages 1 and 2 with whole= leave matrices whole"
            allowed = "'device' for matrices on GPUs, which exchange them"
            raise ValueError(got("param_tier", self.param_tier, allowed, do))
        if apart and on_disk and not self.rests:
            do = "zk.Muon takes a disk there; a plan does not count that yet"
            raise ValueError(got("tier", said, "'device', 'cpu' or both, with budgets, for matrices on a GPU", do))
        check_whole(said, self.update, apart=apart and not self.rests)

    def is_taken(self, device: str, stage: int, world: int) -> bool:
        """Returns whether the optimizer takes state in these tiers.

        >>> made = [Recipe("muon", tier=tier, update="device", ring_nbytes=1 << 26) for tier in ("cpu", "nvme")]
        >>> [one.is_taken("cuda", 3, 8) for one in made]
        [True, False]
        """
        try:
            self.check(device, stage, world)
        except ValueError:
            return False
        return True

    @property
    def rule(self) -> PlannedOptimizer:
        """What the optimizer is called and keeps."""
        return OPTIMIZERS[self.optimizer]

    @property
    def is_muon(self) -> bool:
        """Whether matrices are updated by Muon, and the rest by AdamW."""
        return self.optimizer == "muon"

    def iterates_on_host(self, device: str) -> bool:
        """Returns whether Muon multiplies on the host beside a device, where parameters rest.

        >>> Recipe("muon", tier="cpu", param_tier="cpu").iterates_on_host("cuda")
        True
        """
        return self.is_muon and self.rests and device != "cpu"

    def iterates_in(self, device: str) -> str:
        """Returns the dtype that Muon orthogonalizes in.

        >>> Recipe("muon").iterates_in("cuda"), Recipe("muon").iterates_in("cpu")
        ('bfloat16', 'float32')
        """
        on_host = device == "cpu" or self.iterates_on_host(device)
        return self.ns_dtype or ("float32" if on_host else "bfloat16")

    @property
    def rests(self) -> bool:
        """Whether parameters rest off the device and are fetched for each forward and backward."""
        return self.param_tier != "device"

    @property
    def keep_tiers(self) -> list[tuple[str, int | None]]:
        """The tiers of kept inputs with their budgets, the fastest first; none where nothing is recomputed."""
        return [] if self.keep is None else [*self.keep_budgets, (self.keep, None)]

    @property
    def delays(self) -> bool:
        return isinstance(self.schedule, Delayed)

    @property
    def delays_at_rest(self) -> bool:
        """Whether an update of parameters at rest is published later: it makes others beside them, from gradients of
        its own."""
        return self.rests and self.delays and self.optimizer != "none"

    def is_lossy(self) -> bool:
        """Returns whether these formats round."""
        return self.state_format != "fp32" or self.master_format in ("split8", "none")

    def placed(self, tier: str, param_tier: str, keep: str | None) -> Recipe:
        """Returns the same recipe with state, parameters and kept inputs in other tiers, each in one."""
        kept = self.keep_budgets if keep == self.keep else ()
        return replace(
            self, tier=tier, param_tier=param_tier, keep=keep, keep_budgets=kept, budgets=(), param_budgets=()
        )

    def on(self, device: str, stage: int) -> Recipe:
        """Returns the recipe for a kind of device. On "cpu", the tiers "cpu" and "device" are the same."""
        here = self
        if self.budgets and (device == "cpu" or self.rests):  # all is host memory, to which "auto" adds nothing
            budget = sum(budget for _, budget in self.budgets if budget != AUTO)
            budgets = (("cpu", budget),) if self.tier == "nvme" and budget else ()
            here = replace(here, budgets=budgets, tier="nvme" if self.tier == "nvme" else "cpu")
        if device == "cpu":
            here = replace(here, param_tier="device") if self.param_tier == "cpu" else here
            here = replace(here, param_budgets=_in_one_memory(self.param_budgets, self.param_tier))
            here = replace(here, keep_budgets=_in_one_memory(self.keep_budgets, self.keep))
            here = replace(here, keep="device") if self.keep == "cpu" else here
        if not here.rests:
            return here
        if not shards_parameters(stage):
            allowed = "'device' below stage 3, where every rank computes with all parameters as they lie"
            raise ValueError(got("param_tier", self.param_tier, allowed, "Plan it with stage=3"))
        if device != "cpu" and self.tier == "device" and self.optimizer != "none":
            allowed = "'cpu' or 'nvme' (zk.Nvme(path)) for parameters that rest off the device"
            raise ValueError(got("tier", self.tier, allowed, "Their state is larger than they are"))
        if not here.is_on_both_sides(device):
            return here
        do = "Some parameters are on the device and others are not"
        if self.budgets:
            allowed = "'cpu' or 'nvme', one of them, where some parameters are on the device and others off it"
            raise ValueError(got("tier", [*self.budgets, self.tier], allowed, "Such a split of both is not planned"))
        if self.update == "device" and not self.is_muon:
            raise ValueError(got("update", self.update, "'host'", do))
        if self.delays:
            raise ValueError(got("schedule", self.schedule, "'sync' or 'overlap'", do))
        return here

    def rings_nbytes(self, device: str, stores: int) -> int:
        """Returns the bytes of host memory that disks are read and written through. `stores`: optimizers that each have
        one for state."""
        nbytes = stores * self.ring_nbytes if self.tier == "nvme" else 0
        if device != "cpu":
            nbytes += self.param_ring_nbytes if self.param_tier == "nvme" else 0
            nbytes += self.keep_ring_nbytes if self.keep == "nvme" else 0
        return nbytes

    def is_on_both_sides(self, device: str) -> bool:
        """Returns whether some parameters may be on a device with memory of its own, and others off it."""
        return device != "cpu" and any(tier == "device" for tier, _ in self.param_budgets)

    def streams(self, device: str) -> bool:
        """Returns whether state streams from host memory through the device, which updates it."""
        on_device = self.update == "device" and device != "cpu" and not self.rests
        return on_device and self.tier == "cpu" and self.optimizer != "none"

    def has_host_copies(self, device: str) -> bool:
        """Returns whether the optimizer updates copies in host memory of the parameters."""
        if self.rests:
            return False  # they are updated where they rest
        if self.streams(device):
            return False
        return self.optimizer != "none" and (self.delays or (device != "cpu" and self.tier != "device"))

    def state_nbytes(self, dtype: str, in_matrices: float = 0.0) -> float:
        """Returns bytes of state for each element of a parameter of this dtype; with Muon the mean of parameters of
        which a part is in matrices.

        >>> int8 = Recipe(state_format="int8", master_format="split8")
        >>> Recipe().state_nbytes("bfloat16"), int8.state_nbytes("bfloat16")
        (10.0, 3.0625)
        >>> Recipe("muon").state_nbytes("bfloat16", 1.0), Recipe("muon").state_nbytes("bfloat16", 0.5)
        (6.0, 8.0)
        """
        shares = (True, in_matrices), (False, 1.0 - in_matrices)
        return sum(
            share * tensor.nbytes / tensor.per for matrix, share in shares for tensor in self.state_of(dtype, matrix)
        )

    def master_of(self, dtype: str) -> str:
        """Returns the master format of a parameter of this dtype; "own" where the parameter is its own master."""
        return master_of(dtype, self.master_format)

    def state_of(self, dtype: str, matrix: bool = False) -> list[StateTensor]:
        """Returns what the optimizer keeps for a trainable parameter of this dtype. `matrix`: Muon updates it, if there
        is one."""
        if self.optimizer == "none":
            return []
        if dtype not in MASTERS:
            raise ValueError(got("dtype", dtype, f"parameters in {', '.join(MASTERS)}", "Freeze it, or convert it"))
        keys = OPTIMIZERS["adamw"].moments if self.is_muon and not matrix else self.rule.moments
        return state_tensors(keys, dtype, self.state_format, self.master_format)

    def wire_dtype(self, dtype: str) -> str:
        """Returns the dtype in which a gradient of a parameter of this dtype is reduced and kept."""
        return self.reduce_dtype or dtype

    def wire_itemsize(self, dtype: str) -> int:
        """Returns the bytes of one of its elements."""
        return itemsize(self.wire_dtype(dtype))

    def alternatives(self, dtype: str) -> list[Recipe]:
        """Returns the same run in every format there is for parameters of this dtype, the exact ones first."""
        if self.optimizer == "none":
            return []
        masters = MASTERS[dtype][1] or (None,)
        states = self.rule.state_formats if self.rule.moments else STATE_FORMATS[:1]
        made = [replace(self, state_format=state, master_format=master) for state in states for master in masters]
        return sorted(made, key=Recipe.is_lossy)

    def smallest_lossy(self, dtype: str) -> Recipe | None:
        """Returns the lossy formats of fewest bytes that keep a master; None where there are none."""
        lossy = [
            alternative
            for alternative in self.alternatives(dtype)
            if alternative.is_lossy() and alternative.master_format != "none"
        ]
        return min(lossy, key=lambda recipe: recipe.state_nbytes(dtype), default=None)


@dataclass(frozen=True)
class Arrangement:
    """How a run is divided: each of tp x pp parts of the model is sharded over `world` ranks, `replicate` times.

    `device` is where collectives run: on CPUs they need scratch memory. `spills`: gradients of parameters at rest wait
    on disk.

    >>> Arrangement(world=0, device="cuda", bucket_bytes=1, accumulate=1, no_sync=False)
    Traceback (most recent call last):
    ...
    ValueError: world=0: must be a whole number of ranks, from 1 on
    """

    world: int
    device: str
    bucket_bytes: int
    accumulate: int
    no_sync: bool
    micro: int = 1
    spills: bool = False
    replicate: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        counts = {"world": "ranks", "bucket_bytes": "bytes", "accumulate": "micro-batches in a step"}
        counts |= {"micro": "slices of a batch", "replicate": "ranks", "tp": "ranks", "pp": "ranks"}
        for name, what in counts.items():
            whole_number(name, getattr(self, name), f"a whole number of {what}, from 1 on")
        one_of("device", self.device, ("cuda", "cpu"))

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.world * self.replicate * self.tp * self.pp

    @property
    def has_others(self) -> bool:
        """Whether there are several ranks to reduce gradients over."""
        return self.world * self.replicate > 1

    @property
    def mesh(self) -> str:
        """The dimensions that have several ranks, in the order of a mesh.

        >>> Arrangement(4, "cuda", 1, 1, False, tp=2).mesh
        'dp 4 x tp 2'
        """
        sizes = {"pp": self.pp, "replicate": self.replicate, "dp": self.world, "tp": self.tp}
        return " x ".join(f"{name} {size:,}" for name, size in sizes.items() if size > 1)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Returns the ranks of a mesh by the fields of `Arrangement`. A mesh without names is read as `zk.shard` reads it.

    Ranks that have the same parameters and other tokens (`cp`) shard them as `dp` does.

    >>> mesh_sizes({"pp": 2, "dp_replicate": 3, "dp_shard": 4, "cp": 2, "tp": 8})
    {'pp': 2, 'replicate': 3, 'world': 8, 'tp': 8}
    """
    found: dict[str, int] = {}
    for name, size in _named_sizes(mesh).items():
        if name not in _MESH_DIMS:
            apart = name in _EXPERT_DIMS or not isinstance(name, str)
            do = did_you_mean(name, _MESH_DIMS) or "Give it as a dict"
            do = "Experts that have a mesh of their own are not planned" if apart else do
            found_there = name if isinstance(name, str) else f"one for a {type(name).__name__}"
            raise ValueError(got("mesh", found_there, f"dimensions named {', '.join(_MESH_DIMS)}", do))
        count = whole_number(f"mesh[{name!r}]", size, "a whole number of ranks, from 1 on")
        found[_MESH_DIMS[name]] = found.get(_MESH_DIMS[name], 1) * count
    return found


def _named_sizes(mesh: Any) -> dict[str, Any]:
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


def dtype_of(argument: str, value: object) -> str:
    """Returns the name of a dtype given as torch's own or as text.

    >>> dtype_of("param_dtype", "bf16")
    'bfloat16'
    """
    name = str(value).removeprefix("torch.")
    if name not in _BY_NAME:
        allowed = " | ".join(map(repr, _SHORT.values())) + ", or torch's dtypes"
        raise ValueError(got(argument, value, allowed, did_you_mean(value, _BY_NAME)))
    return _BY_NAME[name]


def short(dtype: str) -> str:
    """
    >>> short("bfloat16"), short("int64")
    ('bf16', 'int64')
    """
    return _SHORT.get(dtype, dtype)


def _in_one_memory(budgets: Sequence[tuple[str, int]], tier: str | None) -> tuple[tuple[str, int], ...]:
    """Returns the budgets before a tier where "device" and "cpu" are the same."""
    return (("device", sum(budget for _, budget in budgets)),) if budgets and tier == "nvme" else ()


def _tiers(argument: str, tier: Any, *, auto: bool = False) -> tuple[str, int, tuple[tuple[str, Any], ...]]:
    """Returns the last of several tiers, as `_tier` does, and the others with their budgets."""
    if not isinstance(tier, list | tuple):
        return *_tier(argument, tier), ()
    from zerokern.memory.order import read_order  # its package needs torch, other plans do not

    named = read_order(argument, tier, _tier, auto=auto)
    return *named[-1][0], tuple((name, budget) for (name, _), budget in named[:-1] if budget is not None)


def _tier(argument: str, tier: Any) -> tuple[str, int]:
    """Returns the name of a tier, and the bytes of the host memory that it is read and written through."""
    if isinstance(tier, str) and tier.startswith("nvme:"):
        from zerokern.memory.tier import check_tier  # its package needs torch, other plans do not

        tier = check_tier(argument, tier)
    if hasattr(tier, "ring_nbytes"):
        return "nvme", int(tier.ring_nbytes)
    if tier in ("device", "cpu", "nvme"):
        return str(tier), RING_NBYTES
    allowed = "'device' | 'cpu' | 'nvme', or zk.Nvme(path), as text 'nvme:/path'"
    raise ValueError(got(argument, tier, allowed, meant_tier(tier)))
