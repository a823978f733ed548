"""The unit in which a relative temperature is measured."""

import torch
from torch import Tensor


def check_temperature(temperature: float, name: str, relative: bool, unit: object) -> None:
    """Raise unless a temperature is one, and a unit comes where it is used."""
    if isinstance(temperature, Tensor | str | None):
        # A parameter, say: it would get no gradient, and nobody would be told.
        raise TypeError(f"expected a temperature {name} that is a number, a constant, but got {temperature!r}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"expected a temperature {name} > 0 but got {temperature}")
    smallest = torch.finfo(torch.float32).tiny
    if temperature < smallest:  # one over it is infinite, and a gap of 0 times that is no number
        raise ValueError(
            f"expected a temperature {name} ≥ {smallest:.3g}, which float32 can carry, but got {temperature}; "
            "the limit is HardSort, or relaxation=None"
        )
    if unit is None:
        return
    if not isinstance(unit, Tensor):
        raise TypeError(f"expected unit to be a torch.Tensor but got {type(unit).__name__}")
    if not relative:
        raise ValueError(f"unit is what a relative temperature is measured in: give relative=True too, or scale {name}")


def given_unit(unit: Tensor, projections: Tensor) -> Tensor:
    """Give a unit that has been measured already, for projections ``(…, L, N)``, or raise."""
    expected = (*projections.shape[-2:-1], 1)
    if tuple(unit.shape) != expected:
        raise ValueError(f"expected unit of shape {expected}, one number per slice, but got {tuple(unit.shape)}")
    return unit.to(projections)


def slice_unit(projections: Tensor, mask: Tensor | None, relative: bool) -> Tensor:
    """Give the unit of the temperature per slice, ``(L, 1)`` (``(1,)`` for a plain vector).

    1 unless ``relative``; then the standard deviation of the slice's projections ``(…, L, N)`` over the batch, held
    constant. Projections are divided by it, so that everything downstream sees one scalar temperature.
    """
    slices = projections.shape[-2:-1]
    ones = torch.ones((*slices, 1), dtype=projections.dtype, device=projections.device)
    if not relative:
        return ones
    projections = projections.detach()  # no_grad alone would let forward-mode derivatives through
    with torch.no_grad():
        present = torch.ones_like(projections) if mask is None else mask.expand(projections.shape)
        present = present.to(projections.dtype)
        axes = [axis for axis in range(projections.ndim) if axis != projections.ndim - 2]
        count = present.sum(axes)
        mean = ((projections * present).sum(axes) / count).reshape(*slices, 1)
        variance = ((projections - mean).square() * present).sum(axes) / count
        spread = variance.sqrt().reshape(*slices, 1)
        # Equal projections give a unit of 1. Their spread is seldom exactly 0: it is the rounding of their mean, and in
        # that as a unit a gradient would be all noise.
        rounding = 8 * torch.finfo(projections.dtype).eps * mean.abs()
        return torch.where(spread > rounding, spread, ones)
