"""Mutants of the disk: order, checksums, what lasts, room, and the native engine."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        "checksum_not_compared",
        "zerokern/io/ticket.py",
        "if found != crc:",
        "if found != crc and not self.nbytes:",
        "The checksum of what a get has read is computed, and compared with nothing.",
        ("tests/io/test_damage.py",),
    ),
    Mutant(
        "get_not_ordered_behind_its_put",
        "zerokern/io/store.py",
        "ticket = self._start(READ, entry, address, nbytes, out, self._before(entry, after), crc, source)",
        "ticket = self._start(READ, entry, address, nbytes, out, self._before(None, after), crc, source)",
        "A get may begin before the put of the same key has ended.",
        ("tests/io/test_order.py",),
    ),
    Mutant(
        "index_not_synced_before_its_rename",
        "zerokern/io/renaming.py",
        "            file.flush()\n            os.fsync(file.fileno())",
        "            file.flush()",
        "An index takes the place of the one before while its own bytes may be in memory only.",
        ("tests/checkpoint/test_folder.py", "tests/io/test_durable.py"),
    ),
    Mutant(
        "data_not_synced_before_the_index",
        "zerokern/io/store.py",
        "try:\n            self.files.sync()\n        except",
        "try:\n            self.files.all[0:0]\n        except",
        "A durable store publishes an index of data that may not be on the disk yet.",
        ("tests/io/test_durable.py",),
    ),
    Mutant(
        "rename_not_synced",
        "zerokern/io/renaming.py",
        "            os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)\n        self.sync()",
        "            os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)",
        "What was published by a rename is taken for lasting before the folder is synced.",
        ("tests/checkpoint/test_folder.py", "tests/io/test_durable.py"),
    ),
    Mutant(
        "published_extent_given_away",
        "zerokern/io/store.py",
        "if entry.published:\n            self._replaced.append(entry)",
        "if entry.published and entry.put is None:\n            self._replaced.append(entry)",
        "Room that the published index still speaks of is written over before the next one is published.",
        ("tests/io/test_durable.py", "tests/io/test_model.py"),
    ),
    Mutant(
        "room_reused_under_a_transfer",
        "zerokern/io/space.py",
        "if last is None or last.done():",
        "if last is None or last is not None:",
        "The room of a deleted key is used again while a transfer still moves in it.",
        ("tests/io/test_order.py", "tests/io/test_model.py"),
    ),
    Mutant(
        "no_room_for_the_scale_of_a_last_block",
        "zerokern/io/pieces.py",
        "end += _rounded_up(-(-numel // width.per) * width.nbytes, ALIGNMENT)",
        "end += _rounded_up(max(1, numel // width.per) * width.nbytes, ALIGNMENT)",
        "A record has no room for the scale of a last, partial block of int8 state.",
        (
            "tests/mutants/test_found.py::test_a_record_has_room_for_the_scale_of_each_block_begun",
            "tests/io/test_pieces.py",
        ),
    ),
    Mutant(
        "get_of_a_failed_put_succeeds",
        "zerokern/io/store.py",
        "source = None if slot is None else put",
        "source = None",
        "A get that was queued behind a put which fails returns what was on the disk before.",
        ("tests/io/test_faults.py",),
    ),
    Mutant(
        "child_keeps_the_lock",
        "zerokern/io/lock.py",
        "for one in list(_inherited):\n        one.let_go()",
        "for one in [one for one in _inherited if not isinstance(one, FolderLock)]:\n        one.let_go()",
        "A forked child holds one of its parent's locks, also when the parent is gone.",
        ("tests/io/test_lock.py", "tests/io/test_process.py"),
    ),
    Mutant(
        "short_read_taken_for_whole",
        "cpu/io/engine.cpp",
        "if (op->done < op->needed) {",
        "if (op->done < op->needed && op->write) {",
        "A read that the device cut short counts as whole.",
        ("tests/io/test_faults.py", "tests/io/test_damage.py"),
    ),
    Mutant(
        "request_overtakes_the_one_before",
        "cpu/io/engine.cpp",
        "return state == ZK_IO_PENDING || state == ZK_IO_WAITED;",
        "return state == ZK_IO_WAITED;",
        "A request waits for the one before it only where somebody waits for that already.",
        ("tests/io/test_order.py", "tests/io/test_roundtrip.py"),
    ),
    Mutant(
        "crc_of_long_spans_joined_in_another_order",
        "cpu/io/crc32c.cpp",
        "a = over_one(over_one(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^ c;",
        "a = over_one(over_one(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(c)) ^ b;",
        "The checksum of spans from 6 KiB on is not CRC-32C.",
        ("tests/io/test_durable.py", "tests/checkpoint/test_files.py", "tests/kernels/test_fingerprint.py"),
    ),
)
