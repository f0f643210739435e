"""What a machine decides by itself is speed: results have the same bits on every kind of it (`machines.py`)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from forked import run_forked
from machines import KINDS, switches
from tables import each

from zerokern.core import env, native

TESTS = Path(__file__).resolve().parents[1]
HELPERS = f"import sys; sys.path.insert(0, {str(TESTS / 'comm')!r})\n"
PLAYED = HELPERS + "from machines import play; play({name!r})\n"

# A small part of the tests, which every kind of CPU runs: kernels, Muon, plans, what the demo and zk.info choose.
PART = (
    "kernels/test_dispatch.py::test_the_forced_set_is_the_active_one",
    "kernels/test_dispatch.py::test_an_op_forces_a_set_for_its_own_call_only",
    "kernels/test_dispatch.py::test_the_reference_is_an_implementation",
    "kernels/test_muon.py::test_threads_do_not_show",
    "kernels/test_orthogonal.py::test_that_loop_is_the_one_of_torch",
    "optim/test_muon.py::test_the_default_multiplies_in_fp32_on_every_cpu",
    "optim/test_muon_small.py::test_a_batch_has_at_most_its_bound",
    "planner/test_muon_plan.py::TestPlanned::test_a_plan_of_a_cpu_is_that_of_every_cpu",
    "cli/test_demo.py::test_a_cpu_that_multiplies_bf16_slowly_widens_it_and_says_so",
)


@pytest.mark.parametrize("name", KINDS)
def test_a_part_of_the_tests_passes_on_each_kind_of_cpu(name: str) -> None:
    chosen = [str(TESTS / one) for one in PART]
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "--rootdir", str(TESTS.parent)]
    program = f"{PLAYED.format(name=name)}import pytest; sys.exit(pytest.main({options + chosen}))"
    ran = run_forked(program, env=switches(KINDS[name]), timeout=300.0)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


# Everything that is computed here is the library's: gradients are numbers, and Muon's iteration, of torch's products,
# has no steps. Of int8 Adam the states but no remainder, which is the lower half of a parameter's master: parameters on
# AVX-512 are the exception, which docs/optimizers.md names.
TRAINED = """
import functools, hashlib, sys
import torch
import zerokern as zk

folder = sys.argv[1]
shapes = [(300, 430), (128, 33), (1, 70), (70, 1)]

@functools.cache
def drawn(seed, dtype):
    make = torch.Generator().manual_seed(seed)
    return [torch.randint(-999, 999, shape, generator=make).div(512).to(dtype) for shape in shapes]

def told(name, tensors):
    digest = hashlib.sha256()
    for one in tensors:
        digest.update(one.detach().reshape(-1).view(torch.uint8).numpy())
    print(name, digest.hexdigest()[:16])

def stepped(name, rule, dtype=torch.bfloat16, states_only=False, **settings):
    params = [torch.nn.Parameter(one.clone()) for one in drawn(0, dtype)]
    opt = rule(params, lr=0.05, **settings)
    for seed in (1, 2):
        for param, grad in zip(params, drawn(seed, dtype)):
            param.grad = grad.clone()
        opt.step()
    opt.flush()
    entries = [(key, one) for param in params for key, one in sorted(opt.state[param].items())]
    states = [one for key, one in entries if isinstance(one, torch.Tensor) and not (states_only and key == "remainder")]
    told(name, states + ([] if states_only else params))
    opt.close()

stepped("AdamW", zk.AdamW, max_grad_norm=1.0)
stepped("AdamW in fp32", zk.AdamW, torch.float32)
stepped("AdamW in int8", zk.AdamW, state_format="int8", states_only=True)
stepped("AdamW on a disk", zk.AdamW, tier=zk.Nvme(folder + "/state"), max_grad_norm=1.0)
stepped("Lion", zk.Lion, tier="cpu")
stepped("Adagrad", zk.Adagrad, torch.float32)
stepped("SGD", zk.SGD, momentum=0.9)
stepped("Muon", zk.Muon, ns_steps=0, max_grad_norm=1.0)
stepped("Muon in bf16 by name", zk.Muon, ns_steps=0, ns_dtype="bf16")

class Weighed(torch.nn.Module):  # whose gradient is what it is given
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, x):
        return (self.weight * x).sum()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(map(Weighed, drawn(0, torch.float32)))

    def forward(self, given):
        return sum(layer(one) for layer, one in zip(self.layers, given))

for tier in ("device", zk.Nvme(folder + "/parameters")):
    model = Model()
    zk.shard(model, stage=3, units=lambda module: isinstance(module, Weighed), tier=tier)
    opt = zk.AdamW(model.parameters(), lr=0.05, max_grad_norm=1.0, schedule="overlap")
    for seed in (1, 2):
        model(drawn(seed, torch.float32)).backward()
        opt.step()
        opt.zero_grad()
    with zk.gathered(model):
        told("stage 3", list(model.parameters()))
zk.save(folder + "/saved", model, opt)
loaded = Model()
zk.load(folder + "/saved", loaded)
told("saved and loaded", list(loaded.parameters()))
"""

ONE_CPU = {"ZEROKERN_THREADS": "1", "ZEROKERN_CPUS": str(env.process_cpus()[0]), "LOCAL_WORLD_SIZE": "4"}
WITHOUT_PAGES = """
import ctypes, resource
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
"""
ANOTHER_DISK = """
import errno
from zerokern.io import engine, store
opened = engine.Engine._open
engine.Engine._open = lambda self, kind: errno.EPERM if kind == engine.native.IO_URING else opened(self, kind)
store.settings = lambda folder, depth, block: (depth or 3, block or 8192)
"""
SHORT_OF_MEMORY = """
from zerokern.checkpoint import filling
from zerokern.zero import sharding, spilling
for module in (filling, sharding, spilling):
    module.exceeds_half_of_memory = lambda *_, **__: True
"""
NO_NODES = """
from zerokern.memory import placement
placement.nodes = placement.cores = lambda *_: {}
"""


def machines() -> dict[str, tuple[dict[str, str], str]]:
    """What machines differ in: environments, and what a program does first."""
    many = {"ZEROKERN_THREADS": "5", "ZEROKERN_POISON": "1"}
    rows = {
        "one CPU, which four ranks share; another disk, no io_uring, little memory": (
            ONE_CPU,
            ANOTHER_DISK + SHORT_OF_MEMORY + "import torch; torch.set_num_threads(1)\n",
        ),
        "many threads; no huge pages, no locked memory, no NUMA": (
            many,
            WITHOUT_PAGES + NO_NODES + "import torch; torch.set_num_threads(3)\n",
        ),
        **{name: (switches(kind), PLAYED.format(name=name)) for name, kind in KINDS.items()},
    }
    of_kinds = {environment.get("ZEROKERN_CPU_ISA") for environment, _ in rows.values()}
    others = [name for name in native.isa_usable() if name not in of_kinds]
    return rows | {f"the set {name}": ({"ZEROKERN_CPU_ISA": name}, "") for name in others}


def bits(environment: dict[str, str], begins: str, folder: Path) -> str:
    ran = run_forked(begins + TRAINED, folder, env={**os.environ, **environment})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def bits_here(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of this machine as it is."""
    found = bits({}, "", tmp_path_factory.mktemp("here"))
    assert found.count("\n") == 12
    return found


@each("machine", machines())
def test_bits_do_not_depend_on_the_machine(machine: str, bits_here: str, tmp_path: Path) -> None:
    environment, begins = machines()[machine]
    assert bits(environment, begins, tmp_path).splitlines() == bits_here.splitlines()


def test_memory_that_is_no_disk_has_these_bits_too(bits_here: str) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert bits({}, "", Path(folder)).splitlines() == bits_here.splitlines()
