# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""L-moments of many rows under several learned weightings, in Triton: one pass forward, one backward.

A row is a sample seen along a slice, sorted. With masses p in rank order, cumulative masses t and
:math:`J_j = \int_0^t P^*_j` the moments are :math:`λ_{j+1} = -\sqrt{2j+1} Σ_r J_j(t_r) (s_{r+1} - s_r)`, so that

.. math:: ∂λ_{j+1}/∂s_r = \sqrt{2j+1} (J_j(t_r) - J_j(t_{r-1})), \qquad
          ∂λ_{j+1}/∂t_r = -\sqrt{2j+1} P^*_j(t_r) (s_{r+1} - s_r).

Masses in rank order and their sums, H times as large as the projections, exist in registers only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_rows import on_device_of
from cswe.ops.kernels.cuda_sizes import cdiv, power_of_two
from cswe.ops.kernels.cuda_sort import plain_sort
from cswe.ops.laplace import refuse_second_derivative

LONGEST = 4096
"""Ranks that one program holds."""

TEMPORARY_BYTES = 256 << 20
"""What the gradients of masses, before they are summed over slices, may take."""


@triton.jit
def _gaps(ordered, at, rank, exists, length):
    """Give the distance to the next value, 0 behind the last one."""
    follows = exists & (rank + 1 < length)
    here = tl.load(ordered + at, mask=follows, other=0.0)
    return tl.load(ordered + at + 1, mask=follows, other=0.0) - here, follows


@triton.jit
def moments_pass(
    ordered,
    order,
    masses,
    lengths,
    out,
    rows,
    L,
    H,
    N,
    K: tl.constexpr,
    R: tl.constexpr,
    NB: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Write the moments from the second to the K-th, ``(B, H, L, K − 1)``."""
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    exists = row < rows
    sample = row // L
    rank = tl.arange(0, NB)[None, :]
    length = tl.load(lengths + sample, mask=exists, other=1).to(tl.int32) if RAGGED else N
    at = row * N + rank
    gap, _ = _gaps(ordered, at, rank, exists, length)
    read = exists & (rank < length)
    token = tl.load(order + at, mask=read, other=0)
    for h in range(H):
        p = tl.load(masses + (sample * H + h) * N + token, mask=read, other=0.0)
        t = tl.cumsum(p, 1) / tl.sum(p, 1)[:, None]
        x = 2.0 * t - 1.0
        bump = 2.0 * t * (t - 1.0) * gap
        before = tl.zeros_like(x)
        current = before + 1.0
        place = out + ((sample * H + h) * L + row % L) * (K - 1)
        for j in tl.static_range(1, K):
            value = tl.sum(bump * current, 1)[:, None] * (-((2 * j + 1) ** 0.5) / (j * (j + 1)))
            tl.store(place + (j - 1), value, mask=exists)
            following = ((2 * j + 1) * x * current - (j + 1) * before) / j
            before = current
            current = following


@triton.jit
def moments_back_pass(
    ordered,
    order,
    masses,
    lengths,
    grad,
    at_projections,
    at_masses,
    rows,
    L,
    H,
    N,
    K: tl.constexpr,
    R: tl.constexpr,
    NB: tl.constexpr,
    RAGGED: tl.constexpr,
    VALUES: tl.constexpr,
    MASSES: tl.constexpr,
):
    """Write the gradients of the projections ``(B, L, N)`` and of the masses by slice ``(B, L, H, N)``, by token."""
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    exists = row < rows
    sample = row // L
    rank = tl.arange(0, NB)[None, :]
    length = tl.load(lengths + sample, mask=exists, other=1).to(tl.int32) if RAGGED else N
    at = row * N + rank
    gap, follows = _gaps(ordered, at, rank, exists, length)
    inside = exists & (rank < N)
    read = exists & (rank < length)
    token = tl.load(order + at, mask=inside, other=0)
    at_values = tl.zeros((R, NB), dtype=tl.float32)
    for h in range(H):
        p = tl.load(masses + (sample * H + h) * N + token, mask=read, other=0.0)
        edge = tl.cumsum(p, 1)
        per_total = 1.0 / tl.sum(p, 1)[:, None]
        t = edge * per_total
        t_before = (edge - p) * per_total
        x = 2.0 * t - 1.0
        x_before = 2.0 * t_before - 1.0
        old = tl.zeros_like(x)
        new = old + 1.0
        old_before = old
        new_before = new
        # Legendre polynomials themselves, for the masses.
        lower = new
        upper = x
        here = tl.zeros_like(x)
        left = tl.zeros_like(x)
        at_edges = tl.zeros_like(x)
        place = grad + ((sample * H + h) * L + row % L) * (K - 1)
        for j in tl.static_range(1, K):
            g = tl.load(place + (j - 1), mask=exists, other=0.0) * ((2 * j + 1) ** 0.5)
            if VALUES:
                here += g * new * (1.0 / (j * (j + 1)))
                left += g * new_before * (1.0 / (j * (j + 1)))
                following = ((2 * j + 1) * x_before * new_before - (j + 1) * old_before) / j
                old_before = new_before
                new_before = following
                following = ((2 * j + 1) * x * new - (j + 1) * old) / j
                old = new
                new = following
            if MASSES:
                at_edges -= g * upper
                following = ((2 * j + 1) * x * upper - j * lower) / (j + 1)
                lower = upper
                upper = following
        if VALUES:
            here = tl.where(follows, 2.0 * t * (t - 1.0) * here, 0.0)
            at_values += here - 2.0 * t_before * (t_before - 1.0) * left
        if MASSES:
            at_edges *= gap
            tail = tl.cumsum(at_edges, 1, reverse=True)
            at_mass = (tail - tl.sum(at_edges * t, 1)[:, None]) * per_total
            tl.store(at_masses + (row * H + h) * N + token, tl.where(read, at_mass, 0.0), mask=inside)
    if VALUES:
        tl.store(at_projections + row * N + token, tl.where(read, at_values, 0.0), mask=inside)


def fits(projections: Tensor, k: int) -> bool:
    """Whether a row is short enough, and there is anything beyond the mean to compute."""
    return k > 1 and projections.shape[-1] <= LONGEST


def higher_moments(projections: Tensor, masses: Tensor, mask: Tensor | None, k: int) -> Tensor:
    """Give the L-moments from the second to the k-th, ``(B, H, L, k − 1)``, differentiable.

    Projections are ``(B, L, N)``, masses ``(B, H, N)``, the mask ``(B, N)``, True = valid.
    """
    result: Tensor = _Moments.apply(projections, masses, mask, k)
    return result


def _tile(count: int) -> dict[str, int]:
    block = max(16, power_of_two(count))
    return {"R": max(1, 256 // block), "NB": block, "num_warps": max(1, block // 256)}


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projections: Tensor, given: Tensor, mask: Tensor | None, k: int) -> Tensor:
        batch, slices, count = projections.shape
        heads = given.shape[1]
        with on_device_of(projections):
            values = projections
            if mask is not None:
                values = projections.masked_fill(~mask.unsqueeze(1), torch.finfo(torch.float32).max)
            ordered, order = plain_sort(values)
            masses = given.contiguous()
            lengths = None if mask is None else mask.sum(-1)
            out = torch.empty((batch, heads, slices, k - 1), dtype=torch.float32, device=ordered.device)
            tile = _tile(count)
            moments_pass[(cdiv(batch * slices, tile["R"]),)](
                ordered, order, masses, order if lengths is None else lengths, out, batch * slices, slices, heads,
                count, K=k, RAGGED=lengths is not None, **tile,
            )  # fmt: skip
        # What was given is kept for the sake of a second derivative, which is refused.
        ctx.save_for_backward(projections, given, ordered, order, masses, lengths)
        ctx.k = k
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        projections, given, ordered, order, masses, lengths = ctx.saved_tensors
        to_values, to_masses, _, _ = ctx.needs_input_grad
        with torch.no_grad(), on_device_of(grad):
            at_values, at_masses = _backward(
                ordered, order, masses, lengths, grad.contiguous(), ctx.k, to_values, to_masses
            )
        found = tuple(each for each in (at_values, at_masses) if each is not None)
        inputs = (grad, projections, given)
        refused = iter(refuse_second_derivative(found, inputs, "a weighted L-moment", "cswe.backend('scan')"))
        return (next(refused) if to_values else None, next(refused) if to_masses else None, None, None)


def _backward(
    ordered: Tensor,
    order: Tensor,
    masses: Tensor,
    lengths: Tensor | None,
    grad: Tensor,
    k: int,
    to_values: bool,
    to_masses: bool,
) -> tuple[Tensor | None, Tensor | None]:
    batch, slices, count = ordered.shape
    heads = masses.shape[1]
    at_values = torch.empty_like(ordered) if to_values else None
    at_masses = torch.empty_like(masses) if to_masses else None
    together = batch
    if to_masses:
        together = max(1, min(batch, TEMPORARY_BYTES // (4 * slices * heads * count)))
    tile = _tile(count)
    for start in range(0, batch, together):
        here = slice(start, min(start + together, batch))
        rows = (here.stop - start) * slices
        by_slice = ordered
        if to_masses:
            shape = (here.stop - start, slices, heads, count)
            by_slice = torch.empty(shape, dtype=torch.float32, device=ordered.device)
        moments_back_pass[(cdiv(rows, tile["R"]),)](
            ordered[here], order[here], masses[here], order if lengths is None else lengths[here], grad[here],
            ordered if at_values is None else at_values[here], by_slice, rows, slices, heads, count,
            K=k, RAGGED=lengths is not None, VALUES=to_values, MASSES=to_masses, **tile,
        )  # fmt: skip
        if at_masses is not None:
            torch.sum(by_slice, 1, out=at_masses[here])
    return at_values, at_masses
