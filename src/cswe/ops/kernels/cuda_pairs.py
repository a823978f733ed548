# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""Small sets, in Triton: all pairs of a set and a slice in one tile of registers.

Up to 128 tokens the kernel matrix :math:`K_{ij} = e^{-|p_i - p_j| / τ}` fits into the registers of a program,
and so does :math:`W_{ij} = α ‖v_j‖² + β ⟨T_i, v_j⟩`, with T_i the target at the rank of token i. Then

.. math:: S = Σ_i c_i t_i, \quad t_i = Σ_j K_{ij} W_{ij}, \quad c_i = 1 / Σ_j K_{ij}

and its slope are sums along rows and columns of one tile. Ranks are counted from it, so nothing is sorted, and tokens
stay in their own order. Instead of twenty launches there are four, and that is what a small batch waits for.

A reference being sorted softly is one such set: its sorted points are :math:`Σ_j c_i K_{ij} y_j`, and what comes back
to it has the form of S again, with gradients for targets.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_prepare import TOKEN_BITS
from cswe.ops.kernels.cuda_project import root_of
from cswe.ops.kernels.cuda_rows import FAR, WEIGHT_UNIT, decayed, mixed_targets, sign_of, split, unit_for


@triton.jit
def _present(mask, sample, N, NB: tl.constexpr, HAS_MASK: tl.constexpr):
    """Say which tokens of a set there are."""
    token = tl.arange(0, NB)
    present = token < N
    if HAS_MASK:
        present = present & (tl.load(mask + sample * N + token, mask=present, other=0) != 0)
    return present


@triton.jit
def _load_set(projections, mask, line, sample, N, NB: tl.constexpr, HAS_MASK: tl.constexpr):
    """Give the projections of a set, which of its tokens there are, and how many. Absent ones are far behind."""
    present = _present(mask, sample, N, NB, HAS_MASK)
    length = N
    if HAS_MASK:
        length = tl.sum(present.to(tl.int32), 0)
    return tl.load(projections + line * N + tl.arange(0, NB), mask=present, other=FAR), present, length


@triton.jit
def _precedes(gap, NB: tl.constexpr):
    """Whether the token of the column comes before that of the row: smaller, or as large and with a smaller number."""
    token = tl.arange(0, NB)
    return (gap > 0) | ((gap == 0) & (token[None, :] < token[:, None]))


@triton.jit
def _token_rows(tokens, centre, sample, present, columns, N, d, NB: tl.constexpr):
    """Give a block of columns of the centred tokens, 0 where there is none."""
    read = present[:, None] & (columns < d)[None, :]
    at = tl.arange(0, NB)[:, None] * d + columns[None, :]
    rows = tl.load(tokens + sample * N * d + at, mask=read, other=0.0).to(tl.float32)
    return tl.where(read, rows - tl.load(centre + columns, mask=columns < d, other=0.0)[None, :], 0.0)


@triton.jit
def _half_rows(tokens, centre, unit, sample, present, columns, N, d, NB: tl.constexpr, REFERENCE: tl.constexpr):
    """Give the same in half precision, times a unit: those of a sample are stored that way."""
    if REFERENCE:
        rows = (_token_rows(tokens, centre, sample, present, columns, N, d, NB) * unit).to(tl.float16)
    else:
        read = present[:, None] & (columns < d)[None, :]
        at = tl.arange(0, NB)[:, None] * d + columns[None, :]
        rows = tl.load(tokens + sample * N * d + at, mask=read, other=0.0)
    return rows


@triton.jit
def _rows_at(targets, slice_index, rank, present, columns, length, M, d, MIXED: tl.constexpr):
    """Give a block of columns of what these ranks meet, times ``length / M``, as it is stored or in float32."""
    inside = columns < d
    own = targets + slice_index * M * d
    if MIXED:
        rows = mixed_targets(own, rank, present, columns, inside, length, M, d)
    else:
        read = present[:, None] & inside[None, :]
        rows = tl.load(own + rank[:, None] * d + columns[None, :], mask=read, other=0.0)
    return rows


@triton.jit
def _unit_of_targets(target_squares, M, NB: tl.constexpr):
    """Give the unit in which targets are stored in half precision: sorted points are no longer than the longest."""
    point = tl.arange(0, NB)
    longest = tl.sqrt(tl.max(tl.load(target_squares + point, mask=point < M, other=0.0), 0))
    return unit_for(longest, TOKEN_BITS) * M


@triton.jit
def cost_pass(
    projections,
    mask,
    tokens,
    centre,
    squares,
    largest,
    targets,
    target_squares,
    weights,
    offset,
    root,
    half_inverse,
    ordered,
    scale,
    slope,
    L,
    N,
    M,
    d,
    rate,
    per_tau,
    rounding,
    NB: tl.constexpr,
    DB: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MIXED: tl.constexpr,
    REFERENCE: tl.constexpr,
    PRECISE: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Write, for a set and a slice, D and 1/2D, projections and 1/Z by rank, and the slope of D by projections.

    Unless ``PRECISE``, ``tokens`` are in half precision (a reference's are as they come), and ``targets``
    those of :func:`ranked_pass`.

    For a reference, instead, the slope of ``Σ_r ⟨T_r, y_r⟩ + w ‖y_r‖²`` over its sorted points, over their number: T
    and w (``weights``) are what came back to the sorted points and to the mean of their squared norms.
    """
    line = tl.program_id(0).to(tl.int64)
    sample = line // L
    slice_index = line % L
    token = tl.arange(0, NB)
    p, present, length = _load_set(projections, mask, line, sample, N, NB, HAS_MASK)
    rank = tl.sum(_precedes(p[:, None] - p[None, :], NB).to(tl.int32), 1)
    square = tl.load(squares + sample * N + token, mask=present, other=0.0)
    unit = 1.0
    if not PRECISE:
        unit = unit_for(tl.load(largest), TOKEN_BITS)

    product = tl.zeros((NB, NB), dtype=tl.float32)
    for start in range(0, d, DB):
        columns = start + tl.arange(0, DB)
        t = _rows_at(targets, slice_index, rank, present, columns, length, M, d, MIXED)
        if PRECISE:
            v = _token_rows(tokens, centre, sample, present, columns, N, d, NB)
            product = tl.dot(t, tl.trans(v), product, input_precision="tf32x3")
        else:
            v = _half_rows(tokens, centre, unit, sample, present, columns, N, d, NB, REFERENCE)
            if REFERENCE:  # gradients, of which nobody knows how large they are
                own_unit = unit_for(tl.max(tl.max(tl.abs(t), 1), 0), TOKEN_BITS)
                product += tl.dot((t * own_unit).to(tl.float16), tl.trans(v)) / own_unit
            else:
                product = tl.dot(t.to(tl.float16), tl.trans(v), product)

    if REFERENCE:
        per_product = 1.0 / length / unit
        per_square = tl.load(weights + slice_index) / length
    else:
        if not PRECISE:
            unit *= _unit_of_targets(target_squares, M, NB)
        per_product = -2.0 * M / length / unit
        per_square = 1.0 / length
    w = product * per_product + square[None, :] * per_square
    # Read once more: gaps would take a tile of registers through the loop, and leave too few.
    p = tl.load(projections + line * N + token, mask=present, other=FAR, volatile=True)
    gap = p[:, None] - p[None, :]
    kernel = decayed(gap * rate)
    c = tl.where(present, 1.0 / tl.maximum(tl.sum(kernel, 1), 1.0), 0.0)
    mean = c * tl.sum(kernel * w, 1)
    factor = per_tau
    if not REFERENCE:
        squared = tl.sum(mean, 0) + tl.load(offset + slice_index)
        size = tl.sum(square, 0) / length
        size += tl.sum(tl.load(target_squares + token, mask=token < M, other=0.0), 0) / M
        distance, inverse = root_of(squared, rounding * size)
        tl.store(root + line, distance)
        tl.store(half_inverse + line, inverse)
        tl.store(ordered + line * N + rank, p, mask=present)
        tl.store(scale + line * N + rank, c, mask=present)
        factor = per_tau * inverse
    if SLOPE:
        moved = kernel * sign_of(gap) * (c[:, None] * (w - mean[:, None]))
        tl.store(slope + line * N + token, (tl.sum(moved, 0) - tl.sum(moved, 1)) * factor, mask=token < N)


@triton.jit
def ranked_pass(
    projections,
    ordered,
    scale,
    mask,
    tokens,
    centre,
    squares,
    largest,
    grad,
    half_inverse,
    out,
    out_offset,
    B,
    L,
    N,
    M,
    d,
    rate,
    each,
    NB: tl.constexpr,
    DB: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MIXED: tl.constexpr,
    REFERENCE: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write sums over the sets of what comes back to targets, ``(parts, L, M, d)``, and to the offset, ``(parts, L)``.

    For a reference: its softly sorted points ``(1, L, M, d)``, over their number (in half precision and in a unit of
    their own, unless ``PRECISE``), and the mean of their squared norms.
    """
    part = tl.program_id(0).to(tl.int64)
    slice_index = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * DB + tl.arange(0, DB)
    row = tl.arange(0, NB)
    first = part * each
    last = tl.minimum(first + each, B)
    unit = 1.0
    top = 1.0
    if not PRECISE:
        unit = unit_for(tl.load(largest), TOKEN_BITS)
        if not REFERENCE:
            found = tl.zeros((NB,), dtype=tl.float32)
            for start in range(first, last, NB):
                at = (start + row.to(tl.int64)) * L + slice_index
                read = start + row < last
                g = tl.load(grad + at, mask=read, other=0.0) * tl.load(half_inverse + at, mask=read, other=0.0)
                found = tl.maximum(found, tl.abs(g))
            top = tl.maximum(tl.max(found, 0), 1e-30)
    # What weights are multiplied by, to be numbers of half precision.
    per_weight = 1.0 / top if PRECISE else WEIGHT_UNIT / top
    acc = tl.zeros((NB, DB), dtype=tl.float32)
    total = 0.0
    rank = row
    for sample in range(first, last):
        line = sample * L + slice_index
        p, present, length = _load_set(projections, mask, line, sample, N, NB, HAS_MASK)
        if REFERENCE:
            gap = p[:, None] - p[None, :]
            rank = tl.sum(_precedes(gap, NB).to(tl.int32), 1)
            kernel = decayed(gap * rate)
            weight = kernel * (per_weight / tl.maximum(tl.sum(kernel, 1), 1.0))[:, None]
            square = tl.load(squares + row, mask=present, other=0.0)
            total += tl.sum(tl.sum(weight * square[None, :], 1), 0) / (per_weight * M)
        else:
            g = tl.load(grad + line) * tl.load(half_inverse + line)
            total += g
            s = tl.load(ordered + line * N + row, mask=row < length, other=0.0)
            c = tl.load(scale + line * N + row, mask=row < length, other=0.0) * (g * per_weight)
            # Tokens that are absent are rows of zeros, whatever their weight.
            weight = decayed((s[:, None] - p[None, :]) * rate) * c[:, None]
            if MIXED:
                # In units of 1/(length · M) of the mass all edges are integers, so overlaps are exact. Ranks behind the
                # last have no weight, targets behind the last are not written.
                from_left = tl.maximum((row * length)[:, None], (row * M)[None, :])
                to_right = tl.minimum((row * length + length)[:, None], (row * M + M)[None, :])
                share = tl.maximum(to_right - from_left, 0).to(tl.float32) / length
                if PRECISE:
                    weight = tl.dot(share, weight, input_precision="tf32x3")
                else:
                    high, low = split(share)
                    half = weight.to(tl.float16)
                    weight = tl.dot(low, half, tl.dot(high, half))
        if PRECISE:
            v = _token_rows(tokens, centre, sample, present, columns, N, d, NB)
            acc = tl.dot(weight, v, acc, input_precision="tf32x3")
        else:
            v = _half_rows(tokens, centre, unit, sample, present, columns, N, d, NB, REFERENCE)
            acc = tl.dot(weight.to(tl.float16), v, acc)
    factor = (1.0 / M if REFERENCE else -2.0) / (per_weight * unit)
    if REFERENCE and not PRECISE:
        factor *= _unit_of_targets(squares, M, NB)
    at = ((part * L + slice_index) * M + rank)[:, None] * d + columns[None, :]
    tl.store(out + at, (acc * factor).to(out.dtype.element_ty), mask=(row < M)[:, None] & (columns < d)[None, :])
    if tl.program_id(2) == 0:
        tl.store(out_offset + part * L + slice_index, total)


@triton.jit
def back_pass(
    projections,
    mask,
    tokens,
    centre,
    targets,
    target_squares,
    weights,
    out,
    B,
    L,
    N,
    M,
    d,
    rate,
    each,
    NB: tl.constexpr,
    DB: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MIXED: tl.constexpr,
    REFERENCE: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Write what comes back to the tokens other than by their projections, ``(parts, B, N, d)``: each part some slices.

    ``weights`` are the gradients of D², ``(B, L)``; for a reference those of the offset, as in :func:`cost_pass`.
    """
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * DB + tl.arange(0, DB)
    token = tl.arange(0, NB)
    unit = 1.0
    if not PRECISE and not REFERENCE:
        unit = _unit_of_targets(target_squares, M, NB)
    acc = tl.zeros((NB, DB), dtype=tl.float32)
    taken = tl.zeros((NB,), dtype=tl.float32)
    for slice_index in range(part * each, tl.minimum(part * each + each, L)):
        line = sample * L + slice_index
        p, present, length = _load_set(projections, mask, line, sample, N, NB, HAS_MASK)
        # Here columns are the tokens that are ranked, rows those that they take from.
        gap = p[:, None] - p[None, :]
        precedes = (gap < 0) | ((gap == 0) & (token[:, None] < token[None, :]))
        rank = tl.sum(precedes.to(tl.int32), 0)
        kernel = decayed(gap * rate)
        kernel = kernel / tl.maximum(tl.sum(kernel, 0), 1.0)[None, :]
        w = tl.load(weights + line)
        per_square = w / length
        per_product = 1.0 / length if REFERENCE else -2.0 * w * M / length
        t = _rows_at(targets, slice_index, rank, present, columns, length, M, d, MIXED)
        if PRECISE:
            acc += per_product * tl.dot(kernel, t, input_precision="tf32x3")
        else:
            if REFERENCE:
                unit = unit_for(tl.max(tl.max(tl.abs(t), 1), 0), TOKEN_BITS)
                t *= unit
            sent = tl.dot((kernel * WEIGHT_UNIT).to(tl.float16), t.to(tl.float16))
            acc += per_product / (WEIGHT_UNIT * unit) * sent
        taken += per_square * tl.sum(kernel, 1)
    exists = _present(mask, sample, N, NB, HAS_MASK)
    acc += 2.0 * taken[:, None] * _token_rows(tokens, centre, sample, exists, columns, N, d, NB)
    at = ((part * B + sample) * N + token)[:, None] * d + columns[None, :]
    tl.store(out + at, acc, mask=(token < N)[:, None] & (columns < d)[None, :])
