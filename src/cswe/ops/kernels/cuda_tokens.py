# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""The gradient with respect to the tokens and their squared norms in Triton.

.. math:: ∂v_k = -2 \sum_l g_{il} (K c T_l)_k, \qquad ∂‖v_k‖² = \sum_l g_{il} m (K c)_k

One program is one warp and works for one sample and one piece of the dimensions, slice after slice, and adds to the
rows of a buffer of its own. It is only run where the tokens come from something that learns.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import WEIGHT_UNIT, decayed, sample_length, split, target_rows


@triton.jit
def _add(at, values, write):
    """Add to the buffer. A row's next turn may come in another thread: wait for all."""
    tl.store(at, tl.load(at, mask=write, other=0.0) + values, mask=write)
    tl.debug_barrier()


@triton.jit
def _sweep(
    points,
    order,
    scale,
    high,
    low,
    targets,
    out,
    out_squares,
    factor,
    square_factor,
    length,
    M,
    d,
    rate,
    columns,
    square_length,
    FROM_LEFT: tl.constexpr,
    C: tl.constexpr,
    DB: tl.constexpr,
    MIXED: tl.constexpr,
):
    lane = tl.arange(0, C)
    inside = columns < d
    chunks = tl.cdiv(length, C)
    state = tl.zeros((DB,), dtype=tl.float32)
    square_state = 0.0
    edge = tl.load(points + (0 if FROM_LEFT else length - 1))
    for step in range(chunks):
        chunk = step if FROM_LEFT else chunks - 1 - step
        ranks = chunk * C + lane
        present = ranks < length
        s = tl.load(points + ranks, mask=present, other=0.0)
        c = tl.load(scale + ranks, mask=present, other=0.0) * WEIGHT_UNIT
        token = tl.load(order + ranks, mask=present, other=0).to(tl.int64)
        far = tl.load(points + (tl.minimum(chunk * C + C, length) - 1 if FROM_LEFT else chunk * C))
        t, t_low = target_rows(high, low, targets, ranks, present, columns, inside, length, M, d, MIXED, True)
        t, t_low = tl.trans(t), tl.trans(t_low)
        reached = decayed((s - edge) * rate)
        onwards = decayed((far - edge) * rate)
        weight = tl.where(present, decayed((far - s) * rate), 0.0) * c
        sums = state[:, None] * reached[None, :]
        squares = square_state * reached
        if FROM_LEFT:
            kernel = decayed((s[:, None] - s[None, :]) * rate) * c[:, None]
            # The targets nearly add up to 0, so at a large τ what remains is small against the terms: split both.
            first, second = split(kernel)
            sums = tl.dot(t, first, sums)
            sums = tl.dot(t, second, sums)
            sums = tl.dot(t_low, first, sums)
            squares += tl.sum(kernel, 0)
        state = state * onwards + tl.sum((t.to(tl.float32) + t_low.to(tl.float32)) * weight[None, :], 1)
        square_state = square_state * onwards + tl.sum(weight, 0)
        write = present[None, :] & inside[:, None]
        _add(out + token[None, :] * d + columns[:, None], sums * factor, write)
        _add(out_squares + token, squares * square_factor, ranks < square_length)
        edge = far


@triton.jit
def tokens_pass(
    points,
    order,
    scale,
    high,
    low,
    targets,
    lengths,
    grad,
    out,
    out_squares,
    units,
    B,
    L,
    N,
    M,
    d,
    rate,
    each,
    C: tl.constexpr,
    DB: tl.constexpr,
    GROUPS: tl.constexpr,
    MIXED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Add to partial sums ``(parts, B, N, d)`` and ``(parts, B, N)``, zero at the start: ``each`` slices a part."""
    index = tl.program_id(0)
    group = index % GROUPS
    index = index // GROUPS
    sample = (index % B).to(tl.int64)
    part = index // B
    length = sample_length(lengths, sample, B, N, RAGGED)
    columns = group * DB + tl.arange(0, DB)
    square_length = tl.where(group == 0, length, 0)  # one of the pieces takes the squared norms along
    out += (part * B + sample) * N * d
    out_squares += (part * B + sample) * N
    for slice_index in range(part * each, tl.minimum(part * each + each, L)):
        row = sample * L + slice_index
        g = tl.load(grad + row) / WEIGHT_UNIT
        # Rows hold averages of the targets: T is M/length times that.
        factor = -2.0 * g * (M / length) / tl.load(units + 1)
        wide = row - sample * L  # the slice again, in 64 bits
        own_high = high + wide * N * d
        own_low = low + wide * N * d
        own_targets = targets + wide * M * d
        _sweep(
            points + row * N, order + row * N, scale + row * N, own_high, own_low, own_targets,
            out, out_squares, factor, g / length, length, M, d, rate, columns, square_length, True, C, DB, MIXED,
        )  # fmt: skip
        _sweep(
            points + row * N, order + row * N, scale + row * N, own_high, own_low, own_targets,
            out, out_squares, factor, g / length, length, M, d, rate, columns, square_length, False, C, DB, MIXED,
        )  # fmt: skip
