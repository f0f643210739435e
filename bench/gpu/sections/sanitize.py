"""compute-sanitizer over a small case of every kernel: memcheck and racecheck, side by side."""

from __future__ import annotations

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..report import Desk
from .commands import run_logged

TOOLS = ("memcheck", "racecheck")
FOUND = 9  # what compute-sanitizer ends with where it has found something
ERROR = re.compile("Error|Invalid|hazard|leaked")
SUMMARY = re.compile(r"=+ (ERROR SUMMARY|RACECHECK SUMMARY): (.*)")


def run(desk: Desk, out: Path) -> None:
    module = f"{__package__.rpartition('.')[0]}.small_case"
    if desk.settings.rehearse:
        code, lines = run_logged(["-m", module, "--rehearse"], out / "rehearsal-sanitizer.log", desk.budget.left)
        _tell(desk, "the small case without a sanitizer", code, lines, lines[-1:])
        return
    found = shutil.which("compute-sanitizer")
    if found is None:
        desk.could_not("sanitize", "there is no compute-sanitizer on PATH; it comes with the CUDA toolkit")
        return
    # each tensor in memory of its own, so that an access beyond it is one beyond an allocation
    program = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", found)
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        # logs of their own while both write, one file afterwards
        logs = {tool: out / f".{tool}.part" for tool in TOOLS}
        ran = {
            tool: pool.submit(
                run_logged,
                ["--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m", module],
                logs[tool], desk.budget.left, program=program,
            )
            for tool in TOOLS
        }  # fmt: skip
        for tool, future in ran.items():
            code, lines = future.result()
            summary = [match[2] for line in lines if (match := SUMMARY.match(line))]
            _tell(desk, tool, code, lines, summary[-1:])
    with (out / "sanitizer.log").open("wb") as whole:
        for part in logs.values():
            whole.write(part.read_bytes())
            part.unlink()


def _tell(desk: Desk, tool: str, code: int | None, lines: list[str], summary: list[str]) -> None:
    reached = [line for line in lines if line.startswith("small case: ")]
    told = f"{tool}: {'; '.join(summary) or 'no summary'}; {(reached or ['no op ran'])[-1]}"
    desk.say(told)
    desk.fact(f"sanitize: {tool}", {"exit": code, "summary": summary, "reached": reached[-1:]})
    if code is None:
        desk.could_not(f"sanitize.{tool}", f"stopped, late; {(reached or ['no op ran'])[-1]}")
    elif code:
        first = next((line for line in lines if line.startswith("=========") and ERROR.search(line)), "")
        desk.could_not(f"sanitize.{tool}", f"ended with {code}: {first or (lines or [''])[-1]}"[:300])
