"""`zk.plan(...).advice()`: the cheapest exact configuration that fits, and what would where none does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zerokern as zk
from zerokern.cli.main import main
from zerokern.cli.plan import plain
from zerokern.planner import from_config, preset
from zerokern.planner.amounts import gigabytes
from zerokern.planner.shapes import PRESETS

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
LLAMA = PRESETS["llama-3-8b"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_count(name: str) -> None:
    shape = preset(name)
    assert shape.numel == PUBLISHED[name]
    assert zk.plan(shape, stage=3).numel == shape.numel
    assert str(zk.plan(name, world=8)) == str(zk.plan(shape, world=8))


@pytest.mark.parametrize(
    "kind", ["LlamaConfig", "MistralConfig", "Qwen2Config", "GPT2Config", "GPTNeoXConfig", "MixtralConfig"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_has_the_count_of_the_module(kind: str, tied: bool, tmp_path: Path) -> None:
    import torch
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    more: dict[str, Any] = {"vocab_size": 130, "tie_word_embeddings": tied or kind == "GPT2Config"}
    if kind == "GPT2Config":
        sizes = {"n_embd": 64, "n_inner": 160, "n_layer": 3, "n_head": 4}
    elif kind != "GPTNeoXConfig":
        sizes |= {"num_key_value_heads": 2}
    config = getattr(transformers, kind)(**sizes, **more)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    assert from_config(tmp_path / "config.json").numel == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "asked, says",
    [
        ({"world": 1, "device_memory": "200GB"}, r"one rank, bf16 parameters, 112 of 200 GB .*`zk\.AdamW\(\S*\)`$"),
        ({"world": 8, "device_memory": "200GB"}, r"stage 0 on 8 .*`zk\.shard\(model, stage=0\)` and `zk\.AdamW\(\S*`$"),
        ({"world": 8, "device_memory": "80GB"}, r"stage 1 on 8 .*`zk\.shard\(model, stage=1\)` and `zk\.AdamW\(\S*`$"),
        ({"world": 8, "device_memory": "40GB"}, r"stage 2 on 8 .*`zk\.shard\(model, stage=2\)` and `zk\.AdamW\(\S*`$"),
        ({"world": 8, "device_memory": "20GB"}, r"stage 3 on 8 .*`zk\.shard\(model, stage=3\)` and `zk\.AdamW\(\S*`$"),
        ({"world": 1, "device_memory": "40GB"}, r'rank, .* 32.* 112 GB of host .*tier="cpu", schedule="overlap"\)`$'),
        ({"world": 1, "device_memory": "40GB", "host_memory": "64GB"}, r"GB of disk .*tier=zk\.Nvme\(path\), schedule"),
        ({"world": 1, "device_memory": "16GB"}, r'stage 3 on one .*`zk\.shard\(model, stage=3, tier="cpu"\)` and '),
        ({"world": 8, "device_memory": "h100"}, r"80\.0 GB \(h100\)"),
    ],
)  # fmt: skip
def test_the_cheapest_is_named(asked: dict[str, Any], says: str) -> None:
    assert re.search(says, zk.plan("8B", **asked).advice())


@pytest.mark.parametrize("schedule", ["overlap", zk.Delayed()])
def test_a_schedule_of_the_host_does_not_bar_state_on_the_device(schedule: Any) -> None:
    asked = {"tier": "cpu", "schedule": schedule}
    for memory in ("200GB", "24GB"):
        told = [zk.plan("8B", device_memory=memory, **more).advice() for more in (asked, {})]
        assert told[0].partition("->")[2] == told[1].partition("->")[2] != ""


def test_where_nothing_exact_fits() -> None:
    nowhere = {"host_memory": "1GB", "disk": "1GB"}
    told = zk.plan("1B", device_memory="8GB", **nowhere).advice().splitlines()
    assert told[0] == "No exact configuration fits on one rank."
    assert told[1].startswith("Lossy, and fits: ") and 'state_format="int8", master_format="split8"' in told[1]
    assert told[2].startswith("Exact, with more ranks: stage 3 on 2 ranks, ")
    assert "Nor does a lossy one, on up to 4,096 ranks" in zk.plan("100T", device_memory="1GB", **nowhere).advice()
    told = zk.plan("100T", world=10**9, device_memory="1KB", **nowhere).advice()
    assert "on up to 1,000,000,000 ranks" in told


def test_activations_that_do_not_fit_go_elsewhere_or_are_cut() -> None:
    memory = {"device_memory": "40GB", "host_memory": "2TB"}
    asked = {"model": preset("llama-3-8b", batch=32, seq=8192), "world": 8, **memory}
    assert zk.plan(**asked, stage=3).missing
    told = zk.plan(**asked).advice().splitlines()
    assert told[0] == "No exact configuration fits on 8 ranks."
    called = (
        r'`zk\.shard\(model, stage=3, keep="cpu", micro=(\d+)\)` and `zk\.AdamW\(.*, tier="cpu", schedule="overlap"\)`$'
    )
    found = re.search(rf"^Exact, with fewer activations on the device: stage 3 on 8 ranks, .* -> {called}", told[1])
    assert found, told
    chosen = {"stage": 3, "keep": "cpu", "tier": "cpu", "schedule": "overlap"}
    assert not zk.plan(**asked, **chosen, micro=int(found[1])).missing
    assert zk.plan(**asked, **chosen, micro=int(found[1]) // 2).missing


@pytest.mark.parametrize("batch", [3, 5, 6, 7])
def test_a_batch_is_cut_down_to_one_sequence(batch: int) -> None:
    chosen = {"stage": 3, "keep": "cpu", "tier": "cpu", "schedule": "overlap", "micro": batch}
    shape, around = preset("llama-3-8b", batch=batch, seq=8192), {"world": 8, "host_memory": "2TB"}
    needed = zk.plan(shape, **around, **chosen).total
    told = zk.plan(shape, **around, device_memory=needed).advice()
    assert f'zk.build(make_model, stage=3, keep="cpu", micro={batch})` and `zk.AdamW(' in told
    if batch == 7:
        assert "micro=7" in zk.plan(shape, **around, device_memory="15GB").advice()


@pytest.mark.parametrize("world, memory, stage", [(1, "200GB", 0), (8, "40GB", 2)])
def test_recomputation_that_was_asked_for_is_in_the_code(world: int, memory: str, stage: int) -> None:
    asked = {"model": preset("llama-3-8b", batch=2, seq=2048), "world": world, "device_memory": memory}
    told = zk.plan(**asked, keep="device").advice()
    assert f"fits: {f'stage {stage} on 8 ranks' if world > 1 else 'one rank'}, " in told
    assert f'-> `zk.shard(model, stage={stage}, keep="device")` and `zk.AdamW(model.parameters())`' in told
    assert f"-> `zk.shard(model, stage={stage}, micro=2)` and" in zk.plan(**asked, micro=2, keep="device").advice()


def test_each_number_of_ranks_and_each_memory_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--numel", "8B", "--world", "1,8", "--device-memory", "80GB,24GB"]) == 0
    told = capsys.readouterr().out.split("\n\n")[0].splitlines()
    begins = [re.sub(r"(\d+GB): .*: (stage \d on |)(.*? ranks?), .*", r"\1, \3", line) for line in told]
    assert begins == ["80GB, one rank", "24GB, one rank", "80GB, 8 ranks", "24GB, 8 ranks"]


def test_memory_of_a_host_that_nobody_said_is_named() -> None:
    assert "rank (taken to be there: no --host-memory)" in zk.plan("8B", device_memory="24GB").advice()
    told = zk.plan("8B", device_memory="24GB", host_memory="64GB").advice()
    assert "rank (taken to be there: no --disk)" in told and "--host-memory" not in told
    assert "taken to be there" not in zk.plan("8B", device_memory="24GB", host_memory="640GB").advice()


@pytest.mark.parametrize(
    "asked",
    [
        ["--model", "llama-3-8b", "--world", "8", "--device-memory", "80GB", "--batch", "1", "--seq", "4096"],
        ["--numel", "8B", "--device-memory", "24GB", "--schedule", "delayed", "--tier", "nvme"],
        ["--numel", "8B", "--device-memory", "24GB", "--host-memory", "1GB", "--disk", "40GB"],
        ["--numel", "8B", "--device-memory", "200GB", "--state-format", "int8", "--master-format", "split8"],
        ["--model", "llama-3-8b", "--world", "8", "--device-memory", "40GB", "--batch", "32", "--seq", "8192"],
    ],
)  # fmt: skip
def test_the_page_of_what_is_advised(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The options that the advice names print what it counted, and then there is nothing left to name."""
    assert main(["plan", *asked]) == 0
    said = capsys.readouterr().out.split("\n\n")[0]
    total, options = re.findall(r"([\d.,]+) of [^>]*\(its tables: ([^)]*)\) ->", said)[0]
    assert main(["plan", *asked, *options.split()]) == 0
    advice, page = capsys.readouterr().out.split("\n\n", 1)
    assert total in page and ("its tables" not in advice.splitlines()[0] or "--state-format" in options)


def planned(told: str, asked: dict[str, Any]) -> zk.Plan:
    """The plan of the code that the first line of an advice names."""
    (code,) = re.findall(r"-> (.*)", told.splitlines()[0])
    changed: dict[str, Any] = {}
    for keyword, name in (("tier", "param_tier"), ("keep", "keep"), ("micro", "micro"), ("stage", "stage")):
        found = re.search(rf'zk\.shard\([^`]*\b{keyword}="?(\w+)', code)
        changed |= {name: int(found[1]) if found[1].isdecimal() else found[1]} if found else {}
    for keyword in ("tier", "schedule"):
        found = re.search(rf'parameters\(\)[^`]*\b{keyword}="?(\w+)', code)
        changed |= {keyword: found[1]} if found else {}
    return zk.plan(**asked, **changed)


@pytest.mark.parametrize("seq, whole", [(128, True), (4096, False)])
@pytest.mark.parametrize("world, memory", [(8, "80GB"), (1, "200GB"), (1, "24GB"), (8, "24GB")])
def test_the_code_is_what_was_counted(seq: int, whole: bool, world: int, memory: str) -> None:
    """Without keep= all activations are there: they are counted so, and units computed again where they do not fit."""
    shape = preset("llama-3-8b", batch=1, seq=seq)
    asked = {"model": shape, "world": world, "device_memory": memory}
    told = zk.plan(**asked).advice()
    meant = planned(told, asked)
    assert not meant.missing
    assert f"{gigabytes(meant.total)} of " in told and ("keep=" not in told) == (whole or memory == "200GB")


def test_activations_of_one_sequence_are_not_called_a_unit() -> None:
    told = zk.plan(preset("llama-3-8b", batch=1, seq=131_072), device_memory="24GB").advice()
    assert "one sequence alone are 1,108 GB" in told and "Context parallelism" in told and "zk.tile" not in told
    nowhere = {"host_memory": "1GB", "disk": "1GB"}
    told = zk.plan(preset("llama-3-8b", batch=1, seq=128), device_memory="1MB", **nowhere).advice()
    assert "zk.tile" in told and "Context parallelism" not in told


def test_a_model_that_cannot_be_whole_is_built() -> None:
    """70B parameters are 140 GB in bf16: more than the device has, and on a CPU more than the host."""
    built = "-> `model = zk.build(make_model, stage=3)` and `zk.AdamW(model.parameters())`"
    assert built in zk.plan("70B", world=16, device_memory="80GB").advice()
    assert built not in zk.plan("70B", world=16, device_memory="150GB").advice()
    resting = zk.plan("8B", device_memory="12GB").advice()
    assert '`model = zk.build(make_model, stage=3, tier="cpu")` and `zk.AdamW(' in resting
    host = zk.plan("8B", world=8, device="cpu", device_memory="80GB", host_memory="80GB", disk="1TB").advice()
    assert "`model = zk.build(make_model, stage=3)` and `zk.AdamW(model.parameters(), tier=zk.Nvme(path)," in host


def test_the_optimizer_is_the_one_that_was_planned() -> None:
    def told(name: str | None, world: int = 1) -> str:
        return zk.plan("1B", optimizer=name, world=world, param_dtype="fp32", device_memory="80GB").advice()

    assert "fp32 parameters, " in told("lion") and told("lion").endswith("-> `zk.Lion(model.parameters())`")
    assert told("sgd-momentum").endswith("-> `zk.SGD(model.parameters(), momentum=0.9)`")
    assert told(None).endswith("-> `model`, as it is") and told(None, 2).endswith("-> `zk.shard(model, stage=0)`")


def test_lora_is_named_where_frozen_parameters_fit() -> None:
    nowhere = {"host_memory": "1GB", "disk": "1GB"}
    told = zk.plan("8B", device_memory="24GB", **nowhere).advice()
    says = "the frozen parameters take 16.0 of 24.0 GB on one rank before activations, its own state is small"
    assert told.endswith(f"LoRA instead: {says}")
    assert "LoRA" not in zk.plan("8B", device_memory="12GB", **nowhere).advice()
    told = zk.plan(preset("llama-3-8b", batch=1, seq=128), device_memory="24GB", **nowhere).advice()
    assert "LoRA instead: the frozen parameters and activations take" in told and "before activations" not in told


def test_it_is_told_what_is_missing() -> None:
    assert "device_memory" in zk.plan("1B").advice()


def test_what_it_names_fits() -> None:
    """Whatever the memory, the plan of what is written there fits."""
    for memory in range(4, 200, 7):
        plan = zk.plan("8B", world=4, device_memory=f"{memory}GB")
        code = r"-> `zk\.shard\(model, stage=\d\)` and `zk\.AdamW\(model\.parameters\(\)\)`$"
        found = re.search(rf"fits: stage (\d) on [^>]*{code}", plan.advice())
        if found:
            assert not plan.at(int(found[1])).missing
            assert all(plan.at(stage).missing for stage in range(int(found[1])))


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": "4096"}, "hidden_size='4096': must be a whole number"),
        ({"vocab_size": 0}, "vocab_size=0: must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be"),
        ({"model_type": "mamba"}, "model_type='mamba': must be llama, .*MODULE:FUNCTION"),
        ({"model_type": None}, "model_type=None: must be"),
    ],
)
def test_a_config_that_says_too_little_is_refused(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changed))
    with pytest.raises(ValueError, match=says):
        from_config(path)


@pytest.mark.parametrize("text, says", [("{", "must be JSON"), ("[1]", "must be a JSON object"), (None, "can be read")])
def test_what_is_no_config_is_refused(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says):
        from_config(path)


def test_no_groups_of_queries_means_as_many_as_heads(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["llama-2-7b"] | {"num_key_value_heads": None}))
    assert from_config(path).numel == PUBLISHED["llama-2-7b"]


def test_the_command_begins_with_the_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for what in (["--model", "llama-3-8b"], ["--config", str(path)]):
        assert main(["plan", *what, "--world", "8", "--device-memory", "80GB", "--batch", "1", "--seq", "4096"]) == 0
        said = capsys.readouterr().out
        assert said.startswith("Cheapest exact configuration that fits: stage ") and "before activations" not in said
        assert "8B parameters" in said
    assert main(["plan", "--model", "lama-3-8b"]) == 2
    assert "The nearest is 'llama-3-8b'" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_plain_page_keeps_text_to_the_columns_and_loses_no_number(columns: int) -> None:
    page = str(zk.plan("8B", world=8, device_memory="80GB"))
    shown = plain(page, columns)
    assert "|" not in shown and "**" not in shown and "---" not in shown
    numbers = re.findall(r"\d+\.\d+", page)
    assert re.findall(r"\d+\.\d+", shown) == numbers and "yes, 52 %" in shown
    notes = shown[shown.index("* ") : shown.index("state_format  ")]
    assert max(map(len, notes.splitlines())) <= max(columns, 20)


def test_a_narrow_fit_before_activations_names_what_moves_as_much_and_takes_less() -> None:
    said = zk.plan("1.3B", world=4, device_memory="24GB").advice()
    assert "18.2 of 24.0 GB before activations (stage 1 moves as much and takes 8.45 GB)" in said
    assert "moves as much" not in zk.plan("1.3B", world=4, device_memory="80GB").advice()  # there is room
    assert "moves as much" not in zk.plan("1.3B", device_memory="24GB").advice()  # one rank


@pytest.mark.parametrize("few", [24, "24", 9999, "999999"])
@pytest.mark.parametrize("argument", ["device_memory", "host_memory", "disk"])
def test_gigabytes_without_their_unit_are_refused(argument: str, few: int | str) -> None:
    with pytest.raises(ValueError, match=f"{argument}={few!r}.*{few} alone are bytes; {few}GB may be meant"):
        zk.plan("1B", **{argument: few})


def test_bytes_of_a_small_model_are_taken() -> None:
    assert zk.plan(torch.nn.Linear(8, 8), device_memory=20_000).advice().startswith("Cheapest exact configuration")
