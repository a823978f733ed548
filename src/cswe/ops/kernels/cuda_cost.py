"""The relaxed SWGG dissimilarity as a whole on a GPU, in eager use: one step of autograd, from tokens to D.

The same kernels as behind :mod:`cswe.ops.kernels.cuda`, without the operators between them: a small batch is computed
faster than torch can be told about it, so what counts there is the number of launches. What the forward pass has found
out, 1/Z, tokens in half precision and the states around every chunk, is kept for the backward pass. Small sets take a
way with still fewer launches, :mod:`cswe.ops.kernels.cuda_small_cost`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cswe.ops._inputs import without_autocast
from cswe.ops.kernels import cuda, cuda_ranks, cuda_reference, cuda_small, cuda_small_cost, cuda_sort
from cswe.ops.kernels.cuda_prepare import Halves, halves
from cswe.ops.kernels.cuda_project import centre_of, project, root, slices_gradient
from cswe.ops.kernels.cuda_rows import on_device_of
from cswe.ops.kernels.cuda_step import (
    Directions,
    Options,
    Wanted,
    back_through_projections,
    directions_of,
    in_units,
    put_together,
    take_apart,
)
from cswe.ops.kernels.problem import Problem, problem_of_rows
from cswe.ops.laplace import DENSE, refuse_second_derivative

KEPT_BYTES = 1 << 30
"""What may be kept of the states around chunks; beyond it they are found once more in the backward pass."""


def fits(tokens: Tensor, reference: Tensor) -> bool:
    """Whether this way serves: one reference, and more than one sample (a single one has a way of its own)."""
    return tokens.shape[0] > 1 and reference.ndim == 2


def distance(
    tokens: Tensor,
    reference: Tensor,
    slices: Tensor,
    mask: Tensor | None,
    tau: float,
    unit: Tensor | None = None,
    measure_unit: bool = False,
) -> Tensor:
    """Give D ``(B, L)`` between samples ``(B, N, d)`` and one reference ``(M, d)`` along slices ``(L, d)``.

    Differentiable in tokens, reference and slices (which are normalised here). Uniform masses.
    """
    graph = torch.is_grad_enabled()
    wanted = (graph and tokens.requires_grad, graph and reference.requires_grad, graph and slices.requires_grad)
    options = Options(mask, tau, unit, measure_unit, wanted)
    result: Tensor = _Distance.apply(tokens, reference, slices, options)  # type: ignore[no-untyped-call]
    return result


class Reference(NamedTuple):
    """A large reference, softly sorted along every slice; see :mod:`cswe.ops.kernels.cuda_reference` for others."""

    points: Tensor
    """Centred, with their squared norms as one more column, ``(M, d + 1)``."""
    problem: Problem
    """The soft sort itself."""
    scale: Tensor
    """Its 1/Z."""
    targets: Tensor
    """Points by rank, each times its mass, ``(L, M, d)``."""
    offset: Tensor
    """The mean of the sorted squared norms, ``(L,)``."""

    @property
    def size(self) -> Tensor:
        """The mean of the squared norms."""
        return self.points[:, -1].mean()


def _sort_reference(
    reference: Tensor, centre: Tensor, directions: Tensor, tokens: Tensor, tau: float
) -> Reference | cuda_reference.Sorted:
    if cuda_reference.fits(reference, len(directions), tokens):
        return cuda_reference.sort_softly(reference, centre, directions, tau)
    centred = reference - centre
    points = torch.cat([centred, centred.square().sum(-1, keepdim=True)], dim=-1)
    ordered, order = (each.squeeze(0) for each in cuda_sort.plain_sort((directions @ centred.T).unsqueeze(0)))
    problem = problem_of_rows(ordered, order, points, points.expand(len(ordered), *points.shape), tau)
    scale = cuda.normaliser(problem)
    mass = ordered.new_full((1, len(ordered)), -0.5 / len(points))
    if cuda_ranks.fits(problem):
        ranked = cuda_ranks.targets_gradient(problem, mass, scale)
    else:
        ranked = cuda.targets_gradient(problem, mass)
    return Reference(points, problem, scale, ranked[..., :-1].contiguous(), ranked[..., -1].sum(-1))


def _reference_gradients(
    sorted_reference: Reference | cuda_reference.Sorted, at_targets: Tensor, at_offset: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Give the gradients of the reference ``(M, d)`` and of the directions ``(L, d)`` it was sorted along."""
    if isinstance(sorted_reference, cuda_reference.Sorted):
        return cuda_reference.gradients(sorted_reference, at_targets, at_offset, directions)
    points, problem, scale = sorted_reference.points, sorted_reference.problem, sorted_reference.scale
    slices, count, width = at_targets.shape
    grad = torch.cat([at_targets, at_offset.reshape(-1, 1, 1).expand(slices, count, 1)], dim=-1)
    problem = problem._replace(targets=grad.mul_(-0.5 / count))
    ones = at_offset.new_ones((1, slices))
    if cuda_ranks.fits(problem):
        at_ordered = cuda_ranks.value_and_slope(problem, scale, True)[1]
        at_rows = cuda_ranks.tokens_gradient(problem, ones, scale)[0]
    else:
        at_ordered = cuda.value_and_slope(problem, True)[1]
        at_rows = cuda.tokens_gradient(problem, ones)[0]
    at_projections = cuda_sort.unsort_rows(at_ordered[0], problem.order[0])
    centred = points[:, :width]
    at_points = torch.addcmul(at_rows[0, :, :width], centred, at_rows[0, :, width:], value=2)
    return at_points.addmm_(at_projections.T, directions), at_projections @ centred


class Found(NamedTuple):
    """What the forward pass leaves to the backward one."""

    directions: Directions
    mask: Tensor | None
    slope: Tensor
    scale: Tensor
    half_inverse: Tensor
    problem: Problem
    parts: Halves
    sorted_reference: Reference | cuda_reference.Sorted
    kept: cuda.States | None


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, reference: Tensor, slices: Tensor, options: Options) -> Tensor:
        small = cuda_small.fits(tokens, reference, options.mask is not None)
        mask = None if options.mask is None else options.mask.contiguous()
        with on_device_of(tokens):
            forward = cuda_small_cost.forward if small else _forward
            result, found = forward(tokens.contiguous(), reference.contiguous(), slices, options._replace(mask=mask))
        # Autograd keeps all of it: it is freed with the graph, and a change in place of an input is noticed.
        saved = [tokens, reference, slices]
        ctx.wanted, ctx.found = options.wanted, take_apart(found, saved)
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = put_together(ctx.found, ctx.saved_tensors)
        with on_device_of(grad), torch.no_grad():
            backward = cuda_small_cost.backward if isinstance(found, cuda_small_cost.Found) else _backward
            grads = backward(found, ctx.wanted, grad)
        given = tuple(tensor for tensor in grads if tensor is not None)
        refused = iter(refuse_second_derivative(given, (grad, *ctx.saved_tensors[:3]), "a relaxed SWGG", DENSE))
        return (*(None if tensor is None else next(refused) for tensor in grads), None)


def _forward(tokens: Tensor, reference: Tensor, slices: Tensor, options: Options) -> tuple[Tensor, Found]:
    centre, directions, mask = centre_of(reference), directions_of(slices), options.mask
    projections, squares, largest = project(tokens, mask, centre, directions.unit_length)
    directions = in_units(directions, projections, options)
    points, order = cuda_sort.plain_sort(projections)
    sorted_reference = _sort_reference(reference, centre, directions.scaled, tokens, options.tau)
    problem = Problem(
        points=points,
        order=order,
        tokens=tokens,
        squares=squares,
        targets=sorted_reference.targets,
        centre=centre,
        lengths=None if mask is None else mask.sum(-1),
        positions=None,
        mass=None,
        tau=options.tau,
    )
    to_tokens, to_reference, to_slices = options.wanted
    precise = cuda.precise_forward(problem)
    scale, parts = cuda.normaliser(problem), halves(problem, precise, largest_token=largest)
    keep = None
    if (to_reference or to_slices) and cuda.state_bytes(problem, precise) <= KEPT_BYTES:
        keep = cuda.empty_states(problem, precise)
    value, slope = cuda.forward_passes(problem, scale, parts, precise, to_tokens or to_slices, keep, projections)
    result, half_inverse = root(value, sorted_reference.offset, squares, sorted_reference.size, problem.lengths)
    return result, Found(directions, mask, slope, scale, half_inverse, problem, parts, sorted_reference, keep)


@without_autocast
def _backward(found: Found, wanted: Wanted, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    problem, parts, mask, directions = found.problem, found.parts, found.mask, found.directions
    to_tokens, to_reference, to_slices = wanted
    at_value = grad * found.half_inverse
    at_reference = at_scaled = at_tokens = at_slices = None
    if to_reference or to_slices:
        precise = cuda.precise_backward(problem)
        own = parts if precise else parts._replace(tokens_low=None)
        at_targets = cuda.targets_passes(problem, found.scale, own, precise, at_value, found.kept)
        at_reference, at_scaled = _reference_gradients(
            found.sorted_reference, at_targets, at_value.sum(0), directions.scaled
        )
    if to_tokens or to_slices:
        at_projections = cuda_sort.unsort_rows(found.slope, problem.order, at_value)
    if to_slices:
        assert at_scaled is not None
        at_scaled += slices_gradient(at_projections, problem.tokens, mask, problem.centre)
        at_slices = directions.back(at_scaled)
    if to_tokens:
        at_centred, at_squares = cuda.tokens_passes(problem, found.scale, parts, at_value)
        centred = problem.tokens - problem.centre
        at_centred = torch.addcmul(at_centred, centred, at_squares.unsqueeze(-1), value=2)
        at_tokens = back_through_projections(at_centred, at_projections, directions, mask).to(problem.tokens.dtype)
    return at_tokens, at_reference if to_reference else None, at_slices
