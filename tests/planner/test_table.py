"""A plan as people read it: aligned, with units, and with what it leaves out."""

from __future__ import annotations

import pytest
import torch

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.planner import Transformer


def gpt() -> torch.nn.Module:
    with torch.device("meta"):
        return GPT(Shape(4, 256, 64))


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of the stages by the name of the row."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[2:] for row in rows}


class TestText:
    def test_table_of_a_number(self) -> None:
        text = str(zk.plan("7.5B", world=64, param_dtype="fp16", device_memory="v100,24GB"))
        rows = rows_of(text)
        assert text.startswith("### 7.5B parameters, on 64 ranks\n")
        assert "in GB (10^9 bytes)" in text
        assert rows["**model states**"] == ["120", "31.4", "16.6", "1.88"]
        assert rows["fits v100 (32 GB)"] == ["no, 375 %", "yes, 98 %", "yes, 52 %", "yes, 6 %"]
        assert rows["fits 24GB"][:2] == ["no, 500 %", "no, 131 %"]
        assert rows["volume of a step"] == ["2.00 Ψ", "2.00 Ψ", "2.00 Ψ", "3.00 Ψ"]
        assert rows["units gathered"] == ["-", "-", "-", "?"], "a number does not say what is gathered"
        assert "| unknown for a bare number; give --model |" in text
        assert len({line.count("|") for line in text.splitlines() if line.startswith("| on each")}) == 1

    def test_table_is_aligned_markdown(self) -> None:
        blocks = str(zk.plan(gpt(), stage=3, world=8, device_memory="h100")).split("\n\n")
        tables = [block.splitlines() for block in blocks if block.startswith("|")]
        assert len(tables) == 2
        for lines in tables:
            assert len({len(line) for line in lines}) == 1
            assert set(lines[1]) <= set("|-: ")

    def test_lossy_formats_say_so(self) -> None:
        rows = [
            line for line in str(zk.plan("1B", world=2)).splitlines() if line.startswith(("| fp32", "| bf16", "| int8"))
        ]
        cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows]
        assert len(cells) == 12
        for state_format, master_format, _ in cells:
            assert state_format.endswith("*(lossy)*") == (not state_format.startswith("fp32"))
            assert master_format.endswith("*(lossy)*") == master_format.startswith(("split8", "none"))
        assert [cell[2] for cell in cells[:2]] == ["10", "12"], "the exact ones come first"

    def test_activations_of_a_transformer_count(self) -> None:
        shape = Transformer(8, 1024, heads=16, batch=2, seq=512)
        whole, again = (zk.plan(shape, world=2, keep=keep) for keep in (None, "device"))
        without = zk.plan(Transformer(8, 1024), world=2)
        assert whole.total - without.total == shape.activations
        assert again.total - without.total == shape.checkpoints + shape.working_activations
        assert "activation checkpoints" in str(again) and "activation checkpoints" not in str(whole)
        assert "Not counted: activations" in str(without)

    def test_a_row_counts_all_dtypes_and_what_is_frozen(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 4096).bfloat16())
        model[0].weight.requires_grad_(False)
        plan = zk.plan(model, stage=3, world=2, param_tier="nvme", tier="nvme", device="cpu")
        rows = [line.split("|")[1:-1] for line in str(plan).split("In a step")[0].splitlines() if line.startswith("| ")]
        held = [float(row[-1].strip(" *-") or 0) for row in rows[2:]]
        assert sum(held[:-1]) == pytest.approx(held[-1], rel=0.01), "the rows make the total"
