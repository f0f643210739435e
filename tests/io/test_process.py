"""What processes do to a store: kill it, fork it, leave it. Remains are found and cleared, nobody hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from children import Nursery
from io_cases import EngineCase, files_of, pattern, read, same
from tries import Missed, in_time

BUSY = """
store = case.open(folder, faults={"delay": 65536, "delay_us": 3000})
print("open", flush=True)
for i in range(100000):
    store.put(f"{i % 50}", pattern(300000, i))
"""


def test_killed_in_the_middle_the_remains_are_cleared(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    for i in range(2):
        child = nursery.start(BUSY, engine.name, folder)
        child.wait_for("open")
        time.sleep(0.03 + 0.05 * i)
        child.kill()
        assert files_of(folder) == ["zerokern.lock"]
    (folder / "zerokern.1.data").write_text("of an earlier crash")
    (folder / "zerokern.index.new").write_text("of an earlier crash")
    with engine.open(folder) as store:
        assert files_of(folder) == ["zerokern.lock"]
        assert store.keys() == [] and store.nbytes == 0
        store.put("x", pattern(100))
        assert same(read(store, "x", pattern(100)), pattern(100))
    assert files_of(folder) == []


def test_exit_with_an_exception_and_without_close(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    """Requests in flight: the interpreter ends in order, and the files are gone."""
    child = nursery.start(
        """
store = case.open(folder, faults={"delay": 65536, "delay_us": 2000})
tickets = [store.put(f"{i}", pattern(200000, i)) for i in range(50)]
raise RuntimeError("the job failed")
""",
        engine.name,
        folder,
        exits=True,
    )
    assert child.wait() == 1 and "RuntimeError: the job failed" in child.said()
    assert files_of(folder) == []


def test_close_with_requests_in_flight(engine: EngineCase, folder: Path) -> None:
    """Close waits for them: what they read into and write from is in use until then."""
    tensors = [pattern(200000, i) for i in range(20)]

    def close(delay_s: float) -> None:
        outs = [torch.zeros(200000, dtype=torch.uint8) for _ in tensors]
        store = engine.open(folder, faults={"delay": 65536, "delay_us": int(delay_s * 1e6)})
        for i, tensor in enumerate(tensors):
            store.put(f"{i}", tensor)
        tickets = [store.get(f"{i}", out) for i, out in enumerate(outs)]
        in_flight = not tickets[-1].done()
        store.close()
        assert all(ticket.done() for ticket in tickets) and all(map(same, outs, tensors))
        for ticket in tickets:
            ticket.wait()
        if not in_flight:
            raise Missed("nothing was in flight any more")

    in_time(close, 0.005)


def test_a_store_that_nobody_holds_any_more(engine: EngineCase, folder: Path) -> None:
    """Its tickets end all the same; its files and its lock go with it."""
    store = engine.open(folder, faults={"delay": 65536, "delay_us": 2000})
    tensor = pattern(500000)
    store.put("x", tensor)
    out = torch.zeros_like(tensor)
    ticket = store.get("x", out)
    del store
    assert files_of(folder) == []
    ticket.wait()
    assert same(out, tensor)


def test_what_is_left_untold_is_logged(engine: EngineCase, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = engine.open(folder, faults={"fail_begin": 0, "fail_end": 1, "fail_errno": 5})
    store.put("x", pattern(100))
    del store
    assert "nobody was told: put of 'x'" in caplog.text


FORK = """
tensors = {f"{i}": pattern(200000 + i, i) for i in range(30)}
for delay_us in (3000, 10000, 40000, 160000):  # until the fork is in the middle
    store = case.open(folder, faults={"delay": 65536, "delay_us": delay_us})
    tickets = [store.put(key, tensor) for key, tensor in tensors.items()]
    child = os.fork()
    late = tickets[-1].done()
    if not late or delay_us == 160000:
        break
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    store.close()
if child == 0:
    for use in (
        lambda: store.put("x", pattern(100)),
        lambda: store.get("0", pattern(200000)),
        lambda: store.delete("0"),
        store.sync,
        tickets[-1].wait,
    ):
        try:
            use()
            os._exit(1)
        except IoError as error:
            if not ("forked" in str(error) and error.errno in (errno.EBADF, errno.ECHILD)):
                os._exit(2)
    store.close()
    del store
    gc.collect()
    with case.open(folder.with_name("of the child")) as own:
        own.put("x", tensors["7"])
        if not same(read(own, "x", tensors["7"]), tensors["7"]):
            os._exit(3)
    os._exit(0)
for ticket in tickets:
    ticket.wait()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), files_of(folder))
print(all(same(read(store, key, tensor), tensor) for key, tensor in tensors.items()))
store.put("0", pattern(100)).wait()
store.close()
"""


def test_a_fork_in_the_middle(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    """The parent goes on as if nothing were; the child is told what it cannot do, and may have a store of its own."""
    child = nursery.start(FORK, engine.name, folder)
    assert child.output() == "0 ['zerokern.lock']\nTrue\n"
    assert files_of(folder) == []


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)
store = case.open(folder, faults={"delay": 65536, "delay_us": int(1e6 * float(sys.argv[2]))})
tensor = pattern(100)
out = torch.zeros(100, dtype=torch.uint8)
ticket = store.put("x", tensor)
got = store.get("x", out)
try:
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    got.wait()
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", not got.done())
store.close()
print(got.done() and same(out, tensor))
"""


def test_control_c_ends_a_wait(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    """The wait is over at once; the transfer is not, and close waits for it."""

    def interrupted(delay_s: float) -> str:
        said = nursery.start(INTERRUPTED, engine.name, folder, delay_s).output()
        if said.startswith("interrupted False"):
            raise Missed("the transfer had ended before")
        return said

    assert in_time(interrupted, 0.4) == "interrupted True\nTrue\n"


def test_a_child_that_exits_in_order_removes_nothing(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    """It runs the same clean-up as its parent would, for a store that is not its own."""
    child = nursery.start(
        """
store = case.open(folder)
x = pattern(5000)
store.put("x", x).wait()
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(files_of(folder), same(read(store, "x", x), x))
""",
        engine.name,
        folder,
        exits=True,
    )
    assert child.output() == "['zerokern.lock'] True\n"
    assert files_of(folder) == []
