"""Options of `zerokern bench` that mean nothing where they stand, or have no such value, are named; nothing runs."""

from __future__ import annotations

import pytest
from tables import each

from zerokern.cli.main import main

REFUSED = [
    ("adam --vs torch,tensorflow", "vs='torch,tensorflow': must be a list of torch"),
    ("adam --vs none", "vs='none': must be a list of torch"),
    ("adam --numel 64Q", "numel='64Q': must be"),
    ("adam --numel 0", "numel='0': must be"),
    ("adam --threads 0", "a whole number from 1 on"),
    ("adam --plot chart.gif", ".png, .svg, .pdf"),
    ("adam --json no-such-folder/x.json", "there is no folder"),
    ("adam --path .", "a folder with io, save and --tier nvme"),
    ("adam --ranks 2", "--ranks 2 is not an option here. It belongs to zero, offload, infinity."),
    ("adam --tier nvme", "Name a folder on the disk"),
    ("adam --tier nvme --path . --vs torch", "--vs has no meaning with --tier nvme"),
    ("lion --tier nvme --path .", "--tier nvme --path . is not an option here. It belongs to adam."),
    ("save", "a folder with io, save and --tier nvme"),
    ("io", "Name a folder on the disk to measure: --path"),
    ("io --path . --numel 1M", "It belongs to adam, lion, adagrad, sgd, muon, sumsq, cast, accumulate, stream, save."),
    ("io --path . --threads 1", "--threads 1 is not an option here"),
    ("io --path no-such-folder", "a folder that exists, on the disk to measure"),
    ("zero --numel 1M", "--numel 1M is not an option here"),
    ("zero --tier nvme", "It belongs to adam."),
    ("zero --vs torch,ddp", "vs='torch,ddp': must be a list of ddp, zero1"),
    ("zero --stage 2", "It belongs to offload."),
    ("zero --hidden", "It belongs to offload, infinity."),
    ("zero --micro 2", "It belongs to infinity."),
    ("zero --ranks 1", "ranks=1: must be 2 or more with zero"),
    ("zero --ranks 0", "numbers from 1 to 64"),
    ("zero --ranks 2,x", "numbers from 1 to 64"),
    ("zero --model 7B", "a list of tiny, 25M, 100M"),
    ("zero --dtype fp16", "a list of fp32, bf16"),
    ("zero --batch 0", "from 1 on"),
    ("zero --tp 0", "from 1 on"),
    ("offload --hidden --model 25M", "--model has no meaning with --hidden"),
    ("offload --where --ranks 2", "--ranks has no meaning with --where"),
    ("offload --numel 1M", "--numel 1M is not an option here"),
    ("offload --tier nvme", "It belongs to adam."),
    ("offload --path .", "It belongs to adam, io, save, infinity."),
    ("offload --vs ddp", "vs='ddp': must be a list of none, deepspeed, fsdp2, torchao"),
    ("offload --stage 4", "stage='4': must be a list of 1, 2, 3"),
    ("infinity --numel 1M", "--numel 1M is not an option here"),
    ("infinity --stage 2", "It belongs to offload."),
    ("infinity --vs ddp", "vs='ddp': must be a list of deepspeed, fsdp2"),
    ("infinity --largest 6B", "path"),
    ("infinity --cap 4GB", "--cap has no meaning without --largest"),
    ("infinity --largest 6B --micro 4 --path .", "--micro"),
    ("offload --hidden nonsense", "hidden='nonsense': must be a word of compute, then the update |"),
    ("right --numel 4", "--numel 4 is not an option here"),
    ("right --vs torch", "vs='torch': must be a list of ddp, fsdp2"),
    ("right --ranks 3", "It belongs to zero, offload, infinity."),
    ("adam --only tied", "It belongs to right."),
    ("zero --vs zerokern-3", "vs='zerokern-3': must be a list of ddp"),
]


@each("words, says", REFUSED)
def test_what_does_not_fit_is_taught(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["bench", *words.split()])
    except SystemExit as left:
        status = left.code
    assert status == 2 and says in capsys.readouterr().err
