"""Our storage below torch.distributed.checkpoint: any boxes in, any boxes out, readable by torch, nothing believed."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_cases import flip, raw, same, some
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from worlds import World, on_ranks, ranked

from zerokern.checkpoint import storage
from zerokern.checkpoint.files import BLOCK
from zerokern.checkpoint.folder import Draft
from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.source import Saved, no_report
from zerokern.checkpoint.storage import write_checkpoint
from zerokern.core import native
from zerokern.core.errors import IoError, StateError
from zerokern.io import Faults

Corner = tuple[int, ...]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2, torch.int64]


class Boxed(torch.Tensor):
    """Boxes of one tensor, each with memory of its own, as DCP knows them from any tensor class."""

    boxes: dict[Corner, Tensor]

    @staticmethod
    def of(whole: Tensor, cuts: list[tuple[Corner, Corner]]) -> Boxed:
        self = torch.Tensor._make_subclass(Boxed, whole)
        self.boxes = {at: narrowed(whole, at, sizes).clone() for at, sizes in cuts}
        return self

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, at),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk(at, box.shape), properties, self.shape),
            )
            for at, box in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(at, box.shape) for at, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[tuple(index.offset or ())]


def chunk(at: Corner, sizes: Corner) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(at), torch.Size(sizes))


def narrowed(whole: Tensor, at: Corner, sizes: Corner) -> Tensor:
    for dim, (begin, length) in enumerate(zip(at, sizes, strict=True)):
        whole = whole.narrow(dim, begin, length)
    return whole


def cuts(shape: Corner, pieces: int) -> list[tuple[Corner, Corner]]:
    """The shape cut at random, again and again, until there are so many boxes."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(20 * pieces):
        at, sizes = boxes.pop(random.randrange(len(boxes)))
        dim = random.randrange(len(shape))
        if sizes[dim] < 2 or len(boxes) + 1 >= pieces:
            boxes.append((at, sizes))
            continue
        where = random.randrange(1, sizes[dim])
        low = tuple(where if d == dim else n for d, n in enumerate(sizes))
        high = tuple(sizes[dim] - where if d == dim else n for d, n in enumerate(sizes))
        boxes += [(at, low), (tuple(n + where if d == dim else n for d, n in enumerate(at)), high)]
    return boxes


def blank(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.zeros(one.shape, dtype=one.dtype) for key, one in items.items()}


@pytest.fixture(autouse=True)
def without_a_group(nothing_left_open: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says each time that there is one process
        yield


def save(folder: Path, items: dict[str, Any], values: dict[str, Any] | None = None, **settings: Any) -> Saved:
    draft = Draft.begin(folder, 0)
    try:
        planner = settings.pop("planner", dcp.DefaultSavePlanner(flatten_state_dict=False))
        write_checkpoint(draft, items, values or {}, planner, Ranks.of(None), settings.pop("told", no_report))
    except BaseException:
        draft.abandon()
        raise
    return Saved(folder)


def load(published: Saved, items: dict[str, Any], told: Callable[[int], object] | None = None) -> None:
    Saved(published.path).read(items, told or no_report)


def refused(work: Callable[[], Any]) -> BaseException:
    """What a rank raised."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        work()
    return caught.value


@pytest.fixture
def items() -> dict[str, Tensor]:
    found = {f"model.{str(dtype)[6:]}": some(dtype, (5, 7)) for dtype in DTYPES}
    large = torch.randn(1100, 1000)
    return found | {"large": large, "turned": large.t(), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}


def test_what_was_saved_is_loaded(tmp_path: Path, items: dict[str, Tensor]) -> None:
    told: list[int] = []
    published = save(tmp_path / "c", items, {"step": 7}, told=told.append)
    assert sum(told) == sum(one.nbytes for one in items.values())
    index = published.index
    assert index.values == {"step": 7} and index.world == 1 and index.versions["torch"] == torch.__version__
    assert {key: (row.dtype, row.shape) for key, row in index.tensors.items()} == {
        key: (str(one.dtype)[6:], tuple(one.shape)) for key, one in items.items()
    }
    told.clear()
    found = blank(items)
    load(published, found, told.append)
    same(found, items)
    assert sum(told) == sum(one.nbytes for one in items.values())


def test_torch_reads_it(tmp_path: Path, items: dict[str, Tensor]) -> None:
    save(tmp_path / "c", items)
    found = blank(items)
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    same(found, items)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "one.pt")
    same(torch.load(tmp_path / "one.pt", weights_only=True), items)


def test_it_does_not_look_at_what_could_be_unpickled(tmp_path: Path, items: dict[str, Tensor]) -> None:
    published = save(tmp_path / "c", items)
    (tmp_path / "c" / ".metadata").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    found = blank(items)
    load(published, found)
    same(found, items)


def test_any_boxes_into_any_boxes(tmp_path: Path) -> None:
    shapes = [(301,), (37, 53), (7, 1, 29, 11), (1, 4097)]
    for number, (shape, dtype) in enumerate(itertools.product(shapes, (torch.float32, torch.int8))):
        whole, folder = some(dtype, shape), tmp_path / str(number)
        for i in range(2):
            published = save(folder / f"c{i}", {"x": Boxed.of(whole, cuts(shape, 7))})
            for _ in range(4):
                target = Boxed.of(torch.zeros(shape, dtype=dtype), cuts(shape, 5))
                load(published, {"x": target})
                for at, box in target.boxes.items():
                    assert raw(box) == raw(narrowed(whole, at, tuple(box.shape))), (shape, dtype)
            again = {"x": torch.zeros(shape, dtype=dtype)}
            dcp.load(again, checkpoint_id=folder / f"c{i}", no_dist=True)
            same(again, {"x": whole})


def test_into_strided_memory(tmp_path: Path) -> None:
    """And versions tell that a tensor was written."""
    whole = torch.randn(40, 30)
    published = save(tmp_path / "c", {"x": whole})
    room = torch.zeros(30, 80)
    before = room._version
    load(published, {"x": room.t()[::2]})
    assert torch.equal(room.t()[::2], whole) and room.t()[1::2].count_nonzero() == 0 and room._version > before


@pytest.mark.gpu
def test_into_a_gpu(tmp_path: Path) -> None:
    whole = torch.randn(3000, 1500, device="cuda")
    published = save(tmp_path / "c", {"x": whole, "turned": whole.t()})
    room = torch.zeros(1500, 6000, device="cuda")
    found = {"x": torch.zeros_like(whole), "turned": room[:, ::2]}
    load(published, found)
    assert torch.equal(found["x"], whole) and torch.equal(found["turned"], whole.t())


def test_every_item_is_written_before_the_next_is_asked_for(tmp_path: Path) -> None:
    """What comes from a disk lies in memory that the next item takes over."""
    numel = 3 << 20
    lent = torch.zeros(numel)

    class Lending(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            lent.fill_(float(write_item.index.fqn))
            return lent

    items = {str(i): torch.empty(numel) for i in range(3)}
    published = save(tmp_path / "c", items, planner=Lending(flatten_state_dict=False))
    found = blank(items)
    load(published, found)
    same(found, {key: torch.full((numel,), float(key)) for key in items})


def test_nothing_is_cast(tmp_path: Path) -> None:
    published = save(tmp_path / "c", {"model.w": torch.ones(3)})
    with pytest.raises(StateError, match=r"model\.w was saved as torch\.float32.*torch\.float64"):
        load(published, {"model.w": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(StateError, match=r"model\.w was saved with the shape \(3,\)"):
        load(published, {"model.w": torch.zeros(4)})


def test_what_is_no_dense_tensor_is_refused(tmp_path: Path) -> None:
    for value, says in (({"a": 1}, "extra.x is no tensor"), (torch.ones(3).to_sparse(), "to_dense")):
        error = refused(lambda value=value: save(tmp_path / "c", {"extra.x": value}))
        assert isinstance(error, TypeError) and says in str(error) and "extra.x" in str(error)
        assert not (tmp_path / "c").exists()


def test_a_failed_write_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(fail_op=native.IO_WRITE, fail_begin=9 << 20, fail_end=10 << 20, fail_errno=errno.ENOSPC)
    monkeypatch.setattr(storage, "FileWriter", functools.partial(storage.FileWriter, faults=faults, block=BLOCK))
    items = {f"model.{i}": torch.ones(1 << 20) for i in range(5)}
    error = refused(lambda: save(tmp_path / "c", items))
    assert isinstance(error, IoError) and error.errno == errno.ENOSPC
    assert "'model.2' was being saved" in str(error)
    assert not (tmp_path / "c").exists()


def spoil(published: Saved, key: str) -> int:
    """Changes one bit of a tensor; returns the block that it is in."""
    box = published.index.tensors[key].boxes[0]
    flip(published.path / published.index.files[box.file].name, box.offset)
    return box.offset // BLOCK


def test_damage_names_file_and_keys(tmp_path: Path) -> None:
    items = {f"model.{i}": torch.randn(1 << 19) for i in range(6)}
    published = save(tmp_path / "c", items)
    block = spoil(published, "model.4")
    reader = Saved(published.path)
    (error,) = reader.find_damage()
    assert error.path == str(published.path / published.index.files[0].name) and error.offset == block * BLOCK
    assert "model.4" in str(error) and error.key in ("model.3", "model.4")
    with pytest.raises(IoError, match=r"model\.4"):
        reader.verify()
    found = blank(items)
    with pytest.raises(IoError, match=r"model\.4"):
        load(published, found)
    fine = blank({"model.0": items["model.0"]})
    load(published, fine)
    assert torch.equal(fine["model.0"], items["model.0"])


@ranked
def save_by_ranks(world: World, folder: str) -> list[str]:
    whole = torch.arange(60 * 1000, dtype=torch.float32).view(60, 1000)
    rows = 60 // world.size
    mine = [((world.rank * rows, 0), (rows, 1000))]
    kept = [Draft.begin(folder, 0)] if world.rank == 0 else []
    save_id = world.exchange(kept[0].save_id if kept else None)[0]
    draft = kept[0] if kept else Draft.join(folder, save_id, world.rank)
    items = {"divided": Boxed.of(whole, mine), "same": torch.full((7,), 5.0)}
    if world.rank == 1:
        items["only 1"] = Boxed.of(torch.ones(3), [((0,), (3,))])
    write_checkpoint(draft, items, {"rank": world.rank}, dcp.DefaultSavePlanner(False), Ranks.of(None))
    world.exchange(None)
    published = Saved(Path(folder))
    halves = [((0, 500 * world.rank), (60, 500))]
    target = {"divided": Boxed.of(torch.zeros_like(whole), halves), "same": torch.zeros(7)}
    load(published, target)
    Saved(published.path).verify(world.rank, world.size)
    assert torch.equal(target["divided"].boxes[halves[0][0]], narrowed(whole, *halves[0]))
    assert torch.equal(target["same"], items["same"])
    return [file.name for file in published.index.files]


def test_real_ranks_write_a_file_each(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    (names, others) = on_ranks(2, save_by_ranks, str(folder))
    assert names == others and [name.rpartition("_")[2] for name in names] == ["0.distcp", "1.distcp"]
    published = Saved(folder)
    assert published.index.world == 2 and published.index.values == {"rank": 0}
    assert json.loads((folder / "zerokern.json").read_text().splitlines()[0])["zerokern"] == 1
    found = {"divided": torch.zeros(60, 1000), "same": torch.zeros(7), "only 1": torch.zeros(3)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found["divided"].view(-1), torch.arange(60_000.0))
    assert found["same"].tolist() == [5.0] * 7 and found["only 1"].tolist() == [1.0] * 3
