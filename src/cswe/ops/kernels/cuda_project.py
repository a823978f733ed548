# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""From tokens to projections and back, in Triton: what surrounds the relaxed cost, in few launches.

Tokens are read as they are stored, centred on the way, and multiplied in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_sizes import cdiv, power_of_two

BEHIND = tl.constexpr(3e38)
"""Where masked tokens are projected to: behind everything."""

ENOUGH_PARTS = 1024
"""Programs that keep a large GPU busy with sums of products."""


@triton.jit
def centre_pass(reference, centre, M, d, RB: tl.constexpr, DB: tl.constexpr):
    """Write the mean of the reference, rounded to steps of 2⁻⁷ of its size; see :func:`cswe.ops.measure.centre_of`."""
    column = tl.program_id(0) * DB + tl.arange(0, DB)
    total = tl.zeros((RB, DB), dtype=tl.float32)
    size = tl.zeros((RB, DB), dtype=tl.float32)
    for start in range(0, M, RB):
        row = start + tl.arange(0, RB)
        read = (row < M)[:, None] & (column < d)[None, :]
        values = tl.load(reference + row[:, None] * d + column[None, :], mask=read, other=0.0)
        total += values
        size = tl.maximum(size, tl.abs(values))
    top = tl.max(tl.max(size, 1), 0)
    step = tl.exp2(tl.floor(tl.log2(tl.maximum(top, 1e-30))) - 7.0)
    tl.store(centre + column, tl.floor(tl.sum(total, 0) / M / step + 0.5) * step, mask=column < d)


@triton.jit
def project_pass(
    tokens,
    mask,
    centre,
    directions,
    projections,
    squares,
    largest,
    count,
    N,
    L,
    d,
    ROWS: tl.constexpr,
    LB: tl.constexpr,
    DB: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Write projections ``(B, L, N)``, squared norms ``(B, N)`` and the largest number of all centred tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slice_index = tl.program_id(1) * LB + tl.arange(0, LB)
    exists = row < count
    present = exists
    if HAS_MASK:
        present = exists & (tl.load(mask + row, mask=exists, other=0) != 0)
    acc = tl.zeros((ROWS, LB), dtype=tl.float32)
    square = tl.zeros((ROWS,), dtype=tl.float32)
    top = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, d, DB):
        column = start + tl.arange(0, DB)
        inside = column < d
        read = present[:, None] & inside[None, :]
        v = tl.load(tokens + row[:, None] * d + column[None, :], mask=read, other=0.0).to(tl.float32)
        v = tl.where(read, v - tl.load(centre + column, mask=inside, other=0.0)[None, :], 0.0)
        along = inside[:, None] & (slice_index < L)[None, :]
        u = tl.load(directions + slice_index[None, :] * d + column[:, None], mask=along, other=0.0)
        # Not tensor cores: at small τ the rounding of projections is what limits the slope.
        acc = tl.dot(v, u, acc, input_precision="ieee")
        square += tl.sum(v * v, 1)
        top = tl.maximum(top, tl.max(tl.abs(v), 1))
    at = (row // N * L)[:, None] * N + slice_index[None, :].to(tl.int64) * N + (row % N)[:, None]
    acc = tl.where(present[:, None], acc, BEHIND)
    tl.store(projections + at, acc, mask=exists[:, None] & (slice_index < L)[None, :])
    if tl.program_id(1) == 0:
        tl.store(squares + row, square, mask=exists)
        tl.atomic_max(largest, tl.max(top, 0))


@triton.jit
def slices_pass(
    weights,
    tokens,
    mask,
    centre,
    partial,
    count,
    N,
    L,
    d,
    each,
    LB: tl.constexpr,
    DB: tl.constexpr,
    KB: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Write sums of centred tokens by weights ``(B, L, N)``, each part over ``each`` tokens, ``(parts, L, d)``."""
    part = tl.program_id(0).to(tl.int64)
    slice_index = tl.program_id(1) * LB + tl.arange(0, LB)
    column = tl.program_id(2) * DB + tl.arange(0, DB)
    inside = column < d
    offset = tl.load(centre + column, mask=inside, other=0.0)
    acc = tl.zeros((LB, DB), dtype=tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, count), KB):
        k = start + tl.arange(0, KB).to(tl.int64)
        present = (k < count) & (k < part * each + each)
        if HAS_MASK:
            present = present & (tl.load(mask + k, mask=present, other=0) != 0)
        read = (slice_index < L)[:, None] & present[None, :]
        at = ((k // N) * L)[None, :] * N + slice_index[:, None].to(tl.int64) * N + (k % N)[None, :]
        weight = tl.load(weights + at, mask=read, other=0.0)
        read = present[:, None] & inside[None, :]
        v = tl.load(tokens + k[:, None] * d + column[None, :], mask=read, other=0.0).to(tl.float32)
        v = tl.where(read, v - offset[None, :], 0.0)
        acc = tl.dot(weight, v, acc, input_precision="tf32x3")
    at = (part * L + slice_index)[:, None] * d + column[None, :]
    tl.store(partial + at, acc, mask=(slice_index < L)[:, None] & inside[None, :])


@triton.jit
def root_of(squared, least):
    """Give D and 1/2D from D²; both 0 where it is no more than ``least``. Not a number stays what it is."""
    distance = tl.sqrt(tl.where(squared <= least, 0.0, squared))
    return distance, tl.where(squared > least, 0.5 / distance, 0.0)


@triton.jit
def root_pass(
    value,
    offset,
    squares,
    reference_size,
    lengths,
    root,
    half_inverse,
    L,
    N,
    rounding,
    LB: tl.constexpr,
    NB: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Write ``D = √(value + offset)`` and ``1 / 2D``, ``(B, L)``; both 0 where D² is rounding of its terms' size."""
    sample = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sample).to(tl.int32) if RAGGED else N
    total = tl.zeros((NB,), dtype=tl.float32)
    for start in range(0, N, NB):
        at = start + tl.arange(0, NB)
        total += tl.load(squares + sample * N + at, mask=at < N, other=0.0)
    size = tl.sum(total, 0) / length + tl.load(reference_size)
    for start in range(0, L, LB):
        at = start + tl.arange(0, LB)
        inside = at < L
        squared = tl.load(value + sample * L + at, mask=inside, other=0.0) + tl.load(
            offset + at, mask=inside, other=0.0
        )
        distance, inverse = root_of(squared, rounding * size)
        tl.store(root + sample * L + at, distance, mask=inside)
        tl.store(half_inverse + sample * L + at, inverse, mask=inside)


def centre_of(reference: Tensor) -> Tensor:
    """Give one vector to subtract from tokens and reference."""
    count, width = reference.shape
    result = torch.empty(width, dtype=torch.float32, device=reference.device)
    centre_pass[(cdiv(width, 64),)](reference, result, count, width, RB=16, DB=64, num_warps=1)
    return result


def _slice_tile(slices: int) -> int:
    return max(16, min(64, power_of_two(slices)))


def project(tokens: Tensor, mask: Tensor | None, centre: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give projections ``(B, L, N)``, squared norms ``(B, N)`` and the largest number of the centred tokens.

    Masked tokens are projected behind all others and have no norm.
    """
    batch, count, width = tokens.shape
    slices, rows = directions.shape[0], batch * count
    projections = torch.empty((batch, slices, count), dtype=torch.float32, device=tokens.device)
    squares = torch.empty((batch, count), dtype=torch.float32, device=tokens.device)
    largest = torch.zeros((), dtype=torch.float32, device=tokens.device)
    tile = _slice_tile(slices)
    project_pass[(cdiv(rows, 64), cdiv(slices, tile))](
        tokens, tokens if mask is None else mask, centre, directions, projections, squares, largest,
        rows, count, slices, width, ROWS=64, LB=tile, DB=32, HAS_MASK=mask is not None, num_warps=4,
    )  # fmt: skip
    return projections, squares, largest


def slices_gradient(weights: Tensor, tokens: Tensor, mask: Tensor | None, centre: Tensor) -> Tensor:
    """Give the sums of the centred tokens by their weights ``(B, L, N)``, ``(L, d)``."""
    batch, slices, count = weights.shape
    width, rows = tokens.shape[-1], batch * count
    tile = _slice_tile(slices)
    blocks = cdiv(slices, tile), cdiv(width, 64)
    parts = max(1, min(cdiv(rows, 128), ENOUGH_PARTS // (blocks[0] * blocks[1])))
    each = cdiv(cdiv(rows, parts), 32) * 32
    parts = cdiv(rows, each)
    partial = torch.empty((parts, slices, width), dtype=torch.float32, device=tokens.device)
    slices_pass[(parts, *blocks)](
        weights, tokens, tokens if mask is None else mask, centre, partial, rows, count, slices, width, each,
        LB=tile, DB=64, KB=32, HAS_MASK=mask is not None, num_warps=4,
    )  # fmt: skip
    return partial.sum(0)


def root(
    value: Tensor, offset: Tensor, squares: Tensor, reference_size: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Give D and 1/2D, ``(B, L)``, from the part of D² that depends on the sample and the part that does not."""
    batch, slices = value.shape
    count = squares.shape[1]
    distance, half_inverse = torch.empty_like(value), torch.empty_like(value)
    root_pass[(batch,)](
        value, offset, squares, reference_size, offset if lengths is None else lengths, distance, half_inverse,
        slices, count, 4 * torch.finfo(torch.float32).eps, LB=64, NB=256, RAGGED=lengths is not None, num_warps=1,
    )  # fmt: skip
    return distance, half_inverse
