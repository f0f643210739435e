"""Refuses models that cannot be sharded, ranks that do not agree, gradients that cannot be reduced, and whatever would
train on without the other ranks: strange optimizers, and a model that has changed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from zerokern.comm import Group
from zerokern.core.errors import ShardError, StateError, adapter_of_caller, did_you_mean, got, one_of, warn
from zerokern.core.units import PUBLISH
from zerokern.memory.addresses import TensorBodies
from zerokern.zero import hooks
from zerokern.zero.kinds import Placed, is_placed, local_of, shardings_of, without_waiting
from zerokern.zero.params import sharded_parameter_of
from zerokern.zero.partition import shards_parameters
from zerokern.zero.shard import Shard, give_shard, refuse_unfrozen, shard_of
from zerokern.zero.sharded import Sharded
from zerokern.zero.units import PLACE, UnitSpec

__all__ = [
    "Guard",
    "check_policy",
    "gradient",
    "install",
    "is_trained",
    "mixed",
    "model",
    "no_other_wrapper",
    "not_reduced_by_ddp",
    "reduce",
    "refuse_materialized",
    "refuse_max_norm",
    "refuse_stranger",
    "same_on_all_ranks",
    "thawed",
    "unreduced",
    "warn_of_large_units",
]


_PLACE = operator.itemgetter(0, 1)
LARGE = 64 << 20  # bytes that nobody wants to have whole by accident


def reduce(value: object) -> str:
    """
    >>> reduce("sum")
    'sum'
    """
    if value not in ("mean", "sum"):
        do = "'sum' is for losses that are divided by what all ranks have together, as by the tokens of the whole batch"
        do = did_you_mean(value, ("mean", "sum")) or do
        raise ValueError(got("reduce", value, "'mean' or 'sum' of the ranks' gradients", do))
    return str(value)


def publish(value: object, stage: int, *, apart: bool) -> str:
    """`apart`: parameters are on a device, which updates in host memory publish to at every stage.

    >>> publish("delta", 2, apart=False)
    'delta'
    """
    one_of("publish", value, PUBLISH, where=" (what an update has changed)")
    if value == "delta" and stage not in (1, 2) and not apart:
        do = "at stage 3 units are gathered when they compute, at stage 0 each rank updates everything"
        raise ValueError(got("publish", value, f"'all' at stage {stage}", do))
    return str(value)


def model(module: object, units: Sequence[UnitSpec], group: Group, *, built: bool) -> torch.device:
    """The device that everything is on or, if it is yet to be built, will be on; everything else is checked first."""
    params = [(name, param) for unit in units for name, param in unit.params]
    if not params:
        raise ValueError(f"{type(module).__name__} has no parameters; allowed: a module with something to shard")
    for name, param in params:
        _check_parameter(name, param, built)
    _check_overlap(params)
    if built:
        return group.device
    devices = sorted({str(param.device) for _, param in params})
    if len(devices) > 1:
        raise ValueError(
            f"parameters are on {', '.join(devices)}; allowed: one device for the whole model. Move it before zk.shard"
        )
    return params[0][1].device


def no_other_wrapper(module: nn.Module) -> None:
    """Raise if a module is wrapped by DistributedDataParallel, DataParallel or FSDP.

    >>> no_other_wrapper(nn.Linear(2, 2))
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has called fully_shard has imported it
    divided = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for name, one in module.named_modules():
        where = f"{name!r} of the model" if name else "the model"
        if isinstance(one, DistributedDataParallel | nn.DataParallel):
            raise StateError(
                f"{where} is a {type(one).__name__}, and two would reduce its gradients; zk.shard takes the model by "
                "itself, before anything wraps it, and reduces at every stage"
            )
        if isinstance(one, divided):
            raise StateError(
                f"{where} is sharded by FSDP already (fully_shard): remove that call, and zk.shard shards the model; "
                "or keep it and remove zk.shard: zk.AdamW(model.parameters()) takes FSDP2's parameters as they are"
            )


def not_reduced_by_ddp(module: nn.Module) -> None:
    """Raise in a forward that DistributedDataParallel has called, if it reduces parameters of this module too.

    It does not reduce frozen ones, nor those in its `parameters_to_ignore`.

    >>> not_reduced_by_ddp(nn.Linear(2, 2))
    """
    outer = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if outer is None:
        return
    reduced = {id(param) for param in outer._module_parameters if param.requires_grad}
    if any(id(param) in reduced for param in module.parameters()):
        raise StateError(
            "this model was given to zk.shard, and is called by DistributedDataParallel, which would replace the "
            "gradients by zeros: zk.shard reduces them at every stage. "
            + (adapter_of_caller() or "Call the model that zk.shard returned, without DistributedDataParallel")
        )


def warn_of_large_units(units: Sequence[UnitSpec]) -> None:
    """Warn of a unit with most of a large model in it: at stage 3 all of it is gathered at once.

    A unit that would not be much smaller without its largest module is as it must be: an embedding, say.
    """
    total = sum(param.nbytes for unit in units for _, param in unit.params)
    for unit in units:
        modules: Counter[str] = Counter()
        for name, param in unit.params:
            modules[name.rpartition(".")[0]] += param.nbytes
        nbytes = modules.total()
        if 2 * nbytes <= total or nbytes - max(modules.values(), default=0) < LARGE:
            continue
        which = "the model" if len(units) == 1 else repr(unit.name) if unit.name else "what is in no ModuleList"
        warn(
            f"{which} is one unit, so that all {nbytes / 2**20:.0f} MiB of it are gathered at once, and stage 3 needs "
            "that much more memory than its shards. Units are the children of ModuleLists, unless units= names others. "
            "Name the modules to gather one at a time, as in units=lambda module: isinstance(module, torch.nn.Linear)"
        )


def refuse_max_norm(module: nn.Module, group: Any) -> None:
    """Refuses `max_norm` of embeddings, whose forward writes to other rows on each rank."""
    lookups = [(name, one) for name, one in module.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    for name, one in lookups:
        if one.max_norm is not None and one.weight.requires_grad and group.size > 1:
            raise ValueError(
                f"{name or 'the model'!r} has max_norm={one.max_norm}, so that its forward writes to the rows that it "
                "looks up, which are others on each rank; allowed: on one rank, at stage 0 or frozen. Set "
                "max_norm=None, and renormalize all rows after step(), within zk.gathered(embedding, write=True)"
            )


def gradient(name: str, grad: Tensor, placed: Placed | None = None) -> Tensor:
    """Checks a gradient and returns what is reduced: of a DTensor that is `placed`, this rank's part.

    >>> gradient("weight", torch.ones(2))
    tensor([1., 1.])
    """
    if placed is not None and not grad.requires_grad and grad.layout is torch.strided:
        if not is_placed(grad):
            do = "a hook returns DTensor.from_local(...) of this rank's part"
            raise TypeError(got(f"the gradient of {name!r}", type(grad).__name__, "a DTensor, as it is", do))
        return placed.local(grad)
    if type(grad) is Tensor and grad.layout is torch.strided and not grad.requires_grad:
        return grad
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name!r} is {grad.layout}; allowed: dense gradients (Embedding: sparse=False)"
        )
    if isinstance(grad, Sharded):
        raise StateError(
            f"a torch.autograd.Function was given {name!r}, and returned a gradient made of its part "
            "on this rank alone; compute with the whole parameter: call the Function in the forward of the module "
            "that holds it, or use stage 2 or less"
        )
    if grad.requires_grad:
        raise StateError(
            f"the gradient of {name!r} was computed with create_graph=True, and its graph would be lost in "
            "reducing it; take gradients of gradients by torch.autograd.grad, and of the sum a plain backward()"
        )
    return grad


def mixed(bucket: Any, place: int, *, scaled: bool) -> None:
    """Refuses a first gradient of a pass, not through the model's forward, that was added to one not scaled yet."""
    grad = bucket.inbox.leaves[place].grad
    again = scaled or bucket.reducer.counts_again
    if not (bucket.replicated and again and grad is not None and bucket.shown.shows(place, grad)):
        return
    raise StateError(
        f"a gradient of {bucket.entries[place].name!r} was added to the one that is there, which has yet to be scaled; "
        "call zero_grad() before a backward pass that does not go through the model's forward, or run such a forward "
        "first"
    )


def thawed(name: str) -> NoReturn:
    """Within a pass, between two gradients of one parameter."""
    raise StateError(
        f"{name!r} was frozen or thawed within a backward pass, between two of its gradients "
        "(of its module, and of what was computed within zk.gathered); do that before the pass, or after it"
    )


def unreduced(bucket: Any) -> None:
    """Refuses a step on gradients of passes under no_sync alone, of which other ranks know nothing."""
    apart = not bucket.replicated or bucket.reducer.counts_again  # as in DDP, means at stage 0 are each rank's affair
    if not (bucket.local and apart and bucket.reducer.needed):
        return
    listed = ", ".join(repr(bucket.entries[place].name) for place in sorted(bucket.local)[:3])
    raise StateError(
        f"gradients of {listed} were accumulated under zk.no_sync and never reduced; run the last backward "
        "before step() outside of it, or drop them with zero_grad()"
    )


def _check_parameter(name: str, param: nn.Parameter, built: bool) -> None:
    if shard_of(param) is not None:
        raise StateError(f"{name!r} is sharded already; shard a model once, as a whole")
    if built and is_placed(param):
        raise ShardError(
            f"zk.build made {name!r} as a DTensor, and computes plain tensors alone again; allowed: build, "
            "parallelize_module, then zk.shard(model, ...)"
        )
    if param.is_meta and not built:
        raise ValueError(f"{name!r} is on the meta device and has no values; construct the model by zk.build(fn, ...)")
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name!r} has no shape yet (a lazy module); run one forward before zk.shard")
    if type(param) is not nn.Parameter and not is_placed(param):
        raise TypeError(
            f"{name!r} is a {type(param).__name__}; allowed: plain nn.Parameters, and DTensors of tensor parallelism "
            "(a model with quantized tensors is sharded by its own library)"
        )
    if param.layout is not torch.strided or param.is_complex():
        raise TypeError(f"{name!r} is {param.layout}, {param.dtype}; allowed: dense, real tensors")
    if param.requires_grad and param.dtype not in DTYPES:
        raise TypeError(
            f"{name!r} is trained in {param.dtype}; allowed: torch.float32, bfloat16 and float16; any if frozen"
        )
    if param.grad is not None:
        raise StateError(f"{name!r} has a gradient; call zero_grad() before zk.shard")


def _check_overlap(params: Sequence[tuple[str, Tensor]]) -> None:
    """Refuses two parameters that share memory: in buckets they no longer would."""
    there = [(name, local_of(param)) for name, param in params]
    spans = sorted(((*_address(one), name, one) for name, one in there if one.numel() and not one.is_meta), key=_PLACE)
    open_ones: list[tuple[int, int, str, Tensor]] = []  # those that may reach beyond the beginning of the next one
    for kind, begin, name, one in spans:
        open_ones = [other for other in open_ones if other[0] == kind and other[1] + _extent(other[3]) > begin]
        for _, before, left, other in open_ones:
            if _share_elements(other, one, begin - before):
                raise ValueError(
                    f"{left!r} and {name!r} share memory, but are two parameters; allowed: one nn.Parameter registered "
                    "in both places (a tied weight), or memory of their own"
                )
        open_ones.append((kind, begin, name, one))


def _extent(param: Tensor) -> int:
    """Returns the bytes from a parameter's first element to the end of its last one, which strides put anywhere.

    >>> _extent(torch.ones(2, 1).expand(2, 6)), _extent(torch.ones(4, 6)[:, :2])
    (8, 80)
    """
    return (1 + sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))) * param.itemsize


def _share_elements(first: Tensor, second: Tensor, behind: int) -> bool:
    """Returns whether two parameters share a byte; the second begins so many bytes `behind` the first.

    >>> rows = torch.ones(4, 6)
    >>> _share_elements(rows[:, :2], rows[:, 2:], 8), _share_elements(rows[:, :3], rows[:, 2:], 8)
    (False, True)
    >>> _share_elements(rows[:, :1].expand(4, 3), rows[:, 1:], 4), _share_elements(rows, rows[:, 1].expand(2, 4), 4)
    (False, True)
    """
    if first.is_contiguous() and second.is_contiguous():
        return True
    taken = torch.zeros(max(_extent(first), behind + _extent(second)), dtype=torch.bool)
    for one, offset in ((first, 0), (second, behind)):
        dims = [(size, one.itemsize * step) for size, step in zip(one.shape, one.stride(), strict=True) if step]
        sizes, steps = zip(*dims, (one.itemsize, 1), strict=True)
        bytes_of = taken.as_strided(sizes, steps, offset)
        if bytes_of.any():
            return True
        bytes_of.fill_(True)
    return False


def _address(param: Tensor) -> tuple[int, int]:
    """Returns the address; of memory that is empty until its unit is built, the offset within it."""
    storage = param.untyped_storage()
    return (0, param.data_ptr()) if storage.nbytes() else (storage._cdata, int(param.storage_offset()) * param.itemsize)


def same_on_all_ranks(group: Any, settings: dict[str, Any], units: Sequence[UnitSpec]) -> None:
    """Raise on every rank, saying what differs, unless all ranks shard the same model in the same way."""
    if group.alone:
        return
    rows = [
        (name, [*param.shape, *placements], str(param.dtype), "trained" if param.requires_grad else "frozen", unit.name)
        for unit in units
        for name, param in unit.params
        for placements in [map(str, param.placements) if is_placed(param) else ()]
    ]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    found = group.exchange([settings, len(rows), digest])
    for rank, (theirs, _, _) in enumerate(found):
        different = [name for name in settings if theirs[name] != found[0][0][name]]
        if different:
            name = different[0]
            if name == PLACE:
                raise ShardError(
                    "the parameters are DTensors, already sharded over the ranks that zk.shard is to shard them "
                    f"over (on their mesh, rank 0 is at {found[0][0][name]} and rank {rank} at {theirs[name]}). "
                    "Remove what sharded them (fully_shard, distribute_tensor). Under tensor parallelism, name the "
                    'other dimension: zk.shard(model, mesh=mesh["dp"]) beside parallelize_module(.., mesh["tp"])'
                )
            raise ShardError(
                f"the ranks do not shard alike: {name} is {found[0][0][name]!r} on rank 0 and {theirs[name]!r} "
                f"on rank {rank}"
            )
    if all(one[1:] == found[0][1:] for one in found):
        return
    first = _first_difference(group, rows)
    raise ShardError(f"the ranks do not have the same model: {first}; build the same one on all of them")


def _first_difference(group: Any, rows: list[Any]) -> str:
    everyone = group.exchange(rows)
    for rank, theirs in enumerate(everyone):
        for number, pair in enumerate(itertools.zip_longest(everyone[0], theirs)):
            if pair[0] != pair[1]:
                here, there = map(_in_words, pair)
                return f"parameter {number} is {here} on rank 0, {there} on rank {rank}"
    return "the units differ"


def _in_words(row: list[Any] | None) -> str:
    if row is None:
        return "missing"
    name, shape, dtype, trained, unit = row
    return f"{name!r} {tuple(shape)} {dtype} {trained} in unit {unit or 'root'!r}"


# torch's optimizers whose update of an element depends on others
MIXING = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name))

_pointer_of = torch.Tensor.data_ptr
_is_trained = operator.attrgetter("requires_grad")
_materialized_of = operator.attrgetter("materialized")


@functools.cache
def install() -> None:
    """Registers checks around every optimizer step, once for the process."""
    hooks.on_optimizer_steps(before=_before, after=_after)
    # a module that keeps another's parameter in its forward keeps the one that lasts, not what stands for it there
    hooks.on_registration(sharded_parameter_of)


def _shards(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Shard]]:
    everyone = ((param, shard_of(param)) for group in optimizer.param_groups for param in group["params"])
    return [(param, shard) for param, shard in everyone if shard is not None]


def _before(optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "_zk_shards", False):
        return
    shards = _shards(optimizer)
    for param, shard in shards:
        if param is shard.piece:
            if isinstance(optimizer, MIXING):
                kind = type(optimizer).__name__
                raise StateError(
                    f"{kind} mixes elements of a parameter, or of all parameters, and zk.shards(model) gave it this "
                    f"rank's flat part of {shard.name!r}; allowed: optimizers that update each element by itself. "
                    f"For {kind} use stage 0 and model.parameters()"
                )
            shard.local_gradient(param)
        elif not shard.sharding.replicated:
            raise StateError(
                f"{type(optimizer).__name__} was given {shard.name!r}, which is sharded at stage {shard.sharding.stage}"
                ": it would update parts of it that are not this rank's. Use zk.AdamW (or Adam, Lion, Adagrad, SGD) on "
                f"model.parameters(), or give {type(optimizer).__name__} the parameters zk.shards(model)"
            )
    refuse_materialized(shard for _, shard in shards)
    for sharding in shardings_of(shard for _, shard in shards):
        sharding.settle()


def refuse_materialized(shards: Iterable[Shard | None]) -> None:
    """Refuses a step within zk.gathered, which has copies of the parameters."""
    known = [shard for shard in shards if shard is not None]
    for shard in known if list(map(_materialized_of, known)).count(None) < len(known) else ():
        if shard.materialized is not None:
            raise StateError(
                f"{shard.name!r} is whole within zk.gathered, where a step would not be seen, and be lost with "
                "write=True; call step() after the context has ended"
            )


def _after(optimizer: torch.optim.Optimizer) -> None:
    if not getattr(optimizer, "_zk_shards", False):
        for sharding in shardings_of(shard for param, shard in _shards(optimizer) if param is shard.piece):
            sharding.publish()


class Guard:
    """Checks in every forward that the model still has the parameters that zk.shard sharded, where they were.

    All of it is compared by loops that are not Python's; only what differs is looked at.
    """

    def __init__(self, sharding: Any) -> None:
        self._sharding = weakref.ref(sharding)
        self._tables: list[dict[str, Any]] = []  # of parameters and modules
        self._empty: list[dict[str, Any]] = []
        self._found: list[Any] = []
        entries = [entry for memory in sharding.memories for entry in memory.entries]
        frozen = [entry for memory in sharding.memories if not memory.bucket.trainable for entry in memory.entries]
        self._frozen = [entry.param for entry in frozen]
        self.before_forward: list[Callable[[], None]] = []  # other checks of a forward with gradients
        # at stage 3 bodies are exchanged all the time, and gradients come through the gathered ones
        self._plain = [] if shards_parameters(sharding.stage) else entries
        self._params = [entry.param for entry in self._plain]
        self._shards = [sharding.shards[entry.place.param] for entry in self._plain]
        self._has_dtensors = any(entry.placed is not None for entry in self._plain)
        self._bodies = TensorBodies(self._params)
        self._addresses = self._whereabouts()
        if self._params:
            for module in sharding.module.modules():
                hooks.after_loading(module, hooks.weakly(self.check_memory))

    @property
    def sharding(self) -> Any:
        sharding = self._sharding()
        assert sharding is not None
        return sharding

    def check(self) -> None:
        """Refuses parameters that were added, exchanged, moved or unfrozen; restores hooks that were lost."""
        for check in self.before_forward:
            check()
        known = bool(self._tables) and not any(self._empty) and sum(map(len, self._tables)) == len(self._found)
        there = chain.from_iterable(map(dict.values, self._tables))
        if not known or not all(map(operator.is_, there, self._found)):
            self._check_parameters()
        if any(map(_is_trained, self._frozen)):
            self._refuse_unfrozen()
        with without_waiting():
            self.check_memory()

    def _check_parameters(self) -> None:
        """Refuses parameters that were added or removed. Plain tensors in their place (functional_call) are allowed."""
        known = self.sharding.entries
        there = set()
        for name, module in self.sharding.module.named_modules():
            for attribute, param in module._parameters.items():
                entry = known.get(id(param))
                if entry is not None:
                    there.add(entry.name)
                elif is_trained(param):
                    refuse_stranger(f"{name}.{attribute}" if name else attribute, param)
        missing = {entry.name: entry.param for entry in known.values() if entry.name not in there}
        lost = [name for name, param in missing.items() if not self.sharding.has_substitute(param)]
        if lost:
            raise ShardError(
                f"{lost[0]!r} is no longer a parameter of the model, and is still in a bucket of zk.shard; build the "
                "model as it is to be, then shard it (to compute with other values for a while, give functional_call "
                "plain tensors)"
            )
        if missing:
            return
        modules = list(self.sharding.module.modules())
        tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._tables, self._empty = [one for one in tables if one], [one for one in tables if not one]
        self._found = list(chain.from_iterable(map(dict.values, self._tables)))

    def _refuse_unfrozen(self) -> None:
        frozen = (one for one in self.sharding.memories if not one.bucket.trainable)
        refuse_unfrozen(next(one.name for memory in frozen for one in memory.entries if one.param.requires_grad))

    def _whereabouts(self) -> array[int]:
        return array("Q", map(_pointer_of, map(local_of, self._params) if self._has_dtensors else self._params))

    def check_memory(self) -> None:
        """Refuses parameters whose memory was exchanged; restores hooks of those swapped over the same memory."""
        in_place = not self._has_dtensors and self._bodies.are_at(self._addresses)
        addresses = self._addresses if in_place else self._whereabouts()
        if addresses != self._addresses:
            known = zip(self._plain, addresses, self._addresses, strict=True)
            moved = next(entry.name for entry, address, before in known if address != before)
            raise ShardError(
                f"the memory of {moved!r} was exchanged after zk.shard (by .data, set_, .to(), .half() or resize_, or "
                "by a parametrization that computes its original); allowed: writing into it (copy_, load_state_dict). "
                "Move, convert and parametrize a model before it is sharded. Under Hugging Face use "
                "zerokern.integrations.transformers.Trainer or TrainerMixin: plain Trainer moves its model"
            )
        if self._bodies.unchanged():  # else their shards went with what they were
            return
        for param, shard in zip(self._params, self._shards, strict=True):
            if shard_of(param) is not shard:
                self._restore_shard(param, shard)
        self._bodies = TensorBodies(self._params)

    def _restore_shard(self, param: nn.Parameter, shard: Shard) -> None:
        give_shard(param, shard)  # with it went what hears of its gradients
        if shard.gradients is None:
            return
        dtype, trained = shard.piece.grad_dtype, param.requires_grad
        param.requires_grad_()
        if param.grad_dtype != dtype:
            param.grad_dtype = dtype
        shard.take_arrived(param)
        param.requires_grad_(trained)


def is_trained(param: Tensor | None) -> bool:
    """Returns whether this is a parameter that would be trained, and no plain tensor of functional_call's."""
    return isinstance(param, nn.Parameter) and param.requires_grad


def refuse_stranger(name: str, param: Tensor) -> None:
    raise ShardError(
        f"{name!r}, of shape {tuple(param.shape)}, is no parameter that the model had when it was sharded, and would "
        "be trained on this rank alone; write into the existing parameters (zk.gathered(..., write=True)), or build "
        "the model again and shard that. To compute with other values, give functional_call detached tensors"
    )


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """The policy, or one that changes nothing.

    >>> check_policy(None).param_dtype is None
    True
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(got("mp_policy", policy, "None or a torch.distributed.fsdp.MixedPrecisionPolicy"))
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(got(f"mp_policy.{name}", dtype, "None, torch.float32, torch.bfloat16 or torch.float16"))
    return policy
