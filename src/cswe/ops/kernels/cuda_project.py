# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""From tokens to projections and back, in Triton: what surrounds the relaxed cost, in few launches.

Tokens are read as they are stored and multiplied by tensor cores, yet as exactly as in float32: at small τ the rounding
of projections is what limits the slope. Factors are cut into parts that tensor cores multiply without rounding. What
they do round is the running sum, and always towards zero; so they add up a few columns at a time, and the sums of those
are added in float32. The centre is not subtracted from tokens in half precision, where the difference would not fit,
but its product from theirs, before the largest part is added. For tokens five deviations away this costs a bit or two.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_sizes import cdiv, power_of_two

BEHIND = 3e38
"""Where masked tokens are projected to: behind everything."""

UPWARDS = tl.constexpr(4096.0)
"""Brings what rounding to half precision took from a number up to its size, so that half precision holds that too."""

MULTIPROCESSORS = 132
"""Of a large GPU: with fewer programs than that, tiles are cut smaller."""

ENOUGH_PARTS = 3 * MULTIPROCESSORS
"""Programs that a large GPU runs at a time when it adds up products."""


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
def rounding_products(x, factors):
    """Give ``x · rᵀ`` for x in half precision, and what r rounding to it takes from float32 factors of size ≤ 2."""
    rest = (factors - factors.to(tl.float16).to(tl.float32)) * UPWARDS
    return tl.dot(x, tl.trans(rest.to(tl.float16))) * (1.0 / UPWARDS)


@triton.jit
def high_bits(x):
    """Round float32 to the 11 bits that tensor cores read of it; the rest then has 12, and seldom the last of them."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def products_of_singles(x, factors):
    """Give ``x · factorsᵀ`` in float32. Triton's own tf32x3 cuts where this rounds, and loses three bits by it."""
    x_high, high = high_bits(x), tl.trans(high_bits(factors))
    lesser = tl.dot(x - x_high, high, input_precision="tf32")
    lesser = tl.dot(x_high, tl.trans(factors) - high, lesser, input_precision="tf32")
    return tl.dot(x_high, high, lesser, input_precision="tf32")


@triton.jit
def place_in_samples(place, L, N):
    """Give where tokens lie in a slice of ``(B, L, N)``, counted from the sample that ``place`` begins in."""
    at = (place // N).to(tl.int64) * (L - 1) * N + place
    # Not so between two samples, but what a thread takes at a time is as aligned as samples are, and thus in one of
    # them. Said so that neighbouring threads take neighbouring tokens and not, as in some versions of Triton, slices.
    return tl.max_contiguous(at, 16)


@triton.jit
def project_pass(
    tokens,
    mask,
    centre,
    directions,
    factor,
    projections,
    squares,
    largest,
    count,
    N,
    L,
    d,
    absent,
    ROWS: tl.constexpr,
    LB: tl.constexpr,
    DB: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
):
    """Write projections ``(B, L, N)``, squared norms ``(B, N)`` and the largest number of all centred tokens.

    A factor multiplies the projections, those of masked tokens are ``absent``.
    """
    N, count = N // ALIGNED * ALIGNED, count // ALIGNED * ALIGNED  # tells the compiler what they are multiples of
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    slice_index = tl.program_id(1) * LB + tl.arange(0, LB)
    exists = row < tl.minimum(count - first, ROWS).to(tl.int32)
    present = exists
    if HAS_MASK:
        present = exists & (tl.load(mask + first + row, mask=exists, other=0) != 0)
    acc = tl.zeros((ROWS, LB), dtype=tl.float32)
    # By eights, which one thread has: threads need not exchange them before the end.
    square = tl.zeros((ROWS, DB // 8), dtype=tl.float32)
    top = tl.zeros((ROWS, DB // 8), dtype=tl.float32)
    for start in range(0, d, DB):
        column = start + tl.arange(0, DB)
        inside = tl.full((DB,), True, tl.int1) if EVEN else column < d
        read = present[:, None] & inside[None, :]
        x = tl.load(tokens + first * d + row[:, None] * d + column[None, :], mask=read, other=0.0)
        offset = tl.load(centre + column, mask=inside, other=0.0)
        along = (slice_index < L)[:, None] & inside[None, :]
        u = tl.load(directions + slice_index[:, None] * d + column[None, :], mask=along, other=0.0)
        v = x.to(tl.float32) - offset[None, :]
        eights = tl.reshape(v, (ROWS, DB // 8, 8))
        square += tl.sum(eights * eights, 2)
        top = tl.maximum(top, tl.max(tl.abs(eights), 2))
        if x.dtype == tl.float16:
            lesser = rounding_products(x, u) - tl.sum(u * offset[None, :], 1)[None, :]
            acc += tl.dot(x, tl.trans(u.to(tl.float16)), lesser)
        else:
            acc += products_of_singles(v, u)
    sample = first // N
    at = place_in_samples((first - sample * N).to(tl.int32) + row, L, N)
    to = projections + sample * L * N + at[None, :] + slice_index.to(tl.int64)[:, None] * N
    if HAS_FACTOR:
        acc *= tl.load(factor)
    acc = tl.where(present[None, :], tl.trans(acc), absent)
    tl.store(to, acc, mask=(slice_index < L)[:, None] & exists[None, :])
    if tl.program_id(1) == 0:
        tl.store(squares + first + row, tl.where(present, tl.sum(square, 1), 0.0), mask=exists)
        tl.atomic_max(largest, tl.max(tl.where(present, tl.max(top, 1), 0.0), 0))


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
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Write sums of centred tokens by weights ``(B, L, N)``, each part over ``each`` tokens, ``(parts, L, d)``."""
    N, count = N // ALIGNED * ALIGNED, count // ALIGNED * ALIGNED  # tells the compiler what they are multiples of
    part = tl.program_id(0).to(tl.int64)
    first = part * each
    length = tl.minimum(count - first, each).to(tl.int32)
    k = tl.arange(0, KB)
    slice_index = tl.program_id(1) * LB + tl.arange(0, LB)
    column = tl.program_id(2) * DB + tl.arange(0, DB)
    inside = tl.full((DB,), True, tl.int1) if EVEN else column < d
    offset = tl.load(centre + column, mask=inside, other=0.0)
    sample = first // N
    place = (first - sample * N).to(tl.int32) + k
    of_slice = weights + sample * L * N + slice_index.to(tl.int64)[:, None] * N
    acc = tl.zeros((DB, LB), dtype=tl.float32)
    for start in range(0, length, KB):
        here = first + start
        present = k < length - start
        if HAS_MASK:
            present = present & (tl.load(mask + here + k, mask=present, other=0) != 0)
        read = (slice_index < L)[:, None] & present[None, :]
        weight = tl.load(of_slice + place_in_samples(place + start, L, N)[None, :], mask=read, other=0.0)
        read = present[:, None] & inside[None, :]
        x = tl.load(tokens + here * d + k[:, None] * d + column[None, :], mask=read, other=0.0)
        if x.dtype == tl.float16:
            # Weights may have any size, half precision has not: each slice has a unit, a power of two.
            unit = tl.maximum(tl.max(weight.to(tl.int32, bitcast=True) & 0x7F800000, 1), 0x00800000)
            weight *= (0x7F000000 - unit).to(tl.float32, bitcast=True)[:, None]
            lesser = rounding_products(tl.trans(x), weight) - offset[:, None] * tl.sum(weight, 1)[None, :]
            products = tl.dot(tl.trans(x), tl.trans(weight.to(tl.float16)), lesser)
            acc += products * unit.to(tl.float32, bitcast=True)[None, :]
        else:
            acc += products_of_singles(tl.trans(x.to(tl.float32) - offset[None, :]), weight)
    at = (part * L + slice_index)[:, None] * d + column[None, :]
    tl.store(partial + at, tl.trans(acc), mask=(slice_index < L)[:, None] & inside[None, :])


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
    centre_pass[(cdiv(width, 64),)](reference, result, count, width, RB=128, DB=64, num_warps=8)
    return result


class _Tile(NamedTuple):
    """What one program of :func:`project_pass` takes at a time."""

    rows: int
    slices: int
    columns: int
    warps: int
    registers: int


# Large tiles read less; small ones make more programs, where else most of the GPU would wait for a few.
HALF_TILES = (_Tile(128, 64, 64, 8, 128), _Tile(64, 64, 64, 4, 128), _Tile(64, 16, 64, 4, 128))
SINGLE_TILES = (_Tile(64, 64, 32, 4, 168), _Tile(16, 32, 64, 4, 168))


@lru_cache
def _tile(rows: int, slices: int, dtype: torch.dtype) -> _Tile:
    tiles = HALF_TILES if dtype == torch.float16 else SINGLE_TILES
    enough = (tile for tile in tiles if cdiv(rows, tile.rows) * cdiv(slices, tile.slices) >= MULTIPROCESSORS)
    tile = next(enough, tiles[-1])
    return tile._replace(slices=_slice_tile(slices, tile.slices))


def _slice_tile(slices: int, most: int) -> int:
    return max(16, min(most, power_of_two(slices)))


def _alignment(count: int) -> int:
    return 4 if count % 4 == 0 else 1


def project(
    tokens: Tensor,
    mask: Tensor | None,
    centre: Tensor,
    directions: Tensor,
    factor: Tensor | None = None,
    absent: float = BEHIND,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give projections ``(B, L, N)``, squared norms ``(B, N)`` and the largest number of the centred tokens.

    Projections are multiplied by a factor, if one is given, a tensor with one number. Masked tokens are projected to
    ``absent``, by default behind all others, and have no norm. For tokens in half precision, no number of the
    directions may be larger than 2.
    """
    batch, count, width = tokens.shape
    slices, rows = directions.shape[0], batch * count
    projections = torch.empty((batch, slices, count), dtype=torch.float32, device=tokens.device)
    squares = torch.empty((batch, count), dtype=torch.float32, device=tokens.device)
    largest = torch.zeros((), dtype=torch.float32, device=tokens.device)
    tile = _tile(rows, slices, tokens.dtype)
    project_pass[(cdiv(rows, tile.rows), cdiv(slices, tile.slices))](
        tokens, tokens if mask is None else mask, centre, directions, centre if factor is None else factor,
        projections, squares, largest, rows, count, slices, width, absent,
        ROWS=tile.rows, LB=tile.slices, DB=tile.columns, ALIGNED=_alignment(count),
        EVEN=width % tile.columns == 0, HAS_MASK=mask is not None, HAS_FACTOR=factor is not None,
        num_warps=tile.warps, num_stages=3, maxnreg=tile.registers,
    )  # fmt: skip
    return projections, squares, largest


def slices_gradient(weights: Tensor, tokens: Tensor, mask: Tensor | None, centre: Tensor) -> Tensor:
    """Give the sums of the centred tokens by their weights ``(B, L, N)``, ``(L, d)``."""
    batch, slices, count = weights.shape
    width, rows = tokens.shape[-1], batch * count
    tile, at_a_time = _slice_tile(slices, 64), 64 if tokens.dtype == torch.float16 else 32
    blocks = cdiv(slices, tile), cdiv(width, 64)
    parts = max(1, min(cdiv(rows, at_a_time), ENOUGH_PARTS // (blocks[0] * blocks[1])))
    each = cdiv(cdiv(rows, parts), at_a_time) * at_a_time
    parts = cdiv(rows, each)
    partial = torch.empty((parts, slices, width), dtype=torch.float32, device=tokens.device)
    slices_pass[(parts, *blocks)](
        weights, tokens, tokens if mask is None else mask, centre, partial, rows, count, slices, width, each,
        LB=tile, DB=64, KB=at_a_time, ALIGNED=_alignment(count), EVEN=width % 64 == 0, HAS_MASK=mask is not None,
        num_warps=4, num_stages=3, maxnreg=168,
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
