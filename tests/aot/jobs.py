"""The jobs of each module of kernels, and what its machine code must show: a few that represent all, or all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from promises import Promises, make_job

from zerokern.kernels.formats import BLOCK, CODECS
from zerokern.kernels.triton import (
    accumulate,
    cast,
    changed,
    codecs,
    ferry,
    fingerprint,
    flatten,
    muon,
    prepare,
    stream,
    strided,
    sumsq,
    update,
    words,
)
from zerokern.kernels.triton.codecs import TYPES
from zerokern.kernels.triton.rows import LAST_ROWS, NUM_WARPS, ROWS, SOME_ROWS, row_width
from zerokern.kernels.triton.variants import _MASTER_NBYTES, _STATE_NBYTES, Config, Formats

Job = dict[str, Any]
FP32, BF16, FP16 = TYPES
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}  # in a signature
SUM_REGISTERS = 255
SUM_TREES = 140  # float64 additions of a thread after its loops
SUM_SHARED = 2048  # once per chunk, where whole and other rows meet
# Fused multiply-adds by name, per element, and those of exact rules in pairs. sm_100 fuses two at a time: of SGD's with
# a buffer one may be idle.
FMAS = {"adam": 7, "muon": 2}
PAIR_FMAS = {"lion": 6, "adagrad": 10, "sgd without a buffer": 10}
REGISTERS = {False: 128, True: 144}  # of an update, by whether its rule is one of float64; 128 leave four programs.
# With bits of what changes eight more, the step in which they are given out: 146 of SGD with a second output on sm_80.
PAIR_REGISTERS = {"lion": 144, "adagrad": 152, "sgd": 200}


def all_jobs(every: bool) -> list[Job]:
    """The jobs of all modules of kernels."""
    modules = (
        of_accumulate, of_cast, of_changed, of_codecs, of_ferry, of_fingerprint, of_flatten, of_muon, of_prepare,
        of_stream, of_strided, of_sumsq, of_updates, of_words,
    )  # fmt: skip
    return [job for module in modules for job in module(every)]


def widest(width: int, load: int, store: int) -> tuple[str, ...]:
    """The ways on which elements are so wide."""
    return tuple(way for way, nbytes in (("load", load), ("store", store)) if nbytes == width)


def of_accumulate(every: bool) -> list[Job]:
    """From and to each dtype, with and without the old value, of one source or many."""
    if not every:
        return [
            summed(FP32, BF16, True, True),
            summed(BF16, FP32, False, True),
            summed(BF16, FP32, True, False, one=True),
        ]
    pairs = list(product(TYPES, TYPES))
    return [
        *(summed(*pair, add, True) for pair in pairs for add in (True, False)),
        *(summed(*pair, True, False) for pair in pairs),
        *(summed(*pair, True, aligned, one=True) for pair in pairs for aligned in (True, False)),
    ]


def summed(src: torch.dtype, dst: torch.dtype, add: bool, aligned: bool, one: bool = False) -> Job:
    wider = max(src.itemsize, dst.itemsize)
    loads = max(src.itemsize, dst.itemsize if add else 0)
    return make_job(
        accumulate.accumulate_tile,
        f"{src}-{dst}-{'add' if add else 'set'}{'-one' * one}{'' if aligned else '-ragged'}".replace("torch.", ""),
        {"dst": POINTERS[dst], "first": "i64", "count": "i32", "numel": "i64", "scale": "fp32"}
        | ({} if one else {"words": "*i64"}),
        {"TYPE": TYPES[src], "ADD": add, **accumulate._shape(src, dst, aligned)} | ({"words": None} if one else {}),
        # a last tile that is not whole is loaded as the whole ones are and stored one by one
        Promises(128, wide=widest(wider, loads, dst.itemsize) if aligned else (), shared=4096),
        num_warps=NUM_WARPS,
    )


def of_cast(every: bool) -> list[Job]:
    """From and to each dtype."""
    made = []
    for src, dst in product(TYPES, TYPES) if every else ((FP32, BF16), (BF16, BF16)):
        wider = max(src.itemsize, dst.itemsize)
        signature = {"dst": POINTERS[dst], "src": POINTERS[src], "numel": "i64", "scale": "fp32"}
        constexprs = {"VEC": 16 // wider, "WIDTH": row_width(wider)}
        promises = Promises(96, wide=widest(wider, src.itemsize, dst.itemsize))
        case = f"{src}-{dst}".replace("torch.", "")
        made.append(make_job(cast.cast_tile, case, signature, constexprs, promises, num_warps=NUM_WARPS))
    return made


def of_changed(every: bool) -> list[Job]:
    """One for each width of element."""
    return [
        make_job(
            changed.unpack_groups,
            f"{8 * width} bits",
            {"rows": "*i64", "counts": "*u8", "places": "*u8", "values": f"*i{8 * width}"},
            {"WORD": word},
            Promises(128, wide=(), shared=16384),
            num_warps=changed.NUM_WARPS,
            aligned=("rows",),
        )
        for width, word in changed.WORDS.items()
    ]


def of_codecs(every: bool) -> list[Job]:
    """One for each codec. A code is the exact one, whatever the reciprocal that it came by."""
    made = []
    for verb, kind in CODECS:
        coded, small = kind.startswith("exp_avg"), {"split16": "*i16", "split8": "*i8"}
        signature = {
            "x": "*fp32",
            "codes": "*u8" if coded else "*i16",
            "aux": "*fp32" if coded else small[kind],
            "numel": "i64",
        }
        wide = ("load",) if verb in ("encode", "split") else ("store",)
        constexprs = {
            "CODEC": f"{verb} {kind}", "ROWS": codecs.CONVERT_ROWS, "BLOCK": BLOCK, "VEC": codecs.CONVERT_VEC,
        }  # fmt: skip
        made.append(
            make_job(
                codecs.convert_kernel, f"{verb} {kind}", signature, constexprs,
                Promises(96, fma=None if coded else {}, exact=not coded, wide=wide, shared=8192),
                num_warps=codecs.CONVERT_WARPS, aligned=("x", "codes", "aux"),
            )
        )  # fmt: skip
    return made if every else made[:1]


def of_ferry(every: bool) -> list[Job]:
    """One for each alignment."""
    kinds = list(ferry._KINDS.items())
    return [
        make_job(
            ferry.ferry_spans,
            f"{kind} bytes",
            {"spans": "*i64", "count": "i32"},
            {"WORD": word, "VEC": vec, "TILE": ferry.TILE},
            Promises(64, wide=("load", "store") if kind == 16 else ()),
            num_warps=ferry.NUM_WARPS,
        )
        for kind, (word, vec) in (kinds if every else kinds[:1])
    ]


def of_fingerprint(every: bool) -> list[Job]:
    """One for each width of element."""
    return [
        make_job(
            fingerprint.fingerprint_tiles,
            f"{8 * width} bits",
            {"out": "*i64", "tiles": "*i32", "pointers": "*i64", "numels": "*i64"},
            {"WORD": word, "WIDTH": width, "VEC": 16 // width},
            Promises(64, wide=("load",), shared=1024),
            num_warps=fingerprint.NUM_WARPS,
        )
        for width, word in fingerprint.WORDS.items()
    ]


def of_flatten(every: bool) -> list[Job]:
    """Both ways, from and to each dtype, with and without sums and a scale on the device."""
    some = ((BF16, BF16, True, False), (FP32, BF16, True, True), (BF16, FP32, True, False), (BF16, BF16, False, False))
    all_of_them = [(*pair, stats, stats) for pair in product(TYPES, TYPES) for stats in (True, False)]
    return [moved(into, *choice) for into in (True, False) for choice in (all_of_them if every else some)]


def moved(into: bool, tensor: torch.dtype, bucket: torch.dtype, stats: bool, factor: bool) -> Job:
    wider = max(tensor.itemsize, bucket.itemsize)
    source, target = (tensor, bucket) if into else (bucket, tensor)
    signature = {"bucket": POINTERS[bucket], "tiles": "*i32", "distances": "*i64", "offsets": "*i64", "numels": "*i64"}
    signature |= {"first": "i64", "scale": "fp32", "follows": "i32"}
    optional = {"stats": "*fp64", "partials": "*fp64", "counter": "*i32"} if stats else {}
    optional |= {"factor": "*fp32"} if factor else {}
    absent = {name: None for name in ("stats", "partials", "counter", "factor") if name not in optional}
    return make_job(
        flatten.move_rows,
        f"{source}-{target}-{'in' if into else 'out'}{'-stats' * stats}{'-factor' * factor}".replace("torch.", ""),
        signature | optional,
        absent | {"TYPE": TYPES[tensor], "IN": into, "VEC": 16 // wider, "WIDTH": row_width(wider), "STATS": stats},
        Promises(
            104,
            fma={"f64": (ROWS.value + SOME_ROWS.value + LAST_ROWS.value) * 16 // wider} if stats else {},
            wide=widest(wider, source.itemsize, target.itemsize),
            shared=8 * row_width(wider) if stats else 0,
            float64=100 if stats else 0,  # a tree for each tile
        ),
        num_warps=NUM_WARPS,
        aligned=[name for name in ("partials", "counter", "tiles", "distances") if name not in absent],
    )


def of_strided(every: bool) -> list[Job]:
    """Dtypes of tensor and bucket, both ways, with sums and a scale on the device or without both."""
    some = [(BF16, BF16, True, True), (FP32, BF16, True, False), (BF16, FP32, False, True)]
    return [turned(*way) for way in (product(TYPES, TYPES, (True, False), (True, False)) if every else some)]


def turned(tensor: torch.dtype, bucket: torch.dtype, into: bool, stats: bool) -> Job:
    source, target = (tensor, bucket) if into else (bucket, tensor)
    signature = {"bucket": POINTERS[bucket], "tiles": "*i32", "distances": "*i64", "rows": "*i64"}
    signature |= {"first": "i64", "scale": "fp32", "follows": "i32"}
    optional = {"stats": "*fp64", "partials": "*fp64", "counter": "*i32", "factor": "*fp32"}
    return make_job(
        strided.move_strided,
        f"{source}-{target}-{'in' if into else 'out'}{'-stats-factor' * stats}".replace("torch.", ""),
        signature | optional if stats else signature,
        {"TYPE": TYPES[tensor], "IN": into, "STATS": stats} | ({} if stats else dict.fromkeys(optional)),
        # shared: a tile that turns, and the sum of a tile
        Promises(104, wide=(), shared=4224, float64=100 if stats else 0),
        num_warps=NUM_WARPS,
        aligned=(*(("partials", "counter") if stats else ()), "tiles", "distances", "rows"),
    )


def shapes(width: int) -> list[tuple[str, sumsq.Shape]]:
    """The shapes that chunks are summed in, by name; short ones are for GPUs with few float64 units."""
    return [
        ("wide", sumsq.WIDE[width]),
        ("narrow", sumsq.NARROW),
        ("short wide", sumsq.SHORT_WIDE[width]),
        ("short narrow", sumsq.SHORT_NARROW),
    ]


def of_chunks(name: str, shape: sumsq.Shape, *, spilled: int = 0) -> Promises:
    """The source names multiply-adds for a thread: whole rows twice, other rows for each alignment."""
    fmas = (2 * shape.rows + (2 if shape.lanes > 1 else 1) * min(shape.rows, sumsq.SOME_ROWS)) * shape.lanes
    return Promises(
        SUM_REGISTERS,
        fma={} if name.startswith("short") else {"f64": fmas},
        wide=("load",) if shape.lanes > 1 else (),
        shared=SUM_SHARED,
        spilled=spilled,
        float64=SUM_TREES,
    )


def of_sumsq(every: bool) -> list[Job]:
    """One for each dtype and shape."""
    signature = {"out": "*fp64", "index": "i32", "partials": "*fp64", "counter": "*i32", "chunks": "*i32"}
    signature |= {"pointers": "*i64", "base": "i64", "numels": "*i64", "nchunks": "i32"}
    return [
        make_job(
            sumsq.sumsq_chunks, f"{str(dtype).removeprefix('torch.')} {name}", signature,
            sumsq.constants(shape, dtype), of_chunks(name, shape),
            num_warps=shape.num_warps, aligned=("counter", "chunks"), scarce=name.startswith("short"),
        )
        for dtype in TYPES
        for name, shape in shapes(dtype.itemsize)
        if every or dtype != torch.float16
    ]  # fmt: skip


def of_muon(every: bool) -> list[Job]:
    """One for each dtype and shape of `sumsq`, whose loops and tree these are; less its sum of all chunks."""
    signature = {"outcome": "*fp64", "rows": "*i64", "chunks": "*i32", "nchunks": "i32"}
    return [
        make_job(
            muon.direction_sums, f"{str(dtype).removeprefix('torch.')} {name}", signature,
            muon.constants(shape, dtype),
            of_chunks(name, shape, spilled=8 if (dtype, name) == (FP32, "wide") else 0),  # by Triton 3.6, on sm_80
            num_warps=shape.num_warps, aligned=("outcome", "rows", "chunks"), scarce=name.startswith("short"),
        )
        for dtype in ((BF16, FP32) if every else (BF16,))
        for name, shape in shapes(dtype.itemsize)
    ]  # fmt: skip


def of_prepare(every: bool) -> list[Job]:
    signature = {
        "outcome": "*fp64", "constants": "*fp32", "wides": "*fp64", "marks": "*i64", "order": "*i64", "ngroups": "i32",
    }  # fmt: skip
    aligned = [name for name in signature if name != "ngroups"]
    promises = Promises(160, wide=(), shared=1024, float64=None)
    return [make_job(prepare.prepare, "32 groups at once", signature, {}, promises, num_warps=1, aligned=aligned)]


def of_stream(every: bool) -> list[Job]:
    """The streams of an exact Adam with split master, and a copy."""
    streams = [(1, 4, 0), (1, 0, 1)] + ([(1, 4, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1)] if every else [])
    return [
        make_job(
            stream.stream_tile,
            f"{reads}-{updates}-{writes}",
            {"words": "*i64", "numel": "i64"},
            {"READS": reads, "UPDATES": updates, "WRITES": writes, "TILE": stream.TILE, "VEC": 4},
            Promises(96, wide=("load",) * bool(reads + updates) + ("store",) * bool(updates + writes)),
            num_warps=stream.NUM_WARPS,
        )
        for reads, updates, writes in streams
    ]


def of_words(every: bool) -> list[Job]:
    """One for each kernel."""
    by_value = {"out": "*i64", "count": "i32", **dict.fromkeys(words._NAMES, "i64")}
    read = {"out": "*i32", "words": "*i32", "count": "i32"}
    return [
        make_job(words.write_words, "by value", by_value, {}, Promises(64, wide=()), num_warps=1),
        make_job(words.copy_words, "pinned", read, {}, Promises(64, wide=()), num_warps=words.NUM_WARPS),
    ]


def every_format() -> Iterator[Formats]:
    """All that a table of updates can hold."""
    averages, sums = ("fp32", "bf16", "int8"), ("fp32", "bf16")
    states = {"adam": averages, "lion": averages, "adagrad": sums, "sgd": ("none", *sums)}
    masters = [(FP32, "fp32", False), (BF16, "split16", False), (BF16, "split8", False)]
    masters += [(dtype, "none", random) for dtype in (BF16, FP16) for random in (False, True)]
    for grad, state, out in product(TYPES, averages, (FP32, BF16)):
        yield Formats("muon", grad, BF16, "none", state, out, False)
    for algorithm in states:
        for grad, state, (param, master, random) in product(TYPES, states[algorithm], masters):
            outs = [(param, out) for out in (None, BF16, FP16)]
            outs += [(published, published) for published in (BF16, FP16) if master == "fp32"]
            for (dtype, out), tells in product(outs, (False, True)):
                yield Formats(algorithm, grad, dtype, master, state, out, random, tells)


def of_updates(every: bool) -> list[Job]:
    """What training runs on, or every combination, with a second output or masks where gradients are bf16."""
    usual = [
        Formats("adam", FP32, FP32, "fp32", "fp32", None, False),
        Formats("adam", BF16, BF16, "split16", "fp32", None, False),
        Formats("adam", BF16, BF16, "fp32", "fp32", BF16, False),
        Formats("adam", BF16, BF16, "split16", "bf16", None, False),
        Formats("adam", BF16, BF16, "split8", "int8", None, False),
        Formats("lion", BF16, BF16, "split8", "int8", None, False),
        Formats("lion", BF16, BF16, "split16", "fp32", None, False),
        Formats("adagrad", BF16, BF16, "split16", "fp32", None, False),
        Formats("sgd", BF16, BF16, "none", "fp32", None, True),
        Formats("muon", BF16, BF16, "none", "bf16", BF16, False),
        Formats("muon", BF16, BF16, "none", "int8", BF16, False),
    ]
    usual += [replace(made, changed=True) for made in usual if made.algorithm != "muon"]
    many = (
        made
        for made in every_format()
        if (made.grad == BF16 and not made.random)
        or (not made.changed and (made.out is None or (made.master == "fp32" and made.out == made.param)))
    )
    return [job for made in (many if every else usual) for job in updates(made)]


def updates(made: Formats) -> list[Job]:
    """One for all GPUs, or, where the rule is one of float64, one for those that have it and one for others."""
    if not made.is_exact:
        return [updated(made, made.config(short=False), None)]
    return [updated(made, made.config(short=short), short) for short in (True, False)]


def updated(made: Formats, config: Config, scarce: bool | None) -> Job:
    coded = made.state == "int8"
    per_thread = config.rows * BLOCK // (32 * config.num_warps)
    bodies = 2  # for rows that are aligned, and for others
    read_nbytes = max(made.grad.itemsize, _MASTER_NBYTES[made.master], _STATE_NBYTES[made.state])
    fmas = FMAS.get(made.algorithm, 0) * per_thread * bodies
    counted = not coded
    if scarce:
        rule = made.algorithm + " without a buffer" * (made.state == "none")
        counted = rule in PAIR_FMAS
        fmas = PAIR_FMAS.get(rule, 0) * per_thread * bodies
    signature = dict.fromkeys(("outcome", "constants", "wides", "marks", "rows", "grads", "tiles"), "*i64")
    signature |= {"outcome": "*fp64", "constants": "*fp32", "wides": "*fp64", "tiles": "*i32"}
    aligned = [*signature]
    signature["each"] = "i32"
    promises = Promises(
        (PAIR_REGISTERS[made.algorithm] if scarce else REGISTERS[made.is_exact]) + 8 * made.changed,
        fma={"f32": fmas} if counted else None,  # coded: sm_100 fuses two at a time, one of them idle
        exact=not coded,
        wide=widest(16, read_nbytes * made.vector, made.written_nbytes * made.vector),
        # the scales of blocks, and rows that are not aligned, change threads
        shared=4096 + (config.ahead(made.read_nbytes + 1) if config.stages > 1 else 0),
        # a word that the assembler spills to get by with a step of registers less: on sm_80 with fp32 gradients
        spilled=8 if coded else 0,
        float64=None if scarce is False else 0,
        seldom=bool(scarce),
        ahead=None if scarce else config.ahead(made.read_nbytes),
        # the tiles before the loop, and the one that its body loads
        copied=0 if config.stages == 1 else config.stages * per_thread * made.read_nbytes,
    )
    most = made.options(config).get("maxnreg")
    return make_job(
        update.update, str(made) + "-pairs" * bool(scarce), signature, made.constants(config), promises,
        num_warps=config.num_warps, aligned=aligned, maxnreg=most, scarce=scarce,
    )  # fmt: skip
