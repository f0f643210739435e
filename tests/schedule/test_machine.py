"""Machines: what ships, with a source for each number, what a description may say, and what it is refused for."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from zerokern.schedule import Op, StepProgram, machine_of, shipped, simulate

# seconds of a step of CPU-Adam on a DGX-2 by billions of parameters: ZeRO-Offload, table 4
CPU_ADAM = {1: 0.22, 2: 0.51, 4: 1.03, 8: 2.41, 10: 2.57}
LEAST = {"name": "mine", "flops_s": 1e12, "device_gb_s": 100, "down_gb_s": 10, "up_gb_s": 12, "host_gb_s": 40}


def written(folder: Path, **changes: object) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps({name: value for name, value in (LEAST | changes).items() if value is not None}))
    return path


class TestShipped:
    def test_names(self) -> None:
        assert {"a100-pcie", "dgx2-v100", "gh200", "h100-pcie", "h200-pcie"} <= set(shipped())

    def test_every_number_has_a_source_and_both_directions_are_no_faster_than_one(self) -> None:
        for name in shipped():
            text = (resources.files("zerokern.schedule") / "machines" / f"{name}.json").read_text("utf-8")
            described, machine = json.loads(text), machine_of(name)
            assert described["name"] == name and described["title"]
            for field, value in described.items():
                assert field in ("name", "title") or len(value["source"]) > 15, f"{name}: where does {field} come from?"
            assert machine.sources.keys() == described.keys() - {"name", "title"}
            assert all(machine.sources[one] in str(machine) for one in machine.sources if getattr(machine, one) > 1)
            assert (machine.down_both_gb_s or 0) <= machine.down_gb_s < machine.device_gb_s
            assert (machine.up_both_gb_s or 0) <= machine.up_gb_s < machine.device_gb_s
            assert machine.host_gb_s <= (machine.host_all_gb_s or machine.host_gb_s)

    def test_cpu_adam_of_the_paper(self) -> None:
        """28 bytes per parameter at one rate, that of its 10B row; the paper's own rows spread from 93 to 127 GB/s."""
        for billions, seconds in CPU_ADAM.items():
            numel = billions * 10**9
            step = Op("Step", "all", "cpu", nbytes=28 * numel, numel=numel)
            assert machine_of("dgx2-v100").seconds(step) == pytest.approx(seconds, rel=0.17)


class TestShared:
    def test_of_one_host(self) -> None:
        whole = machine_of("dgx2-v100")
        four, all_of_it = whole.shared_by(4), whole.shared_by(16)
        assert (four.down_gb_s, four.down_both_gb_s, four.cores) == (12, 8.6, 12), "links of 48 GB/s are enough"
        assert (all_of_it.down_gb_s, all_of_it.up_both_gb_s) == (3, 3), "the paper's 3.0 GB/s per GPU"
        assert all_of_it.host_gb_s == whole.host_gb_s / 16
        assert whole.shared_by(64) == all_of_it, "more ranks have more hosts"

    def test_disks_and_memory_of_one_host(self) -> None:
        """The paper's 1.6 GB/s of the disk per GPU where all 16 use it, and its memory of a node."""
        whole = machine_of("dgx2-v100")
        alone, all_of_it = whole.shared_by(1), whole.shared_by(16)
        assert (alone.rate("read"), all_of_it.rate("read"), all_of_it.rate("write")) == (12, 1.6, 1.6)
        assert (all_of_it.host_memory_gb, all_of_it.disk_gb, all_of_it.device_memory_gb) == (1500 / 16, 1750, 32)

    def test_of_a_device_with_a_host_of_its_own(self) -> None:
        assert machine_of("h200-pcie").shared_by(8) == machine_of("h200-pcie")
        with pytest.raises(ValueError, match="ranks=0: must be"):
            machine_of("h200-pcie").shared_by(0)


class TestDisk:
    def test_a_disk_of_one_rate_is_shared_by_both_directions(self) -> None:
        read, write = (Op(verb, "a", lane, nbytes=6 * 10**9) for verb, lane in (("Fetch", "read"), ("Store", "write")))
        machine = machine_of("h100-pcie")
        assert [machine.seconds(read), machine.seconds(read, {"write"})] == pytest.approx([1, 2], rel=1e-4)
        assert simulate(StepProgram("both", (read, write)), machine).step_seconds == pytest.approx(2, rel=1e-4)
        full = replace(machine, read_both_gb_s=None, write_both_gb_s=None)
        assert simulate(StepProgram("both", (read, write)), full).step_seconds == pytest.approx(1, rel=1e-4)

    def test_what_the_disk_moves_passes_through_host_memory(self) -> None:
        machine = replace(machine_of("h100-pcie"), update_numel_s=None)
        step = Op("Step", "a", "cpu", nbytes=150 * 10**9)
        assert machine.seconds(step, {"read"}) == pytest.approx(150 / 144)

    def test_there_may_be_none(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"machine 'mine': read_gb_s=None: must be .* rests on the disk"):
            machine_of(written(tmp_path)).seconds(Op("Fetch", "a", "read", nbytes=1))


class TestDescription:
    def test_numbers_with_and_without_sources(self, tmp_path: Path) -> None:
        machine = machine_of(written(tmp_path, host_gb_s={"value": 50, "source": "measured"}, net_gb_s=None))
        assert (machine.host_gb_s, machine.net_gb_s, machine.sources) == (50, None, {"host_gb_s": "measured"})
        assert machine_of(str(tmp_path / "mine.json")) == machine and machine_of(machine) is machine
        assert "measured" in str(machine)

    def test_refused_values_and_types(self, tmp_path: Path) -> None:
        rows: list[tuple[dict[str, object], type[Exception], str]] = [
            ({"host_gbs": 3}, ValueError, r"has the unknown field 'host_gbs'; its fields are name, flops_s"),
            ({"up_gb_s": None, "flops_s": None}, ValueError, r"lacks flops_s, up_gb_s; its fields are"),
            ({"down_gb_s": 0}, ValueError, r"machine 'mine': down_gb_s=0: must be a number above 0"),
            ({"copy_us": -1}, ValueError, r"copy_us=-1: must be a number from 0 on"),
            ({"host_gb_s": float("nan")}, ValueError, r"host_gb_s=nan: must be"),
            ({"cores": 1.5}, TypeError, "cores=.*: must be a number above 0"),
            ({"up_gb_s": "12"}, TypeError, "up_gb_s=.*: must be a number above 0"),
            ({"flops_s": True}, TypeError, "flops_s=.*: must be a number above 0"),
        ]
        for changes, kind, says in rows:
            with pytest.raises(kind, match=says):
                machine_of(written(tmp_path, **changes))
        for text, says in (("{", "is no JSON"), ("[1]", "holds a list; allowed: a JSON object")):
            (tmp_path / "mine.json").write_text(text)
            with pytest.raises(ValueError, match=says):
                machine_of(tmp_path / "mine.json")

    def test_an_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"machine='h300': must be a JSON file, or one of a100"):
            machine_of("h300")
        with pytest.raises(TypeError, match="machine=3: must be"):
            machine_of(3)  # type: ignore[arg-type]
