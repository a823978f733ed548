"""The unit in which a relative temperature is measured."""

import torch
from torch import Tensor


def slice_unit(projections: Tensor, mask: Tensor | None, relative: bool) -> Tensor:
    """Give the unit of the temperature per slice, ``(L, 1)`` (``(1,)`` for a plain vector).

    1 unless ``relative``; then the standard deviation of the slice's projections ``(…, L, N)`` over the batch, held
    constant. Projections are divided by it, so that everything downstream sees one scalar temperature.
    """
    slices = projections.shape[-2:-1]
    ones = torch.ones((*slices, 1), dtype=projections.dtype, device=projections.device)
    if not relative:
        return ones
    with torch.no_grad():
        present = torch.ones_like(projections) if mask is None else mask.expand(projections.shape)
        present = present.to(projections.dtype)
        axes = [axis for axis in range(projections.ndim) if axis != projections.ndim - 2]
        count = present.sum(axes)
        mean = ((projections * present).sum(axes) / count).reshape(*slices, 1)
        variance = ((projections - mean).square() * present).sum(axes) / count
        spread = variance.sqrt().reshape(*slices, 1)
        # All projections equal: any unit does, the sort is flat.
        return torch.where(spread > 0, spread, ones)
