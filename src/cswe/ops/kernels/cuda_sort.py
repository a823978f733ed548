# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Many short sorts at once, on a GPU: one tile of rows a program, in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_rows import on_device_of
from cswe.ops.kernels.cuda_sizes import cdiv, power_of_two

LONGEST = 256
"""What one warp holds in registers; beyond it ``torch.sort`` is the better choice."""

FEWEST = 1 << 21
"""Numbers that make it worth while: a small ``torch.sort`` waits for nothing but its launch."""


@triton.jit
def _sort(
    values,
    ordered,
    order,
    rows,
    inner,
    N,
    outer_stride,
    inner_stride,
    stride,
    R: tl.constexpr,
    NB: tl.constexpr,
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    lane = tl.arange(0, NB)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    read = (row < rows)[:, None] & (lane < N)[None, :]
    value = tl.load(values + start[:, None] + lane[None, :] * stride, mask=read, other=0.0)
    # As integers, floats order like themselves if the negative ones are turned round; adding 0 makes −0 and 0 one.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # The index behind the value makes the sort stable.
    key = (bits.to(tl.int64) << 32) | lane[None, :].to(tl.int64)
    key = tl.where((lane < N)[None, :], key, 0x7FFFFFFFFFFFFFFF)
    key = tl.sort(key, dim=1)
    bits = (key >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    at = row.to(tl.int64)[:, None] * N + lane[None, :]
    tl.store(ordered + at, bits.to(tl.float32, bitcast=True), mask=read)
    tl.store(order + at, key & 0xFFFFFFFF, mask=read)


def _launch(values: Tensor, index: torch.dtype) -> tuple[Tensor, Tensor]:
    outer, inner, count = values.shape
    ordered = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    order = torch.empty(values.shape, dtype=index, device=values.device)
    block = power_of_two(count)
    together = max(1, 256 // block)
    with on_device_of(values):
        _sort[(cdiv(outer * inner, together),)](
            values, ordered, order, outer * inner, inner, count, *values.stride(),
            R=together, NB=block, num_warps=1,
        )  # fmt: skip
    return ordered, order


def plain_sort(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort ``(B, L, N)`` likewise, without a gradient, into rows; the order is in whatever integers come cheapest."""
    # One launch, where torch needs several: also for few rows.
    if values.shape[-1] <= LONGEST:
        return _launch(values, torch.int32)
    # torch lays its results out as the values are, and projections are often turned; kernels count on whole rows.
    ordered, order = torch.sort(values.contiguous(), dim=-1, stable=True)
    return ordered, order


@triton.jit
def _unsort(values, order, factors, out, N, NB: tl.constexpr, SCALED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row) if SCALED else 1.0
    for start in range(0, N, NB):
        rank = start + tl.arange(0, NB)
        inside = rank < N
        token = tl.load(order + row * N + rank, mask=inside, other=0)
        value = tl.load(values + row * N + rank, mask=inside, other=0.0)
        tl.store(out + row * N + token, value * factor, mask=inside)


def unsort_rows(values: Tensor, order: Tensor, factors: Tensor | None = None) -> Tensor:
    """Put values ``(…, N)`` back to where the sort took them from, each row times its factor ``(…)``.

    As ``scatter`` does; but that, in deterministic mode, sorts all indices first, not knowing that they are distinct.
    """
    count = values.shape[-1]
    result = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    block = min(1024, power_of_two(count))
    with on_device_of(values):
        _unsort[(values.numel() // count,)](
            values.contiguous(), order.contiguous(), result if factors is None else factors.contiguous(), result, count,
            NB=block, SCALED=factors is not None, num_warps=1,
        )  # fmt: skip
    return result


class _SortRows(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor) -> tuple[Tensor, Tensor]:
        if not is_faster(values):
            ordered, order = torch.sort(values, dim=-1, stable=True)
            return ordered, order
        return _launch(values if values.ndim == 3 else values.reshape(1, -1, values.shape[-1]), torch.int64)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> Tensor:
        (order,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph is being built of this pass: in terms that torch can differentiate again
            return torch.zeros_like(grad).scatter(-1, order, grad)
        return unsort_rows(grad, order)


def is_faster(values: Tensor) -> bool:
    """Whether our own kernel beats ``torch.sort``: many short rows."""
    return 0 < values.shape[-1] <= LONGEST and values.numel() >= FEWEST


def sort_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort float32 values ``(…, N)`` ascending and stably along the last axis; gradients flow back through it.

    The same as ``torch.sort(values, dim=-1, stable=True)``, several times faster for many rows of up to 256.
    """
    ordered, order = _SortRows.apply(values)
    return ordered.reshape(values.shape), order.reshape(values.shape)
