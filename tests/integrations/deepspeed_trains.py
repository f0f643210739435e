"""Run by itself, where DeepSpeed is installed: its engine trains what `deepspeed_losses.json` configures, on the CPU.

Prints that file with the losses that it came to. It compiles an operator first, for minutes, so that no test runs it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch


def trained(config: dict[str, Any]) -> list[float]:
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    passes = engine.gradient_accumulation_steps()
    losses = []
    for step in range(4):
        total = 0.0
        for part in torch.randn(2 * passes, 8, generator=torch.Generator().manual_seed(step)).chunk(passes):
            loss = (engine(part) - part).square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.item() / passes
        losses.append(total)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29873", rank=0, world_size=1)
    path = Path(__file__).with_name("deepspeed_losses.json")
    with contextlib.redirect_stdout(sys.stderr):
        runs = {
            name: {"config": run["config"], "losses": trained(run["config"])}
            for name, run in json.loads(path.read_text()).items()
        }
    print(json.dumps(runs, indent=1))
