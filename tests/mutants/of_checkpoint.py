"""Mutants of checkpoints: what is written, in which order it lasts, what is believed, what comes back."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        "torchs_index_published_first",
        "zerokern/checkpoint/folder.py",
        "folder.rename((new_index, NAME), (new_metadata, METADATA))",
        "folder.rename((new_metadata, METADATA), (new_index, NAME))",
        "A kill between two renames leaves an old checkpoint whose index for torch is that of the new one.",
        ("tests/checkpoint/test_folder.py",),
    ),
    Mutant(
        "data_file_not_synced",
        "zerokern/checkpoint/files.py",
        "os.ftruncate(self._fd, row.nbytes)\n            os.fsync(self._fd)",
        "os.ftruncate(self._fd, row.nbytes)",
        "A checkpoint is published while bytes of its data files may be in memory only.",
        (
            "tests/mutants/test_found.py::test_a_data_file_is_synced_when_it_is_finished",
            "tests/checkpoint/test_files.py",
        ),
    ),
    Mutant(
        "interrupted_publishing_not_finished",
        "zerokern/checkpoint/folder.py",
        "before = _previous_index(folder)\n                _finish_renames(folder, before)",
        "before = _previous_index(folder)",
        "After a kill between the renames the next save removes files that torch's index speaks of.",
        ("tests/checkpoint/test_folder.py",),
    ),
    Mutant(
        "blocks_of_a_checkpoint_not_checked",
        "zerokern/checkpoint/files.py",
        "if crc == expected:",
        "if crc == expected or nbytes < BLOCK:",
        "The last block of a data file is believed whatever its checksum says.",
        ("tests/checkpoint/test_files.py", "tests/checkpoint/test_storage.py"),
    ),
    Mutant(
        "table_of_checksums_not_checked",
        "zerokern/checkpoint/files.py",
        "if crc32c(_address_of(table), len(table)) != row.crc:",
        "if len(table) != row.nbytes - row.table:",
        "A damaged table of checksums is believed.",
        ("tests/checkpoint/test_files.py",),
    ),
    Mutant(
        "index_not_checked",
        "zerokern/checkpoint/index.py",
        'if f"{crc32c(body, len(body)):08x}" != crc:',
        "if len(crc) != 8:",
        "An index that was edited or damaged is believed as long as it can be parsed.",
        ("tests/checkpoint/test_index.py",),
    ),
    Mutant(
        "pythons_generator_not_put_back",
        "zerokern/checkpoint/rng.py",
        'random.setstate(states["python"])\n    torch.set_rng_state(states["torch"])',
        'torch.set_rng_state(states["torch"])',
        "A load does not put Python's random numbers back.",
        ("tests/checkpoint/test_save_load.py", "tests/checkpoint/test_resume.py"),
    ),
    Mutant(
        "tensors_of_ranks_taken_for_the_same",
        "zerokern/checkpoint/extra.py",
        "said.append(crc32c(dense.data_ptr(), dense.numel() * dense.element_size()))",
        "said.append(dense.numel())",
        "Tensors in extra that differ between ranks are saved once, as rank 0 has them.",
        ("tests/checkpoint/test_resume.py", "tests/checkpoint/test_ranks_agree.py"),
    ),
    Mutant(
        "buffers_of_all_ranks_mixed",
        "zerokern/checkpoint/storage.py",
        "return super().create_global_plan(_leave_out_replicas(_assign_unstepped(all_plans)))",
        "return super().create_global_plan(_leave_out_replicas(all_plans))",
        "Buffers that ranks count by themselves are saved as a mixture of several ranks'.",
        ("tests/checkpoint/test_loading.py",),
    ),
    Mutant(
        "remainder_lost_in_a_conversion",
        "zerokern/checkpoint/formats.py",
        'return {"param": high, "remainder": remainder}',
        'return {"param": high, "remainder": remainder.zero_()}',
        "A load into a split master loses what bf16 rounds away.",
        ("tests/checkpoint/test_formats.py",),
    ),
    Mutant(
        "counters_of_an_optimizer_not_restored",
        "zerokern/checkpoint/optimizers.py",
        "if self._counters is not None:\n            self.opt.decision.begin(**self._counters)",
        "if self._counters is None:\n            self.opt.decision.begin(None, 0)",
        "A load does not bring back how many steps were skipped, nor the last norm.",
        ("tests/checkpoint/test_save_load.py",),
    ),
    Mutant(
        "training_goes_on_before_the_copy_is_taken",
        "zerokern/checkpoint/saver.py",
        "planner.wait_until_free(saving)\n    return saving",
        "return saving",
        "zk.save(wait=False) returns while what it saves may still change.",
        ("tests/checkpoint/test_async.py",),
    ),
    Mutant(
        "overlapping_tensors_of_a_file_believed",
        "zerokern/interop/tensorfile.py",
        "if entry.offset < end:",
        "if entry.offset < end and not entry.nbytes:",
        "A safetensors file whose tensors overlap is read.",
        ("tests/interop/test_tensorfile.py",),
    ),
    Mutant(
        "last_int8_block_around_a_box_missed",
        "zerokern/checkpoint/filling.py",
        "self.end = min(-(-(max(map(self._flat, last)) + 1) // BLOCK) * BLOCK, total)",
        "self.end = min(-(-max(map(self._flat, last)) // BLOCK) * BLOCK, total)",
        "int8 state that is cut otherwise than by blocks misses its last block where one element lies in it.",
        (
            "tests/mutants/test_found.py::test_around_elements_lie_all_blocks_that_these_are_in",
            "tests/checkpoint/test_formats.py",
        ),
    ),
    Mutant(
        "failed_save_not_heard_by_the_next",
        "zerokern/checkpoint/background.py",
        "self._join()\n        if not self._reported:\n            self._report()",
        "self._join()",
        "The error of a save in the background that nobody asked for is forgotten.",
        (
            "tests/mutants/test_found.py::test_what_a_save_failed_with_is_raised_by_the_next_and_once",
            "tests/checkpoint/test_async.py",
        ),
    ),
)
