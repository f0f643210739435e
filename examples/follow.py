"""A model that is fine-tuned, and a process that follows it by deltas and generates, as in reinforcement learning.

    python examples/follow.py FOLDER
    python examples/follow.py FOLDER --picture deltas.svg --json deltas.json

A Llama of Hugging Face in bf16 is trained for 50 steps at 1e-3, then for 200 steps at each of several learning rates.
After every step `take()` says exactly which parameters have other bits than before, and what they are now; the file
goes into FOLDER. The follower reads nothing but these files: at the end its parameters have the trainer's bits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zerokern as zk
from zerokern.examples.text import Batches, read_text

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
RATES = (1e-6, 1e-5, 1e-4)
WARM, STEPS, ROWS, CONTEXT = 50, 200, 4, 64
GENERATE_EVERY = 50
PROMPT = b"def __init__(self"


def new_model() -> Any:
    """
    >>> new_model().dtype
    torch.bfloat16
    """
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).bfloat16()


def train(model: Any, opt: Any, batches: Batches) -> float:
    """One step; returns its loss."""
    tokens, _ = batches.next()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    return float(loss.detach())


def share_of(delta: zk.Delta) -> float:
    """Of all elements, how many have other bits."""
    parts = [one.part for one in delta.tensors.values() if one.part is not None]
    changed = sum((part if isinstance(part, torch.Tensor) else part.values).numel() for part in parts)
    return changed / sum(one.numel for one in delta.tensors.values())


def delta_path(folder: Path, rate: float, step: int) -> Path:
    return folder / f"{rate:g}" / f"{step:04d}.safetensors"


def fine_tune(folder: Path, rate: float, steps: int) -> dict[str, Any]:
    """Trains, and writes a delta after each step; returns what each was, and the last parameters."""
    model = new_model()
    opt = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    batches = Batches(read_text(), rows=ROWS, context=CONTEXT, seed=0)
    for _ in range(WARM):
        train(model, opt, batches)
    opt.param_groups[0]["lr"] = rate
    start = folder / f"{rate:g}.pt"  # where the follower begins
    torch.save(model.state_dict(), start.with_suffix(".part"))
    start.with_suffix(".part").rename(start)
    follower = zk.deltas(model, opt)
    delta_path(folder, rate, 0).parent.mkdir()
    losses, nbytes, shares = [], [], []
    for step in range(steps):
        losses.append(train(model, opt, batches))
        delta = follower.take()
        nbytes.append(delta.nbytes)
        shares.append(share_of(delta))
        ready = delta_path(folder, rate, step)
        delta.save(ready)  # by renaming: the follower sees whole files alone
    found = {"lr": rate, "losses": losses, "nbytes": nbytes, "shares": shares, "dense_nbytes": delta.dense_nbytes}
    return {**found, "state": model.state_dict()}


def follow(folder: Path, rate: float, steps: int) -> None:
    """The other process: applies each delta as it comes, and generates now and then."""
    torch.set_num_threads(1)
    model = new_model()
    start = folder / f"{rate:g}.pt"
    _wait_for(start)
    model.load_state_dict(torch.load(start))
    texts = []
    prompt = torch.frombuffer(bytearray(PROMPT), dtype=torch.uint8).long()[None]
    for step in range(steps):
        path = delta_path(folder, rate, step)
        _wait_for(path)
        zk.Delta.load(path).apply_(model)
        if (step + 1) % GENERATE_EVERY == 0:
            tokens = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
            texts.append((step + 1, bytes(tokens[0, prompt.shape[1] :].tolist()).decode(errors="replace")))
    torch.save({"texts": texts, "state": model.state_dict()}, folder / f"{rate:g}-followed.pt")


def _wait_for(path: Path, most_s: float = 600.0) -> None:
    end = time.monotonic() + most_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} has not come within {most_s:.0f} s; the trainer's error says why")
        time.sleep(0.01)


def run(folder: Path, rates: tuple[float, ...] = RATES, steps: int = STEPS) -> list[dict[str, Any]]:
    """Fine-tunes at each rate while another process follows; returns a row for each."""
    rows, context = [], multiprocessing.get_context("spawn")
    for rate in rates:
        other = context.Process(target=follow, args=(folder, rate, steps), daemon=True)
        other.start()
        row = fine_tune(folder, rate, steps)
        other.join()
        if other.exitcode:
            raise RuntimeError("the follower has failed; its error is above")
        found, mine = torch.load(folder / f"{rate:g}-followed.pt"), row.pop("state")
        there = found["state"]
        same = mine.keys() == there.keys() and all(_same_bits(mine[name], there[name]) for name in mine)
        rows.append({**row, "texts": found["texts"], "same": same})
        sent = sum(row["nbytes"]) / (steps * row["dense_nbytes"])
        print(
            f"lr {rate:g}: loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}, "
            f"{100 * sum(row['shares']) / steps:.2f} % of the elements change in a step, a delta has {sent:.3f} of the "
            f"bytes of all parameters; the follower is {'bitwise identical' if same else 'NOT THE SAME'} at the end"
        )
    return rows


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the size of each delta, over that of all parameters, by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for row, colour in zip(rows, ("#2f5d8a", "#e08e45", "#8a4f7d"), strict=False):
        sizes = [nbytes / row["dense_nbytes"] for nbytes in row["nbytes"]]
        label = f"learning rate {row['lr']:g}: {sum(sizes) / len(sizes):.3f} on average"
        axes.plot(range(1, len(sizes) + 1), sizes, color=colour, linewidth=1.6, label=label)
    axes.axhline(1.0, color="#777777", linewidth=1.0, linestyle="--", label="all parameters")
    axes.set(xlabel="step", ylabel="bytes sent / bytes of all parameters", ylim=(0, 1.08))
    axes.set_title("What a follower receives after each step", loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.94))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)  # a new one: files of another run would be followed
    rows = run(given.folder, tuple(given.lr), given.steps)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    if given.picture is not None:
        draw(rows, given.picture)


if __name__ == "__main__":
    main()
