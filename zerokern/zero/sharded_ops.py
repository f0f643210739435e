"""What a call on a sharded tensor does: ops that are right on this rank's elements alone have a rule; all others raise.

A rule is called with the class of the sharded tensors, the op and its arguments. Rules run below autograd, where torch
bumps no version counter: whoever writes into a ``local`` has to do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from zerokern.comm import during
from zerokern.core.errors import adapter_of_caller
from zerokern.zero.hooks import in_backward
from zerokern.zero.tiers import fetched, in_turns

__all__ = [
    "BELOW_DISPATCH",
    "FREEZING",
    "GET_DATA",
    "METADATA",
    "SET_DATA",
    "UNFETCHED_CALLS",
    "UNFETCHED_RULES",
    "UNTRACED",
    "WRITING_OPERATORS",
    "ShardedUseError",
    "advice_for",
    "leaves",
    "refuse",
    "rule_for",
    "targets",
    "written_arguments",
]


class ShardedUseError(TypeError):
    """A sharded tensor was used for what needs the elements of other ranks; nothing was computed or written.

    >>> issubclass(ShardedUseError, TypeError)
    True
    """


def refuse(op: str, tensor: Any, topic: str, detail: str = "") -> NoReturn:
    """Raises: which op, which tensor, what it has here, and what to do.

    >>> from zerokern.zero.sharded import Sharded
    >>> refuse("aten.sum", Sharded(torch.ones(2), torch.Size([4]), 0, name="bias"), "whole")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.zero.sharded_ops.ShardedUseError: aten.sum needs elements of other ranks: Sharded(parameter 'bias'...
    """
    says, advice = TOPICS[topic]
    whole = WHOLE[tensor.kind]
    advice = adapter_of_caller() or advice.format(whole=whole)
    raise ShardedUseError(f"{op} {says}: {tensor!r}{detail}. {advice}")


def advice_for(name: str, random: bool) -> str:
    """The topic of an op that has no rule, by its name.

    >>> advice_for("_foreach_norm", False), advice_for("normal_", True), advice_for("mm", False)
    ('norm', 'random', 'whole')
    """
    if "norm" in name.split("_") or name in ("linalg_vector_norm", "_foreach_powsum"):
        return "norm"
    if name.startswith("_fused_"):
        return "optimizer"
    return "random" if random else "whole"


WHOLE = {
    "parameter": "`with zk.gathered(model):` holds full parameters for a while (write=True keeps what is written)",
    "gradient": "`.local` is this rank's part, and zk.clip_grad_norm_ knows the norm of all parts",
    "state": "`.local` is this rank's part",
}

NEEDS = "needs elements of other ranks"

TOPICS = {
    "whole": (NEEDS, "{whole}; element-wise ops with numbers and tensors sharded alike need no other rank."),
    "alike": (
        "got a tensor that is not sharded alike",
        "Allowed beside it: numbers, 0-dim tensors, full tensors of its shape, tensors with the same elements here. "
        "{whole}.",
    ),
    "norm": (NEEDS, "zk.clip_grad_norm_(model, max_norm) clips and returns the norm over all ranks. {whole}."),
    "random": ("would draw other numbers on each rank", "Draw before zk.shard, or: {whole}."),
    "optimizer": (
        "is a torch optimizer's kernel for whole tensors",
        "Build zk.AdamW on these parameters, or a torch optimizer on zk.shards(model).",
    ),
    "device": ("would move one rank's part", "Move the model before zk.shard; .local can be copied anywhere."),
    "values": (NEEDS, "{whole}."),
    "memory": ("needs all elements in memory here", "{whole}."),
    "copy": ("would copy one rank's part", "Copy the model before zk.shard, or: {whole}."),
    "save": (
        "would hold one rank's part",
        "zk.save(path, model, opt) saves all parts, and model.state_dict() within `with zk.gathered(model):` is whole; "
        "`.local`, `.start`, `.shape` describe this part.",
    ),
    "owner": ("would hold one rank's part", "Copy opt.state_dict(); zk.save(path, model, opt) saves all parts."),
    "rebind": (
        "would give it other memory",
        "Write in place, with `p.data.copy_(tensor)`; change device or dtype before zk.shard.",
    ),
    "swap": (
        "would swap one rank's part away",
        "Load with torch.__future__.set_swap_module_params_on_conversion(False).",
    ),
    "hook": (
        "would never run",
        "At stage 3 autograd meets gathered parameters only: use stage 2 or less, or a module's full backward hook.",
    ),
    "autograd": (
        "meets gathered parameters only",
        "Call loss.backward() and read p.grad, or use stage 2 or less.",
    ),
}


def below_dispatch() -> dict[Callable, tuple[str, str]]:
    """Functions that reach for memory, or for autograd's graph, without an op that could be refused.

    Those of topic "values" take nothing with them, so that a gathered tensor can answer; what the others take would
    outlive it.
    """
    topics = dict.fromkeys(MEMORY_METHODS.split(), "memory") | dict.fromkeys(VALUE_METHODS.split(), "values")
    topics |= {"register_hook": "hook", "register_post_accumulate_grad_hook": "hook", "backward": "autograd"}
    topics |= {"module_load": "swap"}
    methods = {name: getattr(torch.Tensor, name, None) for name in topics}
    table = {method: (f"Tensor.{name}", topics[name]) for name, method in methods.items() if method is not None}
    array_interface: Any = torch.Tensor.__cuda_array_interface__
    table[array_interface.__get__] = ("Tensor.__cuda_array_interface__", "memory")
    return table | {torch.autograd.grad: ("torch.autograd.grad", "autograd")}


MEMORY_METHODS = (
    "data_ptr const_data_ptr storage untyped_storage _typed_storage share_memory_ numpy __array__ __dlpack__ "
    "apply_ map_ map2_"
)
VALUE_METHODS = "item tolist __bool__ __float__ __int__ __index__ __complex__ __iter__ __reversed__ __contains__"
BELOW_DISPATCH = below_dispatch()


def getters(*excluded: str) -> set[Callable]:
    described = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
    found = {one for name, one in described.items() if hasattr(type(one), "__set__") and name not in excluded}
    return {one.__get__ for one in found} | {one.__set__ for one in found}


def methods(names: str) -> set[Callable]:
    return {getattr(torch.Tensor, name) for name in names.split() if hasattr(torch.Tensor, name)}


GET_DATA, SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
METADATA = getters("data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__") | methods(
    "size dim ndimension numel nelement stride storage_offset element_size get_device __len__ __hash__ "
    "is_floating_point is_complex is_signed is_contiguous is_conj is_neg is_inference is_same_size is_set_to is_shared "
    "requires_grad_ retain_grad detach_ contiguous __format__ __dir__ has_names"
)
FREEZING = {torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_}  # type: ignore[attr-defined]
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
UNTRACED = {GET_DATA} | methods("detach clone new_empty new_zeros new_ones new_full new_tensor new_empty_strided")
UNTRACED |= {torch.clone, torch.detach, torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like}
UNFETCHED_CALLS = {torch.detach, torch.Tensor.detach, torch._amp_foreach_non_finite_check_and_unscale_}
"""What reads no values of what rests elsewhere, or fetches them itself"""
WRITING_OPERATORS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ "
    "__ixor__ __ilshift__ __irshift__".split()
)


def leaves(arguments: Any) -> Iterable[Any]:
    """Everything within nested tuples, lists and dicts."""
    for one in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(one, (tuple, list, dict)):
            yield from leaves(one)
        else:
            yield one


def targets(func: Callable, args: tuple, kwargs: dict) -> list[Any]:
    """Returns the arguments that a call writes to."""
    name = getattr(func, "__name__", "")
    found = [kwargs["out"]] if "out" in kwargs else []
    if name in WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        found += [args[0]] if args else list(kwargs.values())[:1]
    return list(leaves(found))


aten = torch.ops.aten
Rule = Callable[[Any, Any, tuple, dict], Any]


@functools.cache
def rule_for(func: Any) -> Rule:
    """The rule of one op (``torch.ops.aten.mul.Tensor``).

    >>> [rule_for(op).__name__ for op in (aten.mul.Tensor, aten._foreach_zero_.default, aten.sum.default)]
    ['elementwise', 'elementwise', 'refused']
    """
    if func in RULES:
        return RULES[func]
    if torch.Tag.nondeterministic_seeded in func.tags or not tensors_only(func):
        return refused
    name = name_of(func)
    derived = name.startswith("_foreach_") or name.endswith("_")  # torch tags `eq`, and neither `eq_` nor its foreach
    base = name.removeprefix("_foreach_").rstrip("_")
    return elementwise if torch.Tag.pointwise in func.tags or (derived and is_elementwise(base)) else refused


def name_of(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def tensors_only(func: Any) -> bool:
    """torch tags `equal` as pointwise too."""
    return all(str(returned.type) in ("Tensor", "List[Tensor]") for returned in func._schema.returns)


def is_elementwise(base: str) -> bool:
    """Whether ops derived from this one are; of one operand, `max` is a reduction."""
    if base in ("max", "min"):
        return False
    packet = getattr(aten, base, None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return base in ("zero", "copy") or any(torch.Tag.pointwise in overload.tags for overload in overloads)


def elementwise(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Computes on this rank's elements; of a foreach op position by position, where plain tensors may be among them."""
    values, written = [*args, *kwargs.values()], written_arguments(func, args, kwargs)
    many = name_of(func).startswith("_foreach_")
    tensors = [value for value in values if is_tensors(value) or isinstance(value, torch.Tensor)]
    columns: list[Any] = list(zip(*filter(is_tensors, tensors), strict=True)) if many else [tensors]
    targets = list(zip(*written, strict=True)) if many and written else [written] * len(columns)
    firsts = [next((one for one in column if isinstance(one, cls)), None) for column in columns]
    for first, column, target in zip(firsts, columns, targets, strict=True):
        if first is None:
            continue
        for one in column:
            if not isinstance(one, cls) and any(one is out for out in target):
                refuse(label(func), first, "alike", f", to be written into a plain tensor of shape {tuple(one.shape)}")
        for one in column:
            check_beside(func, first, one, cls)

    def here(value: Any) -> Any:
        if not many:
            return span(firsts[0], cls, value)
        return list(map(span, firsts, [cls] * len(firsts), value)) if is_tensors(value) else value

    result = func(*map(here, args), **{key: here(value) for key, value in kwargs.items()})
    wrote([one.span for target in targets for one in target if isinstance(one, cls)])
    if written:
        return None if many else written[0] if len(written) == 1 else tuple(written)
    dressed = [dress(column, cls, one) for column, one in zip(columns, result if many else [result], strict=True)]
    return dressed if many else dressed[0]


def same_body(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Over the same ``local``: the same object, since an alias of it made here would have its own version counter."""
    one = args[0]
    same = one.like(one.span, one.dtype)
    if in_backward():  # as a Function is given again what it has saved
        same.use, same.in_forward, same.settle = one.use, one.in_forward, one.settle
        same.original = one if one.original is None else one.original
    return same


def same_shape(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    one, asked = args[0], list(args[1])
    if len(asked) != one.ndim or any(size not in (-1, own) for size, own in zip(asked, one.shape, strict=True)):
        refuse(label(func), one, "whole", f", asked for shape {tuple(asked)}")
    return same_body(cls, func, args, kwargs)


def remade(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """A new ``local``: a copy, another dtype, zeros; the options that speak of the shape or the place are checked."""
    one, options = args[0], dict(kwargs)
    device, layout = options.pop("device", None), options.pop("layout", None)
    if device is not None and torch.device(device) != one.device:
        refuse(label(func), one, "device", f", asked for {device}")
    if layout not in (None, torch.strided):
        refuse(label(func), one, "whole", f", asked for {layout}")
    if options.pop("memory_format", None) not in (None, torch.preserve_format, torch.contiguous_format):
        refuse(label(func), one, "whole", ", asked for another memory format")
    result = func(one.span, *args[1:], **options)
    return one.like(result, None if options.get("dtype") else one.dtype)


def plain_new(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """``p.new_zeros(size)`` asks only for dtype and device."""
    return func(args[0].span, *args[1:], **{"dtype": args[0].dtype, **kwargs})


def of_local(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    return func(args[0].span, *args[1:], **kwargs)


def same_size(cls: Any, func: Any, args: tuple, kwargs: dict) -> bool:
    return args[0].shape == args[1].shape


def unscaled(cls: Any, func: Any, args: tuple, kwargs: dict) -> None:
    """GradScaler's unscale: parts are scaled alone, and what one rank finds non-finite counts on all of them."""
    gradients, found, inverse = args
    for places in in_turns([gradients]):
        some = [gradients[place] for place in places]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for one in some:
            by_dtype.setdefault(bare(one, cls).dtype, []).append(bare(one, cls))
        with fetched(some, written=some):
            for parts in by_dtype.values():
                func([part for part in parts if part.numel()], found, inverse, **kwargs)
    sharded: list[Any] = [one for one in gradients if isinstance(one, cls)]
    wrote([one.span for one in sharded])
    groups = {id(one.group): one.group for one in sharded}
    for group in groups.values():
        if group is not None:
            found_by_any(group, found)


def found_by_any(group: Any, found: torch.Tensor) -> None:
    """Makes an overflow that a GradScaler found on one rank count on all."""
    with during("GradScaler.unscale_", of="GradScaler.unscale_"):
        there = found.to(group.device)
        group.all_reduce(there, "max").wait()
        if there is not found:
            found.copy_(there)


def refused(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    flat = [one for many in (*args, *kwargs.values()) for one in (many if isinstance(many, (list, tuple)) else [many])]
    first = next(one for one in flat if isinstance(one, cls))
    refuse(label(func), first, advice_for(name_of(func), torch.Tag.nondeterministic_seeded in func.tags))


def label(func: Any) -> str:
    return str(func).removesuffix(".default")


def bare(one: Any, cls: Any) -> Any:
    return one.span if isinstance(one, cls) else one


def span(first: Any, cls: Any, one: Any) -> Any:
    """This rank's elements of what stands beside `first`: sharded alike, or a plain tensor of its shape."""
    if isinstance(one, cls):
        return one.span
    return first.span_of(one) if first is not None and isinstance(one, torch.Tensor) and one.ndim else one


def is_tensors(one: Any) -> bool:
    return isinstance(one, (list, tuple)) and bool(one) and isinstance(one[0], torch.Tensor)


def check_beside(func: Any, first: Any, one: torch.Tensor, cls: Any) -> None:
    """Beside a sharded tensor stand tensors sharded alike, whole ones of its shape, of which this rank's span counts,
    and 0-dim ones that leave its dtype. What is copied may come from another device, or have another dtype."""
    if isinstance(one, cls):
        if not first.is_same_layout(one):
            refuse(label(func), first, "alike", f", beside {one!r}")
        return
    copies = one.shape == first.shape and name_of(func) in ("copy_", "_foreach_copy_")
    other = one.shape != first.shape or one.device != first.device if one.ndim else not first.ndim
    if other and not copies and (one.ndim or one.dtype != first.dtype):
        refuse(label(func), first, "alike", f", beside a plain {one.dtype} tensor of shape {tuple(one.shape)}")


def written_arguments(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    positions, keys = written_places(func)
    return [args[at] for at in positions if at < len(args)] + [kwargs[key] for key in keys if key in kwargs]


@functools.cache
def written_places(func: Any) -> tuple[list[int], list[str]]:
    written = [(at, one) for at, one in enumerate(func._schema.arguments) if one.alias_info and one.alias_info.is_write]
    return [at for at, one in written if not one.kwarg_only], [one.name for _, one in written]


def wrote(spans: Iterable[Any]) -> None:
    torch.autograd.graph.increment_version([one for one in spans if not one.is_inference()])


def dress(column: Any, cls: Any, result: Any) -> Any:
    """Results take the layout of the operands, and show the dtype that the operands' shown dtypes would have given."""
    if isinstance(result, (list, tuple)):
        return type(result)(dress(column, cls, one) for one in result)
    sharded = [one for one in column if isinstance(one, cls)]
    if not sharded:
        return result
    kept = functools.reduce(torch.promote_types, [one.span.dtype for one in sharded])
    shown = functools.reduce(torch.promote_types, [one.dtype for one in sharded])
    return sharded[0].like(result, shown if result.dtype == kept else None)


RULES: dict[Any, Rule] = {}


def add_rules(rule: Rule, names: str) -> None:
    """Names may carry an overload; what a torch does not have is not there to be called."""
    for name in names.split():
        base, _, overload = name.partition(".")
        func = getattr(getattr(aten, base, None), overload or "default", None)
        if func is not None:
            RULES[func] = rule


add_rules(same_body, "detach alias")
add_rules(same_shape, "view _unsafe_view expand")
add_rules(remade, "clone _to_copy zeros_like ones_like full_like empty_like")
add_rules(plain_new, "new_empty new_zeros new_ones new_full new_empty_strided")
add_rules(elementwise, "zero zero_ fill.Scalar fill.Tensor fill_.Scalar fill_.Tensor")
add_rules(elementwise, "masked_fill_.Scalar masked_fill_.Tensor masked_fill.Tensor")
add_rules(elementwise, "floor_divide floor_divide_.Tensor rsub.Tensor")
add_rules(unscaled, "_amp_foreach_non_finite_check_and_unscale_")
add_rules(same_size, "is_same_size")
add_rules(of_local, "is_pinned record_stream")
UNFETCHED_RULES = frozenset({same_body, same_shape, same_size, unscaled})
"""Rules that read no values of what rests elsewhere, or fetch them themselves"""
