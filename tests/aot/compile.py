"""Compiles jobs of `promises.py` and prints what the compiled kernels are made of.

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
from collections import Counter, deque
from pathlib import Path

import launches
from promises import compile_job

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
    if verb == "ld":
        found.update(str(8 * nbytes) for nbytes in copied(ptx))
    return dict(found)


def copied(ptx: str) -> list[int]:
    """The bytes of each asynchronous copy from global to shared memory, by thread.

    >>> copied("@%p1 cp.async.cg.shared.global [ %r9 + 0 ], [ %rd7 + 0 ], 0x10, %r10; cp.async.commit_group;")
    [16]
    """
    return [int(nbytes, 0) for nbytes in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^;]*\], (\w+)", ptx)]


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
        "copied": sum(copied(ptx)),
        "stores": access_widths(ptx, "st"),
        "fma": fused(instructions(ptx, r"fma\.rn\.f\d+(?:x2)?")),
        "contractible": instructions(ptx, r"(?:mul|add|sub)\.f\d+(?:x2)?"),  # without .rn: ptxas may fuse them
        "flushing": instructions(ptx, r".*\.ftz\..*"),
        "approximate": instructions(ptx, r"(?:div\.(?:full|approx)|(?:sqrt|rcp|rsqrt|ex2|lg2)\.approx).*"),
        "rounded": instructions(ptx, r"(?:div|sqrt)\.rn\.f\d+"),
    }


def opcode(line: str) -> str:
    """The name of an instruction, without the predicate that it is under.

    >>> opcode("@!UP0 F2F.F64.F32 R2, R3")
    'F2F.F64.F32'
    """
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]


def is_float64(line: str) -> bool:
    """Whether a unit of float64 executes it; conversions go as slowly.

    >>> [is_float64(line) for line in ("DADD R2, R4, R6", "F2F.F32.F64 R2, R4", "MUFU.RCP64H R3, R5", "FADD R2, R3")]
    [True, True, True, False]
    """
    return bool(re.match(r"D(ADD|MUL|FMA|SETP|MNMX)\b|\w+\..*(F64|64H)", opcode(line)))


def float64_before_stores(placed: list[tuple[int, str]]) -> int:
    """How many float64 instructions the shortest way from the start to a store passes, of the store with most of them.

    >>> code = ["@P0 BRA 0x30", "DADD R2, R4, R6", "STG.E [R2], R3", "DADD R2, R4, R6", "STG.E [R4], R3", "EXIT"]
    >>> float64_before_stores([(16 * i, line) for i, line in enumerate(code)])
    1
    >>> float64_before_stores([(0, "@P0 BRA 0x20"), (16, "DADD R2, R4, R6"), (32, "STG.E [R4], R3"), (48, "EXIT")])
    0
    """
    index = {at: i for i, (at, _) in enumerate(placed)}
    passed = {0: int(is_float64(placed[0][1]))}
    waiting = deque([0])
    while waiting:
        i = waiting.popleft()
        for j in following(placed, i, index):
            count = passed[i] + is_float64(placed[j][1])
            if count < passed.get(j, sys.maxsize):
                passed[j] = count
                waiting.append(j) if count > passed[i] else waiting.appendleft(j)
    return max((count for i, count in passed.items() if opcode(placed[i][1]).startswith("STG")), default=0)


def following(placed: list[tuple[int, str]], i: int, index: dict[int, int]) -> list[int]:
    """The instructions that may be next. What is called comes back."""
    line = placed[i][1]
    name = opcode(line).split(".")[0]
    target = re.search(r"0x([0-9a-f]+)$", line) if name == "BRA" else None
    sure = name in ("EXIT", "RET", "BRX") or re.fullmatch(r"BRA(\.(?!U\b|DIV\b)\w+)* 0x\w+", line)
    sure = sure and not line.startswith("@")
    found = [index[int(target[1], 16)]] if target else []
    return found if sure or i + 1 == len(placed) else [*found, i + 1]


def facts_of_cubin(cubin: bytes) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", sass).groups()
    placed = [
        (int(at, 16), line) for at, line in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    ]
    lines = [line for _, line in placed]
    opcodes = [opcode(line).split(".")[0] for line in lines]
    return {
        "registers": int(registers),
        "stack": int(stack),
        "spills": sum(op in ("STL", "LDL") for op in opcodes),
        "instructions": len(opcodes) - opcodes.count("NOP"),
        "opcodes": dict(Counter(opcodes)),
        "float64": sum(map(is_float64, lines)),
        "float64_before_stores": float64_before_stores(placed),
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
