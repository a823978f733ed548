# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Tokens and targets in the half-precision form that the tensor-core passes read, in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_rows import mixed_targets, split, unit_for
from cswe.ops.kernels.cuda_sizes import cdiv
from cswe.ops.kernels.problem import Problem

TARGET_BITS = tl.constexpr(4.0)
"""Targets are scaled to 2⁴ at most: sums of them by weights that add up to about 1, times 1024, must fit."""

TOKEN_BITS = tl.constexpr(12.0)
"""Tokens, where they are scaled, to 2¹² at most."""


class Halves(NamedTuple):
    """What the passes read instead of tokens and targets."""

    tokens: Tensor
    """Tokens ``(B, N, d)`` in half precision, centred and scaled."""
    tokens_low: Tensor | None
    """What rounding left over, or ``None``: one part is enough."""
    high: Tensor
    """Rows T ``(L, N, d)``, as averages and scaled; empty where lengths differ."""
    low: Tensor
    """What rounding left over."""
    targets: Tensor
    """Targets ``(L, M, d)`` in float32, scaled where lengths differ."""
    units: Tensor
    """What undoes both scalings, that of the targets, and that of the tokens."""

    def samples(self, start: int, stop: int) -> "Halves":
        """Restrict to some of the samples."""
        if start == 0 and stop >= self.tokens.shape[0]:
            return self
        low = self.tokens_low
        return self._replace(tokens=self.tokens[start:stop], tokens_low=None if low is None else low[start:stop])


@triton.jit
def _units(largest_token, largest_target, centre, units, d, DB: tl.constexpr):
    largest = 0.0
    for start in range(0, d, DB):
        at = start + tl.arange(0, DB)
        part = tl.load(centre + at, mask=at < d, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 0))
    bound = tl.load(largest_token).to(tl.float32) + largest
    per_token = unit_for(bound, TOKEN_BITS)
    bound = tl.load(largest_target).to(tl.float32)
    per_target = unit_for(bound, TARGET_BITS)
    tl.store(units, 1 / (per_target * per_token))
    tl.store(units + 1, per_target)
    tl.store(units + 2, per_token)


@triton.jit
def _split_tokens(
    tokens,
    centre,
    scaling,
    high,
    low,
    count,
    d,
    ROWS: tl.constexpr,
    DB: tl.constexpr,
    HAS_LOW: tl.constexpr,
    BY_LARGEST: tl.constexpr,
):
    """Write centred tokens in one or two parts; ``scaling`` is their unit, or the largest number, which tells it."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    unit = tl.load(scaling)
    if BY_LARGEST:
        unit = unit_for(unit, TOKEN_BITS)
    for start in range(0, d, DB):
        column = start + tl.arange(0, DB)
        read = (row < count)[:, None] & (column < d)[None, :]
        at = row[:, None] * d + column[None, :]
        value = tl.load(tokens + at, mask=read, other=0.0).to(tl.float32)
        value -= tl.load(centre + column, mask=column < d, other=0.0)[None, :]
        first, second = split(value * unit)
        tl.store(high + at, first, mask=read)
        if HAS_LOW:
            tl.store(low + at, second, mask=read)


@triton.jit
def _split_targets(
    targets,
    units,
    high,
    low,
    scaled,
    N,
    M,
    d,
    ROWS: tl.constexpr,
    DB: tl.constexpr,
    MIXED: tl.constexpr,
):
    rank = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slice_index = tl.program_id(1).to(tl.int64)
    unit = tl.load(units + 1)
    count = M if MIXED else N
    for start in range(0, d, DB):
        column = start + tl.arange(0, DB)
        inside = column < d
        write = (rank < count)[:, None] & inside[None, :]
        at = (slice_index * count + rank)[:, None] * d + column[None, :]
        if MIXED:
            tl.store(scaled + at, unit * tl.load(targets + at, mask=write, other=0.0), mask=write)
        else:
            rows = mixed_targets(targets + slice_index * M * d, rank, rank < N, column, inside, N, M, d)
            first, second = split(rows * unit)
            tl.store(high + at, first, mask=write)
            tl.store(low + at, second, mask=write)


def halves(
    problem: Problem,
    precise: bool,
    with_tokens: bool = True,
    with_targets: bool = True,
    largest_token: Tensor | None = None,
) -> Halves:
    """Bring tokens and targets into half precision, centred and scaled by powers of two.

    ``precise`` keeps what rounding the tokens leaves over (T's is always there). Centring comes before rounding:
    tokens far from the origin would lose most of their digits otherwise. ``largest_token`` is the largest number in
    the tokens, where it is known.
    """
    batch, slices, count, targets, width = problem.sizes
    tokens, reference, centre = problem.tokens, problem.targets, problem.centre
    units = torch.empty(3, dtype=torch.float32, device=tokens.device)
    largest = torch.linalg.vector_norm(reference, torch.inf)
    if largest_token is None:
        largest_token = torch.linalg.vector_norm(tokens, torch.inf) if with_tokens else largest
    _units[(1,)](largest_token, largest, centre, units, width, DB=256, num_warps=1)
    high, low = tokens, None
    if with_tokens:
        high = torch.empty(tokens.shape, dtype=torch.float16, device=tokens.device)
        low = torch.empty_like(high) if precise else None
        rows = batch * count
        _split_tokens[(cdiv(rows, 16),)](
            tokens, centre, units[2:], high, high if low is None else low, rows, width, ROWS=16, DB=128,
            HAS_LOW=precise, BY_LARGEST=False,
        )  # fmt: skip
    mixed = problem.lengths is not None
    scaled = torch.empty_like(reference) if mixed else reference
    t_high = torch.empty((slices, 0 if mixed else count, width), dtype=torch.float16, device=tokens.device)
    t_low = torch.empty_like(t_high)
    if with_targets:
        _split_targets[(cdiv(targets if mixed else count, 4), slices)](
            reference, units, t_high, t_low, scaled, count, targets, width, ROWS=4, DB=128, MIXED=mixed, num_warps=1
        )
    return Halves(high, low, t_high, t_low, scaled, units)


def halve(tokens: Tensor, centre: Tensor, largest: Tensor) -> Tensor:
    """Give tokens ``(B, N, d)`` in half precision, centred, in the unit that the largest number of these asks for."""
    result = torch.empty(tokens.shape, dtype=torch.float16, device=tokens.device)
    batch, count, width = tokens.shape
    rows = batch * count
    _split_tokens[(cdiv(rows, 16),)](
        tokens, centre, largest, result, result, rows, width, ROWS=16, DB=128, HAS_LOW=False, BY_LARGEST=True
    )
    return result


def needs_both_parts(count: int, width: int) -> bool:
    """Whether rounding T and the tokens to half precision could be seen.

    It is random, relative to 1.4e-4 at the most: over N·d products its share of S falls below 2e-6.
    """
    return width < 64 or count * width < 1 << 13


def terms_of(ranks: int, targets: int) -> int:
    """Largest number of targets that one of these ranks overlaps."""
    return 1 if targets == ranks else (targets - 1) // ranks + 2
