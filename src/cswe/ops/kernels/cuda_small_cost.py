"""D of small sets in one step of autograd, on a GPU: ten launches of ours, forward and backward."""

from typing import NamedTuple

from torch import Tensor

from cswe.ops._inputs import without_autocast
from cswe.ops.kernels.cuda_project import centre_of, project, slices_gradient
from cswe.ops.kernels.cuda_small import (
    Cost,
    Sets,
    as_sets,
    back_to_tokens,
    cost_of,
    slope_of_reference,
    sort_softly,
    targets_gradient,
)
from cswe.ops.kernels.cuda_step import (
    Directions,
    Options,
    Wanted,
    back_through_projections,
    directions_of,
    in_units,
)


class Found(NamedTuple):
    """What the forward pass leaves to the backward one."""

    directions: Directions
    sets: Sets
    reference: Sets
    """The reference, as the one set it is."""
    targets: Tensor
    """Its softly sorted points, each times its mass, ``(L, M, d)``."""
    cost: Cost


def forward(tokens: Tensor, reference: Tensor, slices: Tensor, options: Options) -> tuple[Tensor, Found]:
    """Give D ``(B, L)``, and what the way back needs."""
    centre, directions, mask = centre_of(reference), directions_of(slices), options.mask
    projections, squares, largest = project(tokens, mask, centre, directions.unit_length)
    directions = in_units(directions, projections, options)
    sets = as_sets(projections, mask, tokens, centre, squares, largest, options.tau)
    points = reference.unsqueeze(0)
    along, point_squares, largest = project(points, None, centre, directions.scaled)
    only = Sets(along, None, points, centre, point_squares, largest, None, options.tau)
    targets, offset = sort_softly(only, precise=sets.halves is None)
    to_tokens, _, to_slices = options.wanted
    cost = cost_of(sets, targets, offset, point_squares, with_slope=to_tokens or to_slices)
    return cost.distance, Found(directions, sets, only, targets, cost)


@without_autocast
def backward(found: Found, wanted: Wanted, given: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Give the gradients of tokens, reference and slices, those that are wanted."""
    directions, sets, reference, targets, cost = found
    to_tokens, to_reference, to_slices = wanted
    grad, precise = given.contiguous(), sets.halves is None
    at_reference = at_scaled = at_tokens = at_slices = None
    if to_reference or to_slices:
        at_targets, at_offset = targets_gradient(sets, cost, grad, targets.shape[1])
        at_points = slope_of_reference(reference, at_targets, at_offset, precise)
        if to_reference:
            at_reference = back_to_tokens(
                reference, at_targets, reference.squares, at_offset, precise, is_reference=True
            ).squeeze(0)
            at_reference = at_reference.addmm_(at_points.T, directions.scaled)
        at_scaled = at_points @ (reference.tokens.squeeze(0) - reference.centre)
    if to_tokens or to_slices:
        at_projections = cost.slope * grad.unsqueeze(-1)
    if to_slices:
        assert at_scaled is not None
        at_scaled += slices_gradient(at_projections, sets.tokens, sets.mask, sets.centre)
        at_slices = directions.back(at_scaled)
    if to_tokens:
        at_centred = back_to_tokens(sets, targets, reference.squares, grad * cost.half_inverse, precise)
        at_tokens = back_through_projections(at_centred, at_projections, directions, sets.mask).to(sets.tokens.dtype)
    return at_tokens, at_reference, at_slices
