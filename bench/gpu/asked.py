"""What is asked of a GPU run, and whether its figures meet it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..report import columns


@dataclass(frozen=True)
class Asked:
    """One line of what is asked: the figure `key` is at least `least`, or at most `most`."""

    key: str
    what: str
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    def met(self, value: float) -> bool:
        return value >= self.least if self.least is not None else value <= (self.most or 0.0)

    @property
    def text(self) -> str:
        bound = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"
        return bound + self.unit


ASKED = (
    Asked("ranks.fsdp2_stage2", "two GPUs, stage 2 vs FSDP2, gathered until backward", "x", 1.0),
    Asked("ranks.fsdp2_stage3", "two GPUs, stage 3 vs FSDP2, gathered twice", "x", 1.0),
    Asked("ranks.ddp", "two GPUs, stage 2 vs DDP", "x", 1.0),
    Asked("update.copy_share", "every update format, one flat span: share of the copy bandwidth, the worst", "", 0.92),
    Asked("optim.flat", "fp32 AdamW, one flat span, vs torch fused", "x", 1.0),
    Asked("optim.uneven", "fp32 AdamW, 1,000 uneven tensors, vs torch fused", "x", 1.05),
    Asked("optim.small", "fp32 AdamW, 10,000 small tensors, vs torch fused", "x", 3.0),
    Asked("mixed.torch", "mixed step vs torch fused with its casts", "x", 1.8),
    Asked("mixed.compile", "mixed step vs torch.compile of the whole step", "x", 1.05),
    Asked("eightbit.bitsandbytes", "int8 states + split8 vs bitsandbytes 8-bit", "x", 1.3),
    Asked("eightbit.flashoptim", "int8 states + split8 vs FlashOptim", "x", 1.3),
    Asked("eightbit.torchao", "int8 states + split8 vs torchao 8-bit", "x", 1.3),
    Asked("flatten.cat", "flatten of 300 uneven tensors with norm vs torch.cat and a norm", "x", 1.3),
    Asked("flatten.foreach_copy", "the same vs torch._foreach_copy_ and a norm", "x", 1.3),
    Asked("flatten.chunk_cat", "the same vs torch._chunk_cat and a norm", "x", 1.3),
    Asked("flatten.copy_share", "the same: share of the copy bandwidth", "", 0.90),
    Asked("copies.to_host", "device -> host, one large span, vs plain pinned cudaMemcpyAsync", "x", 0.98),
    Asked("copies.to_device", "host -> device, the same", "x", 0.98),
    Asked("copies.both", "both at once vs the best duplex measured", "x", 0.95),
    Asked("batch.loop", "2,000 small tensors -> pinned host in one batch vs a loop of copy_", "x", 3.0),
    Asked("batch.link_share", "the same: share of the link's rate", "", 0.9),
    Asked("zero.overhead", "zk.shard on one rank, stages 0 to 3: step beyond that of plain parameters", " %", most=2.0),
    Asked("zero.reserved", "stage 3, steps of odd sizes: most reserved over most allocated", "x", most=1.3),
    Asked("step1b.ms", "exact step of 1B parameters", " ms", most=6.6),
    Asked("zero.fsdp2_stage2", "1B, 16k tokens, stage 2 through NCCL vs FSDP2, gathered until backward", "x", 1.0),
    Asked("zero.fsdp2_stage3", "1B, 16k tokens, stage 3 through NCCL vs FSDP2, gathered twice", "x", 1.0),
    Asked("offload.delayed", "1B, int8 on the host, Delayed: share of no offload from 16k tokens a step on", "", 0.95),
    Asked("offload.overlap", "the same with overlap, from 32k tokens on", "", 0.90),
    Asked("offload.deepspeed", "1B, exact, overlap vs DeepSpeed's offload", "x", 1.5),
    Asked("offload.fsdp2", "1B, exact, overlap vs FSDP2's CPUOffloadPolicy", "x", 1.5),
    Asked("offload.exposed", "1B, exact, overlap: exposed time from 16k tokens on", " %", most=5.0),
    Asked("offload.host_syncs", "host syncs of a step that a deeper model has more", "", most=0.0),
    Asked("stage3.fsdp2", "152M, 8k tokens, stage 3 through NCCL vs FSDP2, gathered twice", "x", 1.0),
    Asked("exact.bits", "1B, exact: elements and losses that differ, overlap vs sync, 4 clipped steps", "", most=0.0),
    Asked("exact.delayed", "1B, exact, 16k tokens: Delayed, share of no offload", "", 0.95),
    Asked("exact.overlap", "the same with overlap", "", 0.95),
    Asked("exact.budget", "the same with overlap and 8 GiB of state on the GPU", "", 0.95),
    Asked("exact.update_device", 'the same with overlap and update="device"', "", 0.95),
    Asked("muon.torch", "zk.Muon, 78 matrices of 3.7M, vs torch.optim.Muon", "x", 1.0),
    Asked("muon.dion", "the same vs dion", "x", 1.0),
    Asked("muon.launched", "the same vs itself, each product launched alone", "x", 1.0),
    Asked("muon.bits", "the same: parameters that differ from those of single launches", "", most=0.0),
    Asked("graphs.loss", "CUDA graphs under zk.shard: largest difference of a loss", "", most=0.0),
    Asked("keep.cpu", "keep='cpu': largest difference of a loss", "", most=0.0),
    Asked("keep.disk", "keep=zk.Nvme: the same", "", most=0.0),
    Asked("soak.grown", "memory that a soak takes more at its end", " GB", most=0.05),
    Asked("eight.exact", "exact, state on the host, trained on one GPU and its host", "B", 8.0),
    Asked("infinity.share", "1B, parameters on the host: share of parameters on the device, 16k tokens", "", 0.97),
    Asked("infinity.loss", "loss after 4 steps against parameters on the device, 1B", " %", most=1.0),
    Asked("infinity.state_disk", "exact, parameters on the device and state on the disk, 4 steps on one GPU", "B", 8.0),
    Asked("infinity.host", "exact, parameters and state on the host, 4 steps on one GPU", "B", 8.0),
    Asked("infinity.disk", "exact, parameters on the disk and state on the host, the same", "B", 8.0),
    Asked("infinity.int8", "int8 states with split8, parameters and state on the host, the same", "B", 15.0),
    Asked("infinity.int8_disk", "int8 states with split8, parameters and state on the disk, the same", "B", 8.0),
)
ASKED_ALONE = (  # of sections that a run of everything does without
    Asked(
        "offload7b.delayed", "7B, int8 on the host, Delayed: share of no offload from 16k tokens a step on", "", 0.95
    ),
    Asked("offload7b.overlap", "the same with overlap, from 32k tokens on", "", 0.90),
    Asked("offloadmax.exact", "largest model, exact, 10 steps on one GPU and its host", "B", 8.0),
    Asked("offloadmax.int8", "largest model, int8 states with split8, the same", "B", 15.0),
    Asked("offloadmax.exact_bytes", "host memory of it at most, exact, per parameter", " B", most=14.2),
    Asked("offloadmax.int8_bytes", "host memory of it at most, int8 with split8, per parameter", " B", most=7.3),
    Asked("offloadmax.loss", "loss after 10 steps against no offload, at a size that fits", " %", most=1.0),
)


def verdicts(
    figures: Mapping[str, Mapping[str, object]], why_not: Mapping[str, str], sections: Sequence[str], rehearsal: bool
) -> list[dict[str, object]]:
    """One entry for each line of ASKED that belongs to the sections: asked, measured, met.

    >>> share = {"value": 0.9, "of": "split8"}
    >>> first = verdicts({"update.copy_share": share}, {}, ["update"], False)[0]
    >>> first["asked"], first["measured"], first["met"]
    ('>= 0.92', '0.900 (split8)', 'no')
    """
    lines: list[dict[str, object]] = []
    for asked in (*ASKED, *ASKED_ALONE):
        if asked.section not in sections:
            continue
        line = {"key": asked.key, "what": asked.what, "asked": asked.text}
        figure = figures.get(asked.key)
        if figure is None:
            reason = why_not.get(asked.key) or why_not.get(asked.section) or "no figure"
            lines.append({**line, "measured": "not measured", "met": f"- {reason}"})
        elif rehearsal:
            lines.append({**line, "measured": "rehearsed", "met": "-"})
        else:
            value = float(str(figure["value"]))
            of = f" ({figure['of']})" if figure.get("of") else ""
            between = f" [{figure['low']:.3f} {figure['high']:.3f}]" if "low" in figure else ""
            measured = f"{value:.3f}{asked.unit}{between}{of}"
            lines.append({**line, "measured": measured, "met": "yes" if asked.met(value) else "no"})
    return lines


def verdict_lines(entries: Sequence[Mapping[str, object]]) -> list[str]:
    """The table that a run ends with."""
    return columns(
        ["what", "asked", "measured", "met"],
        ([str(entry[column]) for column in ("what", "asked", "measured", "met")] for entry in entries),
    )
