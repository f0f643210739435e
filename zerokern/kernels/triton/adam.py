"""Adam's arithmetic, as `reference.adam` has it. Fused multiply-adds are fused by name only."""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.triton.codecs import reciprocal, root_of, value_of_code, value_of_root_code

LOWEST = tl.constexpr(-3.4028234663852886e38)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def adam(p, g, m, v, w1, w2, beta1, beta2, wd, coupled, slope, floor, decay):
    """(p', m', v') of fp32 averages; g is scaled."""
    if coupled:
        g = tl.fma(wd, p, g)
    # one fma, of m where the weight is below a half and of g where it is not, as torch.lerp does
    light = w1 < 0.5
    m = tl.fma(tl.where(light, w1, -beta1), g - m, tl.where(light, m, g))
    gap = tl.fma(g, g, -v)
    late = tl.fma(w2 * g, g, beta2 * v)
    early = tl.fma(w2, tl.where(gap == float("-inf"), LOWEST, gap), v)
    v = tl.where(w2 < 0.5, tl.where(gap == float("inf"), late, early), late)
    p = p - tl.fma(decay, p, tl.div_rn(m, tl.fma(tl.sqrt_rn(v), slope, floor)))
    return p, m, v


@triton.jit
def adam_int8(
    p, g, m_codes, root_codes, m_scale, root_scale, scale, w1, root_w2, beta1, root_beta2, wd, coupled, slope, floor,
    decay,
):  # fmt: skip
    """(p', m', root') of coded averages, as `reference_int8.adam_int8`; g is as it came.

    The root and the reciprocal are approximate, within two units in the last place: instructions bound this rule.
    """
    if coupled:
        g = tl.fma(wd, p, g * scale)
    gain1 = tl.where(coupled, w1, w1 * scale)
    gain2 = tl.where(coupled, root_w2, root_w2 * scale)
    kept_step = tl.div_rn(root_scale, tl.full(root_scale.shape, 255.0, tl.float32)) * root_beta2
    kept_step = tl.where(kept_step == float("inf"), LARGEST, kept_step)
    m = tl.fma(value_of_code(m_codes), beta1 * m_scale, gain1 * g)
    kept = value_of_root_code(root_codes) * kept_step
    fresh = gain2 * g
    root = root_of(tl.fma(kept, kept, fresh * fresh))
    p = tl.fma(-m, reciprocal(tl.fma(root, slope, floor)), tl.fma(-decay, p, p))
    return p, m, root
