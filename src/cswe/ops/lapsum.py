r"""LapSum: a relaxed sort whose matrix is a true coupling, in linear time.

With F the Laplace distribution function and thresholds b that split the smoothed mass evenly,
:math:`Σ_i p_i F(b_k - s_i) = c_k`, rank k receives from element i the mass :math:`p_i [F(b_k - s_i) - F(b_{k-1} -
s_i)]`. Rows and columns have exactly the masses they should, so plans made of it are transport plans and :math:`W_2 ≤
D` holds. It is continuously differentiable: ties need no rule.

All sums over elements, or over thresholds, are one-sided Laplace sums on sorted points, read at other sorted points.
Everything is in float64: thresholds in float32 break row sums by 1e-3 at N = 2048.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cswe.ops._inputs import usable
from cswe.ops._transforms import is_transforming
from cswe.ops.laplace import CHUNK, decay, refuse_second_derivative
from cswe.ops.sorting import SortOperator, _checked, _put, _take, sort_with_padding_last
from cswe.ops.unit import check_temperature, given_unit, slice_unit

# Thresholds that would lie at infinity are put this far outside: exp(−700) is 0 in every sum.
_FAR = 700.0


def sums_from_below(points: Tensor, values: Tensor) -> Tensor:
    """Give :math:`Σ_{k ≤ r} e^{-(s_r - s_k)} w_k` for ascending points ``(…, N)`` and values ``(…, N, D)``."""
    result = torch.empty_like(values)
    carried = values.new_zeros((*values.shape[:-2], values.shape[-1]))
    edge = points[..., :1]
    for start in range(0, points.shape[-1], CHUNK):
        here = slice(start, min(start + CHUNK, points.shape[-1]))
        s = points[..., here]
        kernel = decay((s.unsqueeze(-1) - s.unsqueeze(-2)).clamp(min=0), 1.0).tril()
        outside = decay(s - edge, 1.0).unsqueeze(-1) * carried.unsqueeze(-2)
        result[..., here, :] = kernel @ values[..., here, :] + outside
        carried, edge = result[..., here.stop - 1, :], s[..., -1:]
    return result


def sums_from_above(points: Tensor, values: Tensor) -> Tensor:
    """Give :math:`Σ_{k ≥ r} e^{-(s_k - s_r)} w_k`."""
    return sums_from_below(-points.flip(-1), values.flip(-2)).flip(-2)


class _Sides(NamedTuple):
    """Laplace sums of values on some points, read at other points: what lies below each, and what lies above."""

    below: Tensor
    above: Tensor
    count_below: Tensor


def _read(points: Tensor, values: Tensor, at: Tensor, *, ties_below: bool) -> _Sides:
    """Read one-sided sums of ``(…, N, D)`` values on points ``(…, N)`` at ascending places ``(…, K)``."""
    total = points.shape[-1]
    number = torch.searchsorted(points.contiguous(), at.contiguous(), right=ties_below)
    low, high = (number - 1).clamp(min=0), number.clamp(max=total - 1)
    below = _take(sums_from_below(points, values), low) * decay(
        (at - points.gather(-1, low)).clamp(min=0), 1.0
    ).unsqueeze(-1)
    above = _take(sums_from_above(points, values), high) * decay(
        (points.gather(-1, high) - at).clamp(min=0), 1.0
    ).unsqueeze(-1)
    nothing = values.new_zeros(())
    return _Sides(
        torch.where((number > 0).unsqueeze(-1), below, nothing),
        torch.where((number < total).unsqueeze(-1), above, nothing),
        number,
    )


def _far_above(point: Tensor) -> Tensor:
    # From about 1e19 on, adding changes nothing: there the next number is far away.
    return torch.maximum(point + _FAR, torch.nextafter(point, torch.full_like(point, torch.inf)))


def thresholds(points: Tensor, mass: Tensor, levels: Tensor) -> Tensor:
    r"""Solve :math:`Σ_i p_i F(b_k - s_i) = c_k` in closed form.

    Parameters
    ----------
    points
        Ascending points s, ``(…, N)``, float64.
    mass
        Masses p that sum to one, ``(…, N)``.
    levels
        Ascending levels c from 0 to 1, ``(…, K)``; at 0 and 1 the threshold is put far outside.
    """
    column = mass.unsqueeze(-1)
    A, B = (sums(points, column).squeeze(-1) for sums in (sums_from_below, sums_from_above))
    W = mass.cumsum(-1)
    at_points = W - mass / 2 + (B - A) / 2  # the smoothed distribution function at every point
    # Rounding may make it step back by an ulp where points tie; searching needs it ascending.
    at_points = at_points.cummax(-1).values
    j = torch.searchsorted(at_points.contiguous(), levels.contiguous(), right=True)
    total = points.shape[-1]
    low, high = (j - 1).clamp(min=0), j.clamp(max=total - 1)
    has_low, has_high = j > 0, j < total
    s_low, s_high = points.gather(-1, low), points.gather(-1, high)
    A_low = torch.where(has_low, A.gather(-1, low), 0.0)
    B_high = torch.where(has_high, B.gather(-1, high), 0.0)
    excess = levels - torch.where(has_low, W.gather(-1, low), 0.0)
    gap = (s_high - s_low).clamp(min=0)
    between = A_low * B_high * torch.exp(-gap)
    zeta = excess.abs() + torch.sqrt(excess.square() + between)
    tiny = torch.finfo(points.dtype).tiny
    log_zeta, log_A, log_B = (torch.log(value.clamp(min=tiny)) for value in (zeta, A_low, B_high))
    b = torch.where(excess > 0, s_high + log_zeta - log_B, s_low - log_zeta + log_A)
    middle = (s_low + s_high + log_A - log_B) / 2
    b = torch.where((excess == 0) & has_low & has_high, middle, b)
    lowest, highest = -_far_above(-points[..., :1]), _far_above(points[..., -1:])
    b = torch.where(levels <= 0, lowest, torch.where(levels >= 1, highest, b))
    b = torch.minimum(torch.maximum(b, lowest), highest)
    return b.cummax(-1).values


class _Couple(torch.autograd.Function):
    """``(P̃ w)_k = Σ_i p_i w_i [F(b_k − s_i) − F(b_{k−1} − s_i)]`` and its transpose, with hand-written derivatives."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, values: Tensor, mass: Tensor, levels: Tensor) -> Tensor:
        edges = thresholds(points, mass, levels)  # the last one lies above everything
        weighted = mass.unsqueeze(-1) * values
        prefix = torch.cat([torch.zeros_like(weighted[..., :1, :]), weighted.cumsum(-2)], dim=-2)
        sides = _read(points, weighted, edges, ties_below=True)
        up_to = _take(prefix, sides.count_below) - sides.below / 2 + sides.above / 2
        ctx.save_for_backward(points, values, mass, edges)
        return up_to.diff(dim=-2, prepend=torch.zeros_like(up_to[..., :1, :]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        points, values, mass, edges = ctx.saved_tensors
        with torch.no_grad():
            step = -grad.diff(dim=-2, append=torch.zeros_like(grad[..., :1, :]))  # γ
            column = mass.unsqueeze(-1)
            both = _read(points, torch.cat([column * values, column], dim=-1), edges, ties_below=True)
            density = (both.below + both.above) / 2
            moved, slope = density[..., :-1], density[..., -1:]
            ratio = torch.where(
                slope > 0, (step * moved).sum(-1, keepdim=True) / torch.where(slope > 0, slope, 1.0), 0.0
            )
            back = _read(edges, torch.cat([step, ratio], dim=-1), points, ties_below=False)
            pull = (back.below + back.above) / 2
            grad_points = mass * (pull[..., -1] - (values * pull[..., :-1]).sum(-1))
            # g of the rank that a point lies in, corrected by what leaks over the thresholds.
            own = _take(grad, back.count_below)
            leaked = (back.below - back.above)[..., :-1] / 2
            grad_values = column * (own + leaked)
        grad_points, grad_values = refuse_second_derivative(
            (grad_points, grad_values), (points, values, grad), "LapSum"
        )
        return (
            grad_points if ctx.needs_input_grad[0] else None,
            grad_values if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def couple(points: Tensor, values: Tensor, mass: Tensor, levels: Tensor) -> Tensor:
    """Couple N sorted elements with K ranks smoothly and carry values over, ``(…, K, D)``.

    Parameters
    ----------
    points
        Ascending points over the temperature, ``(…, N)``, float64.
    values
        ``(…, N, D)``, float64.
    mass
        Masses of the elements, ``(…, N)``, summing to one.
    levels
        Cumulative masses of the ranks, ``(…, K)``, ending at 1.
    """
    if is_transforming():
        return couple_densely(points, values, mass, levels)
    result: Tensor = _Couple.apply(points, values, mass, levels)  # type: ignore[no-untyped-call]
    return result


def couple_densely(points: Tensor, values: Tensor, mass: Tensor, levels: Tensor) -> Tensor:
    """Couple likewise, by the matrix written out, which torch differentiates twice and in any mode."""
    return _dense(points, mass, levels) @ values


def _dense(points: Tensor, mass: Tensor, levels: Tensor) -> Tensor:
    """Write P̃ out, ``(…, K, N)``, columns in rank order."""
    edges, column = thresholds(points.detach(), mass, levels), mass.unsqueeze(-2)
    given = (points, mass, levels)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    # Newton steps from the solution let torch differentiate the implicit thresholds: the error of one is of second
    # order in a change of the points, that of two of fourth. They must not change anything else: between points far
    # apart both residual and slope are rounding, and their quotient anything.
    for _ in range(2 if differentiated or is_transforming() else 0):
        distance = edges.unsqueeze(-1) - points.unsqueeze(-2)
        slope = (column * torch.exp(-distance.abs()) / 2).sum(-1)
        residual = (column * laplace_cdf(distance)).sum(-1) - levels
        residual = residual - residual.detach()
        moves = slope > 1e-100  # far from all points a threshold is not felt; the square of its slope would underflow
        edges = edges - torch.where(moves, residual / torch.where(moves, slope, 1.0), 0.0)
    shares = laplace_cdf(edges.unsqueeze(-1) - points.unsqueeze(-2))
    return shares.diff(dim=-2, prepend=torch.zeros_like(shares[..., :1, :])) * column


class _LapSumPermutation(SortOperator):
    def __init__(self, values: Tensor, mask: Tensor | None, alpha: float) -> None:
        super().__init__(values, mask)
        ordered, self._order = sort_with_padding_last(values, mask)
        self._points = ordered.double() / alpha
        count = values.shape[-1]
        if mask is None:
            self._mass = torch.full_like(self._points, 1 / count)
            length = torch.tensor(count, device=values.device)
        else:
            length = mask.sum(-1, keepdim=True)
            self._mass = _take(mask.double().unsqueeze(-1), self._order).squeeze(-1) / length
        ranks = torch.arange(1, count + 1, device=values.device, dtype=torch.float64)
        self._levels = torch.minimum(ranks, length).expand(values.shape) / length
        self._length = length

    def dense(self) -> Tensor:
        ranked = _dense(self._points, self._mass, self._levels) * self._length.unsqueeze(-1)
        columns = torch.argsort(self._order, dim=-1).unsqueeze(-2).expand(ranked.shape)
        return self._without_empty_rows(ranked.gather(-1, columns)).to(self._values.dtype)

    def _apply(self, w: Tensor) -> Tensor:
        ranked = couple(self._points, _take(w, self._order).double(), self._mass, self._levels)
        return self._without_empty_rows((ranked * self._length.unsqueeze(-1)).to(w.dtype))

    def _apply_transposed(self, w: Tensor) -> Tensor:
        columns = _transposed(self._points, w.double(), self._mass, self._levels) * self._length.unsqueeze(-1)
        return _put(columns.to(w.dtype), self._order)


def _transposed(points: Tensor, ranked: Tensor, mass: Tensor, levels: Tensor) -> Tensor:
    """Carry values of ranks ``(…, K, D)`` back to the elements, ``(…, N, D)``, differentiable in both."""
    if is_transforming():
        return _dense(points, mass, levels).mT @ ranked
    result: Tensor = _CoupleBack.apply(points, ranked, mass, levels)  # type: ignore[no-untyped-call]
    return result


class _CoupleBack(torch.autograd.Function):
    """``P̃ᵀ w``, by way of ``⟨g, P̃ᵀ w⟩ = ⟨P̃ g, w⟩``: the transpose of a linear map is its derivative."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, ranked: Tensor, mass: Tensor, levels: Tensor) -> Tensor:
        ctx.save_for_backward(points, ranked, mass, levels)
        dummy = torch.zeros((*points.shape, ranked.shape[-1]), dtype=points.dtype, device=points.device)
        # Also in inference mode, whose tensors take part in no gradient, but whose copies do.
        with torch.inference_mode(False), torch.enable_grad():
            leaf = usable(dummy).requires_grad_()
            fixed = (usable(tensor).detach() for tensor in (mass, levels))
            product = couple(usable(points).detach(), leaf, *fixed)
            (result,) = torch.autograd.grad(product, leaf, usable(ranked).detach())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        points, ranked, mass, levels = ctx.saved_tensors
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            product = couple(leaf, grad.detach(), mass, levels)
            (grad_points,) = torch.autograd.grad(product, leaf, ranked.detach())
        grad_points, grad_ranked = refuse_second_derivative(
            (grad_points, product.detach()), (points, ranked, grad), "LapSum"
        )
        return (
            grad_points if ctx.needs_input_grad[0] else None,
            grad_ranked if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def laplace_cdf(u: Tensor) -> Tensor:
    """Give the Laplace distribution function, with the right slope ½ at 0 (a form with ``abs`` would have 0 there)."""
    lower = torch.exp(torch.where(u < 0, u, 0.0)) / 2
    upper = 1 - torch.exp(-torch.where(u < 0, 0.0, u)) / 2
    return torch.where(u < 0, lower, upper)


@dataclass(frozen=True)
class LapSum:
    r"""The relaxed sort of Struski et al. [1]_: doubly stochastic, so its plans are true transport plans.

    Linear time after the sort and never a matrix, exact, continuously differentiable, ties included.

    Parameters
    ----------
    alpha
        Temperature α > 0: the width of the Laplace kernel that smooths the points.
    relative
        Measure α in standard deviations of the projections of a slice, taken over the batch and held constant.
    unit
        With ``relative``: the unit of α per slice, ``(L, 1)``, where it has been measured already.

    References
    ----------
    .. [1] Struski, Bednarczyk, Podolak, Tabor. LapSum: one method to differentiate them all. ICML 2025.

    Examples
    --------
    >>> P = LapSum(alpha=0.1)(torch.tensor([3.0, 1.0, 2.0]))
    >>> P @ torch.tensor([30.0, 10.0, 20.0])
    tensor([10.0337, 20.0000, 29.9663])
    >>> P.dense().sum(0), P.dense().sum(1)
    (tensor([1., 1., 1.]), tensor([1., 1., 1.]))
    """

    alpha: float
    relative: bool = False
    unit: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_temperature(self.alpha, "alpha", self.relative, self.unit)

    def __call__(self, values: Tensor, mask: Tensor | None = None) -> SortOperator:
        """Sort ``(…, N)`` values softly; elements under a False mask come last and count for nothing."""
        values, mask = _checked(values, mask)
        if self.relative:
            values = values / self.scale(values, mask)
        return _LapSumPermutation(values, mask, self.alpha)

    def scale(self, projections: Tensor, mask: Tensor | None = None) -> Tensor:
        """Give the unit of α per slice, ``(L, 1)`` (``(1,)`` for a plain vector): 1 unless ``relative``."""
        if self.unit is not None:
            return given_unit(self.unit, projections)
        return slice_unit(projections, mask, self.relative)
