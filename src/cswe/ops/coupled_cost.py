"""The cost of plans made by LapSum: true couplings, so only the cross term is relaxed."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cswe.ops.lapsum import LapSum, couple
from cswe.ops.measure import Measure, centre_of, weighted_mean
from cswe.ops.sorting import sort_with_padding_last

BLOCK_ELEMENTS = 1 << 21
"""Numbers that one temporary may hold: samples and slices are taken in blocks of that size."""


def coupled_squared_cost(
    source: Measure, target: Measure, directions: Tensor, relaxation: LapSum
) -> tuple[Tensor, Tensor]:
    r"""Give the squared D and the size of the terms it is a difference of, both ``(B, L)``.

    Both sides are coupled smoothly with the same M ranks of equal mass: with :math:`\tilde Q` and :math:`\tilde P`
    these couplings, the plan is :math:`M \tilde Q^⊤ \tilde P`. Its marginals are the given ones for any sizes and
    weights.
    """
    centre = centre_of(target)
    x, y = source.points.to(directions.dtype) - centre, target.points - centre
    squares = weighted_mean(x.square().sum(-1), source.mass) + weighted_mean(y.square().sum(-1), target.mass)
    projections = (x @ directions.T).transpose(-1, -2)
    mask = None if source.mask is None else source.mask.unsqueeze(-2)
    scale = relaxation.scale(projections, mask)
    directions = directions / (scale * relaxation.alpha)
    batch, count, width = x.shape
    slices = max(1, min(directions.shape[0], BLOCK_ELEMENTS // (max(count, y.shape[-2]) * width)))
    samples = max(1, BLOCK_ELEMENTS // (slices * max(count, y.shape[-2]) * width))
    rows = []
    for start in range(0, batch, samples):
        here = slice(start, start + samples)
        against = y if y.ndim == 2 else y[here]
        masses = _part(source.mass, here), (target.mass if y.ndim == 2 else _part(target.mass, here))
        rows.append(
            torch.cat(
                [
                    # Recomputed in backward: kept, the rows carried there would be the B×L×N×d that we avoid.
                    checkpoint(_cross, x[here], against, part, *masses, use_reentrant=False, preserve_rng_state=False)
                    for part in directions.split(slices)
                ],
                dim=-1,
            )
        )
    return squares.unsqueeze(-1) - 2 * torch.cat(rows), squares.detach().unsqueeze(-1)


def _cross(x: Tensor, y: Tensor, directions: Tensor, x_mass: Tensor | None, y_mass: Tensor | None) -> Tensor:
    """Give ⟨x, γ y⟩ per sample and slice, ``(B, L)``."""
    ranks = y.shape[-2]
    levels = torch.arange(1, ranks + 1, device=x.device, dtype=torch.float64) / ranks
    x_ranked, y_ranked = (_ranked(points, directions, mass, levels) for points, mass in ((x, x_mass), (y, y_mass)))
    return (ranks * (x_ranked * y_ranked).sum((-1, -2))).to(x.dtype)


def _ranked(points: Tensor, directions: Tensor, mass: Tensor | None, levels: Tensor) -> Tensor:
    """Carry points ``(…, N, d)`` to the ranks along every slice, ``(…, L, K, d)``."""
    projections, order = sort_with_padding_last((points @ directions.T).transpose(-1, -2), None)
    if mass is None:
        masses = torch.full_like(projections, 1 / points.shape[-2], dtype=torch.float64)
    else:
        masses = mass.unsqueeze(-2).expand(order.shape).gather(-1, order)
    rows = points.unsqueeze(-3).expand(*order.shape, points.shape[-1])
    ranked = rows.gather(-2, order.unsqueeze(-1).expand(rows.shape)).double()
    return couple(projections.double(), ranked, masses, levels.expand(*order.shape[:-1], -1))


def _part(tensor: Tensor | None, here: slice) -> Tensor | None:
    return None if tensor is None else tensor[here]
