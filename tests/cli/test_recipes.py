"""docs/recipes.md: what its programs claim, beyond that they run (`test_readme_snippets.py`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")


def program(heading: str) -> str:
    """The Python of a section."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.partition(f"## {heading}")[2], re.MULTILINE | re.DOTALL)[0]


TOKENS = program("A loss per token")
BESIDE = """

import torch
torch.manual_seed(3)
plain = torch.nn.Sequential(torch.nn.Embedding(vocabulary, 32), torch.nn.Linear(32, vocabulary))
import zerokern as zk
model = zk.shard(torch.nn.Sequential(*(type(m)(*a) for m, a in zip(plain, ((vocabulary, 32), (32, vocabulary))))),
                 stage=2, reduce="sum")
model.load_state_dict(plain.state_dict())
opt = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
batches = []
for rank in range(world):
    words = torch.randint(vocabulary, (2, 4, 16))
    labels = words.clone()
    labels[0, :, 3 + rank:] = ignored
    batches.append(list(zip(words, labels)))
total = torch.tensor(step(batches[rank_here]))
if world > 1:
    torch.distributed.all_reduce(total)
all_words = torch.cat([words for rank in batches for words, _ in rank])
all_labels = torch.cat([labels for rank in batches for _, labels in rank])
loss = cross_entropy(plain(all_words).flatten(0, 1), all_labels.flatten())
loss.backward()
norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
torch.testing.assert_close(total, loss.detach())
torch.testing.assert_close(torch.tensor(float(opt.grad_norm)), norm, rtol=1e-5, atol=0)
"""


def test_all_tokens_weigh_the_same(as_it_was: None) -> None:
    """The loss and the norm are those of one batch of all tokens, though micro-batches have other numbers of them."""
    exec(compile(TOKENS + BESIDE, "recipe", "exec"), {"world": 1, "rank_here": 0})


@pytest.mark.slow
def test_all_tokens_of_two_ranks_weigh_the_same(tmp_path: Path) -> None:
    begin = "import torch\ntorch.distributed.init_process_group('gloo')\n"
    begin += "world, rank_here = 2, torch.distributed.get_rank()\n"
    (tmp_path / "recipe.py").write_text(begin + TOKENS + BESIDE)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "recipe.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_activations_leave_and_weights_stay(as_it_was: None) -> None:
    """Each large activation is copied once, no weight is; gradients are those without hooks."""
    text = program("Activations in host memory")
    scope: dict[str, Any] = {}
    exec(compile(text, "recipe", "exec"), scope)
    copied: list[tuple[int, ...]] = []

    def to_host(saved: torch.Tensor) -> Any:
        device, kept = scope["to_host"](saved)
        copied.extend([tuple(saved.shape)] if kept is not saved else [])
        return device, kept

    model, x = scope["model"], torch.randn(512, 256)
    model(x).square().mean().backward()
    expected = [param.grad.local.clone() for param in model.parameters()]
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(to_host, scope["to_device"]):
        loss = model(x).square().mean()
    loss.backward()
    assert copied == [(512, 256)] * 5, "the inputs of four layers, and of the square"
    assert all(torch.equal(param.grad.local, one) for param, one in zip(model.parameters(), expected, strict=True))


def test_the_loss_of_the_page_is_torchs_of_the_same_tokens() -> None:
    """A mean of means is another number: the recipe is needed."""
    scores, labels = torch.randn(2, 8, 10), torch.randint(10, (2, 8))
    labels[0, 2:] = -100
    means = torch.stack([cross_entropy(one, of) for one, of in zip(scores, labels, strict=True)]).mean()
    assert abs(means - cross_entropy(scores.flatten(0, 1), labels.flatten())) > 1e-3
