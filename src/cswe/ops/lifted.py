r"""Plans of one-dimensional transport, lifted back to the space the points live in.

Project two measures on a direction θ, couple the projections optimally, and move the *points* by that coupling: the
lifted plan γ [1]_ [2]_. Its cost :math:`D(θ) = ⟨C, γ⟩^{1/2} ≥ W_2` is the SWGG dissimilarity, which the paper bounds
per slice.

References
----------
.. [1] Mahey, Chapel, Gasso, Bonet, Courty. Fast optimal transport through sliced Wasserstein generalized geodesics.
   NeurIPS 2023.
.. [2] Liu, Díaz Martín, Bai, Shahbazi, Thorpe, Aldroubi, Kolouri. Expected sliced transport plans. ICLR 2025.
"""

import torch
from torch import Tensor

from cswe.ops._gpu import gpu_kernels
from cswe.ops._inputs import (
    as_mask,
    check_finite,
    check_floating,
    check_points,
    check_slices,
    check_weights,
    looks_at_values,
    measure_weights,
    unit_slices,
    without_autocast,
    working_dtype,
)
from cswe.ops.coupled_cost import coupled_squared_cost
from cswe.ops.exact import exact_squared_cost
from cswe.ops.kernels.choose import choose_way
from cswe.ops.lapsum import LapSum
from cswe.ops.measure import Measure, quotient, root
from cswe.ops.relaxed import relaxed_squared_cost
from cswe.ops.sorting import SoftSort


@without_autocast
def lifted_plan(
    x: Tensor,
    y: Tensor,
    theta: Tensor,
    x_weights: Tensor | None = None,
    y_weights: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> Tensor:
    r"""Lift the optimal plan between projections back to the points (the paper's :math:`γ_θ^{μ,ν}`).

    .. math:: γ(x, y) = \frac{p(x)\,q(y)}{P_θ(x)\,Q_θ(y)}\; Λ_θ(θ^⊤x, θ^⊤y)

    P and Q are the masses of all points that share a projection: where projections tie, mass spreads in proportion. The
    plan is dense; :func:`swgg` gives its cost without it.

    Parameters
    ----------
    x, y
        Points ``(N, d)`` and ``(M, d)``.
    theta
        A direction ``(d,)``, or several ``(L, d)``; normalised inside.
    x_weights, y_weights
        Masses ``(N,)`` and ``(M,)``, normalised inside; uniform if not given.
    validate
        Look at the values too; by default in eager use on the CPU.

    Returns
    -------
    Tensor
        ``(N, M)``, or ``(L, N, M)`` for several directions, with marginals x_weights and y_weights.

    Examples
    --------
    >>> x, y = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[5.0, 1.0], [2.0, 1.0]])
    >>> lifted_plan(x, y, theta=torch.tensor([1.0, 0.0]))
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """
    check_points(x, "x", (2,))
    check_points(y, "y", (2,), width=x.shape[-1])
    look = looks_at_values(validate, x)
    if look:
        check_finite(x, "x")
        check_finite(y, "y")
    check_weights(x_weights, (x.shape[0],), "x_weights", look)
    check_weights(y_weights, (y.shape[0],), "y_weights", look)
    check_floating(theta, "theta")
    width = x.shape[-1]
    if theta.ndim not in (1, 2) or theta.shape[-1] != width or theta.shape[0] == 0:
        raise ValueError(f"expected theta of shape ({width},) or (L, {width}) but got {tuple(theta.shape)}")
    dtype = working_dtype(x, y, theta)
    directions = unit_slices(theta if theta.ndim == 2 else theta.unsqueeze(0), width, dtype, look, "theta")
    left = quotient(directions @ x.to(dtype).T, measure_weights(x, None, x_weights))
    right = quotient(directions @ y.to(dtype).T, measure_weights(y, None, y_weights))
    overlap = torch.minimum(left.high.unsqueeze(-1), right.high.unsqueeze(-2)) - torch.maximum(
        left.low.unsqueeze(-1), right.low.unsqueeze(-2)
    )
    ranked = overlap.clamp(min=0) * left.share.unsqueeze(-1) * right.share.unsqueeze(-2)
    rows = left.order.argsort(-1).unsqueeze(-1).expand(ranked.shape)
    cols = right.order.argsort(-1).unsqueeze(-2).expand(ranked.shape)
    plan = ranked.gather(-2, rows).gather(-1, cols).to(dtype)
    return plan if theta.ndim == 2 else plan.squeeze(0)


@without_autocast
def swgg(
    x: Tensor,
    y: Tensor,
    slices: Tensor,
    relaxation: SoftSort | LapSum | None = None,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    x_weights: Tensor | None = None,
    y_weights: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> Tensor:
    r"""Compute the SWGG dissimilarity of every sample along every slice.

    .. math:: D_{il} = ⟨C_i, γ_{il}⟩^{1/2}, \qquad C_i[k, j] = ‖x_{ik} - y_j‖²

    with γ the lifted plan of slice l. Hard (``relaxation=None``), the plan is the exact one, ties and weights included,
    :math:`D ≥ W_2`, and gradients flow to x, y and the weights; as a function of the slices D is then piecewise
    constant. With a relaxation the plan is :math:`Q^⊤ Λ P`, with Q and P the relaxed sorts, and gradients flow to the
    slices as well.

    Neither the plan nor anything else of size B×L×N×N or B×L×N×d is ever stored.

    Parameters
    ----------
    x
        Points ``(B, N, d)``.
    y
        Points to compare with, ``(M, d)`` for all samples or ``(B, M, d)``, one set per sample.
    slices
        Directions ``(L, d)``; normalised inside.
    relaxation
        ``None`` for the exact plan, :class:`SoftSort` (the paper's), or :class:`LapSum`, whose plans have exact
        marginals: with it :math:`D ≥ W_2` too.
    x_mask, y_mask
        ``(B, N)`` and ``(B, M)`` (or ``(M,)``), bool or 0/1, True = valid. What is masked is never read.
    x_weights, y_weights
        Masses of the shapes of the masks, normalised inside; uniform if not given.
    validate
        Look at the values too; by default in eager use on the CPU.

    Returns
    -------
    Tensor
        D, ``(B, L)``, in float32 at least. Of an empty batch it is empty, and gradients are 0.

    Examples
    --------
    >>> x, y = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]]), torch.tensor([[5.0, 0.0], [2.0, 0.0]])
    >>> swgg(x, y, slices=torch.eye(2))  # along the second axis all points tie: mass spreads evenly
    tensor([[3.1623, 3.3912]])
    """
    check_points(x, "x", (3,))
    batch, count, width = x.shape
    check_points(y, "y", (2, 3), width=width)
    if y.ndim == 3 and y.shape[0] != batch:
        raise ValueError(f"expected y of shape (M, {width}) or ({batch}, M, {width}) but got {tuple(y.shape)}")
    if relaxation is not None and not isinstance(relaxation, (SoftSort, LapSum)):
        raise TypeError(f"expected relaxation to be None, SoftSort or LapSum but got {type(relaxation).__name__}")
    look = looks_at_values(validate, x)
    x_mask = as_mask(x_mask, (batch, count), "x_mask", look)
    y_mask = as_mask(y_mask, tuple(y.shape[:-1]), "y_mask", look)
    check_weights(x_weights, (batch, count), "x_weights", look, x_mask)
    check_weights(y_weights, tuple(y.shape[:-1]), "y_weights", look, y_mask)
    dtype = working_dtype(x, y, slices)
    check_slices(slices, width, look)
    if batch == 0:
        given = (tensor for tensor in (x, y, slices, x_weights, y_weights) if tensor is not None)
        return sum((tensor.sum() for tensor in given), x.new_zeros(())).to(dtype).expand(0, slices.shape[0])
    if isinstance(relaxation, SoftSort) and not look and all(each is None for each in (x_weights, y_mask, y_weights)):
        at_once = _at_once(x, y, slices, relaxation, x_mask)
        if at_once is not None:
            return at_once
    directions = unit_slices(slices, width, dtype, validate=False)
    if x_mask is not None:
        x = torch.where(x_mask.unsqueeze(-1), x, 0.0)
    if y_mask is not None:
        y = torch.where(y_mask.unsqueeze(-1), y, 0.0)
    if look:
        check_finite(x, "x", " among its valid points")
        check_finite(y, "y", " among its valid points")
    source = Measure(x, x_mask, x_weights is not None, measure_weights(x, x_mask, x_weights))
    target = Measure(y.to(dtype), y_mask, y_weights is not None, measure_weights(y, y_mask, y_weights))

    if relaxation is None:
        squared, size = exact_squared_cost(source._replace(points=x.to(dtype)), target, directions)
    elif any(measure.mass is not None and measure.mass.requires_grad for measure in (source, target)):
        raise ValueError("a relaxed plan has no gradient to weights: detach them, or use relaxation=None")
    elif isinstance(relaxation, SoftSort):
        squared, size = relaxed_squared_cost(source, target, directions, relaxation)
    else:
        squared, size = coupled_squared_cost(source, target, directions, relaxation)
    return root(squared, size)


def _at_once(x: Tensor, y: Tensor, slices: Tensor, relaxation: SoftSort, x_mask: Tensor | None) -> Tensor | None:
    """Compute D in one step of autograd on a GPU, or say by ``None`` that this is not for it."""
    compiled = gpu_kernels("cuda_cost", y, slices, half=(x,))
    unit = relaxation.unit
    if unit is not None and tuple(unit.shape) != (slices.shape[0], 1):
        return None  # the other way says what is wrong
    if compiled is None or not compiled.fits(x, y) or choose_way("cuda", is_uniform=True) != "cuda":
        return None
    measure_unit = relaxation.relative and unit is None
    distance: Tensor = compiled.distance(x, y, slices, x_mask, relaxation.tau, unit, measure_unit)
    return distance
