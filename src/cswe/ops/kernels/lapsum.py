"""LapSum's cross term, compiled: custom operators with hand-written first derivatives, as those of the soft sort.

There is one compiled way, for the CPU. Where it does not apply, :mod:`cswe.ops.coupled_cost` works in plain torch.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from cswe.ops._transforms import is_transforming
from cswe.ops.kernels import first_only
from cswe.ops.kernels.choose import choose_way
from cswe.ops.kernels.lapsum_problem import LapSumProblem


def choose_lapsum(device: torch.device, is_uniform: bool) -> str:
    """Name the way to take on a device, with equal masses or not: ``"dense"``, ``"scan"`` or ``"cpu"``."""
    return "dense" if is_transforming() else choose_way(device.type, is_uniform and device.type == "cpu")


def lapsum_cross(problem: LapSumProblem) -> Tensor:
    """Give S of a :class:`LapSumProblem`, ``(B, L)``, differentiable in points, tokens and targets."""
    with_slope = torch.is_grad_enabled() and problem.points.requires_grad
    value: Tensor = torch.ops.cswe.lapsum_cross(*problem, with_slope)[0]
    return value


def lapsum_ranks(points: Tensor, order: Tensor, rows: Tensor) -> Tensor:
    """Sort rows by LapSum along every slice: ``P_l @ rows``, ``(L, M, D)``, differentiable in points and rows.

    This is the same operation once more, read the other way: the rows of rank k are the derivative of S by T_k.

    Parameters
    ----------
    points, order
        Sorted projections over the temperature and the row that has rank r, both ``(L, M)``.
    rows
        ``(M, D)``.
    """
    result: Tensor = torch.ops.cswe.lapsum_ranks(points, order, rows)
    return result


def _compiled() -> Any:
    return importlib.import_module("cswe.ops.kernels.cpu_lapsum")


@torch.library.custom_op("cswe::lapsum_cross", mutates_args=())
def _lapsum_cross(
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    with_slope: bool,
) -> tuple[Tensor, Tensor]:
    pair: tuple[Tensor, Tensor] = _compiled().value_and_slope(
        LapSumProblem(points, order, tokens, targets, centre, lengths), with_slope
    )
    return pair


@_lapsum_cross.register_fake
def _(
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    with_slope: bool,
) -> tuple[Tensor, Tensor]:
    batch, slices, count = points.shape
    slope = (batch, slices, count) if with_slope else (batch, 0, 0)
    return points.new_empty((batch, slices)), points.new_empty(slope)


@torch.library.custom_op("cswe::lapsum_cross_targets", mutates_args=())
def _lapsum_cross_targets(
    grad: Tensor,
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
) -> Tensor:
    result: Tensor = _compiled().targets_gradient(LapSumProblem(points, order, tokens, targets, centre, lengths), grad)
    return result


@_lapsum_cross_targets.register_fake
def _(grad: Tensor, points: Tensor, order: Tensor, tokens: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    return targets.new_empty(targets.shape)


@torch.library.custom_op("cswe::lapsum_cross_tokens", mutates_args=())
def _lapsum_cross_tokens(
    grad: Tensor,
    points: Tensor,
    order: Tensor,
    tokens: Tensor,
    targets: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
) -> Tensor:
    result: Tensor = _compiled().tokens_gradient(LapSumProblem(points, order, tokens, targets, centre, lengths), grad)
    return result


@_lapsum_cross_tokens.register_fake
def _(grad: Tensor, points: Tensor, order: Tensor, tokens: Tensor, *rest: Any) -> Tensor:
    return points.new_empty(tokens.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *problem, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*problem, output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * 7
    *problem, slope = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        grads[0] = grad.unsqueeze(-1) * slope
    if ctx.needs_input_grad[2]:
        grads[2] = torch.ops.cswe.lapsum_cross_tokens(grad.contiguous(), *problem).to(problem[2].dtype)
    if ctx.needs_input_grad[3]:
        grads[3] = torch.ops.cswe.lapsum_cross_targets(grad.contiguous(), *problem)
    return first_only(grads, (grad, *problem))


_lapsum_cross.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("cswe::lapsum_ranks", mutates_args=())
def _lapsum_ranks(points: Tensor, order: Tensor, rows: Tensor) -> Tensor:
    slices, count = points.shape
    problem = _of_rows(points, order, rows, rows.expand(slices, *rows.shape))
    result: Tensor = _compiled().targets_gradient(problem, points.new_full((1, slices), count))
    return result


@_lapsum_ranks.register_fake
def _(points: Tensor, order: Tensor, rows: Tensor) -> Tensor:
    return points.new_empty((points.shape[0], *rows.shape))


def _of_rows(points: Tensor, order: Tensor, rows: Tensor, targets: Tensor) -> LapSumProblem:
    """State the problem of one sample: S is ⟨P_l rows, targets_l⟩ over the number of rows."""
    return LapSumProblem(
        points=points.unsqueeze(0),
        order=order.unsqueeze(0),
        tokens=rows.unsqueeze(0),
        targets=targets,
        centre=points.new_zeros(rows.shape[1]),
        lengths=None,
    )


def _setup_ranks(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _ranks_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    points, order, rows = ctx.saved_tensors
    at_points, at_rows = None, None
    problem = _of_rows(points, order, rows, grad.contiguous() * points.shape[1])
    if ctx.needs_input_grad[0]:
        at_points = torch.ops.cswe.lapsum_cross(*problem, True)[1].squeeze(0)
    if ctx.needs_input_grad[2]:
        ones = points.new_ones((1, points.shape[0]))
        at_rows = torch.ops.cswe.lapsum_cross_tokens(ones, *problem).squeeze(0)
    return first_only([at_points, None, at_rows], (grad, points, rows))


_lapsum_ranks.register_autograd(_ranks_backward, setup_context=_setup_ranks)
