# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""Quantile functions on M ranks of sets of other sizes, in Triton: averages over pieces of equal mass.

In units of 1/(N M) of the mass all edges are integers, so overlaps are exact. Both ways read and neither adds in
memory, so the result is the same in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_rows import on_device_of
from cswe.ops.kernels.cuda_sizes import cdiv, power_of_two


@triton.jit
def average_pass(
    values,
    lengths,
    out,
    rows,
    L,
    N,
    M,
    NB: tl.constexpr,
    RAGGED: tl.constexpr,
    BACK: tl.constexpr,
):
    """Write :math:`q_m = M Σ_r Λ_{rm} s_r`, ``(rows, M)``; or, the way back, :math:`M Σ_m Λ_{rm} g_m`, ``(rows, N)``.

    ``values`` are s ``(rows, N)`` or g ``(rows, M)``. What lies behind a sample's length is not read, and its
    gradient is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row // L).to(tl.int64) if RAGGED else N + row * 0
    here = tl.program_id(1) * NB + tl.arange(0, NB)
    # An element of the result covers `own` units of mass, one of the values `other`.
    own = M + row * 0 if BACK else length
    other = length if BACK else M + row * 0
    count = length if BACK else M + row * 0
    limit = M + row * 0 if BACK else length
    low = here.to(tl.int64) * own
    first = low // other
    total = tl.zeros((NB,), dtype=tl.float32)
    for term in range(0, (own - 1) // other + 2):
        at = first + term
        overlap = tl.minimum(low + own, (at + 1) * other) - tl.maximum(low, at * other)
        read = (overlap > 0) & (at < limit) & (here < count)
        value = tl.load(values + row * (M if BACK else N) + at, mask=read, other=0.0)
        total += tl.where(read, overlap.to(tl.float32), 0.0) * value
    width = N if BACK else M
    tl.store(out + row * width + here, tl.where(here < count, total / length, 0.0), mask=here < width)


def averages(ranked: Tensor, lengths: Tensor | None, points: int) -> Tensor:
    """Give the quantile functions on M ranks, ``(B, L, M)``, of ascending values ``(B, L, N)``; differentiable.

    Of sample i the first ``lengths[i]`` ranks exist (``None``: all).
    """
    result: Tensor = _Averages.apply(ranked, lengths, points)
    return result


def _launch(values: Tensor, lengths: Tensor | None, count: int, points: int, back: bool) -> Tensor:
    batch, slices, _ = values.shape
    result = torch.empty((batch, slices, count if back else points), dtype=torch.float32, device=values.device)
    block = min(256, max(16, power_of_two(result.shape[-1])))
    with on_device_of(values):
        average_pass[(batch * slices, cdiv(result.shape[-1], block))](
            values.contiguous(), values if lengths is None else lengths, result, batch * slices, slices, count, points,
            NB=block, RAGGED=lengths is not None, BACK=back, num_warps=1,
        )  # fmt: skip
    return result


class _Averages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranked: Tensor, lengths: Tensor | None, points: int) -> Tensor:
        ctx.lengths, ctx.count = lengths, ranked.shape[-1]
        return _launch(ranked, lengths, ranked.shape[-1], points, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Linear, so its own derivative is of the same kind.
        return _AveragesBack.apply(grad, ctx.lengths, ctx.count), None, None


class _AveragesBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, lengths: Tensor | None, count: int) -> Tensor:
        ctx.lengths, ctx.points = lengths, grad.shape[-1]
        return _launch(grad, lengths, count, grad.shape[-1], back=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Averages.apply(grad, ctx.lengths, ctx.points), None, None
