# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""The d-wide part of the fused pass in Triton, one chunk of ranks a program, on tensor cores.

With T the coupled targets and V the sorted tokens of a chunk, all that the chunk needs of itself is the Gram matrix
:math:`G_{rk} = ⟨T_r, v_k⟩` under the Laplace kernel; all that lies outside acts through the states of
:mod:`cswe.ops.kernels.cuda_states`, one inner product per rank, side and quantity. Chunks do not wait for each other.
A point outside that ties with one inside is counted like any other there; :mod:`cswe.ops.kernels.cuda_ties` puts that
right.

Products run in half precision with float32 accumulation. What is not exactly a half-precision number is split into a
high and a low part (22 bits together), except where rounding at random is harmless (``PRECISE`` is off).

A token's squared norm is one more column of V, met by the rank's mass in T: added in float32.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import FAR, WEIGHT_UNIT, decayed, sample_length, sign_of, target_rows


@triton.jit
def both_sides(states, first, has_left, has_right, columns, inside, d):
    """Load the states left and right of a chunk as columns 0 and 1 of a tile of eight."""
    column = tl.arange(0, 8)
    has = (column >= tl.where(has_left, 0, 1)) & (column < tl.where(has_right, 2, 1))
    at = (column * d)[None, :] + columns[:, None]
    return tl.load(states + first * d + at, mask=has[None, :] & inside[:, None], other=0.0)


@triton.jit
def finish_chunk(
    gram,
    along_targets,
    along_tokens,
    points,
    masses,
    square_states,
    scale_states,
    height,
    base,
    received,
    s,
    c,
    q,
    ranks,
    present,
    row,
    state,
    start,
    has_left,
    has_right,
    factor,
    mass,
    N,
    rate,
    C: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Write what a chunk has of h and of the slope, from its Gram matrix and the products with its states.

    The slope is the sum of ``base`` and ``received``: what the rows of the Gram matrix give, and what its columns do.
    To add them here would be to exchange them between threads, and no loop with a barrier in it is pipelined.

    ``factor`` undoes the scaling: rows of T were averages of the targets. ``points`` are those of the row.
    """
    left_point = tl.load(points + start - 1, mask=has_left, other=0.0)
    right_point = tl.load(points + start + C, mask=has_right, other=0.0)
    from_left = tl.where(has_left, decayed((s - left_point) * rate), 0.0)
    from_right = tl.where(has_right, decayed((s - right_point) * rate), 0.0)
    column = tl.arange(0, 8)[None, :]
    left_mass = tl.load(masses + state, mask=has_left, other=0.0)
    right_mass = tl.load(masses + state + 1, mask=has_right, other=0.0)
    left = tl.sum(tl.where(column == 0, along_targets, 0.0), 1) * (factor * left_mass)
    right = tl.sum(tl.where(column == 1, along_targets, 0.0), 1) * (factor * right_mass)
    left = from_left * (left + mass * tl.load(square_states + state, mask=has_left, other=0.0))
    right = from_right * (right + mass * tl.load(square_states + state + 1, mask=has_right, other=0.0))
    gap = s[:, None] - s[None, :]
    kernel = decayed(gap * rate)
    product = kernel * (gram * factor + q[None, :])
    h = -c * c * (tl.sum(product, 1) + left + right)
    tl.store(height + row * N + ranks, h, mask=present)
    if SLOPE:
        sign = sign_of(gap)
        product *= sign
        # Row k of the transposed Gram matrix: the sign turns, and rank r sends with its own scale.
        tl.store(received + row * N + ranks, -tl.sum(product * c[:, None], 0), mask=present)
        here = c * (tl.sum(product, 1) + left - right)
        # Adding nothing keeps the compiler from making the kernel a second time, in another layout.
        ones = tl.sum((kernel + 0.0 * gram) * sign, 1) + from_left * left_mass - from_right * right_mass
        left_scale = tl.load(scale_states + state, mask=has_left, other=0.0)
        right_scale = tl.load(scale_states + state + 1, mask=has_right, other=0.0)
        per_unit = factor / WEIGHT_UNIT
        sent = tl.where(column == 0, from_left[:, None], 0.0) - tl.where(column == 1, from_right[:, None], 0.0)
        outside = tl.sum(along_tokens * sent, 1) * per_unit + q * (from_left * left_scale - from_right * right_scale)
        tl.store(base + row * N + ranks, here + h * ones + outside, mask=present)


@triton.jit
def _chunk(
    points,
    order,
    scale,
    squares,
    tokens,
    tokens_low,
    high,
    low,
    targets,
    token_states,
    token_states_low,
    masses,
    square_states,
    target_states,
    target_states_low,
    scale_states,
    height,
    base,
    received,
    units,
    N,
    M,
    d,
    rate,
    length,
    sample,
    slice_index,
    row,
    state,
    start,
    C: tl.constexpr,
    DB: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_LOW: tl.constexpr,
    PRECISE: tl.constexpr,
    MIXED: tl.constexpr,
    SLOPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute what :func:`chunk_pass` does for up to C ranks from a start, which are a chunk or the last one's rest."""
    points += row * N
    ranks = start + tl.arange(0, C)
    present = ranks < length
    # What is absent lies far away from everything.
    s = tl.load(points + ranks, mask=present, other=FAR)
    c = tl.load(scale + row * N + ranks, mask=present, other=0.0)
    token = tl.load(order + row * N + ranks, mask=present, other=0).to(tl.int32)
    mass = 1.0 / length
    q = tl.load(squares + sample * N + token, mask=present, other=0.0) * mass
    at = token * d
    tokens += sample * N * d
    tokens_low += sample * N * d
    high += slice_index * N * d
    low += slice_index * N * d
    targets += slice_index * M * d
    has_left = start > 0
    has_right = start + C < length

    gram = tl.zeros((C, C), dtype=tl.float32)
    along_targets = tl.zeros((C, 8), dtype=tl.float32)
    along_tokens = tl.zeros((C, 8), dtype=tl.float32)
    for first in tl.range(0, d, DB, num_stages=STAGES):
        columns = first + tl.arange(0, DB)
        inside = (columns < d) | EVEN
        read = present[:, None] & inside[None, :]
        v = tl.load(tokens + at[:, None] + columns[None, :], mask=read, other=0.0)
        t, t_low = target_rows(high, low, targets, ranks, present, columns, inside, length, M, d, MIXED, PRECISE)
        f = both_sides(token_states, state, has_left, has_right, columns, inside, d)
        gram = tl.dot(t, tl.trans(v), gram)
        along_targets = tl.dot(t, f, along_targets)
        if PRECISE:
            f_low = both_sides(token_states_low, state, has_left, has_right, columns, inside, d)
            gram = tl.dot(t_low, tl.trans(v), gram)
            along_targets = tl.dot(t_low, f, along_targets)
            along_targets = tl.dot(t, f_low, along_targets)
        if SLOPE:
            g = both_sides(target_states, state, has_left, has_right, columns, inside, d)
            along_tokens = tl.dot(v, g, along_tokens)
            if PRECISE:
                g_low = both_sides(target_states_low, state, has_left, has_right, columns, inside, d)
                along_tokens = tl.dot(v, g_low, along_tokens)
        if HAS_LOW:
            v_low = tl.load(tokens_low + at[:, None] + columns[None, :], mask=read, other=0.0)
            gram = tl.dot(t, tl.trans(v_low), gram)
            if SLOPE:
                along_tokens = tl.dot(v_low, g, along_tokens)

    factor = -2.0 * tl.load(units) * (M / length)
    finish_chunk(
        gram, along_targets, along_tokens, points, masses, square_states, scale_states, height, base, received,
        s, c, q, ranks, present, row, state, start, has_left, has_right, factor, mass, N, rate, C, SLOPE,
    )  # fmt: skip


@triton.jit
def chunk_pass(
    points,
    order,
    scale,
    squares,
    tokens,
    tokens_low,
    high,
    low,
    targets,
    lengths,
    token_states,
    token_states_low,
    masses,
    square_states,
    target_states,
    target_states_low,
    scale_states,
    height,
    base,
    received,
    units,
    B,
    L,
    N,
    M,
    d,
    rate,
    C: tl.constexpr,
    DB: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_LOW: tl.constexpr,
    PRECISE: tl.constexpr,
    MIXED: tl.constexpr,
    SLOPE: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    r"""Compute, per rank, :math:`h_r = -c_r² t_r` and :math:`c_r (A - B)_r + (E - F)_r + h_r (K̃ 1)_r`, ``(B, L, N)``.

    ``high`` and ``low`` are T in two parts, ``(L, N, d)``, or, where lengths differ (``MIXED``), ``targets``
    ``(L, M, d)`` in float32 are mixed here.
    """
    index = tl.program_id(0)
    chunks = tl.cdiv(N, C)
    slice_index = (index % L).to(tl.int64)
    index = index // L
    start = (index % chunks) * C
    sample = (index // chunks).to(tl.int64)
    length = sample_length(lengths, sample, B, N, MIXED)
    if start < length:
        row = sample * L + slice_index
        state = (row * chunks + start // C) * 2
        if HALVES & (start + C // 2 >= length):
            # Of 196 ranks the last chunk has 4: half a tile is enough for them.
            _chunk(
                points, order, scale, squares, tokens, tokens_low, high, low, targets, token_states, token_states_low,
                masses, square_states, target_states, target_states_low, scale_states, height, base, received, units, N,
                M, d, rate, length, sample, slice_index, row, state, start, C // 2, DB, EVEN, HAS_LOW, PRECISE, MIXED,
                SLOPE, STAGES,
            )  # fmt: skip
        else:
            _chunk(
                points, order, scale, squares, tokens, tokens_low, high, low, targets, token_states, token_states_low,
                masses, square_states, target_states, target_states_low, scale_states, height, base, received, units, N,
                M, d, rate, length, sample, slice_index, row, state, start, C, DB, EVEN, HAS_LOW, PRECISE, MIXED, SLOPE,
                STAGES,
            )  # fmt: skip
