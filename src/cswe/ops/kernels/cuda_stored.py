"""Projections of tokens as they are stored, for pools on a GPU: no copy of the tokens is made, and none converted.

Tokens of a frozen backbone have no gradient, so all that comes back from a projection is the directions' gradient.
"""

from typing import Any

import torch
from torch import Tensor

from cswe.ops._inputs import without_autocast
from cswe.ops.kernels.cuda_project import project, slices_gradient
from cswe.ops.kernels.cuda_rows import on_device_of


def project_stored(
    tokens: Tensor,
    mask: Tensor | None,
    centre: Tensor | None,
    factor: Tensor | None,
    directions: Tensor,
    are_unit: bool = False,
) -> tuple[Tensor, Tensor]:
    """Give ``factor · ⟨x − centre, θ⟩``, ``(B, L, N)``, and ``‖x − centre‖²``, ``(B, N)``; 0 for masked tokens.

    Parameters
    ----------
    tokens
        ``(B, N, d)``, in float32 or half precision; without a gradient.
    mask
        ``(B, N)``, boolean.
    centre
        ``(d,)``, float32; nothing is subtracted without it.
    factor
        One number, float32.
    directions
        ``(L, d)``, float32, of any size. The gradient of the projections flows to them.
    are_unit
        Whether the directions have length 1, which saves looking for their size.
    """
    offset = directions.new_zeros(directions.shape[-1]) if centre is None else centre
    unit = None if are_unit or tokens.dtype != torch.float16 else _unit_of(directions.detach())
    pair: tuple[Tensor, Tensor] = _Projections.apply(tokens.contiguous(), mask, offset, factor, directions, unit)  # type: ignore[no-untyped-call]
    return pair


def _unit_of(directions: Tensor) -> Tensor:
    """Give the power of two above the largest number: in units of it, directions fit half precision."""
    return torch.exp2(torch.ceil(torch.log2(torch.linalg.vector_norm(directions, torch.inf).clamp_(min=1e-30))))


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        mask: Tensor | None,
        centre: Tensor,
        factor: Tensor | None,
        directions: Tensor,
        unit: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        mask = None if mask is None else mask.contiguous()
        scale = factor
        if unit is not None:
            directions, scale = directions / unit, unit if factor is None else unit * factor
        with on_device_of(tokens):
            projections, squares, _ = project(tokens, mask, centre, directions.contiguous(), scale, 0.0)
        ctx.save_for_backward(tokens, mask, centre, factor)
        ctx.mark_non_differentiable(squares)
        return projections, squares

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        tokens, mask, centre, factor = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph is being built of this pass: in terms that torch can differentiate again
            centred = tokens.to(grad.dtype) - centre
            centred = centred if mask is None else torch.where(mask.unsqueeze(-1), centred, 0.0)
            sums = torch.einsum("bln,bnd->ld", grad, centred)
        else:
            with on_device_of(tokens):
                sums = slices_gradient(grad.contiguous(), tokens, mask, centre)
        return None, None, None, None, sums if factor is None else sums * factor, None
