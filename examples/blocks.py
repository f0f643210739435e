"""The parts by themselves: `zk.kernels` updates plain tensors, `zk.io` moves tensors between memory and a disk.

    python examples/blocks.py

This is an optimizer step of one's own: gradients of any shape into one bucket, their norm, an exact AdamW update of a
bf16 parameter with a 16-bit remainder, and the state put on a disk and brought back.
"""

from __future__ import annotations

import tempfile

import torch

import zerokern as zk


def main() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(100, 30).t(), torch.randn(40)]
    numel = sum(one.numel() for one in gradients)
    bucket, stats = torch.empty(numel), torch.empty(2, dtype=torch.float64)
    zk.kernels.flatten(gradients, bucket, scale=0.5, stats=stats)  # cast, scale, sum of squares, one pass
    assert abs(stats[0].item() - zk.kernels.sumsq([bucket])) < 1e-9 * stats[0].item()
    print(f"norm {stats[0].sqrt():.4f}, all finite: {not stats[1]}")

    weight, remainder = zk.kernels.split(torch.randn(numel), "split16")
    state = {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
    before = zk.kernels.join(weight, remainder)
    zk.kernels.adam(weight, bucket, state["exp_avg"], state["exp_avg_sq"], remainder=remainder, step=1, lr=1e-3)
    print(f"largest change {(zk.kernels.join(weight, remainder) - before).abs().max():.6f}")

    with tempfile.TemporaryDirectory() as folder, zk.io.Store(folder, checksum=True) as store:
        for name, tensor in state.items():
            store.put(name, tensor)
        back = torch.empty(numel)
        store.get("exp_avg", back).wait()  # after its put, in whatever order the disk works
        print(f"came back unchanged: {torch.equal(back, state['exp_avg'])}")


if __name__ == "__main__":
    main()
