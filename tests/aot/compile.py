"""Compiles jobs of `zerokern.kernels.triton.ahead` and prints what the compiled kernels are made of.

A process of its own: Triton decides when a kernel is defined whether it is compiled or interpreted. Reads a JSON list
of [job, architecture] from stdin, prints a JSON line of facts for each, in order, and with the word `launches` one
more of what launchers ask for. Its first argument is the folder of the disassembler. Needs no GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import launches

from zerokern.kernels.triton.ahead import compile_job

TOOLS = Path(sys.argv[1] if __name__ == "__main__" else "")
BITS = re.compile(r"(?:\.v(\d))?\.[a-z]+(\d+)$")


def access_widths(ptx: str, verb: str) -> dict[str, int]:
    """How many accesses of global memory there are of each width in bits; `verb` is ld or st.

    >>> access_widths("@%p1 ld.global.L1::evict_first.v4.b32 {%r1}; ld.global.b16 %r2;", "ld")
    {'128': 1, '16': 1}
    """
    found: Counter[str] = Counter()
    for access in re.findall(rf"\b{verb}\.global([\w.:]*)", ptx):
        count, bits = BITS.search(access).groups()
        found[str(int(count or 1) * int(bits))] += 1
    return dict(found)


def instructions(ptx: str, pattern: str) -> dict[str, int]:
    """How many instructions there are whose whole name matches.

    >>> instructions("fma.rn.f32 %f1; fma.rn.f32 %f2; mul.rn.f32 %f3;", r"fma[.]rn[.]f32")
    {'fma.rn.f32': 2}
    """
    names = re.findall(r"(?:^|[\s;}])([a-z][a-z0-9_]*(?:\.[\w:]+)+)\s", ptx, re.MULTILINE)
    return dict(Counter(name for name in names if re.fullmatch(pattern, name)))


def fused(found: dict[str, int]) -> dict[str, int]:
    """Multiply-adds by type; from sm_100 on one instruction may be two of them.

    >>> fused({"fma.rn.f32": 1, "fma.rn.f32x2": 3, "fma.rn.f64": 2})
    {'f32': 7, 'f64': 2}
    """
    total: Counter[str] = Counter()
    for name, count in found.items():
        kind, _, packed = name.rpartition(".")[2].partition("x")
        total[kind] += count * int(packed or 1)
    return dict(total)


def facts_of_ptx(ptx: str) -> dict[str, object]:
    return {
        "loads": access_widths(ptx, "ld"),
        "stores": access_widths(ptx, "st"),
        "fma": fused(instructions(ptx, r"fma\.rn\.f\d+(?:x2)?")),
        "contractible": instructions(ptx, r"(?:mul|add|sub)\.f\d+(?:x2)?"),  # without .rn: ptxas may fuse them
        "flushing": instructions(ptx, r".*\.ftz\..*"),
        "approximate": instructions(ptx, r"(?:div\.(?:full|approx)|(?:sqrt|rcp|rsqrt|ex2|lg2)\.approx).*"),
        "rounded": instructions(ptx, r"(?:div|sqrt)\.rn\.f\d+"),
    }


def facts_of_cubin(cubin: bytes) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", sass).groups()
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.MULTILINE)
    opcodes = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0] for line in lines]
    return {
        "registers": int(registers),
        "stack": int(stack),
        "spills": sum(op in ("STL", "LDL") for op in opcodes),
        "instructions": len(opcodes) - opcodes.count("NOP"),
        "opcodes": dict(Counter(opcodes)),
    }


def main() -> None:
    for job, architecture in json.load(sys.stdin):
        print(json.dumps(facts_of_job(job, architecture)), flush=True)
    if "launches" in sys.argv:
        print(json.dumps(launches.recorded()))


def facts_of_job(job: dict[str, object], architecture: int) -> dict[str, object]:
    try:
        compiled = compile_job(job, architecture)
    except Exception as error:  # of one job: the others are still of interest
        return {"error": f"{type(error).__name__}: {error}"}
    facts = facts_of_ptx(compiled.asm["ptx"]) | facts_of_cubin(compiled.asm["cubin"])
    return {"shared": compiled.metadata.shared} | facts


if __name__ == "__main__":
    main()
