"""The arena against the system: limits of memory and of locked memory, forks, budgets larger than the machine."""

from __future__ import annotations

import pytest
from memory_cases import in_child
from tables import each

from zerokern.core.errors import BudgetError
from zerokern.memory import Arena, room


@each("limit, used", [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_a_limit_of_the_process_is_a_budget_error(limit: str, used: str) -> None:
    said = in_child(f"""
from zerokern.memory import room
now = room._kilobytes("/proc/self/status")["{used}"]
resource.setrlimit(resource.{limit}, (now + (64 << 20), -1))
try:
    Arena(128 << 20)
except BudgetError as error:
    print(error)
arena = Arena(16 << 20)
print("a smaller one:", arena.lease(100, "a").tensor().fill_(1).sum().item())
""")
    assert "an arena of 128.0 MiB does not fit. What is left:" in said
    assert limit in said and "Ask for less than" in said and said.endswith("a smaller one: 100\n")


def test_more_than_the_machine_has_is_refused_before_it_is_touched() -> None:
    with pytest.raises(BudgetError) as caught:
        Arena(1 << 50)
    text = str(caught.value)
    assert text.startswith("an arena of 1,048,576.0 GiB does not fit. What is left:\n  free memory and swap")
    assert "or raise the limit" in text


def test_a_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "900000\n",
        "memory.stat": "anon 500000\ninactive_file 300000\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(room, "_GROUP_FILES", ((str(tmp_path), "memory.max", "memory.current", "inactive_file"),))
    assert room.memory_left()["control group"] == 400000
    (tmp_path / "memory.stat").write_text("inactive_file 300000\nactive_file 200000\n")  # a cache is given back too
    assert room.memory_left()["control group"] == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert "control group" not in room.memory_left()
    (tmp_path / "memory.max").write_text("9223372036854771712\n")
    assert "control group" not in room.memory_left()


MLOCK_REFUSED = """
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # gives up CAP_IPC_LOCK
arenas = [Arena(1 << 20) for _ in range(3)]
print([arena.locked for arena in arenas])
flags = [line.split() for line in open("/proc/self/smaps") if line.startswith("VmFlags")]
print(sum("dc" in row for row in flags) >= 1, any("lo" in row for row in flags))
print(arenas[2].lease(10, "a").tensor().fill_(2).sum().item())
"""


def test_a_refused_mlock_is_named_once() -> None:
    lines = in_child(MLOCK_REFUSED).splitlines()
    assert lines[1:] == ["[False, False, False]", "True False", "20"]
    assert lines[0].startswith("zerokern.memory: arena memory is not locked (mlock: E")
    assert "see ulimit -l" in lines[0]


def test_a_forked_child_has_no_arena_and_says_so() -> None:
    said = in_child("""
arena = Arena(1 << 20)
lease = arena.lease(100, "exp_avg")
pid = os.fork()
if not pid:
    for use in (lease.tensor, lease.release, lambda: arena.lease(1, "b"), arena.close, arena.table):
        try:
            use()
            print("nothing was said")
        except ZerokernError as error:
            print(error)
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
lease.release()
print("the parent goes on:", arena.free_nbytes)
""").splitlines()
    assert len(said) == 6 and said[-1] == "the parent goes on: 1048576"
    assert len(set(said[:5])) == 1
    assert "forked from it: the memory is not here (MADV_DONTFORK). Make an arena in the child" in said[0]


def test_the_end_of_an_arena_in_a_child_unmaps_nothing_of_the_child() -> None:
    said = in_child("""
arena = Arena(64 << 20)
base, view = arena.base, arena.lease(64 << 20, "a").tensor()
pid = os.fork()
if not pid:
    theirs = [mmap.mmap(-1, 64 << 20) for _ in range(4)]  # takes the addresses that are free now
    reuses = any(
        low <= base < high
        for low, high in (map(lambda x: int(x, 16), line.split()[0].split("-")) for line in open("/proc/self/maps"))
    )
    for one in theirs:
        one[:] = b"x" * (64 << 20)
    del arena, view
    gc.collect()
    print(reuses, all(one[-1:] == b"x" == one[:1] for one in theirs), flush=True)
    own = Arena(1 << 20)
    own.lease(10, "a").tensor().fill_(1)
    own.close(force=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
""")
    assert said == "True True\n", "the first is whether the child had something at the address at all"


def test_a_machine_that_grows_may_be_given_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is free is no limit then; what was found is said, and what to do."""
    read = room._kilobytes
    small = {"MemAvailable": 1 << 20}
    monkeypatch.setattr(room, "_kilobytes", lambda path: small if path == "/proc/meminfo" else read(path))
    monkeypatch.setattr(room, "_group_room", lambda: None)
    with pytest.raises(BudgetError, match=r"(?s)free memory and swap +1\.0 MiB.*ZEROKERN_MEMORY=64G"):
        Arena(8 << 20)
    monkeypatch.setenv("ZEROKERN_MEMORY", "512G")
    Arena(8 << 20).close()
    monkeypatch.setenv("ZEROKERN_MEMORY", "1M")
    with pytest.raises(BudgetError, match=r"ZEROKERN_MEMORY +0 B"):
        Arena(8 << 20)
