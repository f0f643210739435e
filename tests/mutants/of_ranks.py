"""Mutants of what ranks do together: collectives, groups, agreements."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        "sum_in_an_order_of_each_rank",
        "zerokern/comm/peers.py",
        "sources = [arrived[r] if r != self.rank else own_span(bucket, r, self.size) for r in range(self.size)]",
        "sources = [own(bucket, self.rank, self.size), *arrived.values()]",
        "A reduction adds up in another order on each rank.",
        ("tests/comm/test_exact.py",),
    ),
    Mutant(
        "mean_of_one_rank_too_few",
        "zerokern/comm/group.py",
        "tensor.mul_(1.0 / self.size)",
        "tensor.mul_(1.0 / max(1, self.size - 1))",
        "A mean is divided by one rank too few.",
        ("tests/zero/test_losses.py", "tests/zero/test_modules.py"),
    ),
    Mutant(
        "rest_of_an_uneven_all_reduce_lost",
        "zerokern/comm/peers.py",
        "each = -(-tensor.numel() // size)",
        "each = tensor.numel() // size",
        "The last elements of a large sum that the ranks do not divide evenly are not summed.",
        ("tests/comm/test_exact.py",),
    ),
    Mutant(
        "last_transfer_not_waited_for",
        "zerokern/comm/peers.py",
        "for work in works:\n                work.wait()",
        "for work in works[:-1]:\n                work.wait()",
        "A collective ends before the last part of it has arrived.",
        ("tests/comm/test_exact.py", "tests/comm/test_traffic.py"),
    ),
    Mutant(
        "replicas_sum_not_divided",
        "zerokern/comm/hybrid.py",
        'self._flat("tensor", tensor).div_(self.replicas.size)',
        'self._flat("tensor", tensor)',
        "A sum over spans of which there are replicas counts each of these.",
        ("tests/zero/test_hybrid_failures.py", "tests/zero/test_hybrid.py"),
    ),
    Mutant(
        "hybrid_accumulation_written_over",
        "zerokern/comm/hybrid.py",
        "if add or out.dtype != bucket.dtype else out",
        "if out.dtype != bucket.dtype else out",
        "With replicas, a second reduction writes over what it should be added to.",
        ("tests/zero/test_hybrid.py",),
    ),
    Mutant(
        "gather_behind_the_reduction_before_it",
        "zerokern/zero/params.py",
        'with self.host.copies.driver.aside("gather"):',
        'with self.host.copies.driver.aside("reduce"):',
        "Parameters that come from host memory are gathered only when the gradients before them have been reduced.",
        ("tests/zero/test_streams.py", "tests/zero/test_launch_order.py"),
    ),
    Mutant(
        "reductions_on_a_stream_of_usual_priority",
        "zerokern/comm/collectives.py",
        "options.is_high_priority_stream = True",
        "options.is_high_priority_stream = False",
        "Reductions take their stream from the pool that copies and gathers take theirs from.",
        ("tests/comm/test_device.py",),
    ),
    Mutant(
        "unset_queues_not_warned_of",
        "zerokern/comm/joining.py",
        "if said is None or not said.isdecimal() or int(said) < QUEUES:",
        "if said is not None and (not said.isdecimal() or int(said) < QUEUES):",
        "Nobody says that CUDA's eight queues are too few for two communicators.",
        ("tests/comm/test_device.py",),
    ),
    Mutant(
        "agreement_on_nothing_in_particular",
        "zerokern/debug/agreement.py",
        'return f"count/{position}/{zlib.crc32(key.encode()):08x}"',
        'return f"count/{position}"',
        "Ranks that want different steps at one position count as agreed.",
        ("tests/comm/test_failures.py", "tests/zero/test_different_calls.py"),
    ),
    Mutant(
        "failure_told_once",
        "zerokern/comm/group.py",
        "                    self._failure = error\n                # not after",
        "                    self._ended = True\n                    raise\n                # not after",
        "Who waits for a collective that has failed already hears of no failure.",
        ("tests/comm/test_group.py", "tests/comm/test_failures.py"),
    ),
    Mutant(
        "own_span_counted_as_sent",
        "zerokern/comm/group.py",
        'self.traffic.add("reduce", (self.size - 1) * span * bucket.element_size())',
        'self.traffic.add("reduce", self.size * span * bucket.element_size())',
        "The traffic of a reduction counts the span that stays.",
        ("tests/comm/test_traffic.py",),
    ),
    Mutant(
        "publications_share_tags_with_gathers",
        "zerokern/comm/peers.py",
        '"publish": 4,',
        '"publish": 1,',
        "What an update's thread publishes can be taken for what a forward gathers.",
        (
            "tests/mutants/test_found.py::test_what_a_thread_publishes_is_not_what_another_gathers",
            "tests/optim/test_offload_overlap.py",
        ),
    ),
)
