"""The relaxed SWGG dissimilarity as a whole on a GPU, in eager use: one step of autograd, from tokens to D.

The same kernels as behind :mod:`cswe.ops.kernels.cuda`, without the operators between them: a small batch is computed
faster than torch can be told about it, so what counts there is the number of launches. What the forward pass has found
out, 1/Z, tokens in half precision and the states around every chunk, is kept for the backward pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cswe.ops._inputs import without_autocast
from cswe.ops.kernels import cuda, cuda_ranks, cuda_sort
from cswe.ops.kernels.cuda_prepare import Halves, halves
from cswe.ops.kernels.cuda_project import centre_of, project, root, slices_gradient
from cswe.ops.kernels.cuda_rows import on_device_of
from cswe.ops.kernels.problem import Problem, problem_of_rows
from cswe.ops.laplace import refuse_second_derivative
from cswe.ops.unit import slice_unit

KEPT_BYTES = 512 << 20
"""What may be kept of the states around chunks; beyond it they are found once more in the backward pass."""


class Options(NamedTuple):
    """What is not a tensor with a gradient."""

    mask: Tensor | None
    tau: float
    unit: Tensor | None
    """The unit of τ per slice, ``(L, 1)``; ``None``: 1."""
    measure_unit: bool
    """Whether the unit is the spread of these projections."""
    wanted: tuple[bool, bool, bool]
    """Which gradients will be asked for: tokens, reference, slices."""


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
    """The reference, softly sorted along every slice."""

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


def _sort_reference(reference: Tensor, centre: Tensor, directions: Tensor, tau: float) -> Reference:
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
    sorted_reference: Reference, at_targets: Tensor, at_offset: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Give the gradients of the reference ``(M, d)`` and of the directions ``(L, d)`` it was sorted along."""
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
    at_projections = torch.empty_like(at_ordered[0]).scatter_(-1, problem.order[0].long(), at_ordered[0])
    centred = points[:, :width]
    at_points = torch.addcmul(at_rows[0, :, :width], centred, at_rows[0, :, width:], value=2)
    return at_points.addmm_(at_projections.T, directions), at_projections @ centred


class Found(NamedTuple):
    """What the forward pass leaves to the backward one."""

    norms: Tensor
    directions: Tensor
    scaled: Tensor
    unit: Tensor | None
    mask: Tensor | None
    slope: Tensor
    scale: Tensor
    half_inverse: Tensor
    problem: Problem
    parts: Halves
    sorted_reference: Reference
    kept: cuda.States | None


class _Place(NamedTuple):
    """Where a tensor lies among those that autograd keeps."""

    number: int


def _take_apart(item: Any, tensors: list[Tensor]) -> Any:
    """Put the tensors of nested tuples on a list, and leave places."""
    if isinstance(item, Tensor):
        tensors.append(item)
        return _Place(len(tensors) - 1)
    return type(item)(*(_take_apart(part, tensors) for part in item)) if isinstance(item, tuple) else item


def _put_together(item: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(item, _Place):
        return tensors[item.number]
    return type(item)(*(_put_together(part, tensors) for part in item)) if isinstance(item, tuple) else item


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, reference: Tensor, slices: Tensor, options: Options) -> Tensor:
        with on_device_of(tokens):
            return _forward(ctx, tokens, reference, slices, options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with on_device_of(grad), torch.no_grad():
            grads = _backward(ctx, grad)
        given = tuple(tensor for tensor in grads if tensor is not None)
        refused = iter(refuse_second_derivative(given, (grad, *ctx.saved_tensors[:3]), "a relaxed SWGG"))
        return (*(None if tensor is None else next(refused) for tensor in grads), None)


def _forward(ctx: Any, tokens_given: Tensor, reference_given: Tensor, slices: Tensor, options: Options) -> Tensor:
    tokens, mask = tokens_given.contiguous(), None if options.mask is None else options.mask.contiguous()
    reference = reference_given.contiguous()
    centre = centre_of(reference)
    norms = torch.linalg.vector_norm(slices, dim=-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    directions = slices / norms
    projections, squares, largest = project(tokens, mask, centre, directions)
    unit = options.unit
    if options.measure_unit:
        present = None if mask is None else mask.unsqueeze(1)
        shown = projections if present is None else projections.where(present, 0.0)
        unit = slice_unit(shown, present, relative=True)
    if unit is not None:
        projections /= unit
    scaled = directions if unit is None else directions / unit
    points, order = cuda_sort.plain_sort(projections)
    sorted_reference = _sort_reference(reference, centre, scaled, options.tau)
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
    reference_size = sorted_reference.points[:, -1].mean()
    result, half_inverse = root(value, sorted_reference.offset, squares, reference_size, problem.lengths)
    # Autograd keeps all of it: it is freed with the graph, and a change in place of an input is noticed.
    saved = [tokens_given, reference_given, slices]
    found = Found(
        norms, directions, scaled, unit, mask, slope, scale, half_inverse, problem, parts, sorted_reference, keep
    )
    ctx.wanted, ctx.found = options.wanted, _take_apart(found, saved)
    ctx.save_for_backward(*saved)
    return result


@without_autocast
def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    found: Found = _put_together(ctx.found, ctx.saved_tensors)
    problem, parts, mask = found.problem, found.parts, found.mask
    to_tokens, to_reference, to_slices = ctx.wanted
    at_value = grad * found.half_inverse
    at_reference = at_scaled = at_tokens = at_slices = None
    if to_reference or to_slices:
        precise = cuda.precise_backward(problem)
        own = parts if precise else parts._replace(tokens_low=None)
        at_targets = cuda.targets_passes(problem, found.scale, own, precise, at_value, found.kept)
        at_reference, at_scaled = _reference_gradients(
            found.sorted_reference, at_targets, at_value.sum(0), found.scaled
        )
    if to_tokens or to_slices:
        at_projections = cuda_sort.unsort_rows(found.slope, problem.order, at_value)
    if to_slices:
        assert at_scaled is not None
        at_scaled += slices_gradient(at_projections, problem.tokens, mask, problem.centre)
        at_directions = at_scaled if found.unit is None else at_scaled / found.unit
        along = (found.directions * at_directions).sum(-1, keepdim=True)
        at_slices = torch.addcmul(at_directions, found.directions, along, value=-1) / found.norms
    if to_tokens:
        at_centred, at_squares = cuda.tokens_passes(problem, found.scale, parts, at_value)
        centred = problem.tokens - problem.centre
        at_centred = torch.addcmul(at_centred, centred, at_squares.unsqueeze(-1), value=2)
        at_centred += torch.einsum("bln,ld->bnd", at_projections, found.scaled)
        at_tokens = at_centred.to(problem.tokens.dtype)
        if mask is not None:
            at_tokens = torch.where(mask.unsqueeze(-1), at_tokens, 0.0)
    return at_tokens, at_reference if to_reference else None, at_slices
