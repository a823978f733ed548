r"""Sums against the Laplace kernel on sorted points, in linear time: the engine of the relaxed sorts.

For ascending points :math:`s_1 \le … \le s_N` and :math:`K_{rk} = e^{-|s_r - s_k|/τ}`, the products
:math:`K w` and :math:`\tilde K w`, with :math:`\tilde K_{rk} = \mathrm{sign}(s_r - s_k) K_{rk}`, are first-order
recurrences in r. Fast sum updating, FKSUM and LapSum use the same fact for other ends.

A recurrence with one step per rank is slow in plain torch, so ranks are taken in chunks: inside a chunk the kernel
is a small dense matrix, and all that lies outside acts through one decayed state per side.
"""

from typing import Any

import torch
from torch import Tensor

from cswe.ops._gpu import gpu_kernels
from cswe.ops._inputs import without_autocast
from cswe.ops._transforms import is_transforming

CHUNK = 32
"""Ranks a chunk: the dense part costs CHUNK per point, the loop has N / CHUNK steps."""


def decay(distance: Tensor, tau: float) -> Tensor:
    """Give exp(−distance/τ), zero where it is below the working precision.

    In float32 that means below 1e-13: smaller terms change no sum, but they breed denormal numbers, on which
    CPUs are 10 to 100 times slower. In float64 only denormals themselves are cut: an earlier cut would be seen.
    """
    smallest = 1e-300 if distance.dtype == torch.float64 else 1e-13
    values = torch.exp(distance / -tau)
    return torch.where(values < smallest, 0.0, values)


def laplace_sums(points: Tensor, values: Tensor, tau: float) -> Tensor:
    r"""Compute :math:`y_r = Σ_k e^{-|s_r - s_k|/τ} w_k`, differentiable once in points and values.

    Parameters
    ----------
    points
        Ascending points s, ``(…, N)``.
    values
        Values w at the points, ``(…, N, D)``, of the same batch shape.
    tau
        Temperature τ > 0.

    Examples
    --------
    >>> laplace_sums(torch.tensor([0.0, 1.0]), torch.ones(2, 1), tau=1.0).squeeze(-1)
    tensor([1.3679, 1.3679])
    """
    if is_transforming():
        return decay((points.unsqueeze(-1) - points.unsqueeze(-2)).abs(), tau) @ values
    result: Tensor = _LaplaceSums.apply(points, values, tau)  # type: ignore[no-untyped-call]
    return result


@without_autocast
def plain_and_signed_sums(points: Tensor, values: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    r"""Compute :math:`K w` and :math:`\tilde K w` in one go (no gradient).

    Equal points have sign 0, so in the signed sum a point must not see the points it ties with. Ties are found by
    comparing the points: a decay of 1 may also come from a distance that is tiny against τ.
    """
    compiled = gpu_kernels("cuda_laplace", points, values)
    if compiled is not None:
        both: tuple[Tensor, Tensor] = compiled.plain_and_signed_sums(points, values, tau)
        return both
    count = points.shape[-1]
    plain, signed = torch.empty_like(values), torch.empty_like(values)
    batch, width = values.shape[:-2], values.shape[-1]

    # What lies left of a chunk, as seen from the last point before it; `apart` leaves out what ties with that point.
    total = values.new_zeros((*batch, width))
    apart = torch.zeros_like(total)
    edge = points[..., :1]
    for start in range(0, count, CHUNK):
        here = slice(start, min(start + CHUNK, count))
        s, w = points[..., here], values[..., here, :]
        difference = s.unsqueeze(-1) - s.unsqueeze(-2)
        kernel = decay(difference.abs(), tau)
        signed_kernel = kernel * difference.sign()
        gap = s - edge
        from_left = decay(gap, tau).unsqueeze(-1) * total.unsqueeze(-2)
        apart_left = torch.where((gap == 0).unsqueeze(-1), apart.unsqueeze(-2), from_left)
        plain[..., here, :] = kernel @ w + from_left
        signed[..., here, :] = signed_kernel @ w + apart_left
        # The last row of a chunk sees only points at or below it: it is the state the next chunk needs.
        total, apart = plain[..., here.stop - 1, :], signed[..., here.stop - 1, :]
        edge = s[..., -1:]

    total = values.new_zeros((*batch, width))
    apart = torch.zeros_like(total)
    edge = points[..., -1:]
    for start in reversed(range(0, count, CHUNK)):
        here = slice(start, min(start + CHUNK, count))
        s, w = points[..., here], values[..., here, :]
        gap = edge - s
        from_right = decay(gap, tau).unsqueeze(-1) * total.unsqueeze(-2)
        apart_right = torch.where((gap == 0).unsqueeze(-1), apart.unsqueeze(-2), from_right)
        to_first = s - s[..., :1]
        weight = decay(to_first, tau).unsqueeze(-2)
        total_new = (weight @ w).squeeze(-2) + from_right[..., 0, :]
        apart = (weight.where(to_first.unsqueeze(-2) != 0, 0.0) @ w).squeeze(-2) + apart_right[..., 0, :]
        total = total_new
        plain[..., here, :] += from_right
        signed[..., here, :] -= apart_right
        edge = s[..., :1]
    return plain, signed


class _LaplaceSums(torch.autograd.Function):
    """``K w`` with the hand-written derivative: ∂s = −(⟨G, K̃ w⟩ + ⟨w, K̃ G⟩)/τ, ∂w = K G."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, values: Tensor, tau: float) -> Tensor:
        ctx.save_for_backward(points, values)
        ctx.tau = tau
        return plain_and_signed_sums(points, values, tau)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        points, values = ctx.saved_tensors
        with torch.no_grad():
            both = torch.cat([values, grad], dim=-1)
            plain, signed = plain_and_signed_sums(points, both, ctx.tau)
            width = values.shape[-1]
            grad_values = plain[..., width:]
            grad_points = -(grad * signed[..., :width] + values * signed[..., width:]).sum(-1) / ctx.tau
        grad_points, grad_values = refuse_second_derivative(
            (grad_points, grad_values), (points, values, grad), "a soft sort"
        )
        return (
            grad_points if ctx.needs_input_grad[0] else None,
            grad_values if ctx.needs_input_grad[1] else None,
            None,
        )


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(ctx.message)


DENSE = 'cswe.backend("dense")'
"""What has second derivatives where a caller holds no operator."""


def refuse_second_derivative(
    grads: tuple[Tensor, ...],
    depends_on: tuple[Tensor, ...],
    what: str,
    instead: str = f"{DENSE} or the operator's dense() form",
) -> tuple[Tensor, ...]:
    """Pass gradients on, such that differentiating them again is an error instead of silently wrong."""
    if not torch.is_grad_enabled():  # no graph is being built of this backward pass
        return grads
    message = (
        f"{what} has a hand-written first derivative and no second one. Leave out create_graph=True, or use {instead}, "
        "which torch differentiates further"
    )
    result: tuple[Tensor, ...] = _FirstDerivative.apply(message, len(grads), *grads, *depends_on)  # type: ignore[no-untyped-call]
    return result
