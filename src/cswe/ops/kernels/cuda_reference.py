# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""A reference of moderate size, softly sorted along every slice and back, on a GPU: by all its pairs.

One set of M points y with projections p is little work even for all its pairs, and pairs wait for nothing, where
scans over ranks wait for each other. :math:`P_{rj} = c_r e^{-|s_r - p_j| / τ}`, with the sorted projections s, is
written down for every slice, by rank and by point, over M; then sorting is a product, :math:`T = P y`, and so is the
way back, :math:`Σ_l P^\top g` for g at T. With w what comes back to the mean of the sorted squared norms, and
:math:`W_{rj} = ⟨g_r, y_j⟩ + w ‖y_j‖²`, what comes back to the projections sums over rows and columns of

.. math:: m_{rj} = \mathrm{sign}(s_r - p_j) P_{rj} (W_{rj} - \bar W_r), \qquad \bar W_r = M Σ_j P_{rj} W_{rj},

subtracted for the point at rank r and added for point j, over τ. Ranks are counted from the pairs: nothing is sorted.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_project import project
from cswe.ops.kernels.cuda_rows import FAR, decayed, rate_of, sign_of
from cswe.ops.kernels.cuda_sizes import cdiv, power_of_two

MOST_POINTS = 1024
"""Beyond it scans are faster than all pairs."""

FEW_PAIRS = 1 << 22
"""So many pairs of all slices are no matter of memory; more of them must be fewer than the numbers in the tokens."""


@triton.jit
def plan_pass(projections, squares, plan, ranks, mean_squares, M, rate, RB: tl.constexpr, JB: tl.constexpr):
    """Write P over M by rank and point ``(L, M, M)``, ranks by point, and sorted squared norms by rank ``(L, M)``."""
    at = tl.program_id(0).to(tl.int64) * M
    own = tl.program_id(1) * RB + tl.arange(0, RB)
    exists = own < M
    s = tl.load(projections + at + own, mask=exists, other=FAR)
    total = tl.zeros((RB,), dtype=tl.float32)
    square = tl.zeros((RB,), dtype=tl.float32)
    rank = tl.zeros((RB,), dtype=tl.int32)
    for start in range(0, M, JB):
        j = start + tl.arange(0, JB)
        gap = s[:, None] - tl.load(projections + at + j, mask=j < M, other=FAR)[None, :]
        kernel = decayed(gap * rate)
        total += tl.sum(kernel, 1)
        square += tl.sum(kernel * tl.load(squares + j, mask=j < M, other=0.0)[None, :], 1)
        precedes = (gap > 0) | ((gap == 0) & (j[None, :] < own[:, None]))
        rank += tl.sum(precedes.to(tl.int32), 1)
    c = 1.0 / total
    tl.store(ranks + at + own, rank, mask=exists)
    tl.store(mean_squares + at + rank, square * c, mask=exists)
    c /= M
    for start in range(0, M, JB):
        j = start + tl.arange(0, JB)
        there = j < M
        gap = s[:, None] - tl.load(projections + at + j, mask=there, other=FAR)[None, :]
        place = (at + rank)[:, None] * M + j[None, :]
        tl.store(plan + place, decayed(gap * rate) * c[:, None], mask=exists[:, None] & there[None, :])


@triton.jit
def plan_slope_pass(
    projections,
    squares,
    plan,
    ranks,
    mean_squares,
    products,
    means,
    weights,
    slope,
    received,
    M,
    per_tau,
    RB: tl.constexpr,
    JB: tl.constexpr,
):
    """Write what comes back to the projections, and w times what every point gives to all ranks, by point ``(L, M)``.

    ``products`` are ⟨g_r, y_j⟩, ``means`` ⟨g_r, T_r⟩, ``weights`` w.
    """
    slice_index = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * RB + tl.arange(0, RB)
    exists = own < M
    at = slice_index * M
    weight = tl.load(weights + slice_index)
    p = tl.load(projections + at + own, mask=exists, other=0.0)
    rank = tl.load(ranks + at + own, mask=exists, other=0)
    square = tl.load(squares + own, mask=exists, other=0.0)
    mean = M * tl.load(means + at + rank, mask=exists, other=0.0)
    mean += weight * tl.load(mean_squares + at + rank, mask=exists, other=0.0)
    total = tl.zeros((RB,), dtype=tl.float32)
    given = tl.zeros((RB,), dtype=tl.float32)
    for start in range(0, M, JB):
        j = start + tl.arange(0, JB)
        there = j < M
        sign = sign_of(p[:, None] - tl.load(projections + at + j, mask=there, other=0.0)[None, :])
        both = exists[:, None] & there[None, :]
        # As the point at a rank, seen from all points.
        place = (at + rank)[:, None] * M + j[None, :]
        w = tl.load(products + place, mask=both, other=0.0)
        w += weight * tl.load(squares + j, mask=there, other=0.0)[None, :] - mean[:, None]
        total -= tl.sum(tl.load(plan + place, mask=both, other=0.0) * sign * w, 1)
        # As a point, seen from all ranks.
        other = tl.load(ranks + at + j, mask=there, other=0)
        other_mean = M * tl.load(means + at + other, mask=there, other=0.0)
        other_mean += weight * tl.load(mean_squares + at + other, mask=there, other=0.0)
        place = (at + other)[None, :] * M + own[:, None]
        w = tl.load(products + place, mask=both, other=0.0) + (weight * square)[:, None] - other_mean[None, :]
        share = tl.load(plan + place, mask=both, other=0.0)
        total -= tl.sum(share * sign * w, 1)
        given += tl.sum(share, 1)
    tl.store(slope + at + own, total * per_tau, mask=exists)
    tl.store(received + at + own, given * weight, mask=exists)


def fits(reference: Tensor, slices: int, tokens: Tensor) -> bool:
    """Whether all pairs of a reference ``(M, d)`` along so many slices are few."""
    count = reference.shape[0]
    return count <= MOST_POINTS and slices * count**2 <= max(FEW_PAIRS, tokens.numel())


class Sorted(NamedTuple):
    """A reference, softly sorted along every slice, and what the way back needs."""

    centred: Tensor
    """The points, centred, ``(M, d)``."""
    squares: Tensor
    """Their squared norms, ``(M,)``."""
    projections: Tensor
    """``(L, M)``, in units of τ's unit."""
    plan: Tensor
    """P over M, by rank and point, ``(L, M, M)``."""
    ranks: Tensor
    """By point, ``(L, M)``."""
    mean_squares: Tensor
    """Squared norms, softly sorted, by rank, ``(L, M)``."""
    targets: Tensor
    """Points by rank, each times its mass, ``(L, M, d)``."""
    tau: float

    @property
    def offset(self) -> Tensor:
        """The mean of the sorted squared norms, ``(L,)``."""
        return self.mean_squares.mean(-1)

    @property
    def size(self) -> Tensor:
        """The mean of the squared norms."""
        return self.squares.mean()


def sort_softly(reference: Tensor, centre: Tensor, directions: Tensor, tau: float) -> Sorted:
    """Sort a reference ``(M, d)``, contiguous and in float32, along directions ``(L, d)``."""
    (count, width), slices = reference.shape, directions.shape[0]
    along, squares, _ = project(reference.unsqueeze(0), None, centre, directions)
    plan = torch.empty((slices, count, count), dtype=torch.float32, device=reference.device)
    mean_squares = torch.empty((slices, count), dtype=torch.float32, device=reference.device)
    ranks = torch.empty((slices, count), dtype=torch.int32, device=reference.device)
    rows, columns = _tile(count)
    plan_pass[(slices, cdiv(count, rows))](
        along, squares, plan, ranks, mean_squares, count, rate_of(tau), RB=rows, JB=columns, num_warps=4
    )
    centred = reference - centre
    targets = (plan.view(-1, count) @ centred).view(slices, count, width)
    return Sorted(centred, squares.view(-1), along.view(slices, count), plan, ranks, mean_squares, targets, tau)


def _tile(count: int) -> tuple[int, int]:
    """Choose a tile of some thousand pairs: 32 a thread."""
    columns = max(16, min(256, power_of_two(count)))
    return max(4, 2048 // columns), columns


def gradients(found: Sorted, at_targets: Tensor, at_offset: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Give what comes back to the reference ``(M, d)`` and to the directions ``(L, d)`` it was sorted along."""
    slices, count, width = at_targets.shape
    centred, plan = found.centred, found.plan
    products = at_targets.reshape(-1, width) @ centred.T
    means = (at_targets * found.targets).sum(-1)
    slope, received = torch.empty((2, slices, count), dtype=torch.float32, device=plan.device).unbind()
    rows, columns = _tile(count)
    plan_slope_pass[(slices, cdiv(count, rows))](
        found.projections, found.squares, plan, found.ranks, found.mean_squares, products, means, at_offset,
        slope, received, count, 1 / found.tau, RB=rows, JB=columns, num_warps=4,
    )  # fmt: skip
    # A product for every slice and their sum: one product alone would have few rows and thousands to sum over.
    at_points = torch.bmm(plan.transpose(1, 2), at_targets).sum(0)
    at_points.addcmul_(centred, received.sum(0).unsqueeze(-1), value=2)
    return at_points.addmm_(slope.T, directions), slope @ centred
