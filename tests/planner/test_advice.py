"""`zk.plan(...).advice()`: the cheapest exact configuration that fits, and what would where none does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tables import each

import zerokern as zk
from zerokern.cli.main import main
from zerokern.pages import text_page
from zerokern.planner import from_config, preset
from zerokern.planner.amounts import gigabytes
from zerokern.planner.footprint import host_nbytes
from zerokern.planner.forecast import in_seconds, step_seconds
from zerokern.planner.table import order_said
from zerokern.planner.transformer import PRESETS
from zerokern.schedule import machine_of

# as their publishers state them
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
}
NOWHERE = {"host_memory": "1GB", "disk": "1GB"}
ADAMW = "opt = zk.AdamW(model.parameters())"
ON_HOST = 'opt = zk.AdamW(model.parameters(), tier="cpu", schedule="overlap")'


def lines(model: Any, **asked: Any) -> list[str]:
    return zk.plan(model, **asked).advice().splitlines()


def code(model: Any, **asked: Any) -> str:
    """Of what is named first."""
    return next(line.removeprefix("Code: ") for line in lines(model, **asked) if line.startswith("Code: "))


def test_a_preset_has_the_published_count() -> None:
    assert {name: preset(name).numel for name in PRESETS} == PUBLISHED
    for name in ("gpt2", "mixtral-8x7b"):
        assert zk.plan(preset(name), stage=3).numel == PUBLISHED[name]
        assert str(zk.plan(name, world=8)) == str(zk.plan(preset(name), world=8))


def test_a_config_has_the_count_of_the_module(tmp_path: Path) -> None:
    for kind in ("Llama", "Mistral", "Qwen2", "GPT2", "GPTNeoX", "Mixtral"):
        for tied in (False, True):
            sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
            if kind == "GPT2":
                sizes = {"n_embd": 64, "n_inner": 160, "n_layer": 3, "n_head": 4}
            elif kind != "GPTNeoX":
                sizes |= {"num_key_value_heads": 2}
            more: dict[str, Any] = {"vocab_size": 130, "tie_word_embeddings": tied or kind == "GPT2"}
            config = getattr(transformers, f"{kind}Config")(**sizes, **more)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            config.save_pretrained(tmp_path)
            found = from_config(tmp_path / "config.json").numel
            assert found == sum(param.numel() for param in model.parameters()), (kind, tied)


@each("world, memory, host, wanted", [
    (1, "80GB", None, '["device:28GB", "cpu"]'),  # 60 GB less parameters and gradients, 16 GB each
    (1, "80GB", "64GB", '["device:28GB", "cpu:36GB", zk.Nvme(path)]'),
    (1, "40GB", None, '"cpu"'),  # parameters and gradients are more than 0.75 of it
    (1, "40GB", "64GB", '["cpu:25GB", zk.Nvme(path)]'),
    (4, "24GB", "128GB", '["device:5GB", "cpu:18GB", zk.Nvme(path)]'),
])  # fmt: skip
def test_state_fills_the_device_then_host_memory_then_the_disk(world: int, memory: str, host: str, wanted: str) -> None:
    """What is written is what is planned, and a GB more would be more than the device's share, or 0.9 of the host's."""
    model = "8B" if world == 1 else "12B"
    asked = {"world": world, "device_memory": memory, "host_memory": host, "ranks_per_host": world}
    (one,) = zk.plan(model, **asked).advised()
    assert f"tier={wanted}" in code(model, **asked)
    most = 0.75 * one.device_memory[memory]
    assert not one.missing and (one.total <= most or not one.budgets or one.budgets[0][0] == "cpu")
    said = "state fills the device up to 75% of it, which leaves the rest to activations"
    assert (said in lines(model, **asked)[-1]) == ("device" in wanted)
    written = [word.strip(' "[]').replace("zk.Nvme(path)", "nvme") for word in wanted.split(",")]
    again = zk.plan(model, stage=one.stage, tier=written, schedule="overlap", **asked)
    assert again.tiers == one.tiers and again.pinned == one.pinned
    for tier, _ in one.budgets:
        larger = f"{tier}:{dict(one.budgets)[tier] + 2 * 10**9}"
        more = [larger if word.startswith(tier) else word for word in written]
        other = zk.plan(model, stage=one.stage, tier=more, schedule="overlap", **asked)
        too_much = host is not None and other.tiers["cpu"] > 0.9 * other.budget["cpu"]
        assert other.total > most or too_much, "what is left is too little for more"


def test_activations_that_are_known_leave_more_to_state() -> None:
    """0.9 of the device, less what a step needs at its peak; state on ranks that are CPUs has no such place."""
    shape = preset("llama-3-8b", batch=1, seq=4096)
    (one,) = zk.plan(shape, device_memory="80GB").advised()
    assert one.budgets == (("device", 6 * 10**9),) and 71e9 < one.total <= 72e9
    assert "state fills the device up to 90% of it;" in lines(shape, device_memory="80GB")[-1]
    host = zk.plan("8B", device="cpu", device_memory="40GB", host_memory="40GB")
    assert all(tier != "device" for one in host.advised() for tier, _ in one.budgets)


def test_on_a_machine_the_fastest_is_named() -> None:
    """More than the order of prices: units that are computed again leave room for state that crosses no link."""
    shape = preset("llama-3-8b", batch=1, seq=4096)
    asked, machine = zk.plan(shape, device_memory="80GB", host_memory="256GB"), machine_of("h100-pcie")
    (cheapest,), (fastest,) = asked.advised(), asked.advised(machine)
    assert (cheapest.recipe.keep, fastest.recipe.keep) == (None, "device")
    took = [step_seconds(one, machine, 4096, plain=one.recipe.keep is None) for one in (cheapest, fastest)]
    assert took[1] < 0.95 * took[0]
    told = asked.advice("h100-pcie").splitlines()
    assert told[0].startswith("Fastest exact configuration that fits: one rank, ")
    assert told[0].endswith(f", {in_seconds(took[1])} for a step of 4,096 tokens on h100-pcie")
    assert 'keep="device"); opt = zk.AdamW(model.parameters(), tier=["device:31GB", "cpu"]' in told[1]
    for tier in ("cpu", ["device:16GB", "cpu"], ["device:31GB", "cpu:16GB", "nvme"]):
        other = zk.plan(shape, stage=0, tier=tier, keep="device", schedule="overlap")
        assert step_seconds(other, machine, 4096) > took[1]


def test_ranks_on_a_machine_divide_what_the_host_updates() -> None:
    asked = zk.plan("8B", world=2, device_memory="40GB")
    assert [one.stage for one in asked.advised()] == [1]
    (one,) = asked.advised("dgx2-v100")
    assert one.stage == 3 and one.budgets == (("device", 13 * 10**9),)
    with pytest.raises(ValueError, match="net_gb_s"):
        asked.advice("h100-pcie")
    with pytest.raises(ValueError, match="None without a machine"):
        asked.advice(tokens=4096)
    with pytest.raises(ValueError, match="wait for each other"):
        zk.plan("8B", mesh={"tp": 2}, device_memory="80GB").advice("dgx2-v100")


def test_what_is_free_is_what_the_advice_fills() -> None:
    """device:auto is the advice's rule, to the byte, at each stage."""
    plan = zk.plan("8B", stage=0, tier=["device:auto", "cpu"], device_memory="80GB")
    assert plan.budgets == (("device", 28 * 10**9),)
    assert order_said(plan.budgets, plan.recipe.tier) == '["device:28GB", "cpu"]'
    shape = preset("llama-3-8b", batch=1, seq=4096)
    found = [zk.plan(shape, stage=n, world=4, tier=["device:auto", "cpu"], device_memory="80GB") for n in (1, 2, 3)]
    for one in found:
        assert one.at(3).budgets == found[2].budgets, "a stage has what it leaves itself"
        assert one.total <= 72e9, "fills what it is given"
    assert dict(found[0].budgets)["device"] < dict(found[2].budgets)["device"]
    with pytest.raises(ValueError, match="the device's memory for tier='device:auto'"):
        zk.plan("8B", tier=["device:auto", "cpu"])
    host = zk.plan("8B", tier=["device:auto", "cpu:8GB", "nvme"], device="cpu")
    assert host.budgets == (("cpu", 8 * 10**9),), "a CPU has no memory beside the host's"
    rests = zk.plan("8B", stage=3, param_tier="cpu", tier=["device:auto", "nvme"], device_memory="80GB")
    assert rests.budgets == () and rests.recipe.tier == "nvme"


def test_the_cheapest_is_named() -> None:
    for world, memory, stage in ((8, 200, 0), (8, 80, 1), (8, 40, 2), (8, 20, 3)):
        asked = {"world": world, "device_memory": f"{memory}GB"}
        assert code("8B", **asked) == f"zk.shard(model, stage={stage}); {ADAMW}"
        assert lines("8B", **asked)[0].startswith(f"Cheapest exact configuration that fits: stage {stage} on 8 ranks, ")
    alone = "Cheapest exact configuration that fits: one rank, 112 of 200 GB before activations"
    assert lines("8B", device_memory="200GB")[:2] == [alone, f"Code: {ADAMW}"]
    found = lines("8B", device_memory="40GB")
    assert found[0].endswith("one rank, 32.0 of 40.0 GB before activations, 112 GB of host memory for each rank")
    assert found[1] == f"Code: {ON_HOST}"
    assert 'tier=["cpu:25GB", zk.Nvme(path)], schedule' in code("8B", device_memory="40GB", host_memory="64GB")
    assert code("8B", device_memory="16GB") == f'zk.shard(model, stage=3, tier="cpu"); {ON_HOST}'
    assert " of 80.0 GB (h100) " in lines("8B", world=8, device_memory="h100")[0]
    assert "device_memory" in zk.plan("1B").advice()
    assert lines(torch.nn.Linear(8, 8), device_memory=20_000)[0].startswith("Cheapest exact configuration")


@pytest.mark.parametrize("seq, wanted", [(4096, "stage=2"), (16_384, 'stage=2, keep="device"')])
def test_llama_3_8b_on_eight_devices_of_80_gb(seq: int, wanted: str) -> None:
    """What everybody asks: the answer, its code and its assumptions, on three lines; scores are counted on request."""
    asked = {"world": 8, "device_memory": "80GB"}
    answer, written, assumed = lines(preset("llama-3-8b", batch=1, seq=seq), **asked)
    assert answer.startswith(f"Cheapest exact configuration that fits: stage {wanted[6]} on 8 ranks, ")
    assert written.startswith(f"Code: zk.shard(model, {wanted}); opt = zk.AdamW(model.parameters()")
    logits = gigabytes((2 + 3 * 4) * 128_256 * seq)
    for word in ("bf16 parameters", f"batch 1 x {seq:,}", "attention='sdpa'", f"{logits} GB of logits and loss"):
        assert word in assumed
    assert ("zk.recompute(head_and_loss, ..., micro=)" in assumed) == (seq == 16_384)
    eager = lines(preset("llama-3-8b", batch=1, seq=seq, attention="eager"), **asked)
    assert eager[1] != written and "stores all scores" in eager[-1]


def test_where_nothing_exact_fits() -> None:
    told = lines("1B", device_memory="8GB", **NOWHERE)
    assert told[0] == "No exact configuration fits on one rank."
    assert told[1].startswith("Lossy, and fits: ") and 'state_format="int8", master_format="split8"' in told[2]
    assert told[3].startswith("Exact, with more ranks: stage 3 on 2 ranks, ")
    for world, most in ((1, "4,096"), (10**9, "1,000,000,000")):
        told = lines("100T", world=world, device_memory="1MB", **NOWHERE)
        assert f"Nor does a lossy one, on up to {most} ranks" in told[1] and "zk.tile" in told[1]


@pytest.mark.slow  # 9 s
def test_a_batch_that_does_not_fit_is_divided() -> None:
    """Units in slices where that is enough, for a shape without logits; or else more backward passes in a step."""
    for batch in (3, 7, 32):
        shape = preset("llama-3-8b", batch=batch, seq=8192)
        for one in zk.plan(shape, world=8, device_memory="40GB", host_memory="2TB").advised():
            now, times = one.subject.transformer.batch, one.settings.accumulate
            assert now < batch <= now * times and not one.missing and one.recipe.keep
            twice = zk.plan(preset("llama-3-8b", batch=2 * now, seq=8192), world=8, device_memory="40GB")
            assert batch < 2 * now or not any(keeps.settings.accumulate == 1 for keeps in twice.advised())
            said = f", batch {now} and {times} backward passes in a step"
            told = zk.plan(shape, world=8, device_memory="40GB", host_memory="2TB").advice().splitlines()
            assert told[0] == "No exact configuration fits on 8 ranks."
            assert told[1].startswith("Exact, with fewer activations on the device: ") and told[1].endswith(said)
    bare = zk.planner.Transformer(32, 4096, heads=32, batch=16, seq=8192)
    (one,) = zk.plan(bare, world=8, device_memory="6.7GB", host_memory="2TB").advised()
    assert one.settings.micro > 1 == one.settings.accumulate
    assert f"micro={one.settings.micro})" in code(bare, world=8, device_memory="6.7GB", host_memory="2TB")


def test_recomputation_that_was_asked_for_is_in_the_code() -> None:
    for world, memory, stage in ((1, "200GB", 0), (8, "48GB", 2)):
        asked = {"model": preset("llama-3-8b", batch=2, seq=2048), "world": world, "device_memory": memory}
        assert code(**asked, keep="device") == f'zk.shard(model, stage={stage}, keep="device"); {ADAMW}'
        assert code(**asked, micro=2, keep="device") == f"zk.shard(model, stage={stage}, micro=2); {ADAMW}"


def test_each_number_of_ranks_and_each_memory_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--numel", "8B", "--world", "1,8", "--device-memory", "80GB,24GB"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "GB: " in line]
    begins = [re.sub(r"(\d+GB): .*: (stage \d on |)(.*? ranks?), .*", r"\1, \3", line) for line in told]
    assert begins == ["80GB, one rank", "24GB, one rank", "80GB, 8 ranks", "24GB, 8 ranks"]


def test_memory_of_a_host_that_nobody_said_is_assumed() -> None:
    said = {host: lines("8B", device_memory="24GB", host_memory=host)[-1] for host in (None, "64GB", "640GB")}
    assert [("--host-memory" in one, "--disk" in one) for one in said.values()] == [
        (True, False),
        (False, True),
        (False, False),
    ]


@pytest.mark.parametrize(
    "asked",
    [
        ["--model", "llama-3-8b", "--world", "8", "--device-memory", "80GB", "--batch", "1", "--seq", "4096"],
        ["--numel", "8B", "--device-memory", "24GB", "--schedule", "delayed", "--tier", "nvme"],
        ["--numel", "8B", "--device-memory", "200GB", "--state-format", "int8", "--master-format", "split8"],
    ],
)  # fmt: skip
def test_the_page_is_that_of_what_is_advised(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Three lines, and the tables of what they say; everything that was asked for comes with --all."""
    assert main(["plan", "--markdown", *asked]) == 0
    told = capsys.readouterr().out
    assert told.startswith("As asked: " if "--schedule" in asked or "--state-format" in asked else "Cheapest ")
    title, *page = told[told.rindex("### ") :].split("\n\n")
    answer, written, _ = next(one for one in told.split("\n\n") if one.startswith("Cheapest ")).splitlines()
    (total,) = re.findall(r", ([\d.,]+) of ", answer)
    stage = re.findall(r"stage=(\d)", written) or ["0"]
    assert title.endswith(f", stage {stage[0]}") and f"**{total}**" in "\n".join(page)
    assert "no, " not in "\n".join(page) and "state_format  " not in "\n".join(page)
    assert main(["plan", "--markdown", *asked, "--all"]) == 0
    everything = capsys.readouterr().out
    assert everything.startswith(told.rpartition("\n\n")[0]) and "| state_format " in everything


def test_what_was_asked_for_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes, whether it fits, its code and its table; then the advice, which is alone where nothing was chosen."""
    asked = ["--model", "llama-3-8b", "--batch", "1", "--seq", "4096", "--device-memory", "24GB"]
    chosen = ["--stage", "3", "--param-tier", "device:7GB,cpu", "--tier", "cpu", "--keep", "device"]
    assert main(["plan", "--markdown", *asked, *chosen]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    plan = zk.plan(
        preset("llama-3-8b", batch=1, seq=4096), stage=3, param_tier=["device:7GB", "cpu"], tier="cpu", keep="device"
    )
    assert parts[0].splitlines() == [
        f"As asked: stage 3 on one rank, {gigabytes(plan.total)} of 24.0 GB, "
        f"{gigabytes(plan.tiers['cpu'])} GB of host memory for each rank; it fits with less than 10% left",
        'Code: zk.shard(model, stage=3, tier=["device:7GB", "cpu"], keep="device"); '
        'opt = zk.AdamW(model.parameters(), tier="cpu")',
    ]
    assert parts[1].startswith("Cheapest exact configuration that fits: ")
    titles = [part for part in parts if part.startswith("### ")]
    assert len(titles) == 2 and f"**{gigabytes(plan.total)}**" in "\n".join(parts[: parts.index(titles[1], 3)])
    assert main(["plan", "--markdown", *asked, "--stage", "2"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("As asked: one rank, ") and first.endswith("of 24.0 GB; it does not fit")
    assert (
        main(["plan", "--markdown", *asked, "--schedule", "delayed", "--tier", "cpu", "--master-format", "fp32"]) == 0
    )
    written = 'zk.AdamW(model.parameters(), tier="cpu", schedule=zk.Delayed(after=0), master_format="fp32")'
    assert capsys.readouterr().out.splitlines()[1] == f"Code: opt = {written}"
    assert main(["plan", "--markdown", *asked]) == 0
    assert capsys.readouterr().out.startswith("Cheapest exact configuration that fits: ")


@each("world, memory, asked", [
    (1, "80GB", {}),
    (8, "80GB", {}),
    (8, "24GB", {}),
    (1, "24GB", {"host_memory": "64GB"}),
    (1, "24GB", {"host_memory": "16GB"}),
    (1, "80GB", {"host_memory": "64GB"}),
    (8, "24GB", {"host_memory": "256GB"}),
    (1, "256GB", {"host_memory": "64GB", "device": "cpu"}),
])  # fmt: skip
def test_a_tenth_of_each_memory_is_left(world: int, memory: str, asked: dict[str, Any]) -> None:
    """On one device and on eight, and on the host; what would fit instead of a plan leaves it, too."""
    plan = zk.plan(preset("llama-3-8b", batch=1, seq=4096), world=world, device_memory=memory, **asked)
    found = [*plan.advised(), *plan.would_fit()]
    assert found
    for one in found:
        assert one.total <= 0.9 * one.device_memory[memory]
        assert host_nbytes(one) <= 0.9 * one.budget.get("cpu", float("inf"))
        assert one.budget == plan.budget, "what a host has, not what is filled of it"
    said = lines(preset("llama-3-8b", batch=1, seq=4096), world=world, device_memory=memory, **asked)[-1]
    assert "10% of the device is left to the driver, NCCL and fragments of the allocator" in said
    assert ("10% of host memory to other programs" in said) == ("host_memory" in asked)


@each("model, world, memory, stage, instead", [
    ("8B", 8, "80GB", 1, None),  # 42.0 GB: there is room
    ("8B", 8, "50GB", 2, 1),  # 42.0 of 50, or 26.0
    ("1.3B", 4, "24GB", 1, 0),
    ("1.3B", 4, "80GB", 0, None),
])  # fmt: skip
def test_near_the_limit_the_stage_that_takes_less_and_sends_as_much_is_named(
    model: str, world: int, memory: str, stage: int, instead: int | None
) -> None:
    (one,) = zk.plan(model, world=world, device_memory=memory).advised()
    assert one.stage == stage
    if instead is not None:
        below = one.at(instead)
        assert 0.75 * one.device_memory[memory] < below.total < 0.9 * one.device_memory[memory]
        assert one.traffic.sent_nbytes == pytest.approx(below.traffic.sent_nbytes, rel=0.01)
        for machine in ("dgx2-v100", replace(machine_of("h100-pcie"), net_gb_s=50)):
            here = machine_of(machine)
            assert step_seconds(one, here, 4096) <= 1.01 * step_seconds(below, here, 4096)
    (later,) = zk.plan(model, world=world, device_memory=memory, accumulate=4, no_sync=True).advised()
    assert later.stage <= stage, "whole gradients until the last micro-batch"


def test_parameters_fill_host_memory_before_state_and_rest_on_the_device_together() -> None:
    """By the forecast: a part of them on the device makes a step longer, and a part in host memory makes it shorter."""
    shape = preset("llama-3-8b", batch=1, seq=4096)
    (one,) = zk.plan(shape, device_memory="24GB").advised()
    assert (one.recipe.param_tier, one.recipe.param_budgets) == ("cpu", ())
    for name in ("a100-pcie", "h100-pcie", "gh200", "h200-pcie"):
        machine, took = machine_of(name), []
        for param_tier in ("cpu", ["device:2GB", "cpu"], ["device:6GB", "cpu"]):
            asked = {"param_tier": param_tier, "tier": "cpu", "keep": "device", "schedule": "overlap"}
            took.append(step_seconds(zk.plan(shape, stage=3, **asked), machine, 4096))
        assert took[0] == min(took), name
    (small,) = zk.plan(shape, device_memory="24GB", host_memory="16GB").advised()
    assert small.recipe.param_tier == "nvme" and dict(small.recipe.param_budgets)["cpu"] >= 12 * 10**9
    asked = {"param_tier": "nvme", "tier": ["cpu:14GB", "nvme"], "keep": "device", "schedule": "overlap"}
    state_first = zk.plan(shape, stage=3, host_memory="16GB", **asked)
    for name in ("a100-pcie", "h100-pcie"):
        assert step_seconds(small, machine_of(name), 4096) < step_seconds(state_first, machine_of(name), 4096)


def test_what_is_advised_is_the_cheapest_that_fits() -> None:
    """Whatever the memory and the model: it fits, and on the device no lower stage does."""
    for model in ("8B", preset("llama-3-8b", batch=1, seq=4096), preset("llama-3-8b", batch=1, seq=32_768)):
        for memory in range(4, 200, 28):
            asked = zk.plan(model, world=4, device_memory=f"{memory}GB")
            for one in asked.advised():
                assert not one.missing
                if one.recipe.tier == "device" and not one.settings.micro > 1:
                    below = [one.at(stage) for stage in range(one.stage)]
                    assert all(other.total > 0.75 * 10**9 * memory for other in below)
                assert f"{gigabytes(one.total)} of " in asked.advice()


def test_why_one_sequence_does_not_fit() -> None:
    for attention, scores in (("sdpa", False), ("eager", True)):
        told = "\n".join(lines(preset("llama-3-8b", batch=1, seq=131_072, attention=attention), device_memory="24GB"))
        assert "Context parallelism" in told and "zk.tile" not in told and ("with attention's scores" in told) == scores
    told = "\n".join(lines(preset("llama-3-8b", batch=1, seq=128), device_memory="1MB", **NOWHERE))
    assert "zk.tile" in told and "Context parallelism" not in told


def test_a_model_that_cannot_be_whole_is_built() -> None:
    """70B parameters are 140 GB in bf16: more than the device has, and on a CPU more than the host."""
    assert code("70B", world=16, device_memory="80GB") == f"model = zk.build(make_model, stage=3); {ADAMW}"
    assert "zk.build" not in code("70B", world=16, device_memory="150GB")
    assert 'zk.build(make_model, stage=3, tier="cpu")' in code("8B", device_memory="12GB")
    host = {"device": "cpu", "device_memory": "80GB", "host_memory": "80GB", "disk": "1TB"}
    assert code("8B", world=8, **host).startswith("model = zk.build(make_model, stage=3); opt = zk.AdamW(")


def test_the_optimizer_is_the_one_that_was_planned() -> None:
    asked = {"param_dtype": "fp32", "device_memory": "80GB"}
    assert code("1B", optimizer="lion", **asked) == "opt = zk.Lion(model.parameters())"
    assert "fp32 parameters" in lines("1B", optimizer="lion", **asked)[-1]
    assert code("1B", optimizer="sgd-momentum", **asked) == "opt = zk.SGD(model.parameters(), momentum=0.9)"
    assert "as it is" in code("1B", optimizer=None, **asked)
    assert code("1B", optimizer=None, world=2, **asked) == "zk.shard(model, stage=0)"


def test_lora_is_named_where_frozen_parameters_fit() -> None:
    says = "the frozen parameters take 16.0 of 24.0 GB on one rank before activations, its own state is small"
    assert f"LoRA instead: {says}" in lines("8B", device_memory="24GB", **NOWHERE)
    assert "LoRA" not in zk.plan("8B", device_memory="12GB", **NOWHERE).advice()
    told = zk.plan(preset("llama-3-8b", batch=1, seq=128), device_memory="24GB", **NOWHERE).advice()
    assert "LoRA instead: the frozen parameters and activations take" in told and "before activations" not in told


def test_a_plain_page_keeps_text_to_the_columns_and_loses_no_number() -> None:
    plan = zk.plan("8B", world=8, device_memory="80GB")
    page = f"{plan.advice()}\n\n{plan}"
    for columns in (20, 80, 200):
        shown = text_page(page, columns)
        assert "|" not in shown and "**" not in shown and "---" not in shown
        assert sorted(re.findall(r"\d+\.\d+", shown)) == sorted(re.findall(r"\d+\.\d+", page))
        assert "yes, 52 %" in shown
        assert f"\nCode: zk.shard(model, stage=1); {ADAMW}\n" in shown, "code stays on its line"
        notes = shown[shown.index("* ") : shown.index("state_format  ")]
        assert max(map(len, notes.splitlines())) <= max(columns, 20)
