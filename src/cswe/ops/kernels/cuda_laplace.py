# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Sums against the Laplace kernel on sorted points in Triton: what ``cswe.ops.laplace`` does in plain torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_rows import decayed, on_device_of, rate_of
from cswe.ops.kernels.cuda_scan import apart
from cswe.ops.kernels.cuda_sizes import cdiv, power_of_two


@triton.jit
def _side(
    points,
    values,
    plain,
    signed,
    row,
    start,
    columns,
    total,
    held,
    N,
    D,
    rate,
    FROM_LEFT: tl.constexpr,
    NB: tl.constexpr,
    DB: tl.constexpr,
):
    rank = start + tl.arange(0, NB)
    step = -1 if FROM_LEFT else 1
    reached = (rank > 0) & (rank < N) if FROM_LEFT else rank + 1 < N
    s = tl.load(points + row * N + rank, mask=rank < N, other=0.0)
    neighbour = tl.load(points + row * N + rank + step, mask=reached, other=0.0)
    decay = tl.where(reached, decayed((s - neighbour) * rate), 0.0)
    tied = tl.broadcast_to((reached & (s == neighbour))[:, None], (NB, DB))
    at = (row * N + rank)[:, None] * D + columns[None, :]
    inside = (columns < D)[None, :]
    before = tl.load(values + at + step * D, mask=reached[:, None] & inside, other=0.0)
    beside, below = apart(tl.broadcast_to(decay[:, None], (NB, DB)), before, tied, total, held, 0, not FROM_LEFT)
    write = (rank < N)[:, None] & inside
    if FROM_LEFT:
        tl.store(plain + at, below + tl.load(values + at, mask=write, other=0.0), mask=write)
        tl.store(signed + at, beside, mask=write)
    else:
        tl.store(plain + at, tl.load(plain + at, mask=write, other=0.0) + below, mask=write)
        tl.store(signed + at, tl.load(signed + at, mask=write, other=0.0) - beside, mask=write)
    last = (tl.arange(0, NB) == (NB - 1 if FROM_LEFT else 0))[:, None]
    total = tl.sum(tl.where(last, below, 0.0), 0)[None, :]
    held = tl.sum(tl.where(last, beside, 0.0), 0)[None, :]
    return total, held


@triton.jit
def _sums(points, values, plain, signed, N, D, rate, NB: tl.constexpr, DB: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * DB + tl.arange(0, DB)
    total = tl.zeros((1, DB), dtype=tl.float32)
    held = tl.zeros((1, DB), dtype=tl.float32)
    for start in range(0, N, NB):
        total, held = _side(
            points, values, plain, signed, row, start, columns, total, held, N, D, rate, True, NB, DB
        )  # fmt: skip
    tl.debug_barrier()
    total = tl.zeros((1, DB), dtype=tl.float32)
    held = tl.zeros((1, DB), dtype=tl.float32)
    blocks = tl.cdiv(N, NB)
    for step in range(0, blocks):
        start = (blocks - 1 - step) * NB
        total, held = _side(
            points, values, plain, signed, row, start, columns, total, held, N, D, rate, False, NB, DB
        )  # fmt: skip


def plain_and_signed_sums(points: Tensor, values: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Compute ``K w`` and the signed sums for points ``(…, N)`` and values ``(…, N, D)`` in float32."""
    count, width = values.shape[-2:]
    points, values = points.contiguous(), values.contiguous()
    plain, signed = torch.empty_like(values), torch.empty_like(values)
    columns = min(128, max(16, power_of_two(width)))
    rows = points.numel() // count
    if values.numel():
        with on_device_of(points):
            # All ranks of a column in one thread: scans need no exchange.
            _sums[(rows, cdiv(width, columns))](
                points, values, plain, signed, count, width, rate_of(tau), NB=8, DB=columns, num_warps=1
            )
    return plain, signed
