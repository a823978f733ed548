# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""What lies outside each chunk of ranks, for many samples or slices at a time: one product on tensor cores, in Triton.

A state is a sum of rows by weights, and rows are shared: all slices weigh the tokens of one sample, and all samples the
targets of one slice. So several slices (or samples), the *partners*, are the lines of one tile of weights, and the rows
are read once for all of them, in their own order, without a gather. Which side of a chunk a row lies on is told by its
projection, and by its number where projections tie, exactly as the stable sort would.

The states are those of :mod:`cswe.ops.kernels.cuda_states`, which takes over where samples are long.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import WEIGHT_UNIT, decayed


@triton.jit
def _tile(rows, k, N, columns, d, EVEN: tl.constexpr):
    """Load rows; those behind the last have no weight, so that any other will do for them."""
    at = rows + (tl.minimum(k, N - 1) * d)[:, None] + columns[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=(columns < d)[None, :], other=0.0)


@triton.jit
def shared_states_pass(
    values,
    points,
    order,
    scalars,
    rows,
    states,
    masses,
    sums,
    partners,
    own_stride,
    partner_stride,
    N,
    d,
    rate,
    C: tl.constexpr,
    P: tl.constexpr,
    LINES: tl.constexpr,
    KB: tl.constexpr,
    DB: tl.constexpr,
    MORE: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the states of tokens (averages, with their masses) or of ``c T`` (sums) around every chunk.

    Number ``o`` owns ``rows[o]``, ``(N, d)``; it meets partner p in line ``o · own_stride + p · partner_stride`` of
    ``values`` (projections in the order of the rows), ``points`` (the same, sorted) and ``order``. ``scalars`` are
    squared norms of the rows, or c by line. A program has DB + MORE columns, two powers of two.
    """
    groups = tl.cdiv(partners, P)
    owner = (tl.program_id(0) // groups).to(tl.int64)
    partner = tl.program_id(0) % groups * P + tl.arange(0, P)
    exists = partner < partners
    at = owner * own_stride + partner.to(tl.int64) * partner_stride
    columns = tl.program_id(1) * (DB + MORE) + tl.arange(0, DB)
    rows += owner * N * d

    # Line j is what lies left of chunk j, line LINES/2 + j what lies right of it, seen from the chunk's neighbour.
    # There left and right are exchanged, by turning signs: what counts lies below the edge, at it, or before it at it.
    line = tl.arange(0, LINES)
    chunk = line % (LINES // 2)
    bound = tl.where(line < LINES // 2, chunk * C, chunk * C + C)
    valid = exists[:, None] & ((bound > 0) & (bound < N))[None, :]
    rank = tl.where(line < LINES // 2, bound - 1, bound)
    side = tl.where(line < LINES // 2, 1.0, -1.0)
    turn = tl.where(line < LINES // 2, 0, -1)
    edge = tl.load(points + (at * N)[:, None] + rank[None, :], mask=valid, other=0.0) * side[None, :]
    edge_row = tl.broadcast_to(rank[None, :], (P, LINES))
    if TOKENS:
        edge = tl.where(valid, edge, -1e38)  # nothing lies below it
        edge_row = tl.load(order + (at * N)[:, None] + rank[None, :], mask=valid, other=0).to(tl.int32)
    edge_row = tl.where(valid, edge_row ^ turn[None, :], -(1 << 30))

    acc = tl.zeros((P * LINES, DB), dtype=tl.float32)
    if MORE:
        more_columns = tl.program_id(1) * (DB + MORE) + DB + tl.arange(0, MORE)
        more = tl.zeros((P * LINES, MORE), dtype=tl.float32)
    total = tl.zeros((P, LINES, KB), dtype=tl.float32)
    beside = tl.zeros((P, LINES, KB), dtype=tl.float32)
    for start in tl.range(0, N, KB, num_stages=STAGES):
        k = start + tl.arange(0, KB)
        present = k < N
        x = _tile(rows, k, N, columns, d, EVEN)
        if MORE:
            more_x = _tile(rows, k, N, more_columns, d, EVEN)
        read = exists[:, None] & present[None, :]
        # What is not a number counts nowhere.
        value = tl.load(values + (at * N)[:, None] + k[None, :], mask=read, other=float("nan"))
        if TOKENS:
            scalar = tl.load(scalars + owner * N + k, mask=present, other=0.0)[None, None, :]
        else:
            scalar = tl.load(scalars + (at * N)[:, None] + k[None, :], mask=read, other=0.0)[:, None, :]
        gap = value[:, None, :] * side[None, :, None] - edge[:, :, None]
        counts = (gap <= 0) & ((k[None, :] ^ turn[:, None])[None, :, :] <= edge_row[:, :, None])
        if TOKENS:
            counts = counts | (gap < 0)
        weight = tl.where(counts, decayed(gap * rate), 0.0)
        total += weight
        beside += weight * scalar
        if not TOKENS:
            weight *= scalar * WEIGHT_UNIT
        half = tl.reshape(weight, (P * LINES, KB)).to(tl.float16)
        acc = tl.dot(half, x, acc)
        if MORE:
            more = tl.dot(half, more_x, more)

    mass = tl.sum(total, 2)
    state = (at * tl.cdiv(N, C))[:, None] * 2 + (chunk * 2 + tl.where(line < LINES // 2, 0, 1))[None, :]
    flat = tl.reshape(state, (P * LINES,))
    write = tl.reshape(valid.to(tl.int32), (P * LINES,)) != 0
    per_mass = tl.reshape(1 / tl.maximum(mass, 1e-30), (P * LINES,))
    if TOKENS:
        acc = acc * per_mass[:, None]
    tl.store(
        states + flat[:, None] * d + columns[None, :], acc.to(tl.float16), mask=write[:, None] & (columns < d)[None, :]
    )
    if MORE:
        if TOKENS:
            more = more * per_mass[:, None]
        tl.store(
            states + flat[:, None] * d + more_columns[None, :], more.to(tl.float16),
            mask=write[:, None] & (more_columns < d)[None, :],
        )  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(masses + state, mass, mask=valid)
        tl.store(sums + state, tl.sum(beside, 2), mask=valid)
