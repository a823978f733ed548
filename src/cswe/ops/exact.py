"""The cost of exact lifted plans.

Without ties the plan of a slice has at most N + M − 1 entries, so its cross term is a sum over few inner products,
and the Gram matrix of tokens and reference holds all of them, for all slices. Where projections tie, mass spreads
over whole groups; that goes through running integrals instead.
"""

import torch
from torch import Tensor

from cswe.ops._recompute import recomputed
from cswe.ops._transforms import is_transforming
from cswe.ops.coupling import couple_masses
from cswe.ops.fast_sort import sort_rows
from cswe.ops.measure import Measure, centre_of, quotient, weighted_mean

BLOCK_ELEMENTS = 1 << 22
"""Numbers that one temporary may hold: samples and slices are taken in blocks of that size."""


def exact_squared_cost(source: Measure, target: Measure, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Give the squared D of exact plans and the size of the terms it is a difference of, both ``(B, L)``."""
    centre = centre_of(target)
    x, y = source.points - centre, target.points - centre
    squares = weighted_mean(x.square().sum(-1), source.mass) + weighted_mean(y.square().sum(-1), target.mass)
    batch, count, _ = x.shape
    # A block's Gram matrix is no larger than the tokens themselves, or than a sixteenth of what a temporary may hold.
    block = max(1, min(BLOCK_ELEMENTS, max(x.numel(), BLOCK_ELEMENTS // 16)) // (count * y.shape[-2]))
    rows = []
    for start in range(0, batch, block):
        here = slice(start, start + block)
        part, y_part = x[here], (y if y.ndim == 2 else y[here])
        x_mass = None if source.mass is None else source.mass[here]
        y_mass = target.mass if target.mass is None or y.ndim == 2 else target.mass[here]
        rows.append(_cross(part, y_part, directions.detach(), x_mass, y_mass))
    return squares.unsqueeze(-1) - 2 * torch.cat(rows), squares.detach().unsqueeze(-1)


def _cross(x: Tensor, y: Tensor, directions: Tensor, x_mass: Tensor | None, y_mass: Tensor | None) -> Tensor:
    """Give ⟨x, γ y⟩ per sample and slice, ``(B, L)``."""
    with torch.no_grad():
        x_ranked, x_order = sort_rows((x @ directions.T).transpose(-1, -2))
        y_ranked, y_order = sort_rows((y @ directions.T).transpose(-1, -2))
    x_masses, y_masses = (
        None if mass is None else mass.unsqueeze(-2).expand(order.shape).gather(-1, order)
        for mass, order in ((x_mass, x_order), (y_mass, y_order))
    )
    # One Gram matrix must fit, and neither a compiled graph nor vmap can ask where anything ties.
    if x.shape[-2] * y.shape[-2] > 8 * BLOCK_ELEMENTS or torch.compiler.is_compiling() or is_transforming():
        return _tied_slices(x, y, directions, x_mass, y_mass)
    tied = _ties(x_ranked, x_masses) | _ties(y_ranked, y_masses)  # (B, L)
    if int(tied.sum()) > tied.numel() // 4:
        return _tied_slices(x, y, directions, x_mass, y_mass)
    cross: Tensor = recomputed(_untied_cross, x, y, x_order, y_order, x_masses, y_masses)
    # In float32 a few projections tie by chance even where the points do not.
    for index in tied.any(0).nonzero().flatten().tolist():
        samples = tied[:, index].nonzero().flatten()
        again = _tied_slices(
            x[samples],
            y if y.ndim == 2 else y[samples],
            directions[index : index + 1],
            None if x_mass is None else x_mass[samples],
            y_mass if y_mass is None or y.ndim == 2 else y_mass[samples],
        )
        cross = cross.index_put((samples, torch.full_like(samples, index)), again.squeeze(-1))
    return cross


def _ties(ranked: Tensor, masses: Tensor | None) -> Tensor:
    """Say for each row whether neighbours that have mass are equal."""
    equal = ranked[..., 1:] == ranked[..., :-1]
    if masses is not None:
        # A point without mass may stand between two equal ones: the second of them tells.
        equal = equal & (masses[..., 1:] > 0)
    return equal.any(-1)


def _tied_slices(x: Tensor, y: Tensor, directions: Tensor, x_mass: Tensor | None, y_mass: Tensor | None) -> Tensor:
    block = max(1, BLOCK_ELEMENTS // max(x.numel(), y.numel()))
    parts = [
        # Recomputed in backward: kept for all slices, the rows gathered there would be the B×L×N×d that we avoid.
        recomputed(tied_cross, x, y, part, x_mass, y_mass)
        for part in directions.split(block)
    ]
    return torch.cat(parts, dim=-1)


def _untied_cross(
    x: Tensor, y: Tensor, x_order: Tensor, y_order: Tensor, x_masses: Tensor | None, y_masses: Tensor | None
) -> Tensor:
    coupling = couple_masses(
        x.shape[-2] if x_masses is None else x_masses, y.shape[-2] if y_masses is None else y_masses, x.device
    )
    gram = x @ y.transpose(-1, -2)  # (B, N, M)
    shape = (*x_order.shape[:-1], coupling.mass.shape[-1])
    rows = x_order.gather(-1, coupling.rows.expand(shape))
    cols = y_order.expand(*shape[:-1], -1).gather(-1, coupling.cols.expand(shape))
    places = (rows * y.shape[-2] + cols).flatten(1)
    entries = gram.flatten(1).gather(-1, places).reshape(shape)
    return (entries * coupling.mass.to(entries.dtype)).sum(-1)


def tied_cross(x: Tensor, y: Tensor, directions: Tensor, x_mass: Tensor | None, y_mass: Tensor | None) -> Tensor:
    """Give ⟨x, γ y⟩ per sample and slice, ``(B, L)``, with ties and any weights, in time linear in N and M.

    With I(t) the integral of y's points over the lowest t of the mass, in the order of the projections and linear
    within ties, point k of x receives ``share · (I(high) − I(low))``. I is kept in float64: only
    its differences are used.
    """
    source = quotient(directions @ x.transpose(-1, -2), None if x_mass is None else x_mass.unsqueeze(-2))
    target = quotient(directions @ y.transpose(-1, -2), None if y_mass is None else y_mass.unsqueeze(-2))
    points = y.unsqueeze(-3).expand(*target.order.shape, y.shape[-1])
    ranked = points.gather(-2, target.order.unsqueeze(-1).expand(points.shape)).double()
    integral = torch.cumsum(ranked * target.mass.unsqueeze(-1), dim=-2)
    integral = torch.cat([torch.zeros_like(integral[..., :1, :]), integral], dim=-2)

    edges = target.high.contiguous()

    def integral_up_to(t: Tensor) -> Tensor:
        # The group that t lies in, and how far into it.
        inside = torch.searchsorted(edges.expand(*t.shape[:-1], -1).contiguous().detach(), t.detach())
        inside = inside.clamp(max=edges.shape[-1] - 1)

        def at(values: Tensor) -> Tensor:
            return values.expand(*t.shape[:-1], -1).gather(-1, inside)

        low, high = at(target.low), at(target.high)
        part = ((t - low) / torch.where(high > low, high - low, 1.0)).clamp(0, 1).unsqueeze(-1)
        table = integral.expand(*t.shape[:-1], *integral.shape[-2:])

        def row(index: Tensor) -> Tensor:
            return table.gather(-2, index.unsqueeze(-1).expand(*index.shape, table.shape[-1]))

        below = row(at(target.first))
        return below + part * (row(at(target.last) + 1) - below)

    received = source.share.unsqueeze(-1) * (integral_up_to(source.high) - integral_up_to(source.low))
    rows = source.order.unsqueeze(-1).expand(received.shape)
    sent = x.unsqueeze(-3).expand(received.shape).gather(-2, rows)
    return (sent * received.to(x.dtype)).sum((-1, -2))
