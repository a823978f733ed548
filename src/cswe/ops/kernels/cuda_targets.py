# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""The gradient with respect to the targets in Triton, on tensor cores.

.. math:: ∂T_r = -2 \sum_i g_{il} c_r (K V_i)_r

One program is one slice and one chunk of ranks, and adds over many samples in registers: the samples' own kernels, some
of them side by side, times their rows of the chunk, and for eight samples at a time one product with their states. No
atomics: the same result in every run. Gradients need no more than half-precision factors, with float32 sums;
``PRECISE`` splits them all the same.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import FAR, decayed, sample_length, split


@triton.jit
def _outside_weights(
    points,
    scale,
    grad,
    masses,
    largest,
    first_sample,
    slice_index,
    start,
    last_sample,
    L,
    N,
    length,
    rate,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Give what ranks of a chunk take from the states of up to eight samples, both sides of each a line; and where.

    C: as many ranks as are looked at, all that the chunk has.
    """
    ranks = start + tl.arange(0, C)
    line = tl.arange(0, 16)
    is_left = line % 2 == 0
    sample = first_sample.to(tl.int64) + line // 2
    has = (tl.where(is_left, start, length - start - C) > 0) & (sample < last_sample) & (line < 2 * SAMPLES)
    row = sample * L + slice_index
    at = (row * tl.cdiv(N, CHUNK) + start // CHUNK) * 2 + line % 2
    edge = tl.load(points + row * N + tl.where(is_left, start - 1, start + C), mask=has, other=0.0)
    factor = tl.load(masses + at, mask=has, other=0.0) * tl.load(grad + row, mask=has, other=0.0) / largest
    read = has[None, :] & (ranks < length)[:, None]
    s = tl.load(points + row[None, :] * N + ranks[:, None], mask=read, other=0.0)
    c = tl.load(scale + row[None, :] * N + ranks[:, None], mask=read, other=0.0)
    return decayed((s - edge[None, :]) * rate) * c * factor[None, :], at, has


@triton.jit
def _outside(acc, sent, at, has, states, states_low, columns, d, PRECISE: tl.constexpr):
    """Add what lies outside the chunk, some columns of it."""
    mask = has[:, None] & (columns < d)[None, :]
    state = tl.load(states + at[:, None] * d + columns[None, :], mask=mask, other=0.0)
    high, low = split(sent)
    total = tl.dot(high, state)
    if PRECISE:
        state_low = tl.load(states_low + at[:, None] * d + columns[None, :], mask=mask, other=0.0)
        total = tl.dot(low, state, total)
        total = tl.dot(high, state_low, total)
    return acc + total


@triton.jit
def _inside_weights(
    points,
    scale,
    grad,
    largest,
    sample,
    last_sample,
    slice_index,
    ranks,
    present,
    L,
    N,
    rate,
    C: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Give what ranks of a chunk take from each other's tokens, ``(C, SAMPLES · C)``."""
    row = sample.to(tl.int64) * L + slice_index
    factor = tl.load(grad + row, mask=sample < last_sample, other=0.0) / largest
    read = present[:, None] & (sample < last_sample)[None, :]
    at = row[None, :] * N + ranks[:, None]
    taking = tl.load(points + at, mask=read, other=0.0) * rate
    c = tl.load(scale + at, mask=read, other=0.0) * factor[None, :]
    at = row[:, None] * N + ranks[None, :]
    # What is absent lies far away from everything.
    giving = tl.load(points + at, mask=(sample < last_sample)[:, None] & present[None, :], other=FAR) * rate
    kernel = decayed(taking[:, :, None] - giving[None, :, :]) * c[:, :, None]
    return tl.reshape(kernel, (C, SAMPLES * C))


@triton.jit
def _inside(
    acc,
    kernel,
    tokens,
    tokens_low,
    token,
    present,
    columns,
    d,
    EVEN: tl.constexpr,
    PRECISE: tl.constexpr,
    HAS_LOW: tl.constexpr,
):
    """Add what the chunk's own tokens send, some columns of it; ``token`` are their numbers, by rank."""
    at = (token * d)[:, None] + columns[None, :]
    read = present[:, None] & ((columns < d) | EVEN)[None, :]
    v = tl.load(tokens + at, mask=read, other=0.0)
    high, low = split(kernel)
    acc = tl.dot(high, v, acc)
    if PRECISE:
        acc = tl.dot(low, v, acc)
        if HAS_LOW:
            v_low = tl.load(tokens_low + at, mask=read, other=0.0)
            acc = tl.dot(high, v_low, acc)
    return acc


@triton.jit
def _targets_of_chunk(
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
    piece,
    part,
    slice_index,
    start,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    DB: tl.constexpr,
    MORE: tl.constexpr,
    EVEN: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISE: tl.constexpr,
    HAS_LOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Do what :func:`targets_pass` does for up to C ranks from a start: a chunk, or the rest that the last one has."""
    columns = piece * (DB + MORE) + tl.arange(0, DB)
    top = tl.maximum(tl.load(largest + slice_index), 1e-30)
    acc = tl.zeros((C, DB), dtype=tl.float32)
    if MORE:
        more_columns = piece * (DB + MORE) + DB + tl.arange(0, MORE)
        more = tl.zeros((C, MORE), dtype=tl.float32)
    first = part * each
    last = tl.minimum(first + each, B)
    for first_sample in range(first, last, 8):
        sent, at, has = _outside_weights(
            points, scale, grad, masses, top, slice_index * 0 + first_sample, slice_index, start, last, L, N, N,
            rate, C, CHUNK, 8,
        )  # fmt: skip
        acc = _outside(acc, sent, at, has, states, states_low, columns, d, PRECISE)
        if MORE:
            more = _outside(more, sent, at, has, states, states_low, more_columns, d, PRECISE)
    # A turn takes some samples at once, and line k is a rank of one of them: what is asked for rank by rank (where
    # tokens lie, their projections) costs as many instructions for four samples as for one.
    line = tl.arange(0, TOGETHER * C)
    line_rank = start + line % C
    ranks = start + tl.arange(0, C)
    present = ranks < N
    order += slice_index * N
    own = line // C
    left = tl.where(line_rank < N, last - own, 0)  # the first sample of a turn must lie below it
    at = (first + own).to(tl.int64) * L * N + line_rank
    token = tl.load(order + at, mask=first < left, other=0).to(tl.int32)
    for index in tl.range(first, last, TOGETHER, num_stages=STAGES):
        # Where the next samples' tokens lie is asked for a turn ahead: tokens cannot be fetched before it is known.
        at = (index + TOGETHER + own).to(tl.int64) * L * N + line_rank
        following = tl.load(order + at, mask=index + TOGETHER < left, other=0).to(tl.int32)
        kernel = _inside_weights(
            points, scale, grad, top, index + tl.arange(0, TOGETHER), last, slice_index, ranks, present, L, N, rate,
            C, TOGETHER,
        )  # fmt: skip
        skipped = (slice_index * 0 + index) * N * d
        row = token + own * N
        acc = _inside(
            acc, kernel, tokens + skipped, tokens_low + skipped, row, index < left, columns, d, EVEN, PRECISE, HAS_LOW
        )
        if MORE:
            more = _inside(
                more, kernel, tokens + skipped, tokens_low + skipped, row, index < left, more_columns, d, EVEN, PRECISE,
                HAS_LOW,
            )  # fmt: skip
        token = following
    at = (((slice_index * 0 + part) * L + slice_index) * N + ranks)[:, None] * d
    tl.store(partial + at + columns[None, :], acc * top, mask=present[:, None] & (columns < d)[None, :])
    if MORE:
        tl.store(partial + at + more_columns[None, :], more * top, mask=present[:, None] & (more_columns < d)[None, :])


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
    MORE: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISE: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write partial sums of ``Σ_i g_il c_r (K V_i)_r``, ``(parts, L, N, d)``: each part ``each`` samples.

    A piece has DB + MORE columns: widths are rarely a power of two, and two of them fit better (192 is 128 + 64).
    """
    index = tl.program_id(0)
    piece = index % PIECES
    index = index // PIECES
    # Slices run side by side on the same samples, whose tokens then stay in the cache.
    slice_index = (index % L).to(tl.int64)
    index = index // L
    chunks = tl.cdiv(N, C)
    start = (index % chunks) * C
    part = index // chunks
    if HALVES & (start + C // 2 >= N):
        # Half the ranks of twice the samples are as large a tile.
        _targets_of_chunk(
            points, order, scale, tokens, tokens_low, grad, largest, states, states_low, masses, partial, B, L, N,
            d, rate, each, piece, part, slice_index, start, C // 2, C, DB, MORE, EVEN, 2 * TOGETHER, PRECISE,
            HAS_LOW, STAGES,
        )  # fmt: skip
    else:
        _targets_of_chunk(
            points, order, scale, tokens, tokens_low, grad, largest, states, states_low, masses, partial, B, L, N,
            d, rate, each, piece, part, slice_index, start, C, C, DB, MORE, EVEN, TOGETHER, PRECISE, HAS_LOW, STAGES,
        )  # fmt: skip


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
        for start in range(0, length, C):
            acc = tl.zeros((C, DB), dtype=tl.float32)
            sent, at, has = _outside_weights(
                points, scale, grad, masses, top, sample, slice_index, start, B, L, N, length, rate, C, C, 1
            )
            acc = _outside(acc, sent, at, has, states, states_low, columns, d, PRECISE)
            ranks = start + tl.arange(0, C)
            present = ranks < length
            token = tl.load(order + row * N + ranks, mask=present, other=0).to(tl.int32)
            kernel = _inside_weights(
                points, scale, grad, top, index + tl.arange(0, 1), B, slice_index, ranks, present, L, N, rate, C, 1
            )
            skipped = sample * N * d
            acc = _inside(
                acc, kernel, tokens + skipped, tokens_low + skipped, token, present, columns, d, False, PRECISE, HAS_LOW
            )
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
                place = out + m[:, None] * d + columns[None, :]
                write = (m < M)[:, None] & inside[None, :]
                tl.store(place, tl.load(place, mask=write, other=0.0) + passed, mask=write)
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
