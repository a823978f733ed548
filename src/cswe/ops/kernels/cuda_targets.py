# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""The gradient with respect to the targets in Triton, on tensor cores.

.. math:: ∂T_r = -2 \sum_i g_{il} c_r (K V_i)_r

One program is one slice and one chunk of ranks, and adds over many samples in registers: each sample's own kernel times
its rows of the chunk, and for eight samples at a time one product with their states. No atomics: the same result in
every run. Gradients need no more than half-precision factors, with float32 sums; ``PRECISE`` splits them all the same.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import decayed, sample_length, split


@triton.jit
def _outside(
    acc,
    points,
    scale,
    grad,
    states,
    states_low,
    masses,
    largest,
    first_sample,
    slice_index,
    start,
    last_sample,
    L,
    N,
    d,
    length,
    columns,
    inside,
    rate,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Add what lies outside the chunk, for up to eight samples: both sides of each are the lines of one tile."""
    ranks = start + tl.arange(0, C)
    line = tl.arange(0, 16)
    is_left = line % 2 == 0
    sample = first_sample.to(tl.int64) + line // 2
    has = (tl.where(is_left, start, length - start - C) > 0) & (sample < last_sample) & (line < 2 * SAMPLES)
    row = sample * L + slice_index
    at = (row * tl.cdiv(N, C) + start // C) * 2 + line % 2
    edge = tl.load(points + row * N + tl.where(is_left, start - 1, start + C), mask=has, other=0.0)
    factor = tl.load(masses + at, mask=has, other=0.0) * tl.load(grad + row, mask=has, other=0.0) / largest
    read = has[None, :] & (ranks < length)[:, None]
    s = tl.load(points + row[None, :] * N + ranks[:, None], mask=read, other=0.0)
    c = tl.load(scale + row[None, :] * N + ranks[:, None], mask=read, other=0.0)
    sent = decayed((s - edge[None, :]) * rate) * c * factor[None, :]
    mask = has[:, None] & inside[None, :]
    state = tl.load(states + at[:, None] * d + columns[None, :], mask=mask, other=0.0)
    high, low = split(sent)
    total = tl.dot(high, state)
    if PRECISE:
        state_low = tl.load(states_low + at[:, None] * d + columns[None, :], mask=mask, other=0.0)
        total = tl.dot(low, state, total)
        total = tl.dot(high, state_low, total)
    return acc + total


@triton.jit
def _inside(
    acc,
    points,
    token,
    scale,
    tokens,
    tokens_low,
    factor,
    row,
    sample,
    start,
    N,
    d,
    length,
    columns,
    inside,
    rate,
    C: tl.constexpr,
    PRECISE: tl.constexpr,
    HAS_LOW: tl.constexpr,
):
    """Add what the chunk's own tokens send, for one sample; ``token`` are their numbers, by rank."""
    ranks = start + tl.arange(0, C)
    present = ranks < length
    at = (token * d)[:, None] + columns[None, :]
    read = present[:, None] & inside[None, :]
    v = tl.load(tokens + sample * N * d + at, mask=read, other=0.0)
    s = tl.load(points + row * N + ranks, mask=present, other=0.0)
    c = tl.load(scale + row * N + ranks, mask=present, other=0.0) * factor
    scaled = s * rate
    kernel = decayed(scaled[:, None] - scaled[None, :]) * c[:, None]
    high, low = split(kernel)
    acc = tl.dot(high, v, acc)
    if PRECISE:
        acc = tl.dot(low, v, acc)
        if HAS_LOW:
            v_low = tl.load(tokens_low + sample * N * d + at, mask=read, other=0.0)
            acc = tl.dot(high, v_low, acc)
    return acc


@triton.jit
def targets_pass(
    points,
    order,
    scale,
    tokens,
    tokens_low,
    grad,
    largest,
    states,
    states_low,
    masses,
    partial,
    B,
    L,
    N,
    d,
    rate,
    each,
    C: tl.constexpr,
    DB: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISE: tl.constexpr,
    HAS_LOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write partial sums of ``Σ_i g_il c_r (K V_i)_r``, ``(parts, L, N, d)``: each part ``each`` samples."""
    index = tl.program_id(0)
    piece = index % PIECES
    index = index // PIECES
    # Slices run side by side on the same samples, whose tokens then stay in the cache.
    slice_index = (index % L).to(tl.int64)
    index = index // L
    chunks = tl.cdiv(N, C)
    start = (index % chunks) * C
    part = index // chunks
    columns = piece * DB + tl.arange(0, DB)
    inside = columns < d
    top = tl.maximum(tl.load(largest + slice_index), 1e-30)
    acc = tl.zeros((C, DB), dtype=tl.float32)
    first = part * each
    last = tl.minimum(first + each, B)
    for first_sample in range(first, last, 8):
        acc = _outside(
            acc, points, scale, grad, states, states_low, masses, top, slice_index * 0 + first_sample,
            slice_index, start, last, L, N, d, N, columns, inside, rate, C, PRECISE, 8,
        )  # fmt: skip
    ranks = start + tl.arange(0, C)
    order += slice_index * N
    token = tl.load(order + first.to(tl.int64) * L * N + ranks, mask=ranks < N, other=0).to(tl.int32)
    for index in tl.range(first, last, num_stages=STAGES):
        sample = slice_index * 0 + index
        row = sample * L + slice_index
        # Where the next sample's tokens lie is asked for a turn ahead: tokens cannot be fetched before it is known.
        follows = ranks < tl.where(sample + 1 < last, N, 0)
        following = tl.load(order + (sample + 1) * L * N + ranks, mask=follows, other=0).to(tl.int32)
        factor = tl.load(grad + row) / top
        acc = _inside(
            acc, points, token, scale, tokens, tokens_low, factor, row, sample, start, N, d, N,
            columns, inside, rate, C, PRECISE, HAS_LOW,
        )  # fmt: skip
        token = following
    at = ((slice_index * 0 + part) * L + slice_index) * N + ranks
    write = (ranks < N)[:, None] & inside[None, :]
    tl.store(partial + at[:, None] * d + columns[None, :], acc * top, mask=write)


@triton.jit
def ragged_targets_pass(
    points,
    order,
    scale,
    tokens,
    tokens_low,
    lengths,
    grad,
    largest,
    states,
    states_low,
    masses,
    partial,
    B,
    L,
    N,
    M,
    d,
    rate,
    each,
    C: tl.constexpr,
    DB: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISE: tl.constexpr,
    HAS_LOW: tl.constexpr,
):
    """Add to partial sums over the targets, ``(parts, L, M, d)``, zero at the start: each part ``each`` samples.

    A sample's ranks pass their gradient on to the targets they overlap: a small product with the overlaps.
    """
    index = tl.program_id(0)
    piece = index % PIECES
    index = index // PIECES
    slice_index = (index % L).to(tl.int64)
    part = index // L
    columns = piece * DB + tl.arange(0, DB)
    inside = columns < d
    top = tl.maximum(tl.load(largest + slice_index), 1e-30)
    out = partial + ((slice_index * 0 + part) * L + slice_index) * M * d
    for index in range(part * each, tl.minimum(part * each + each, B)):
        sample = slice_index * 0 + index
        row = sample * L + slice_index
        length = sample_length(lengths, sample, B, N, True)
        factor = tl.load(grad + row) / top
        for start in range(0, length, C):
            acc = tl.zeros((C, DB), dtype=tl.float32)
            acc = _outside(
                acc, points, scale, grad, states, states_low, masses, top, sample, slice_index, start,
                B, L, N, d, length, columns, inside, rate, C, PRECISE, 1,
            )  # fmt: skip
            ranks = start + tl.arange(0, C)
            token = tl.load(order + row * N + ranks, mask=ranks < length, other=0).to(tl.int32)
            acc = _inside(
                acc, points, token, scale, tokens, tokens_low, factor, row, sample, start, N, d, length,
                columns, inside, rate, C, PRECISE, HAS_LOW,
            )  # fmt: skip
            low = ranks.to(tl.int64) * M
            begin = (tl.min(low, 0) // length).to(tl.int32)
            end = tl.minimum((tl.max(low, 0) + M - 1) // length, M - 1).to(tl.int32)
            for window in range(begin, end + 1, C):
                m = (window + tl.arange(0, C)).to(tl.int64)
                overlap = tl.minimum((low + M)[None, :], ((m + 1) * length)[:, None]) - tl.maximum(
                    low[None, :], (m * length)[:, None]
                )
                share = tl.where((ranks < length)[None, :] & (overlap > 0), overlap.to(tl.float32), 0.0) / length
                passed = tl.dot(share, acc * top, input_precision="tf32x3")
                at = out + m[:, None] * d + columns[None, :]
                write = (m < M)[:, None] & inside[None, :]
                tl.store(at, tl.load(at, mask=write, other=0.0) + passed, mask=write)
                # The next window may hold the same target in another thread.
                tl.debug_barrier()


@triton.jit
def collect_targets(
    partial,
    units,
    result,
    L,
    N,
    M,
    d,
    parts,
    terms,
    ROWS: tl.constexpr,
    DB: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Sum the partial sums, pass them from ranks on to targets, and undo the scaling."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slice_index = tl.program_id(1).to(tl.int64)
    rows = M if RAGGED else N
    factor = -2.0 / tl.load(units + 2)
    low = m.to(tl.int64) * N
    first = low // M
    for start in range(0, d, DB):
        column = start + tl.arange(0, DB)
        inside = column < d
        total = tl.zeros((ROWS, DB), dtype=tl.float32)
        block = slice_index
        for _ in range(parts):
            here = partial + block * rows * d
            block += L
            if RAGGED:
                read = (m < M)[:, None] & inside[None, :]
                total += tl.load(here + m[:, None] * d + column[None, :], mask=read, other=0.0)
            else:
                for term in range(terms):
                    r = first + term
                    overlap = tl.minimum(low + N, (r + 1) * M) - tl.maximum(low, r * M)
                    share = tl.where((m < M) & (overlap > 0), overlap.to(tl.float32), 0.0) / N
                    read = (share > 0)[:, None] & inside[None, :]
                    total += share[:, None] * tl.load(here + r[:, None] * d + column[None, :], mask=read, other=0.0)
        total *= factor
        write = (m < M)[:, None] & inside[None, :]
        tl.store(result + (slice_index * M + m)[:, None] * d + column[None, :], total, mask=write)
