"""The one hot operation, several ways: ``dense``, ``scan``, ``cpu``, ``cuda``. Every way has the same signature.

:func:`relaxed_cross_cost` is the door. It is a custom operator, so ``torch.compile`` sees it as one node; its first
derivative is hand-written, in passes of their own: with respect to the projections (in the forward pass), to the
targets, and to the tokens, each only where it is asked for.
"""

from typing import Any

import torch
from torch import Tensor

from cswe.ops._inputs import without_autocast
from cswe.ops.kernels import dense
from cswe.ops.kernels.choose import BACKENDS, backend, choose, way
from cswe.ops.kernels.problem import Problem, problem_of_rows
from cswe.ops.laplace import DENSE, refuse_second_derivative

__all__ = ["BACKENDS", "Problem", "backend", "relaxed_cross_cost", "relaxed_ranks"]


def relaxed_cross_cost(problem: Problem) -> Tensor:
    """Give S of a :class:`Problem`, ``(B, L)``, differentiable in points, tokens, squares and targets."""
    chosen = choose(problem)
    if chosen == "dense":
        return dense.value(problem)
    with_slope = torch.is_grad_enabled() and problem.points.requires_grad
    value: Tensor = torch.ops.cswe.relaxed_cross(*problem, with_slope, chosen)[0]
    return value


def relaxed_ranks(points: Tensor, order: Tensor, rows: Tensor, tau: float) -> Tensor:
    """Sort rows softly along every slice: ``P_l @ rows``, ``(L, M, D)``, differentiable in points and rows.

    This is the same operation once more, read the other way: the rows of rank r are the derivative of S by T_r.

    Parameters
    ----------
    points, order
        Sorted projections and the row that has rank r, both ``(L, M)``.
    rows
        ``(M, D)``.
    tau
        Temperature of the soft sort.
    """
    problem = problem_of_rows(points, order, rows, rows.expand(points.shape[0], *rows.shape), tau)
    chosen = choose(problem)
    if chosen == "dense":
        return dense.ranks(problem).squeeze(0)
    result: Tensor = torch.ops.cswe.relaxed_ranks(points, order, rows, tau, chosen)
    return result


@torch.library.custom_op("cswe::relaxed_ranks", mutates_args=())
@without_autocast
def _relaxed_ranks(points: Tensor, order: Tensor, rows: Tensor, tau: float, backend: str) -> Tensor:
    problem = problem_of_rows(points, order, rows, rows.expand(points.shape[0], *rows.shape), tau)
    return way(backend).targets_gradient(problem, points.new_full((1, points.shape[0]), -0.5))


@_relaxed_ranks.register_fake
def _(points: Tensor, order: Tensor, rows: Tensor, tau: float, backend: str) -> Tensor:
    return points.new_empty((points.shape[0], *rows.shape))


def _setup_ranks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    points, order, rows, ctx.tau, ctx.backend = inputs
    ctx.save_for_backward(points, order, rows)


def _ranks_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    points, order, rows = ctx.saved_tensors
    at_points, at_rows = None, None
    problem = problem_of_rows(points, order, rows, grad.contiguous() * -0.5, ctx.tau)
    if ctx.needs_input_grad[0]:
        at_points = torch.ops.cswe.relaxed_cross(*problem, True, ctx.backend)[1].squeeze(0)
    if ctx.needs_input_grad[2]:
        ones = points.new_ones((1, points.shape[0]))
        at_rows = torch.ops.cswe.relaxed_cross_tokens(ones, *problem, ctx.backend)[0].squeeze(0)
    return first_only([at_points, None, at_rows, None, None], (grad, points, rows))


def first_only(grads: list[Tensor | None], depends_on: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Pass gradients on such that a second derivative is an error."""
    given = tuple(grad for grad in grads if grad is not None)
    inputs = tuple(tensor for tensor in depends_on if tensor is not None)
    refused = iter(refuse_second_derivative(given, inputs, "a relaxed SWGG", DENSE))
    return tuple(None if grad is None else next(refused) for grad in grads)


_relaxed_ranks.register_autograd(_ranks_backward, setup_context=_setup_ranks)


@torch.library.custom_op("cswe::relaxed_cross", mutates_args=())
@without_autocast
def _relaxed_cross(
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    squares: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    positions: Tensor | None,
    mass: Tensor | None,
    tau: float,
    with_slope: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    problem = Problem(points, order, tokens, squares, targets, centre, lengths, positions, mass, tau)
    return way(backend).value_and_slope(problem, with_slope)


@_relaxed_cross.register_fake
def _(
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    squares: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    positions: Tensor | None,
    mass: Tensor | None,
    tau: float,
    with_slope: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    batch, slices, count = points.shape
    slope = (batch, slices, count) if with_slope else (batch, 0, 0)
    return points.new_empty((batch, slices)), points.new_empty(slope)


@torch.library.custom_op("cswe::relaxed_cross_targets", mutates_args=())
@without_autocast
def _relaxed_cross_targets(
    grad: Tensor,
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    squares: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    positions: Tensor | None,
    mass: Tensor | None,
    tau: float,
    backend: str,
) -> Tensor:
    problem = Problem(points, order, tokens, squares, targets, centre, lengths, positions, mass, tau)
    return way(backend).targets_gradient(problem, grad)


@_relaxed_cross_targets.register_fake
def _(
    grad: Tensor, points: Tensor, order: Tensor, tokens: Tensor, squares: Tensor, targets: Tensor, *rest: Any
) -> Tensor:
    return torch.empty_like(targets)


@torch.library.custom_op("cswe::relaxed_cross_tokens", mutates_args=())
@without_autocast
def _relaxed_cross_tokens(
    grad: Tensor,
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    squares: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    positions: Tensor | None,
    mass: Tensor | None,
    tau: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    problem = Problem(points, order, tokens, squares, targets, centre, lengths, positions, mass, tau)
    return way(backend).tokens_gradient(problem, grad)


@_relaxed_cross_tokens.register_fake
def _(
    grad: Tensor, points: Tensor, order: Tensor, tokens: Tensor, squares: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return points.new_empty(tokens.shape), torch.empty_like(squares)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *problem, ctx.with_slope, ctx.backend = inputs
    ctx.tau = problem.pop()
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*problem, output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * 12
    *problem, slope = ctx.saved_tensors
    tokens = problem[2]
    if ctx.needs_input_grad[0]:
        grads[0] = grad.unsqueeze(-1) * slope
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        at_tokens, grads[3] = torch.ops.cswe.relaxed_cross_tokens(grad.contiguous(), *problem, ctx.tau, ctx.backend)
        grads[2] = at_tokens.to(tokens.dtype)
    if ctx.needs_input_grad[4]:
        grads[4] = torch.ops.cswe.relaxed_cross_targets(grad.contiguous(), *problem, ctx.tau, ctx.backend)
    return first_only(grads, (grad, *problem))


_relaxed_cross.register_autograd(_backward, setup_context=_setup)
