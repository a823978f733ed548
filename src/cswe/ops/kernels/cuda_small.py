"""Small sets on a GPU: what is asked of the passes of :mod:`cswe.ops.kernels.cuda_pairs`."""

from typing import NamedTuple

import torch
from torch import Tensor

from cswe.ops.kernels.cuda_pairs import back_pass, cost_pass, ranked_pass
from cswe.ops.kernels.cuda_prepare import halve, needs_both_parts
from cswe.ops.kernels.cuda_rows import rate_of
from cswe.ops.kernels.cuda_sizes import cdiv, in_parts, power_of_two

MOST = 128
"""Tokens of a set, and points of the reference."""

ENOUGH_PROGRAMS = 512
"""Programs that keep a large GPU busy: each has a whole tile to work on."""

MOST_IN_FULL = 32
"""The same where products need full precision and ranks meet several targets: beyond it registers do not suffice."""


def fits(tokens: Tensor, reference: Tensor, is_masked: bool) -> bool:
    """Whether sets ``(B, N, d)`` and a reference ``(M, d)`` are small enough for a tile."""
    (_, count, width), targets = tokens.shape, reference.shape[0]
    in_full = (is_masked or count != targets) and needs_both_parts(count, width)
    return max(count, targets) <= (min(MOST, MOST_IN_FULL) if in_full else MOST)


def _tile(count: int, targets: int) -> tuple[int, int]:
    """Choose the side of the tile, and the warps that share it."""
    side = max(16, power_of_two(max(count, targets)))
    return side, {16: 1, 32: 2, 64: 4}.get(side, 16)


def _columns(width: int, most: int) -> int:
    """Choose how many dimensions to take at a time; ``most`` is what leaves enough registers on sm_90."""
    return min(most, max(16, power_of_two(width)))


class Sets(NamedTuple):
    """Small sets, projected: what all passes read."""

    projections: Tensor
    """``(B, L, N)``, in the order of the tokens, in units of τ's unit."""
    mask: Tensor | None
    """``(B, N)``; contiguous."""
    tokens: Tensor
    """``(B, N, d)``, contiguous, in any floating dtype."""
    centre: Tensor
    """Subtracted from every token, ``(d,)``."""
    squares: Tensor
    """Squared norms of the centred tokens, ``(B, N)``."""
    largest: Tensor
    """The largest number among the centred tokens."""
    halves: Tensor | None
    """Centred tokens in half precision, or ``None`` where they need to be more precise."""
    tau: float

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, L, N, d."""
        return *self.projections.shape, self.tokens.shape[-1]

    def mixes(self, targets: int) -> bool:
        """Whether a rank may meet several targets."""
        return self.mask is not None or self.projections.shape[2] != targets

    @property
    def rate(self) -> float:
        """What distances are multiplied by."""
        return rate_of(self.tau)

    @property
    def read_mask(self) -> Tensor:
        """The mask, or something to point to where none is read."""
        return self.squares if self.mask is None else self.mask

    @property
    def rows(self) -> Tensor:
        """Tokens as products take them."""
        return self.tokens if self.halves is None else self.halves


def as_sets(
    projections: Tensor,
    mask: Tensor | None,
    tokens: Tensor,
    centre: Tensor,
    squares: Tensor,
    largest: Tensor,
    tau: float,
) -> Sets:
    """Put sets together, with their tokens in half precision where rounding at random cannot be seen."""
    _, count, width = tokens.shape
    halves = None if needs_both_parts(count, width) else halve(tokens, centre, largest)
    return Sets(projections, mask, tokens, centre, squares, largest, halves, tau)


class Cost(NamedTuple):
    """What the sets cost, and what the way back needs."""

    distance: Tensor
    """D, ``(B, L)``."""
    half_inverse: Tensor
    """1/2D, ``(B, L)``; 0 where D is."""
    ordered: Tensor
    """Projections by rank, ``(B, L, N)``."""
    scale: Tensor
    """1/Z by rank, ``(B, L, N)``."""
    slope: Tensor
    """∂D by projections in the order of the tokens, ``(B, L, N)``; empty unless asked for."""


def sort_softly(reference: Sets, precise: bool) -> tuple[Tensor, Tensor]:
    """Give softly sorted points of a reference, each times its mass, ``(L, M, d)``, and their mean square ``(L,)``.

    Unless ``precise``, points come in half precision, in a unit of their own.
    """
    ranked, offset = _ranked(reference, None, reference.sizes[2], precise)
    return ranked.squeeze(0), offset.squeeze(0)


def targets_gradient(sets: Sets, cost: Cost, grad: Tensor, targets: int) -> tuple[Tensor, Tensor]:
    """Give what a gradient of D ``(B, L)`` comes to at the targets ``(L, M, d)`` and at the offset ``(L,)``."""
    ranked, offset = _ranked(sets, (cost, grad), targets, sets.halves is None)
    return (ranked.squeeze(0), offset.squeeze(0)) if ranked.shape[0] == 1 else (ranked.sum(0), offset.sum(0))


def _ranked(sets: Sets, returned: tuple[Cost, Tensor] | None, targets: int, precise: bool) -> tuple[Tensor, Tensor]:
    batch, slices, count, width = sets.sizes
    side, warps = _tile(count, targets)
    columns = _columns(width, 32 if precise else 128 if returned is None else 256)
    pieces = cdiv(width, columns)
    each, parts = in_parts(batch, ENOUGH_PROGRAMS // (slices * pieces))
    dtype = torch.float16 if returned is None and not precise else torch.float32
    ranked = torch.empty((parts, slices, targets, width), dtype=dtype, device=sets.tokens.device)
    offset = torch.empty((parts, slices), dtype=torch.float32, device=sets.tokens.device)
    ordered, scale, grad, half_inverse = (sets.squares,) * 4  # of a reference none of them is read
    if returned is not None:
        (_, half_inverse, ordered, scale, _), grad = returned
    ranked_pass[(parts, slices, pieces)](
        sets.projections, ordered, scale, sets.read_mask, sets.rows, sets.centre, sets.squares, sets.largest,
        grad, half_inverse, ranked, offset, batch, slices, count, targets, width, sets.rate, each,
        NB=side, DB=columns, HAS_MASK=sets.mask is not None, MIXED=sets.mixes(targets), REFERENCE=returned is None,
        PRECISE=precise, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return ranked, offset


def cost_of(sets: Sets, targets: Tensor, offset: Tensor, target_squares: Tensor, with_slope: bool) -> Cost:
    """Give D of every set along every slice, and its slope.

    ``targets`` and ``offset`` are what :func:`sort_softly` gives, ``target_squares`` the reference's squared norms.
    """
    batch, slices, count, _ = sets.sizes
    pair = torch.empty((2, batch, slices), dtype=torch.float32, device=targets.device)
    lines = torch.empty((3 if with_slope else 2, batch, slices, count), dtype=torch.float32, device=targets.device)
    distance, half_inverse = pair.unbind()
    ordered, scale, slope = (*lines.unbind(), lines.new_empty((0,)))[:3]
    cost = Cost(distance, half_inverse, ordered, scale, slope)
    _cost(sets, targets, target_squares, offset, offset, cost, sets.halves is None, with_slope=with_slope)
    return cost


def slope_of_reference(reference: Sets, at_targets: Tensor, at_offset: Tensor, precise: bool) -> Tensor:
    """Give what comes back to the projections of a reference, ``(L, M)``, from what :func:`sort_softly` gave."""
    slope = torch.empty_like(reference.projections)
    unread = reference.squares
    cost = Cost(unread, unread, unread, unread, slope)
    _cost(reference, at_targets, unread, at_offset, unread, cost, precise, is_reference=True)
    return slope.squeeze(0)


def _cost(
    sets: Sets,
    targets: Tensor,
    target_squares: Tensor,
    weights: Tensor,
    offset: Tensor,
    cost: Cost,
    precise: bool,
    is_reference: bool = False,
    with_slope: bool = True,
) -> None:
    batch, slices, count, width = sets.sizes
    met = targets.shape[1]
    side, warps = _tile(count, met)
    cost_pass[(batch * slices,)](
        sets.projections, sets.read_mask, sets.rows, sets.centre, sets.squares, sets.largest,
        targets, target_squares, weights, offset, *cost, slices, count, met, width, sets.rate, 1 / sets.tau,
        4 * torch.finfo(torch.float32).eps, NB=side, DB=_columns(width, 32 if precise else 64),
        HAS_MASK=sets.mask is not None, MIXED=sets.mixes(met), REFERENCE=is_reference, PRECISE=precise,
        SLOPE=with_slope, num_warps=warps, num_stages=2,
    )  # fmt: skip


def back_to_tokens(
    sets: Sets,
    targets: Tensor,
    target_squares: Tensor,
    weights: Tensor,
    precise: bool,
    is_reference: bool = False,
) -> Tensor:
    """Give what comes back to the tokens other than by their projections, ``(B, N, d)``.

    ``weights`` are the gradients of D² ``(B, L)``; for a reference those of its offset, and ``targets`` those of its
    sorted points.
    """
    batch, slices, count, width = sets.sizes
    met = targets.shape[1]
    side, warps = _tile(count, met)
    columns = _columns(width, 32 if precise else 128)
    pieces = cdiv(width, columns)
    each, parts = in_parts(slices, ENOUGH_PROGRAMS // (batch * pieces))
    result = torch.empty((parts, batch, count, width), dtype=torch.float32, device=targets.device)
    back_pass[(batch, parts, pieces)](
        sets.projections, sets.read_mask, sets.tokens, sets.centre, targets,
        target_squares, weights, result, batch, slices, count, met, width, sets.rate, each, NB=side, DB=columns,
        HAS_MASK=sets.mask is not None, MIXED=sets.mixes(met), REFERENCE=is_reference, PRECISE=precise, num_warps=warps,
        num_stages=1,
    )  # fmt: skip
    return result.squeeze(0) if parts == 1 else result.sum(0)
