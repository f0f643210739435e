"""Mutants of memory: arenas, rings, copies, what rests elsewhere."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        "slot_refilled_before_it_is_stored",
        "zerokern/memory/ring.py",
        "fetched[k] = fetch(i + depth, slot, slot.drained)",
        "fetched[k] = fetch(i + depth, slot, None)",
        "A slot of a ring is fetched into while its last contents are still being stored.",
        ("tests/memory/test_ring.py",),
    ),
    Mutant(
        "last_store_not_waited_for",
        "zerokern/memory/ring.py",
        "for i in range(max(0, count - depth), count):",
        "for i in range(max(0, count - depth), count - 1):",
        "A flow through a ring ends before its last store has.",
        ("tests/memory/test_ring.py",),
    ),
    Mutant(
        "copy_overtakes_the_kernels_before_it",
        "zerokern/memory/copies.py",
        "before.append(self.here())",
        "self.here()",
        "A copy from or to a device begins before the kernels that were launched ahead of it have ended.",
        ("tests/memory/test_copies.py",),
    ),
    Mutant(
        "copy_lets_go_of_its_tensors",
        "zerokern/memory/copies.py",
        "copy = Copy(self.driver, stream, pairs)",
        "copy = Copy(self.driver, stream, ())",
        "Memory may be freed, and given to others, while a copy still moves it.",
        (
            "tests/mutants/test_found.py::test_a_copy_keeps_its_tensors_whatever_the_device_keeps",
            "tests/memory/test_copies.py",
        ),
    ),
    Mutant(
        "table_of_spans_written_while_a_kernel_reads_it",
        "zerokern/memory/span_copies.py",
        "if reader is None or reader.done():",
        "if reader is None or not reader.done():",
        "A list of small copies overwrites the table that the kernel of the list before has yet to read.",
        ("tests/memory/test_span_copies.py",),
    ),
    Mutant(
        "copies_of_a_refused_kernel_lost",
        "zerokern/memory/span_copies.py",
        "if small and not self._launch(stream, small):",
        "if small and self._launch(stream, small) is None:",
        "Where a kernel is refused that is to copy small spans, nobody copies them.",
        ("tests/memory/test_span_copies.py",),
    ),
    Mutant(
        "spans_joined_that_touch_on_one_side",
        "zerokern/memory/span_copies.py",
        "if nbytes and span[0] == to + nbytes and span[1] == source + nbytes:",
        "if nbytes and span[0] == to + nbytes:",
        "Copies to neighbouring memory are taken for one, though what they read is not side by side.",
        ("tests/memory/test_span_copies.py",),
    ),
    Mutant(
        "writes_through_views_not_stored",
        "zerokern/memory/rest.py",
        "if any(tensor._version != version for tensor, version in self._watched):\n            self._changed = True",
        "if any(tensor._version < version for tensor, version in self._watched):\n            self._changed = True",
        "What somebody writes into a view of memory that rests on a disk does not reach the disk.",
        (
            "tests/mutants/test_found.py::test_what_is_written_into_memory_that_was_lent_is_stored",
            "tests/memory/test_rest.py",
            "tests/zero/test_tiers.py",
        ),
    ),
    Mutant(
        "span_that_fits_exactly_not_found",
        "zerokern/memory/layout.py",
        "if end - begin >= nbytes:",
        "if end - begin > nbytes:",
        "A free span of exactly the size that is asked for is not found.",
        ("tests/memory/test_layout.py", "tests/memory/test_arena.py"),
    ),
    Mutant(
        "lease_found_beyond_its_end",
        "zerokern/memory/arena.py",
        "return lease if lease is not None and ptr + nbytes <= lease.ptr + lease.nbytes else None",
        "return lease if lease is not None and ptr < lease.ptr + lease.nbytes else None",
        "A span that reaches beyond its lease counts as lying within it.",
        ("tests/memory/test_arena.py",),
    ),
    Mutant(
        "refusal_to_touch_memory_not_heard",
        "zerokern/memory/arena.py",
        "        elif error:\n            check_fits(nbytes",
        "        elif error and len(pieces) == 1:\n            check_fits(nbytes",
        "Where several threads touch the pages of an arena, one that the system refuses is used all the same.",
        ("tests/memory/test_arena.py",),
    ),
    Mutant(
        "pending_copy_replaces_what_was_changed_meanwhile",
        "zerokern/memory/rest.py",
        "if base.is_here or self.is_here or not self._has_contents or self._begun_from != base.edition:",
        "if base.is_here or self.is_here or not self._has_contents:",
        "An update that waits on a disk takes the place of parameters that were written since it was made.",
        ("tests/optim/test_resting.py",),
    ),
    Mutant(
        "state_that_begins_anew_is_not_zero",
        "zerokern/memory/tier.py",
        "if zeroed and key not in self._untouched:",
        "if zeroed and key in self._untouched:",
        "Host memory that is taken again for new state holds the old values.",
        (
            "tests/mutants/test_found.py::test_state_that_begins_anew_in_memory_that_was_used_is_zero",
            "tests/memory/test_host.py",
            "tests/optim/test_writes.py",
        ),
    ),
    Mutant(
        "block_read_into_while_it_is_copied_from",
        "zerokern/memory/blocks.py",
        "if block.last is not None:\n            block.last.wait()",
        "if block.last is not None:\n            block.last.done()",
        "What is kept on a disk comes back with bytes of another input, while that is still copied to the device.",
        ("tests/memory/test_blocks.py",),
    ),
    Mutant(
        "blocks_grow_with_every_size",
        "zerokern/memory/blocks.py",
        "while self._free and self.nbytes + nbytes > most:",
        "while self._free and self.nbytes > most:",
        "Host memory for kept inputs grows with every size of a batch that comes.",
        ("tests/memory/test_blocks.py", "tests/activations/test_keep.py"),
    ),
    Mutant(
        "arena_and_its_leases_keep_each_other",
        "zerokern/memory/arena.py",
        "self._taken[lease.ptr] = _Taken(nbytes, owner, weakref.ref(lease))",
        "self._taken[lease.ptr] = _Taken(nbytes, owner, lambda: lease)",
        "Pinned memory that nobody refers to waits for the garbage collector.",
        ("tests/memory/test_arena.py", "tests/memory/test_ends_by_counts.py"),
    ),
)
