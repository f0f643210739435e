"""Mutants of the native kernels and of what calls them."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        "adam_second_bias_correction_forgotten",
        "cpu/api.cpp",
        "std::fmin(per_step / std::sqrt(1.0 - power(g.beta2, g.step)), FLT_MAX)",
        "std::fmin(per_step, FLT_MAX)",
        "Adam does not correct exp_avg_sq for its beginning at zero.",
        ("tests/kernels/test_adam.py",),
    ),
    Mutant(
        "sgd_first_step_flag_lost",
        "cpu/api.cpp",
        "k.first = (g.flags & ZK_FIRST) != 0;",
        "k.first = (g.flags & ZK_FIRST) != 0 && g.momentum == 0.0;",
        "A momentum buffer does not start as the first gradient.",
        ("tests/kernels/test_sgd.py",),
    ),
    Mutant(
        "half_of_the_last_remainders_lost",
        "cpu/update/update.inl.h",
        "target == TO_SPLIT16  ? 2",
        "target == TO_SPLIT16  ? 1",
        "Of the last, partial tile only half of the split16 remainders are read and written.",
        ("tests/kernels/test_adam.py",),
    ),
    Mutant(
        "int8_scale_of_the_neighbouring_block",
        "cpu/update/update.inl.h",
        "rule.block(s.exp_avg_scale[block],",
        "rule.block(s.exp_avg_scale[block ? block - 1 : 0],",
        "int8 averages are decoded with the scale of the block before.",
        ("tests/kernels/test_adam.py", "tests/kernels/test_lion.py"),
    ),
    Mutant(
        "stochastic_rounding_forgets_where_a_span_begins",
        "cpu/update/formats.inl.h",
        "static_cast<uint64_t>(s.first + i + e)",
        "static_cast<uint64_t>(i + e)",
        "Random bits are numbered from the beginning of the span, and not of the whole parameter.",
        ("tests/kernels/test_adam.py", "tests/kernels/test_sgd.py", "tests/optim/test_shard_state.py"),
    ),
    Mutant(
        "sumsq_last_element_left_out",
        "cpu/sumsq/sumsq.inl.h",
        "if (numel) {  // zeros add nothing",
        "if (numel > 1) {  // zeros add nothing",
        "A sum of squares leaves out a single element behind the last 64.",
        ("tests/kernels/test_sumsq.py",),
    ),
    Mutant(
        "accumulate_forgets_dst_at_the_end",
        "cpu/accumulate/accumulate.inl.h",
        "if (add_to) std::memcpy(to, at<char>(dst, i * TO_BYTES), TO_BYTES);",
        "if (add_to && n > 1) std::memcpy(to, at<char>(dst, i * TO_BYTES), TO_BYTES);",
        "The last few elements of a sum of one source are not added to what is there.",
        ("tests/kernels/test_accumulate.py",),
    ),
    Mutant(
        "segments_behind_the_first_begin_late",
        "cpu/api.cpp",
        "            offset = 0;\n        }\n    }\n}",
        "            static_cast<void>(offset);\n        }\n    }\n}",
        "Where a thread goes from a long segment to the next one, it begins there where it began in the first.",
        ("tests/kernels/test_exactness.py", "tests/kernels/test_adam.py"),
    ),
    Mutant(
        "maximize_flag_lost",
        "zerokern/kernels/cpu.py",
        '"maximize": maximize,',
        '"maximize": False,',
        "The table of an update does not say that it maximizes.",
        ("tests/kernels/test_adam.py", "tests/optim/test_adam.py"),
    ),
    Mutant(
        "first_element_lost_on_the_way_to_a_row",
        "zerokern/kernels/update.py",
        "row.key, row.first = number, begin",
        "row.key, row.first = number, 0",
        "The ops forget which element of a parameter a span begins with.",
        ("tests/kernels/test_adam.py", "tests/kernels/test_sgd.py"),
    ),
    Mutant(
        "unflatten_drops_what_is_not_contiguous",
        "zerokern/kernels/flat.py",
        "if not into and not member.is_contiguous:",
        "if not into and member.is_contiguous:",
        "What a bucket holds is not written back into tensors that are not contiguous.",
        ("tests/kernels/test_flatten.py",),
    ),
    Mutant(
        "forced_instruction_set_stays",
        "zerokern/kernels/dispatch.py",
        "native.force_isa(before)",
        "native.force_isa(native.isa_active())",
        "An instruction set that one call was forced to is that of all later ones.",
        ("tests/kernels/test_dispatch.py",),
    ),
    Mutant(
        "ferry_last_bytes_left_out",
        "zerokern/kernels/triton/ferry.py",
        "if WIDTH > 1:  # less than an access has",
        "if WIDTH > 8:  # less than an access has",
        "A kernel that copies spans leaves out the bytes behind the last whole word.",
        ("tests/kernels/test_ferry.py",),
    ),
)
